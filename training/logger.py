"""The log of a run: one JSON object per line of metrics.jsonl and snapshots.jsonl, and wandb."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cli.files import named_in_errors, replace_file
from cli.limits import usable_cores
from training.console import Console
from training.dataset import Data
from training.metrics import next_attempt
from training.step import Setup


class RunLogger:
    """Writes metrics.jsonl and, if it was started, to wandb. Only rank 0 makes one.

    metrics.jsonl is only ever appended to. `attempt` counts the processes that worked on the run.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self.path = folder / "metrics.jsonl"
        self.attempt = next_attempt(self.path)
        with named_in_errors(self.path):
            end_torn_line(self.path)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (as long as the run)
        self.wandb: Any = None
        self.samples: list[list[Any]] = []  # rows of wandb's table

    def event(self, step: int, **values: Any) -> dict[str, Any]:
        """Write a line of metrics.jsonl and return it. None is left out; inf and nan become null,
        which JSON lacks."""
        entry: dict[str, Any] = {
            "step": step,
            "attempt": self.attempt,
            "time": round(time.time(), 3),
        }
        for name, value in values.items():
            if value is not None:
                bad = isinstance(value, float) and not math.isfinite(value)
                entry[name] = None if bad else value
        with named_in_errors(self.path):
            self.file.write(json.dumps(entry) + "\n")
            self.file.flush()
        return entry

    def log(self, step: int, **values: Any) -> dict[str, Any]:
        """Write a line of metrics.jsonl, send it to wandb, and return it."""
        entry = self.event(step, **values)
        self._to_wandb(lambda: {k: v for k, v in values.items() if v is not None}, step)
        return entry

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Add a row to wandb's table of samples. A table there cannot grow, so it is sent whole."""

        def table() -> dict[str, Any]:
            import wandb

            self.samples.append([step, prompt, text])
            columns: list[str | int] = ["step", "prompt", "sample"]
            return {"samples": wandb.Table(columns=columns, data=self.samples)}

        self._to_wandb(table, step)

    def start_wandb(self, project: str, config: dict[str, Any], run_id: str | None) -> str | None:
        """Open a wandb run named after the folder, or the same one again on a resume; return its
        id.

        The id is also kept in the folder, for a run that is killed before its first checkpoint.
        Without the package, or if wandb cannot start, training continues without it.
        """
        kept = self.folder / "wandb_id"
        if run_id is None and kept.is_file():
            run_id = kept.read_text(encoding="utf-8", errors="replace").strip() or None
        try:
            import wandb

            self.wandb = wandb.init(
                project=project,
                name=os.path.basename(os.path.abspath(self.folder)),  # out_dir may be "."
                dir=str(self.folder),
                config=config,
                id=run_id,
                resume="allow",
            )
            run_id = str(self.wandb.id)
            replace_file(kept, f"{run_id}\n")
        except Exception as error:  # the package is missing, no login, no network ...
            self._drop_wandb("did not start", error)
        return run_id

    def _to_wandb(self, make_values: Any, step: int) -> None:
        if self.wandb is not None:
            try:
                self.wandb.log(make_values(), step=step)
            except Exception as error:
                self._drop_wandb("failed", error)

    def _drop_wandb(self, what: str, error: Exception) -> None:
        self.wandb = None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        self.console.print(
            f"warning: wandb {what} ({reason}); continuing without it. `pip install wandb` and "
            "`wandb login` set it up; WANDB_MODE=offline keeps the metrics in a local folder"
        )

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when the line was written
            self.file.close()
        if self.wandb is not None:
            try:
                self.wandb.finish()
            except Exception as error:
                self._drop_wandb("failed", error)


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append one line of JSON to a file."""
    end_torn_line(path)
    with open(path, "ab") as file:
        file.write(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def end_torn_line(path: Path) -> None:
    """Add the newline that a kill may have cut off, so that the next line starts on its own."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def start_entry(setup: Setup, data: Data, argv: Sequence[str]) -> dict[str, Any]:
    """Describe how a process was started, on what data and on what machine."""
    ranks, device, meta = setup.ranks, setup.ranks.device, data.meta
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    tokens = meta.tokens["train"]
    return {
        "command": command_line(argv, ranks.world),
        "data": {
            "source": meta.source,
            "tokenizer": f"{meta.tokenizer}, {meta.vocab_size:,} ids",
            "tokens to train": tokens,
            "tokens to validate": meta.tokens["val"],
            "documents": sum(meta.documents.values()),
            "bytes per token": round(meta.bytes["train"] / max(1, tokens), 3),
            "fingerprint": meta.fingerprint[:16],
        },
        "environment": {
            "device": f"{device.type}, {name}",
            "ranks": ranks.world,
            "threads of a rank": torch.get_num_threads(),
            "cores": usable_cores(),
            "dtype": setup.config.run.dtype,
            "compiled": setup.compiled,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "parameters": setup.model.parameter_count(),
        },
    }


def command_line(argv: Sequence[str], world: int) -> str:
    """Return the command that resumes this run: the one that was typed, without --overwrite."""
    words = [word for word in argv if "overwrite" not in word.partition("=")[0]]
    launcher = f"torchrun --nproc_per_node={world}" if world > 1 else "python"
    return f"{launcher} train.py {shlex.join(words)}".rstrip()
