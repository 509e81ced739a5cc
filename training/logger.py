"""What a run says: a line of JSON a time, a bar or plain lines on the terminal, wandb if asked."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from training.folder import next_attempt


class Stopwatch:
    """Adds up the seconds between `start` and `stop`: of training, not evaluating or saving."""

    def __init__(self, clock=time.perf_counter) -> None:
        self.clock, self.seconds, self.since = clock, 0.0, None

    def start(self) -> None:
        self.since = self.clock()

    def stop(self) -> None:
        if self.since is not None:
            self.seconds += self.clock() - self.since
            self.since = None

    def take(self) -> float:
        """The seconds so far; counting begins again at 0."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def model_flops_utilisation(
    tokens_per_second: float, flops_per_token: float, peak: float | None, world: int
) -> float | None:
    """The share of the hardware's peak that the model's own arithmetic reaches (PaLM, appendix B).

    tokens_per_second counts all ranks, peak is one device's. None without a peak. At most 1: a
    measured peak can be short of the truth, a share cannot be above it.
    """
    if not peak:
        return None
    return min(1.0, tokens_per_second * flops_per_token / (peak * world))


def clock_text(seconds: float) -> str:
    """75 -> "1:15", 3700 -> "1:01:40"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class RunLogger:
    """Writes metrics.jsonl and shows progress. Only rank 0 makes one.

    metrics.jsonl is only ever appended to. `attempt` counts the processes that worked on the run.
    """

    def __init__(self, folder: Path, max_steps: int, first_step: int, quiet: bool = False) -> None:
        path = folder / "metrics.jsonl"
        self.attempt = next_attempt(path)
        self.max_steps, self.first_step, self.quiet = max_steps, first_step, quiet
        self.started = time.monotonic()
        _end_torn_line(path)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        self.bar = self._make_bar()
        self.wandb: Any = None

    def _make_bar(self) -> Any:
        if self.quiet or not sys.stderr.isatty():
            return None
        from tqdm import tqdm

        return tqdm(total=self.max_steps, initial=self.first_step, unit="step", dynamic_ncols=True)

    def start_wandb(self, project: str, name: str, config: dict, run_id: str | None) -> str | None:
        """Open a wandb run, the same one again on a resume; returns its id.

        Without the package, or if wandb cannot start, training goes on without it and says so.
        """
        try:
            import wandb

            self.wandb = wandb.init(
                project=project, name=name, config=config, id=run_id, resume="allow"
            )
        except Exception as error:
            self.say(
                f"warning: wandb did not start ({error or type(error).__name__}); going on without "
                "it. `wandb offline` or WANDB_MODE=offline logs to a local folder"
            )
            return run_id
        return self.wandb.id

    def log(self, step: int, **values: Any) -> None:
        """One line of metrics.jsonl; None is left out, and inf and nan become null."""
        entry = {"step": step, "attempt": self.attempt, "time": round(time.time(), 3)}
        for name, value in values.items():
            if value is not None:
                bad = isinstance(value, float) and not math.isfinite(value)
                entry[name] = None if bad else value
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        if self.wandb is not None:
            self.wandb.log({k: v for k, v in entry.items() if k not in ("step", "time")}, step=step)

    def progress(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show where the run is: a bar on a terminal, else a line."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {_count(tokens_per_second)} tok/s")
        elif not self.quiet:
            eta = clock_text(self.eta(step))
            self.say(
                f"step {step}/{self.max_steps}  loss {loss:.4f}  "
                f"{_count(tokens_per_second)} tok/s  eta {eta}"
            )

    def advance(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def eta(self, step: int) -> float:
        """Seconds to the end, if what is left goes as this process has gone so far."""
        done = step - self.first_step
        elapsed = time.monotonic() - self.started
        return elapsed / done * (self.max_steps - step) if done > 0 else math.inf

    def say(self, text: str) -> None:
        """A line for the reader; above the bar if there is one."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()


def _end_torn_line(path: Path) -> None:
    """After a kill the last line may lack its end: then the next must not be glued to it."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _count(number: float) -> str:
    """1234567 -> "1.23M"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
