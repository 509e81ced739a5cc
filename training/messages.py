"""The first and the last messages of a run, the sample at its end included."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path

from cli.options import ConfigError
from cli.terminal import clock_text, counted, shown
from training.budget import out_of_patience, planned_steps
from training.checkpoint import Checkpoints, TrainState
from training.config import Config, seconds_of
from training.console import UNKNOWN_STEPS, Console
from training.dataset import Data
from training.memory import estimate_memory
from training.snapshot import sample_text
from training.step import Setup

SAMPLE_TOKENS = 150  # of the sample at the end
ASSUMED_MFU = 0.5  # for the estimate of the time
GIBBERISH = 0.6  # of ln V, the loss of a random guess; above it, samples hold no words
WELL_FILLED = 0.5  # of a window, on average; below it, sharing windows pays


def check_prompt(config: Config, data: Data) -> None:
    """Raise ConfigError if the prompt of the samples cannot be encoded: now, not at the end."""
    try:
        data.tokenizer.encode(config.log.sample_prompt)
    except ConfigError as error:
        raise ConfigError(f"log.sample_prompt={config.log.sample_prompt!r}: {error}") from error


def introduce(
    setup: Setup, data: Data, state: TrainState, peak: float | None, console: Console
) -> None:
    """Print what the run will do. peak: FLOP/s of one device, if known."""
    config = setup.config
    model, source = config.model, config.data.source
    n, T, length = config.data.global_batch, model.context_length, planned_steps(config.run, state)
    size = f"{setup.model.parameter_count():,} parameters, {counted(model.n_layers, 'layer')}"
    console.say(f"model: {size} of width {model.d_model}, vocabulary {model.vocab_size:,}")
    if config.run.lora_rank:
        count = sum(p.numel() for p in setup.model.trained_parameters().values())
        console.say(
            f"LoRA: {count:,} of them are trained, in adapters of rank {config.run.lora_rank}; "
            f"checkpoints hold these alone, so keep {config.run.init_from}"
        )
    validation = f"{data.val.n_tokens:,} for validation" if data.val else "no validation"
    console.say(f"data: {source}, {data.train.n_tokens:,} tokens for training, {validation}")
    steps, epochs = counted(length, "step"), f"{length * n / len(data.train):.2f} epochs, "
    if length == UNKNOWN_STEPS:
        steps, epochs = f"{config.run.time_budget} in steps", ""
    split = f", {counted(setup.n_micro, 'micro-batch', 'micro-batches')}" * (setup.n_micro > 1)
    optimizer = "adamw" if config.run.lora_rank else config.optim.optimizer
    what = f"{steps} of {n * T:,} tokens ({n} x {T}{split})"
    console.say(f"training: {what}, {epochs}{optimizer}")
    console.say(f"estimate: {estimated_time(setup, state, peak)}, {estimated_memory(setup)}")
    console.say(f"folder: {config.run.out_dir}")
    if data.train.filled < WELL_FILLED:
        console.say(
            f"advice: short documents fill only {data.train.filled:.0%} of their windows, and the "
            "rest is padding; with --document_mask=true several share a window"
        )


def estimated_time(setup: Setup, state: TrainState, peak: float | None) -> str:
    """Estimate the time by arithmetic alone; the lines that follow know better."""
    config = setup.config
    if config.run.time_budget:
        return f"{config.run.time_budget} of time"
    if not peak:
        return "time unknown before the first steps"
    T = config.model.context_length
    tokens = (config.run.max_steps - state.step) * config.data.global_batch * T
    work = tokens * setup.model.flops_per_token(T)
    seconds = work / (peak * ASSUMED_MFU * setup.ranks.world)
    return f"{clock_text(seconds)} at {ASSUMED_MFU:.0%} of peak FLOP/s"


def estimated_memory(setup: Setup) -> str:
    ranks = setup.ranks
    need = estimate_memory(setup.config, ranks.world, ranks.device.type, setup.model).peak
    return f"{need / 1e9:.2f} GB of memory{' per rank' * (ranks.world > 1)}"


def say_finished(config: Config, state: TrainState, console: Console) -> None:
    """Tell that no step is left to take, and what can be done with the run."""
    console.print(
        f"{config.run.out_dir} is finished at step {state.step}: {outcome(config, state)}. To "
        f"sample: {sample_command(config)}; to train longer: the same command with "
        f"{' '.join(longer_options(config, state))}"
    )


def longer_options(config: Config, state: TrainState) -> list[str]:
    """Options with which a finished run continues."""
    options, budget = [], config.run.time_budget
    if out_of_patience(config.run, state):
        options.append("--patience=0")
    if state.step >= planned_steps(config.run, state):
        if seconds := seconds_of(budget):
            options.append(f"--time_budget={math.ceil(2 * max(seconds, state.seconds))}s")
        else:  # no time budget, or the lengths of another run
            options += ["--time_budget=", "--resume=changed"] if budget else []
            options.append(f"--max_steps={2 * state.step}")
    return options


def outcome(config: Config, state: TrainState) -> str:
    """Why the run ended, and its losses."""
    why = "all steps done"
    if out_of_patience(config.run, state):
        why = f"no better loss in {counted(state.since_best, 'evaluation')}"
    if state.last_val_loss is None or state.best_loss is None:
        return why
    return (
        f"{why}; validation loss {state.last_val_loss:.4f}, best {state.best_loss:.4f} at step "
        f"{state.best_step}"
    )


def say_stopped(
    config: Config, state: TrainState, checkpoints: Checkpoints, console: Console
) -> None:
    """Tell where a run that was asked to stop is saved, and how to resume it."""
    length = planned_steps(config.run, state)
    of = "" if length == UNKNOWN_STEPS else f" of {length}"
    console.print(
        f"stopped at step {state.step}{of}; saved in {checkpoints.path(state.step)}. Run the same "
        "command to resume"
    )


def say_result(
    setup: Setup, data: Data, state: TrainState, checkpoints: Checkpoints, console: Console
) -> None:
    """Print the losses, the checkpoints, a sample, and the command for more samples."""
    config = setup.config
    prompt, best = config.log.sample_prompt, checkpoints.best_step()
    console.print(f"finished at step {state.step}: {outcome(config, state)}")
    other = f"; best: {checkpoints.path(best)}" if best not in (None, state.step) else ""
    console.print(f"checkpoint: {checkpoints.path(state.step)}{other}")
    text = sample_text(
        setup.model, data.tokenizer, prompt, seed=config.run.seed, tokens=SAMPLE_TOKENS
    )
    guess = math.log(setup.model.config.vocab_size)
    if state.last_val_loss is not None and state.last_val_loss > GIBBERISH * guess:
        console.print(
            f"note: gibberish is expected after {counted(state.step, 'step')}: the loss of random "
            f"guessing is {guess:.2f}"
        )
    console.print(f"sample (prompt: {prompt!r}):\n\n{shown(text, sys.stdout)}\n")
    console.print(f"to generate more: {sample_command(config)}")


def sample_command(config: Config) -> str:
    prompt = config.log.sample_prompt
    start = f" --prompt {shlex.quote(prompt)}" if prompt.strip() else ""
    return f"python sample.py {shlex.quote(str(Path(config.run.out_dir)))}{start}"
