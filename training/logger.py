"""What a run says: a line of JSON a time, a bar or plain lines on the terminal, wandb if asked."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from cli.files import named_in_errors, replace_file
from training.folder import next_attempt

UNKNOWN_STEPS = 10**9  # as good as endless: a time budget before its first fit

YELLOW, GREEN, PLAIN = "\033[33m", "\033[32m", "\033[0m"


class RunLogger:
    """Writes metrics.jsonl and shows progress. Only rank 0 makes one.

    metrics.jsonl is only ever appended to. `attempt` counts the processes that worked on the run.
    """

    def __init__(self, folder: Path, max_steps: int, first_step: int, quiet: bool = False) -> None:
        self.path = folder / "metrics.jsonl"
        self.attempt = next_attempt(self.path)
        self.max_steps, self.first_step, self.quiet = max_steps, first_step, quiet
        self.started = time.monotonic()
        with named_in_errors(self.path):
            _end_torn_line(self.path)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (as long as the run)
        self.bar = self._make_bar()
        self.wandb: Any = None
        self.samples: list[list[Any]] = []  # rows of wandb's table

    def _make_bar(self) -> Any:
        if self.quiet or not sys.stderr.isatty():
            return None
        from tqdm import tqdm

        # smoothing=0: the time left goes by the average, evaluations included, as in `eta`.
        # What is drawn stands last, so that a narrow terminal cuts nothing that is to be read.
        text = "{n_fmt}/{total_fmt}, {remaining} left{postfix} {bar}"
        shape = {"bar_format": text, "dynamic_ncols": True, "smoothing": 0}
        total = self.max_steps if self.max_steps < UNKNOWN_STEPS else None
        return tqdm(total=total, initial=self.first_step, **shape)

    def start_wandb(
        self, folder: Path, project: str, config: dict[str, Any], run_id: str | None
    ) -> str | None:
        """Open a wandb run named like the folder, the same one again on a resume; returns its id.

        The id is kept in the folder: a run may be killed before its first checkpoint.
        Without the package, or if wandb cannot start, training goes on without it and says so.
        """
        kept = folder / "wandb_id"
        if run_id is None and kept.is_file():
            run_id = kept.read_text(encoding="utf-8", errors="replace").strip() or None
        try:
            import wandb

            self.wandb = wandb.init(
                project=project,
                name=os.path.basename(os.path.abspath(folder)),  # of out_dir=. too
                dir=str(folder),
                config=config,
                id=run_id,
                resume="allow",
            )
            run_id = str(self.wandb.id)
            replace_file(kept, f"{run_id}\n")
            return run_id
        except Exception as error:  # the package is missing, no login, no network ...
            self._drop_wandb("did not start", error)
            return run_id

    def _drop_wandb(self, what: str, error: Exception) -> None:
        self.wandb = None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        self.say(
            f"warning: wandb {what} ({reason}); going on without it. `pip install wandb` and "
            "`wandb login` set it up; WANDB_MODE=offline keeps the metrics in a local folder"
        )

    def log(self, step: int, **values: Any) -> dict[str, Any]:
        """One line of metrics.jsonl, which is returned, and wandb's; None is left out, and inf and
        nan become null."""
        entry = self.event(step, **values)
        if self.wandb is not None:
            try:
                self.wandb.log({k: v for k, v in values.items() if v is not None}, step=step)
            except Exception as error:
                self._drop_wandb("failed", error)
        return entry

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """A row of wandb's table of samples; a table cannot grow there, so it is sent whole."""
        if self.wandb is None:
            return
        try:
            import wandb

            self.samples.append([step, prompt, text])
            table = wandb.Table(columns=["step", "prompt", "sample"], data=self.samples)
            self.wandb.log({"samples": table}, step=step)
        except Exception as error:
            self._drop_wandb("failed", error)

    def event(self, step: int, **values: Any) -> dict[str, Any]:
        """A line of metrics.jsonl alone."""
        entry = {"step": step, "attempt": self.attempt, "time": round(time.time(), 3)}
        for name, value in values.items():
            if value is not None:
                bad = isinstance(value, float) and not math.isfinite(value)
                entry[name] = None if bad else value
        with named_in_errors(self.path):
            self.file.write(json.dumps(entry) + "\n")
            self.file.flush()
        return entry

    def advance(self, step: int) -> None:
        """Move the bar, if there is one, to `step`."""
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def progress(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        mfu: float | None = None,
        *,
        bits_per_byte: float | None = None,
        next_evaluation: int | None = None,
    ) -> None:
        """Show how the run is doing: on the bar, which knows the time left, else in a line.

        next_evaluation: the step of it.
        """
        figures = f"loss {loss:.4f}"
        if bits_per_byte is not None:
            figures += f", {bits_per_byte:.3f} bits per byte"
        figures += f", {short(tokens_per_second)} tokens/s"
        used = f", MFU {percent(mfu)}"
        ahead = ""
        if next_evaluation is not None and next_evaluation > step:
            ahead = f", evaluation in {clock_text(self.eta(step, next_evaluation))}"
        if self.bar is not None:
            self.bar.set_postfix_str(figures + ahead + used)
        elif not self.quiet:
            known = self.max_steps < UNKNOWN_STEPS
            of = f"{step}/{self.max_steps}" if known else f"{step}"
            left = f", {clock_text(self.eta(step))} left" if known else ""
            print(f"step {of}: {figures}{used}{left}{ahead}", flush=True)

    def eta(self, step: int, target: int | None = None) -> float:
        """Seconds to the end, or to step `target`, if all goes as this process has gone so far."""
        done = step - self.first_step
        elapsed = time.monotonic() - self.started
        left = (self.max_steps if target is None else target) - step
        return elapsed / done * left if done > 0 else math.inf

    def set_length(self, max_steps: int) -> None:
        """The run has another length than was thought."""
        self.max_steps = max_steps
        if self.bar is not None:
            self.bar.total = max_steps

    def say(self, text: str) -> None:
        """A line for the reader; above the bar if there is one."""
        text = coloured(text)
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        with contextlib.suppress(OSError):  # a full disk has been told of when the line was written
            self.file.close()
        if self.wandb is not None:
            try:
                self.wandb.finish()
            except Exception as error:
                self._drop_wandb("failed", error)


def _end_torn_line(path: Path) -> None:
    """After a kill the last line may lack its end: then the next must not be glued to it."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def coloured(text: str) -> str:
    """Warnings and advice yellow, a best evaluation green: on a terminal, unless NO_COLOR is set
    (https://no-color.org)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    if text.startswith(("warning", "advice", "note")):
        return f"{YELLOW}{text}{PLAIN}"
    return f"{GREEN}{text}{PLAIN}" if text.endswith("(best so far)") else text


def clock_text(seconds: float) -> str:
    """75 -> "1:15", 3700 -> "1:01:40"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(number: float) -> str:
    """1234567 -> "1.23M"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def percent(share: float | None) -> str:
    """0.456 -> "46%", None -> "n/a"."""
    return "n/a" if share is None else f"{share:.0%}"
