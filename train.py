"""Train a GPT: `python train.py CONFIG [--name=value ...]`, or under torchrun on several ranks."""

from __future__ import annotations

from contextlib import ExitStack

from cli.command import ended_by_ctrl_c, run_command
from training.choose import load_or_choose, save_choice


def main(argv: list[str]) -> int:
    """config -> ranks -> folder -> data -> model -> optimizer -> resume -> loop -> sample.

    Returns 0, or 128 + signal after saving. Mistakes and faults are exceptions that carry their own
    exit code (cli/command.py).
    """
    chosen = config = load_or_choose(argv)

    # Importing torch takes a second, so mistakes in the options are reported first.
    with ended_by_ctrl_c():
        from training import messages, startup
        from training.console import Console
        from training.dataset import open_data
        from training.distributed import join_ranks
        from training.resume import checkpoints_of, open_run, restore, take_folder
        from training.run import evaluation_is_due, is_finished, observed, saved_on_failure, train
        from training.signals import Interrupts

    with ExitStack() as stack:
        ranks = join_ranks(config.parallel.mode, config.parallel.timeout)
        stack.push(lambda kind, *_: ranks.close(failed=kind is not None))
        console = Console(ranks.first, config.log.quiet)
        for line in config.reasons:
            console.say(line)

        # Whether to start or to resume, and on which data.
        config, checkpoint = open_run(config, ranks, stack, console)
        ranks.start(config.run.device)
        data = open_data(config, checkpoint, ranks, stack, console)
        config = startup.resolve(config, ranks, data.tokenizer.vocab_size, console)
        messages.check_prompt(config, data)
        startup.prepare_process(config)

        # What every step works on, and what changes from step to step.
        model = startup.build_model(config, ranks)
        setup = startup.build_setup(config, model, ranks, console)
        state = restore(setup, checkpoint, data, console)
        checkpoints = checkpoints_of(config, console)
        if is_finished(config, state) and not evaluation_is_due(config, state):
            messages.say_finished(config, state, console)
            return 0
        take_folder(config, ranks, stack, console)
        if ranks.first:
            save_choice(chosen)

        # Up to here Ctrl-C ends the process at once: there is nothing to save.
        interrupts = Interrupts(announce=ranks.first)
        with (
            observed(setup, data, state, argv, console) as observer,
            interrupts,
            saved_on_failure(setup, data, state, checkpoints, observer),
        ):
            if observer is not None:
                messages.introduce(setup, data, state, observer.peak, console)
            train(setup, data, state, checkpoints, interrupts, observer)

        if interrupts.agreed:
            messages.say_stopped(config, state, checkpoints, console)
            return interrupts.exit_code
        if ranks.first:
            messages.say_result(setup, data, state, checkpoints, console)
        return 0


if __name__ == "__main__":
    run_command(main, outlives_output=True)
