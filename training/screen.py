"""What a run tells its reader at the start and at the end, the sample included."""

from __future__ import annotations

import shlex
from contextlib import nullcontext

import torch

from data.options import ConfigError
from data.tokenizer import Tokenizer, start_ids
from model.generate import SamplingConfig, generate
from training.config import Config
from training.run import Run

SAMPLE_TOKENS = 150  # of the sample at the end


def check_prompt(config: Config, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the sample's prompt cannot be encoded: at the start, not at the end."""
    try:
        tokenizer.encode(config.log.sample_prompt)
    except ConfigError as error:
        raise ConfigError(f"log.sample_prompt={config.log.sample_prompt!r}: {error}") from error


def introduce(run: Run) -> None:
    """Say what will happen."""
    config, model, data = run.config, run.setup.model, run.data
    n, T, steps = config.data.global_batch, config.model.context_length, config.run.max_steps
    run.say(
        f"model: {model.parameter_count():,} parameters, {config.model.n_layers} layers of width "
        f"{config.model.d_model}, vocabulary {config.model.vocab_size:,}"
    )
    run.say(
        f"data: {config.data.source}, {data.train.n_tokens:,} tokens to train, "
        f"{data.val.n_tokens:,} to validate"
    )
    run.say(
        f"{steps:,} steps of {n} x {T} = {n * T:,} tokens in {run.setup.n_micro} micro-batches, "
        f"{steps * n / len(data.train):.2f} epochs, {config.optim.optimizer}; into {run.folder}"
    )


def say_finished(run: Run) -> None:
    """A run that has nothing left to do, and what one can still do with it."""
    run.warn(
        f"{run.folder} is finished at step {run.state.step}: {run.outcome}. To sample: "
        f"{sample_command(run)}; to train on: --resume=must --max_steps=N"
    )


def say_stopped(run: Run) -> None:
    """Asked to stop: where the work is, and how it goes on."""
    run.warn(
        f"stopped at step {run.state.step} of {run.config.run.max_steps}; saved in "
        f"{run.checkpoints.path(run.state.step)}. The same command goes on from there"
    )


def say_result(run: Run) -> None:
    """The last words: the loss, where the checkpoint is, a sample, how to sample more."""
    prompt, state, checkpoints = run.config.log.sample_prompt, run.state, run.checkpoints
    best = checkpoints.best_step()
    run.warn(f"finished at step {state.step}: {run.outcome}")
    run.warn(
        f"checkpoint: {checkpoints.path(state.step)}"
        + (f"; the best: {checkpoints.path(best)}" if best not in (None, state.step) else "")
    )
    run.warn(f"a sample of it, from {prompt!r}:\n\n{sample_text(run, prompt)}\n")
    run.warn(f"more: {sample_command(run)}")


def sample_command(run: Run) -> str:
    """What to type for more samples."""
    prompt = run.config.log.sample_prompt
    start = f" --prompt {shlex.quote(prompt)}" if prompt else ""
    return f"python sample.py {shlex.quote(str(run.folder))}{start}"


def sample_text(run: Run, prompt: str) -> str:
    """The prompt continued, by a generator of its own, so that no training draw changes."""
    tokenizer, device = run.data.tokenizer, run.setup.ranks.device
    ids = tokenizer.encode(prompt) or start_ids(tokenizer)
    rng = torch.Generator(device).manual_seed(run.config.run.seed)
    settings = SamplingConfig(temperature=0.8, top_k=50, max_new_tokens=SAMPLE_TOKENS)
    # Compiled, each length of the text would be compiled anew.
    eager = torch.compiler.set_stance("force_eager") if run.config.run.compile else nullcontext()
    with eager:
        new = generate(
            run.setup.model,
            torch.tensor([ids], device=device),
            settings,
            rng,
            stop_id=tokenizer.eot,
            n_ids=tokenizer.vocab_size,
        )
        return prompt + tokenizer.decode([int(token) for token in new])
