"""The training loop, and its parts: when each is due, and what it does.

Signatures say what a part touches: `setup` and `data` are built once, `state` is saved with every
checkpoint, `meters` are measurements of this process, `observer` is rank 0's log (None elsewhere).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from data.loader import Batch, BatchLoader, prefetch
from training.budget import Budget, next_factor, open_budget, out_of_patience, planned_steps
from training.checkpoint import Checkpoints, TrainState, all_finite
from training.config import Config, to_json
from training.console import Console
from training.dataset import Data
from training.evaluate import choose_windows, evaluate, windows_at_once
from training.observer import Observer
from training.signals import Interrupts
from training.step import NonFinite, Setup, StepMetrics, count_targets, train_step


@dataclass
class Meters:
    """Measurements since the last logged line.

    Of these, only the time budget can influence training.
    """

    budget: Budget | None  # on rank 0, if the run has a time budget
    last: StepMetrics | None = None
    tokens: int = 0  # targets, over all ranks
    seconds: float = 0.0  # spent in steps, without evaluation and saving ...
    waited: float = 0.0  # ... and the part of it spent waiting for data


def train(
    setup: Setup,
    data: Data,
    state: TrainState,
    checkpoints: Checkpoints,
    interrupts: Interrupts,
    observer: Observer | None,
) -> None:
    """Evaluate, save, step and log, each when it is due, until done or asked to stop; then save."""
    config = setup.config
    meters = Meters(open_budget(config.run, state) if setup.ranks.first else None)
    with batches_from(setup, data, state, interrupts) as batches:
        while True:
            if evaluation_is_due(config, state):
                run_evaluation(setup, data, state, checkpoints, interrupts, meters, observer)
            if interrupts.agreed or is_finished(config, state):
                break
            if checkpoint_is_due(config, state):
                save(setup, data, state, checkpoints, observer)
            take_step(setup, data, state, batches, interrupts, meters, observer)
            if log_is_due(config, state) or interrupts.agreed:
                log_step(setup, state, meters, observer)
    if interrupts.agreed:
        share_signal(setup, interrupts)
    save(setup, data, state, checkpoints, observer)


# Conditions


def is_finished(config: Config, state: TrainState) -> bool:
    """Whether no step is left to take; a last evaluation may be."""
    return state.step >= planned_steps(config.run, state) or out_of_patience(config.run, state)


def evaluation_is_due(config: Config, state: TrainState) -> bool:
    """At every eval_interval and at the end; once per step, even if the run is resumed there."""
    at_the_end = state.step >= planned_steps(config.run, state)
    due = state.step % config.run.eval_interval == 0 or at_the_end
    return state.step > 0 and due and state.evaluated_at != state.step


def checkpoint_is_due(config: Config, state: TrainState) -> bool:
    return state.step > 0 and state.step % config.run.checkpoint_interval == 0


def log_is_due(config: Config, state: TrainState) -> bool:
    """At every interval, after the first step, and before every evaluation."""
    on_time = state.step == 1 or state.step % config.log.interval == 0
    return on_time or evaluation_is_due(config, state)


# Actions


@contextlib.contextmanager
def batches_from(
    setup: Setup, data: Data, state: TrainState, interrupts: Interrupts
) -> Iterator[Iterator[Batch]]:
    """Yield this rank's micro-batches from the current step to the end, read ahead by a thread that
    lives as long as the block."""
    run, M = setup.config.run, setup.n_micro
    # With a time budget the end is not known yet.
    end = sys.maxsize if run.time_budget else planned_steps(run, state)
    indices = (step * M + j for step in range(state.step, end) for j in setup.local_micro)
    loader, device = make_loader(setup.config, data), setup.ranks.device
    read = prefetch(loader, indices, device, stop=lambda: interrupts.asked)
    with contextlib.closing(read) as batches:
        yield batches


def make_loader(config: Config, data: Data) -> BatchLoader:
    return BatchLoader(
        data.train,
        seed=config.run.seed,
        global_batch=config.data.global_batch,
        micro_batch=config.data.micro_batch_size,
    )


def take_step(
    setup: Setup,
    data: Data,
    state: TrainState,
    batches: Iterator[Batch],
    interrupts: Interrupts,
    meters: Meters,
    observer: Observer | None,
) -> None:
    """Make one update, unless a rank was asked to stop or the time budget is used up.

    Raises NonFinite naming the windows of the step.
    """
    began = time.perf_counter()
    config, step, budget = setup.config, state.step, meters.budget
    fit = budget.fit(step) if budget is not None else None
    mine = list(itertools.islice(batches, len(setup.local_micro)))  # fewer if asked to stop
    waited = time.perf_counter() - began

    # One exchange per step tells all ranks the number of targets, whether any rank was asked to
    # stop, and rank 0's new length of the run, so that all act on them at the same step.
    counts = [count_targets(mine), int(interrupts.asked), fit or 0]
    n_targets, stops, fit = setup.ranks.sum_ints(counts, f"step {step + 1}, counting targets")
    if stops:
        interrupts.agreed = True
        return
    if fit:
        state.fits = (*state.fits, (step, fit))
        if observer is not None and budget is not None:
            observer.refit(step, fit, budget.spent)
        if is_finished(config, state):
            return

    setup.optimizers.set_lr(next_factor(config, state))
    try:
        metrics = train_step(setup, mine, step, n_targets)
    except NonFinite as error:
        windows = _windows_of(make_loader(config, data), step)
        raise NonFinite(f"{error}. Its windows: {windows}") from error

    state.step += 1  # at once: from here on the weights belong to this step and may be saved
    state.skipped += metrics.skipped
    if state.tokens is not None:
        state.tokens += metrics.tokens
    seconds = time.perf_counter() - began
    meters.last = metrics
    meters.tokens += metrics.tokens
    meters.seconds += seconds
    meters.waited += waited
    if budget is not None:
        budget.stepped(seconds)
        state.seconds = budget.spent
    if observer is not None:
        observer.console.advance(state.step)


def _windows_of(loader: BatchLoader, step: int, limit: int = 32) -> str:
    first, M = step * loader.micro_batches, loader.micro_batches
    used = [place for j in range(M) for place in loader.locate(first + j)]
    shown = ", ".join(f"{window} (epoch {epoch})" for epoch, window, _ in used[:limit])
    return shown + " ..." * (len(used) > limit)


def log_step(setup: Setup, state: TrainState, meters: Meters, observer: Observer | None) -> None:
    """Log the last step, with the average speed since the last logged line."""
    setup.ranks.apart = True  # a disk or wandb may be slow
    if observer is None or meters.last is None or meters.tokens == 0:
        return
    seconds = max(1e-9, meters.seconds)
    rate = meters.tokens / seconds
    observer.log_step(
        state.step,
        loss=meters.last.loss,
        lr=setup.optimizers.lr,
        grad_norm=meters.last.grad_norm,
        tokens=state.tokens,
        tokens_per_second=rate,
        mfu=observer.mfu(rate),
        data_wait=round(meters.waited / seconds, 4),
        skipped=state.skipped or None,
    )
    meters.tokens, meters.seconds, meters.waited = 0, 0.0, 0.0


def run_evaluation(
    setup: Setup,
    data: Data,
    state: TrainState,
    checkpoints: Checkpoints,
    interrupts: Interrupts,
    meters: Meters,
    observer: Observer | None,
) -> None:
    """Measure the validation loss, if there is a validation set; save a new best; then write
    samples and the report. Returns early if a rank is asked to stop.

    Raises NonFinite if the loss is not finite.
    """
    began, config = time.perf_counter(), setup.config
    if data.val is None:
        state.evaluated_at = state.step
    else:
        found = evaluate(
            setup.model,
            data.val,
            choose_windows(len(data.val), config.run.eval_windows),
            batch=windows_at_once(config),
            byte_lengths=data.byte_lengths,
            ranks=setup.ranks,
            precision=setup.precision,
            stop=lambda: interrupts.asked,
        )
        if found is None:
            interrupts.agreed = True
            return
        if not math.isfinite(found.loss):
            raise NonFinite(f"step {state.step}: validation loss {found.loss}; nothing was saved")
        best = state.record(found.loss)
        if observer is not None:
            observer.log_evaluation(
                state.step,
                best,
                val_loss=found.loss,
                perplexity=found.perplexity,
                bits_per_byte=found.bits_per_byte,
            )
        if best:
            save(setup, data, state, checkpoints, observer)
    setup.ranks.apart = True
    if observer is not None:
        observer.evaluated(state.step)
    if meters.budget is not None:
        meters.budget.evaluated(time.perf_counter() - began)


def save(
    setup: Setup, data: Data, state: TrainState, checkpoints: Checkpoints, observer: Observer | None
) -> None:
    """Write a checkpoint of this step on rank 0.

    Raises NonFinite, on all ranks alike, if a weight or the optimizer's state is inf or nan: an
    update can make them so out of a finite gradient.
    """
    model, optim = setup.model.trained_parameters(), setup.optimizers.state_tensors()
    if not all_finite([*model.values(), *optim.values()]):
        raise NonFinite(
            f"step {state.step}: weights or optimizer state are not finite; nothing was saved"
        )
    setup.ranks.apart = True
    if not setup.ranks.first:
        return
    state.scaler = setup.scaler.state_dict()
    about, run_json = {**data.about, **setup.ranks.about}, to_json(setup.config)
    written = checkpoints.save(state, model, optim, run_json, data.checked_tokenizer(), about)
    if state.best_step == state.step:
        checkpoints.set_best(state.step)
    checkpoints.prune(setup.config.run.keep_checkpoints)
    if written and observer is not None and observer.console.bar is None:
        observer.console.say(f"saved {checkpoints.path(state.step)}")


def share_signal(setup: Setup, interrupts: Interrupts) -> None:
    """Make every rank exit with the code of the rank that got a signal."""
    mine = torch.tensor([interrupts.signal or 0])
    interrupts.signal = max(map(int, setup.ranks.gather(mine, "stopping")))


# Around the loop


@contextlib.contextmanager
def observed(
    setup: Setup, data: Data, state: TrainState, argv: Sequence[str], console: Console
) -> Iterator[Observer | None]:
    """Keep rank 0's log open while the block runs; yield None on the other ranks."""
    setup.ranks.apart = True
    if not setup.ranks.first:
        yield None
        return
    observer, how = Observer(setup, data, console), "stopped"
    try:
        length = planned_steps(setup.config.run, state)
        state.wandb_id = observer.begin(state.step, length, state.wandb_id, argv)
        yield observer
        how = "finished" if is_finished(setup.config, state) else "stopped"
    except Exception as error:
        how = f"failed: {(str(error).splitlines() or [type(error).__name__])[0]}"
        raise
    finally:
        observer.end(state.step, how)


@contextlib.contextmanager
def saved_on_failure(
    setup: Setup, data: Data, state: TrainState, checkpoints: Checkpoints, observer: Observer | None
) -> Iterator[None]:
    """If the block fails, save the last complete update, then let the error pass.

    Rank 0 saves without asking the others: they hold the same weights and may be gone. Nothing is
    saved if the weights may be half updated or not finite, or if it is a save that failed.
    """
    try:
        yield
    except Exception as error:
        doubtful = isinstance(error, NonFinite) or setup.updating or checkpoints.save_failed
        if observer is not None and state.step > 0 and not doubtful:
            say = observer.console.print
            try:
                save(setup, data, state, checkpoints, observer)
                say(f"warning: stopped by an error; step {state.step} was saved")
            except Exception as other:  # a full disk, a GPU that is lost ...
                say(f"warning: stopped by an error; step {state.step} was not saved: {other}")
        raise
