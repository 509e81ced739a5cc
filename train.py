"""Train a GPT: `python train.py CONFIG [--name=value ...]`, or under torchrun on many ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from cli.command import ended_by_ctrl_c, run_command
from training.config import load_config

if TYPE_CHECKING:  # torch takes a second to import: a mistake in the config is told before
    from training.run import Run


def main(argv: list[str]) -> int:
    """config -> ranks -> folder -> data -> model -> optimizer -> resume -> loop -> sample.

    Returns 0, or 128 + signal after saving. Mistakes and faults are exceptions that carry their own
    exit code (cli/command.py).
    """
    config = load_config(argv)

    with ended_by_ctrl_c():
        from training import screen, startup
        from training.checkpoint import Checkpoints
        from training.console import Console
        from training.dataset import open_data
        from training.distributed import join_ranks
        from training.resume import clear_folder, open_run, restore
        from training.run import Run, make_loader, recording, saved_on_failure
        from training.signals import Interrupts

    with ExitStack() as stack:
        ranks = join_ranks(config.parallel.mode, config.parallel.timeout)
        stack.push(lambda kind, *_: ranks.close(failed=kind is not None))
        console = Console(first=ranks.first, quiet=config.log.quiet)

        config, checkpoint = open_run(config, ranks, stack, console)
        ranks.start(config.run.device)
        data = open_data(config, checkpoint, ranks, stack, console)
        config = startup.resolve(config, ranks, data.tokenizer.vocab_size, console)
        screen.check_prompt(config, data.tokenizer)
        startup.prepare_process(config)

        model = startup.build_model(config, ranks)
        setup = startup.build_setup(config, model, ranks, console)
        state = restore(config, checkpoint, setup, data, console)
        loader = make_loader(config, data)
        checkpoints = Checkpoints(Path(config.run.out_dir, "checkpoints"), console.print)
        interrupts = Interrupts(announce=ranks.first)
        run = Run(config, setup, data, loader, state, checkpoints, interrupts, console, argv)
        if run.finished and not run.evaluation_is_due:
            screen.say_finished(run)
            return 0
        clear_folder(config, ranks, stack, console)
        # Until here Ctrl-C ends at once: there is nothing to save.
        with recording(run), interrupts, saved_on_failure(run):
            screen.introduce(run)
            train(run)
        if run.stopping:
            screen.say_stopped(run)
            return interrupts.exit_code
        if ranks.first:
            screen.say_result(run)
        return 0


def train(run: Run) -> None:
    """The loop: evaluate, save, step, log, each when it is due, until done or asked to stop."""
    from training.run import batches_from, log_step, run_evaluation, save, share_signal, take_step

    with batches_from(run) as batches:
        while True:
            if run.evaluation_is_due:
                run_evaluation(run)
            if run.stopping or run.finished:
                break
            if run.checkpoint_is_due:
                save(run)
            take_step(run, batches)
            if run.log_is_due:
                log_step(run)
    if run.stopping:
        share_signal(run)
    save(run)


if __name__ == "__main__":
    run_command(main, outlives_output=True)
