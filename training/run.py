"""What the loop of train.py does at each turn: a step, a line of the log, an evaluation, a save."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from data.loader import BatchLoader, prefetch
from data.tokenizer import start_ids
from model.generate import SamplingConfig, generate
from training.checkpoint import Checkpoints, TrainState, model_tensors, replace_file
from training.config import Config, to_json
from training.evaluate import choose_windows, evaluate
from training.hardware import peak_flops
from training.logger import RunLogger, Stopwatch, model_flops_utilisation
from training.schedule import lr_factor
from training.signals import Interrupts
from training.startup import Data, environment
from training.step import NonFinite, Setup, StepMetrics, train_step

Say = Callable[[str], None]


@dataclass
class Run:
    """A training under way: everything the loop touches."""

    config: Config
    setup: Setup
    data: Data
    loader: BatchLoader
    state: TrainState
    checkpoints: Checkpoints
    interrupts: Interrupts
    say: Say
    logger: RunLogger | None = None  # rank 0's
    watch: Stopwatch = field(default_factory=Stopwatch)
    stopping: bool = False  # some rank was asked to; all know
    tokens: int = 0  # targets since the last line of the log
    last: StepMetrics | None = None
    peak: float | None = None  # FLOP/s of one device

    @property
    def folder(self) -> Path:
        return Path(self.config.run.out_dir)

    @property
    def early(self) -> bool:
        """Patience has run out."""
        patience = self.config.run.patience
        return patience > 0 and self.state.since_best >= patience

    @property
    def finished(self) -> bool:
        """Nothing is left to do but perhaps a last evaluation."""
        return self.state.step >= self.config.run.max_steps or self.early

    @property
    def outcome(self) -> str:
        """Why it ended, and the losses, for the reader."""
        state = self.state
        why = (
            f"no better loss in {state.since_best} evaluations" if self.early else "all steps done"
        )
        if state.last_val_loss is None or state.best_loss is None:
            return why
        return (
            f"{why}; validation loss {state.last_val_loss:.4f}, best {state.best_loss:.4f} at step "
            f"{state.best_step}"
        )

    @property
    def evaluation_is_due(self) -> bool:
        """At every eval_interval and at the end; once a step, also over a resume."""
        step = self.state.step
        due = step % self.config.run.eval_interval == 0 or step >= self.config.run.max_steps
        return step > 0 and due and self.state.evaluated_at != step

    @property
    def checkpoint_is_due(self) -> bool:
        step = self.state.step
        return step > 0 and step % self.config.run.checkpoint_interval == 0


@contextlib.contextmanager
def recording(run: Run) -> Iterator[None]:
    """Rank 0: run.json, the log and wandb are open while the block runs."""
    if not run.setup.ranks.first:
        yield
        return
    config, state = run.config, run.state
    replace_file(run.folder / "run.json", to_json(config))
    run.logger = RunLogger(run.folder, config.run.max_steps, state.step, config.log.quiet)
    run.peak = peak_flops(run.setup.ranks.device, run.setup.precision.dtype)
    if config.log.wandb:
        state.wandb_id = run.logger.start_wandb(
            config.log.project, run.folder.name, asdict(config), state.wandb_id
        )
    try:
        yield
    finally:
        run.logger.close()


def introduce(run: Run) -> None:
    """Say what will happen."""
    config, model, data = run.config, run.setup.model, run.data
    n, T = config.data.global_batch, config.model.context_length
    epochs = config.run.max_steps * n / len(data.train)
    run.say(
        f"model {model.parameter_count():,} parameters; data {data.train.n_tokens:,} tokens to "
        f"train, {data.val.n_tokens:,} to validate, vocabulary {data.tokenizer.vocab_size:,}"
    )
    run.say(
        f"{config.run.max_steps:,} steps of {n} x {T} = {n * T:,} tokens in "
        f"{run.setup.n_micro} micro-batches: {epochs:.2f} epochs; into {run.folder}"
    )


def batches_from(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches from the present step to the end, read ahead by a thread."""
    M = run.setup.n_micro
    steps = range(run.state.step, run.config.run.max_steps)
    indices = (step * M + j for step in steps for j in run.setup.local_micro)
    return prefetch(run.loader, indices, run.setup.ranks.device)


def take_step(run: Run, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """One update. Raises NonFinite naming the step's windows."""
    setup, step = run.setup, run.state.step
    run.watch.start()
    setup.optimizers.set_lr(lr_factor(step, run.config.run.max_steps, run.config.schedule))
    mine = [next(batches) for _ in setup.local_micro]
    try:
        run.last = train_step(setup, mine, step, run.interrupts.stop)
    except NonFinite as error:
        first = step * setup.n_micro
        used = [place for j in range(setup.n_micro) for place in run.loader.locate(first + j)]
        shown = ", ".join(f"{window} (epoch {epoch})" for epoch, window, *_ in used[:32])
        raise NonFinite(f"{error}. Its windows: {shown}{' ...' * (len(used) > 32)}") from error
    run.watch.stop()
    run.state.step += 1
    run.state.skipped += run.last.skipped
    run.tokens += run.last.tokens
    run.stopping = run.last.stop


def log_step(run: Run) -> None:
    """The last step's figures; tokens per second over the time trained since the last line."""
    if run.logger is None or run.last is None:
        return
    rate = run.tokens / max(1e-9, run.watch.take())
    run.tokens = 0
    flops = run.setup.model.flops_per_token(run.config.model.context_length)
    run.logger.log(
        run.state.step,
        loss=run.last.loss,
        lr=run.setup.optimizers.lr,
        grad_norm=run.last.grad_norm,
        tokens_per_second=rate,
        mfu=model_flops_utilisation(rate, flops, run.peak, run.setup.ranks.world),
        skipped=run.state.skipped or None,
    )
    run.logger.progress(run.state.step, run.last.loss, rate)


def run_evaluation(run: Run) -> None:
    """Score the validation windows; a new best is saved. Leaves early if asked to stop."""
    setup, config, state = run.setup, run.config, run.state
    found = evaluate(
        setup.model,
        run.data.val,
        choose_windows(len(run.data.val), config.run.eval_windows),
        batch=config.data.micro_batch,
        byte_lengths=run.data.byte_lengths,
        ranks=setup.ranks,
        precision=setup.precision,
        stop=lambda: run.interrupts.stop,
    )
    if found is None:
        run.stopping = True
        return
    best = state.record(found.loss)
    if run.logger is not None:
        run.logger.log(
            state.step,
            val_loss=found.loss,
            perplexity=found.perplexity,
            bits_per_byte=found.bits_per_byte,
        )
        run.say(
            f"step {state.step}: validation loss {found.loss:.4f}, perplexity "
            f"{found.perplexity:.2f}, {found.bits_per_byte:.4f} bits per byte"
            f"{' (best so far)' * best}"
        )
    if best:
        save(run, best=True)


def save(run: Run, best: bool = False) -> None:
    """A checkpoint of this step, by rank 0."""
    if not run.setup.ranks.first:
        return
    setup, state = run.setup, run.state
    state.scaler = setup.scaler.state_dict()
    written = run.checkpoints.save(
        state,
        model_tensors(setup.model),
        setup.optimizers.state_tensors(),
        to_json(run.config),
        run.data.folder / "tokenizer",
        environment(setup.ranks, run.data),
    )
    if best:
        run.checkpoints.set_best(state.step)
    run.checkpoints.prune(run.config.run.keep_checkpoints)
    if written:
        run.say(f"saved {run.checkpoints.path(state.step)}")


def finish(run: Run) -> None:
    """The last words: the loss, where the checkpoint is, a sample, how to sample more."""
    prompt = run.config.log.sample_prompt
    print(f"finished at step {run.state.step}: {run.outcome}")
    print(f"checkpoint: {run.checkpoints.path(run.state.step)}")
    print(f"a sample from {prompt!r}:\n\n{sample_text(run, prompt)}\n")
    print(f"more: python sample.py {run.folder} --prompt {shlex.quote(prompt)}")


def sample_text(run: Run, prompt: str, max_new_tokens: int = 150) -> str:
    """The prompt continued, by a generator of its own, so that no training draw changes."""
    tokenizer, device = run.data.tokenizer, run.setup.ranks.device
    ids = tokenizer.encode(prompt) or start_ids(tokenizer)
    rng = torch.Generator(device).manual_seed(run.config.run.seed)
    settings = SamplingConfig(temperature=0.8, top_k=50, max_new_tokens=max_new_tokens)
    new = generate(
        run.setup.model,
        torch.tensor([ids], device=device),
        settings,
        rng,
        stop_id=tokenizer.eot,
        n_ids=tokenizer.vocab_size,
    )
    return prompt + tokenizer.decode([int(token) for token in new])
