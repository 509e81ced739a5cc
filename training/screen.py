"""What a run tells its reader at the start and at the end, the sample included."""

from __future__ import annotations

import math
import shlex
import sys
from contextlib import nullcontext

import torch

from cli.command import shown
from cli.options import ConfigError
from data.tokenizer import Tokenizer
from training import observer
from training.budget import UNFITTED
from training.config import Config, seconds_of
from training.console import clock_text
from training.memory import estimate_memory
from training.run import Run

SAMPLE_TOKENS = 150  # of the sample at the end
ASSUMED_MFU = 0.5  # of the estimate at the start
WELL_FILLED = 0.5  # of the windows' positions: rows that documents share are, on average


def check_prompt(config: Config, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the sample's prompt cannot be encoded: at the start, not at the end."""
    try:
        tokenizer.encode(config.log.sample_prompt)
    except ConfigError as error:
        raise ConfigError(f"log.sample_prompt={config.log.sample_prompt!r}: {error}") from error


def introduce(run: Run) -> None:
    """Say what will happen."""
    config, model, data = run.config, run.setup.model, run.data
    n, T, budget = config.data.global_batch, config.model.context_length, config.run.time_budget
    steps, count = run.max_steps, f"{run.max_steps:,}"
    epochs = f", {steps * n / len(data.train):.2f} epochs"
    if budget and steps == UNFITTED:
        count, epochs = f"as many as fit into {budget},", ""
    run.console.say(
        f"model: {model.parameter_count():,} parameters, {config.model.n_layers} layers of width "
        f"{config.model.d_model}, vocabulary {config.model.vocab_size:,}"
    )
    validates = f"{data.val.n_tokens:,} to validate" if data.val else "no validation"
    run.console.say(
        f"data: {config.data.source}, {data.train.n_tokens:,} tokens to train, {validates}"
    )
    run.console.say(
        f"steps: {count} of {n} x {T} = {n * T:,} tokens in {run.setup.n_micro} micro-batches"
        f"{epochs}, {config.optim.optimizer}; into {run.folder}"
    )
    run.console.say(f"estimate: {estimated_time(run)}, {estimated_memory(run)}")
    if data.train.filled < WELL_FILLED:
        run.console.say(
            f"advice: short documents fill {data.train.filled:.0%} of their windows, the rest of "
            "each step is padding; with --document_mask=true several share a window"
        )


def estimated_time(run: Run) -> str:
    """How long it may take, from arithmetic alone: the lines that follow know better."""
    if run.config.run.time_budget:
        return f"{run.config.run.time_budget} of time"
    if not run.peak:
        return "time unknown before the first steps"
    T, world = run.config.model.context_length, run.setup.ranks.world
    tokens = (run.max_steps - run.state.step) * run.config.data.global_batch * T
    work = tokens * run.setup.model.flops_per_token(T)
    seconds = work / (run.peak * ASSUMED_MFU * world)
    return f"{clock_text(seconds)} at {ASSUMED_MFU:.0%} of the peak"


def estimated_memory(run: Run) -> str:
    """Memory of a rank, by training/memory.py."""
    ranks = run.setup.ranks
    need = estimate_memory(run.config, ranks.world, ranks.device.type, run.setup.model).peak
    return f"{need / 1e9:.2f} GB of memory{' a rank' * (ranks.world > 1)}"


def say_finished(run: Run) -> None:
    """A run that has nothing left to do, and what one can still do with it."""
    run.console.print(
        f"{run.folder} is finished at step {run.state.step}: {run.outcome}. To sample: "
        f"{sample_command(run)}; to train on: the same command with {' '.join(to_train_on(run))}"
    )


def to_train_on(run: Run) -> list[str]:
    """Options with which a finished run takes steps again."""
    options, budget = [], run.config.run.time_budget
    if run.early:
        options.append("--patience=0")
    if run.state.step >= run.max_steps:
        try:
            used = max(seconds_of(budget), run.state.seconds)
            options.append(f"--time_budget={math.ceil(2 * used)}s")
        except ValueError:  # no budget, or another run's lengths
            options += ["--time_budget=", "--resume=must"] if budget else []
            options.append(f"--max_steps={2 * run.state.step}")
    return options


def say_stopped(run: Run) -> None:
    """Asked to stop: where the work is, and how it goes on."""
    length = "" if run.max_steps == UNFITTED else f" of {run.max_steps}"
    run.console.print(
        f"stopped at step {run.state.step}{length}; saved in "
        f"{run.checkpoints.path(run.state.step)}. The same command goes on from there"
    )


def say_result(run: Run) -> None:
    """The last words: the loss, where the checkpoint is, a sample, how to sample more."""
    prompt, state, checkpoints = run.config.log.sample_prompt, run.state, run.checkpoints
    best = checkpoints.best_step()
    run.console.print(f"finished at step {state.step}: {run.outcome}")
    run.console.print(
        f"checkpoint: {checkpoints.path(state.step)}"
        + (f"; the best: {checkpoints.path(best)}" if best not in (None, state.step) else "")
    )
    run.console.print(
        f"a sample of it, from {prompt!r}:\n\n{shown(sample_text(run, prompt), sys.stdout)}\n"
    )
    run.console.print(f"more: {sample_command(run)}")


def sample_command(run: Run) -> str:
    """What to type for more samples."""
    prompt = run.config.log.sample_prompt
    start = f" --prompt {shlex.quote(prompt)}" if prompt.strip() else ""
    return f"python sample.py {shlex.quote(str(run.folder))}{start}"


def sample_text(run: Run, prompt: str) -> str:
    """The prompt continued, by a generator of its own, so that no training draw changes."""
    # Compiled, each length of the text would be compiled anew.
    eager = torch.compiler.set_stance("force_eager") if run.config.run.compile else nullcontext()
    with eager:
        return observer.sample_text(
            run.setup.model,
            run.data.tokenizer,
            prompt,
            seed=run.config.run.seed,
            tokens=SAMPLE_TOKENS,
        )
