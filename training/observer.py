"""Rank 0's view of a run: its log, progress, advice, snapshots and report.

Nothing here changes a weight or a random draw of training. A snapshot or report that fails does not
stop it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from training.advice import Advice, Adviser
from training.console import UNKNOWN_STEPS, Console
from training.dataset import Data
from training.device import model_flops_utilization, peak_flops
from training.live import LivePage
from training.logger import RunLogger, append_line, start_entry
from training.report.history import SNAPSHOTS, History
from training.report.page import try_report
from training.snapshot import sample_text, scored_passage
from training.step import Setup

SAMPLE_TOKENS = 120  # of the sample at each evaluation
REPORT_SECONDS = 30.0  # between two reports, if no evaluation comes first: 2 to 16 ms of work


class Observer:
    """Follows one run: `begin`, then `log_step` and `log_evaluation`, `evaluated`, `end`."""

    def __init__(self, setup: Setup, data: Data, console: Console) -> None:
        self.config = config = setup.config
        self.setup, self.data, self.console = setup, data, console
        self.folder = Path(config.run.out_dir)
        self.logger = RunLogger(self.folder, console)
        self.peak = peak_flops(setup.ranks.device, setup.precision.dtype)  # FLOP/s per device
        meta = data.meta
        # The average over the training text; the text of a single step differs a little.
        self.bytes_per_token = meta.bytes["train"] / max(1, meta.tokens["train"])
        self.adviser = Adviser(config, len(data.train), data.tokenizer.vocab_size)
        self.live: LivePage | None = None
        self.reported = -math.inf  # when the report was last written, in monotonic seconds
        self.history = History(self.folder, config)
        for entry in self.history.read_metrics():  # of earlier attempts
            if entry.keys() & {"loss", "val_loss", "note"}:
                self.adviser.see(entry, config.run.max_steps)

    def begin(
        self, step: int, max_steps: int, wandb_id: str | None, argv: Sequence[str]
    ) -> str | None:
        """Log that a process starts at this step; return the id of the wandb run, if there is one.

        argv: the command as typed.
        """
        if self.config.log.wandb:
            sections = {
                name: asdict(section)
                for name, section in vars(self.config).items()
                if is_dataclass(section) and not isinstance(section, type)
            }
            wandb_id = self.logger.start_wandb(self.config.log.project, sections, wandb_id)
        if self.config.log.live:
            self.live = LivePage(self.folder, self.console.print)
        start = start_entry(self.setup, self.data, argv)
        self.logger.event(step, start=start)
        self.console.open_progress(step, max_steps)
        if max_steps < UNKNOWN_STEPS:
            self._advise(step, self.adviser.plan(max_steps))
        return wandb_id

    def refit(self, step: int, max_steps: int, seconds: float) -> None:
        """Log a new length of the run, after `seconds` of its time budget."""
        self.console.set_length(max_steps)
        self.logger.event(step, fit=max_steps, seconds=round(seconds, 3))

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilization at this speed; None if the device's peak is unknown."""
        flops = self.setup.model.flops_per_token(self.config.model.context_length)
        world = self.setup.ranks.world
        return model_flops_utilization(tokens_per_second, flops, self.peak, world)

    def log_step(self, step: int, **values: float | None) -> None:
        """Log and show the figures of a step."""
        self._log(step, **values)
        loss, speed, per_token = values["loss"], values["tokens_per_second"], self.bytes_per_token
        assert loss is not None and speed is not None
        interval = self.config.run.eval_interval
        next_evaluation = min(self.console.max_steps, (step // interval + 1) * interval)
        self.console.progress(
            step,
            loss,
            speed,
            values["mfu"],
            bits_per_byte=loss / math.log(2) / per_token if per_token else None,
            next_evaluation=next_evaluation if self.data.val else None,
        )
        if time.monotonic() - self.reported > REPORT_SECONDS:
            self._report()

    def log_evaluation(self, step: int, best: bool, **values: float | None) -> None:
        """Log and print a validation loss."""
        bits, text = values["bits_per_byte"], f"validation loss {values['val_loss']:.4f}"
        if self.console.bar is None:  # exp(loss); with a bar, a line is to fit 80 columns
            text += f", perplexity {values['perplexity']:.2f}"
        text += f", {bits:.4f} bits per byte" if bits is not None else ""
        self.console.say(f"step {step}: {text}" + " (best so far)" * best)
        self._log(step, **values)

    def evaluated(self, step: int) -> None:
        """Save a snapshot and rewrite the report."""
        if not self.config.log.report:
            return
        try:
            snapshot = self._snapshot(step)
            append_line(self.folder / SNAPSHOTS, snapshot)
            self.logger.log_sample(step, snapshot["prompt"], snapshot["sample"])
        except Exception as error:  # out of memory, a full disk: training continues
            reason = (str(error).splitlines() or [""])[0]
            self.console.print(f"note: no snapshot this time ({type(error).__name__}: {reason})")
        self._report()

    def end(self, step: int, how: str) -> None:
        """Log how the process ended, write the last report, and close everything.

        how: finished, stopped, or failed and why.
        """
        self.console.close_progress()
        with contextlib.suppress(OSError):  # a full disk was reported when the line was written
            self.logger.event(step, end=how)
            self._report()
        self.logger.close()
        if self.live is not None:
            self.live.close()

    def _report(self) -> None:
        if self.config.log.report:
            try_report(self.history, self.console.print)
            self.reported = time.monotonic()

    def _snapshot(self, step: int) -> dict[str, Any]:
        config, model, tokenizer = self.config, self.setup.model, self.data.tokenizer
        prompt, seed, val = config.log.sample_prompt, config.run.seed, self.data.val
        return {
            "step": step,
            "attempt": self.logger.attempt,
            "prompt": prompt,
            "sample": sample_text(model, tokenizer, prompt, seed=seed, tokens=SAMPLE_TOKENS),
            "passage": scored_passage(model, tokenizer, val, self.setup.precision) if val else [],
        }

    def _log(self, step: int, **values: float | None) -> None:
        entry = self.logger.log(step, **values)
        self._advise(step, self.adviser.see(entry, self.console.max_steps))

    def _advise(self, step: int, found: list[Advice]) -> None:
        for topic, text in found:
            self.console.print(f"advice: {text}")
            self.logger.event(step, note=text, about=topic)
