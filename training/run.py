"""What the loop of train.py does at each turn: a step, a line of the log, an evaluation, a save."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cli.files import replace_file
from data.loader import Batch, BatchLoader, prefetch
from data.shards import Windows
from training.budget import Budget, fitted, open_budget, steps_at
from training.checkpoint import Checkpoints, TrainState, all_finite
from training.config import Config, sections_of, to_json
from training.console import Console
from training.dataset import Data
from training.device import model_flops_utilization, peak_flops
from training.evaluate import choose_windows, evaluate, windows_at_once
from training.logger import RunLogger
from training.observer import Observer
from training.optimizer import lr_factor
from training.signals import Interrupts
from training.step import NonFinite, Setup, StepMetrics, count_targets, train_step

Batches = Iterator[Batch]


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
    console: Console
    argv: Sequence[str] = ()  # as typed
    logger: RunLogger | None = None  # rank 0's
    observer: Observer | None = None  # rank 0's
    budget: Budget | None = None  # rank 0's, if the run has a time budget
    stopping: bool = False  # some rank was asked to; all know
    saving: bool = False  # a save is under way, or has failed
    tokens: int = 0  # targets of all ranks since the last line of the log ...
    seconds: float = 0.0  # ... and the time for them, without evaluation and saving ...
    waited: float = 0.0  # ... of which it waited for data
    last: StepMetrics | None = None
    peak: float | None = None  # FLOP/s of one device

    @property
    def folder(self) -> Path:
        return Path(self.config.run.out_dir)

    @property
    def max_steps(self) -> int:
        """Updates of the whole run; with a time budget, as far as is known."""
        if not self.config.run.time_budget:
            return self.config.run.max_steps
        return steps_at(self.state.fits, self.state.step)

    @property
    def early(self) -> bool:
        """Patience has run out."""
        patience = self.config.run.patience
        return patience > 0 and self.state.since_best >= patience

    @property
    def finished(self) -> bool:
        """Nothing is left to do but perhaps a last evaluation."""
        return self.state.step >= self.max_steps or self.early

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
        due = step % self.config.run.eval_interval == 0 or step >= self.max_steps
        return step > 0 and due and self.state.evaluated_at != step

    @property
    def checkpoint_is_due(self) -> bool:
        step = self.state.step
        return step > 0 and step % self.config.run.checkpoint_interval == 0

    @property
    def log_is_due(self) -> bool:
        """At every interval, at the first and the last step, and beside every evaluation."""
        step, interval = self.state.step, self.config.log.interval
        return step == 1 or step % interval == 0 or self.stopping or self.evaluation_is_due


def make_loader(config: Config, data: Data) -> BatchLoader:
    return BatchLoader(
        data.train,
        seed=config.run.seed,
        global_batch=config.data.global_batch,
        micro_batch=config.data.micro_batch,
    )


@contextlib.contextmanager
def recording(run: Run) -> Iterator[None]:
    """Rank 0: run.json, the log and wandb are open while the block runs."""
    run.setup.ranks.apart = True
    if not run.setup.ranks.first:
        yield
        return
    config, state = run.config, run.state
    replace_file(run.folder / "run.json", to_json(config))
    run.logger = RunLogger(run.folder, run.console)
    run.budget = open_budget(config.run, state)
    run.peak = peak_flops(run.setup.ranks.device, run.setup.precision.dtype)
    if config.log.wandb:
        sections = {name: asdict(section) for name, section in sections_of(config)}
        state.wandb_id = run.logger.start_wandb(
            run.folder, config.log.project, sections, state.wandb_id
        )
    run.observer = Observer(config, run.setup, run.data, run.logger, run.console)
    run.console.open_progress(state.step, run.max_steps)
    run.observer.begin(state.step, run.max_steps, run.argv)
    try:
        yield
    finally:
        run.console.close_progress()
        run.logger.close()


@contextlib.contextmanager
def batches_from(run: Run) -> Iterator[Batches]:
    """This rank's micro-batches from the present step to the end, read ahead by a thread that lives
    as long as the block."""
    M = run.setup.n_micro
    # With a time budget the end is not known yet.
    steps = range(run.state.step, sys.maxsize if run.config.run.time_budget else run.max_steps)
    indices = (step * M + j for step in steps for j in run.setup.local_micro)
    device, asked_to_stop = run.setup.ranks.device, lambda: run.interrupts.stop
    read = prefetch(run.loader, indices, device, stop=asked_to_stop)
    with contextlib.closing(read) as batches:
        yield batches


def take_step(run: Run, batches: Batches) -> None:
    """One update; none if some rank was asked to stop. Raises NonFinite naming the windows."""
    setup, step = run.setup, run.state.step
    began = time.perf_counter()
    fit = run.budget.fit(step) if run.budget is not None else None
    mine = list(itertools.islice(batches, len(setup.local_micro)))  # fewer when asked to stop
    waited = time.perf_counter() - began
    counts = [count_targets(mine), int(run.interrupts.stop), fit or 0]
    n_targets, stops, fit = setup.ranks.sum_ints(counts, f"step {step + 1}, counting targets")
    if stops:
        run.stopping = True
        return
    if fit:  # of rank 0
        note_fit(run, fit)
        if run.finished:
            return
    setup.optimizers.set_lr(lr_factor(step, run.max_steps, fitted(run.config, run.max_steps)))
    try:
        run.last = train_step(setup, mine, step, n_targets)
    except NonFinite as error:
        first = step * setup.n_micro
        used = [place for j in range(setup.n_micro) for place in run.loader.locate(first + j)]
        shown = ", ".join(f"{window} (epoch {epoch})" for epoch, window, *_ in used[:32])
        raise NonFinite(f"{error}. Its windows: {shown}{' ...' * (len(used) > 32)}") from error
    run.state.step += 1  # at once: weights and step are a state that may be saved at any time
    run.state.skipped += run.last.skipped
    if run.state.tokens is not None:
        run.state.tokens += run.last.tokens
    seconds = time.perf_counter() - began
    run.seconds += seconds
    run.waited += waited
    run.tokens += run.last.tokens
    if run.budget is not None:
        run.budget.stepped(seconds)
        run.state.seconds = run.budget.spent
    run.console.advance(run.state.step)


def note_fit(run: Run, max_steps: int) -> None:
    """From this step on the run is `max_steps` long, by its time budget."""
    step = run.state.step
    run.state.fits = (*run.state.fits, (step, max_steps))
    if run.logger is not None and run.budget is not None:
        run.console.set_length(max_steps)
        run.logger.event(step, fit=max_steps, seconds=round(run.budget.spent, 3))


def log_step(run: Run) -> None:
    """The last step's figures; tokens per second over the time trained since the last line."""
    run.setup.ranks.apart = True  # a disk or wandb may be slow
    if run.logger is None or run.observer is None or run.last is None or run.tokens == 0:
        return
    step, loss = run.state.step, run.last.loss
    rate = run.tokens / max(1e-9, run.seconds)
    flops = run.setup.model.flops_per_token(run.config.model.context_length)
    mfu = model_flops_utilization(rate, flops, run.peak, run.setup.ranks.world)
    entry = run.logger.log(
        step,
        loss=loss,
        lr=run.setup.optimizers.lr,
        grad_norm=run.last.grad_norm,
        tokens=run.state.tokens,
        tokens_per_second=rate,
        mfu=mfu,
        data_wait=round(run.waited / max(1e-9, run.seconds), 4),
        skipped=run.state.skipped or None,
    )
    interval, per_token = run.config.run.eval_interval, run.observer.bytes_per_token
    run.console.progress(
        step,
        loss,
        rate,
        mfu,
        bits_per_byte=loss / math.log(2) / per_token if per_token else None,
        next_evaluation=min(run.max_steps, (step // interval + 1) * interval)
        if run.data.val
        else None,
    )
    run.observer.logged(entry, run.max_steps)
    run.tokens, run.seconds, run.waited = 0, 0.0, 0.0


def run_evaluation(run: Run) -> None:
    """Score the validation windows, if there are any, then write samples and the report; a new best
    is saved. Leaves early if asked to stop.

    Raises NonFinite if the loss is not finite.
    """
    began = time.perf_counter()
    if run.data.val is None:
        run.state.evaluated_at = run.state.step
    else:
        score(run, run.data.val)
        if run.stopping:
            return
    run.setup.ranks.apart = True
    if run.observer is not None:
        run.observer.evaluated(run.state.step)
    if run.budget is not None:
        run.budget.evaluated(time.perf_counter() - began)


def score(run: Run, windows: Windows) -> None:
    """Measure and log the validation loss, and save if it is the best so far."""
    setup, config, state = run.setup, run.config, run.state
    found = evaluate(
        setup.model,
        windows,
        choose_windows(len(windows), config.run.eval_windows),
        batch=windows_at_once(config),
        byte_lengths=run.data.byte_lengths,
        ranks=setup.ranks,
        precision=setup.precision,
        stop=lambda: run.interrupts.stop,
    )
    if found is None:
        run.stopping = True
        return
    if not math.isfinite(found.loss):
        raise NonFinite(f"step {state.step}: validation loss {found.loss}; nothing was saved")
    best = state.record(found.loss)
    if run.logger is not None and run.observer is not None:
        entry = run.logger.log(
            state.step,
            val_loss=found.loss,
            perplexity=found.perplexity,
            bits_per_byte=found.bits_per_byte,
        )
        bits = found.bits_per_byte
        run.console.say(
            f"step {state.step}: validation loss {found.loss:.4f}, perplexity "
            f"{found.perplexity:.2f}"
            + (f", {bits:.4f} bits per byte" if bits is not None else "")
            + " (best so far)" * best
        )
        run.observer.logged(entry, run.max_steps)
    if best:
        save(run, best=True)


def share_signal(run: Run) -> None:
    """Let every rank end as the one that was asked to stop."""
    mine = torch.tensor([run.interrupts.signal or 0])
    run.interrupts.signal = max(map(int, run.setup.ranks.gather(mine, "stopping")))


def save(run: Run, best: bool = False) -> None:
    """A checkpoint of this step, by rank 0. Raises NonFinite, on all ranks alike, if there is inf
    or nan in what would be saved: an update can make it out of a finite gradient."""
    setup, state = run.setup, run.state
    model, optim = dict(setup.model.named_parameters()), setup.optimizers.state_tensors()
    if not all_finite([*model.values(), *optim.values()]):
        raise NonFinite(
            f"step {state.step}: weights or optimizer state are not finite; nothing was saved"
        )
    setup.ranks.apart = True
    if not setup.ranks.first:
        return
    run.saving = True
    state.scaler = setup.scaler.state_dict()
    written = run.checkpoints.save(
        state,
        model,
        optim,
        to_json(run.config),
        run.data.checked_tokenizer(),
        {**run.data.about, **setup.ranks.about},
    )
    if best:
        run.checkpoints.set_best(state.step)
    run.checkpoints.prune(run.config.run.keep_checkpoints)
    run.saving = False
    if written:
        run.console.say(f"saved {run.checkpoints.path(state.step)}")


@contextlib.contextmanager
def saved_on_failure(run: Run) -> Iterator[None]:
    """If the block fails, save the last complete update, then let the failure be seen.

    Rank 0 does it alone, without a word to the others: they hold the same weights and may be gone.
    """
    try:
        yield
    except Exception as error:
        if run.setup.ranks.first and run.state.step > 0 and not doubts_weights(run, error):
            try:
                save(run)
                run.console.print(f"warning: ended by an error; step {run.state.step} is saved")
            except Exception as other:  # a full disk, a GPU that is lost ...
                run.console.print(f"warning: step {run.state.step} could not be saved: {other}")
        raise


def doubts_weights(run: Run, error: Exception) -> bool:
    """Whether after this error the weights may not be those of the last complete update, or not be
    worth keeping, or saving them is what failed. Decided here alone."""
    return isinstance(error, NonFinite) or run.setup.updating or run.saving
