"""The log of a run: one JSON object per line of metrics.jsonl, and wandb if asked for."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from cli.files import named_in_errors, replace_file
from training.console import Console
from training.metrics import next_attempt


class RunLogger:
    """Writes metrics.jsonl, and wandb if asked for. Only rank 0 makes one.

    metrics.jsonl is only ever appended to. `attempt` counts the processes that worked on the run.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self.path = folder / "metrics.jsonl"
        self.console = console
        self.attempt = next_attempt(self.path)
        with named_in_errors(self.path):
            _end_torn_line(self.path)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (as long as the run)
        self.wandb: Any = None
        self.samples: list[list[Any]] = []  # rows of wandb's table

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
        self.console.print(
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

    def close(self) -> None:
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
