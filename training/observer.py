"""What rank 0 does for the reader beside the log: advice, snapshots at evaluations, the report.

Nothing here changes a weight or a random draw of training, and nothing that fails here stops it.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from cli.limits import usable_cores
from training.advice import Advice, Adviser
from training.budget import UNFITTED
from training.config import Config
from training.history import SNAPSHOTS, History
from training.logger import RunLogger
from training.report import try_report
from training.snapshot import append_snapshot, sample_text, scored_passage
from training.startup import Data
from training.step import Setup

Say = Callable[[str], None]

SAMPLE_TOKENS = 120  # of the sample at each evaluation


class Observer:
    """Follows one run: `begin`, then `logged` for every line of the log, `evaluated`."""

    def __init__(
        self,
        config: Config,
        setup: Setup,
        data: Data,
        logger: RunLogger,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.setup, self.data, self.logger, self.say = config, setup, data, logger, say
        self.folder = Path(config.run.out_dir)
        self.reports = config.log.report
        self.about_data = about_data(data)
        # Of the training text as a whole, so only about right for a single step.
        self.bytes_per_token: float = self.about_data["bytes per token"]
        self.adviser = Adviser(config, len(data.train), data.tokenizer.vocab_size)
        self.history = History(self.folder, config)
        for entry in self.history.read_metrics():  # of the attempts before
            if not entry.keys() & {"start", "fit"}:
                self.adviser.see(entry, config.run.max_steps)

    def begin(self, step: int, max_steps: int, argv: Sequence[str]) -> None:
        """Note that a process starts here, and with what."""
        start = {
            "command": command_line(argv, self.setup.ranks.world),
            "data": self.about_data,
            "environment": about_machine(self.config, self.setup),
        }
        self.logger.event(step, start=start)
        if max_steps != UNFITTED:
            self._advise(step, self.adviser.plan(max_steps))

    def logged(self, entry: dict[str, Any], max_steps: int) -> None:
        """A line of the log was written: is there something to say about it?"""
        self._advise(entry["step"], self.adviser.see(entry, max_steps))

    def evaluated(self, step: int) -> None:
        """Keep what the model says now, and write the report anew."""
        if not self.reports:
            return
        try:
            snapshot = self._snapshot(step)
            append_snapshot(self.folder / SNAPSHOTS, snapshot)
            self.logger.log_sample(step, snapshot["prompt"], snapshot["sample"])
        except Exception as error:  # out of memory, a full disk: training goes on
            reason = (str(error).splitlines() or [""])[0]
            self.say(f"note: no snapshot this time ({type(error).__name__}: {reason})")
        # That a package is missing is said once.
        self.reports = try_report(self.history, self.say)

    def _snapshot(self, step: int) -> dict[str, Any]:
        config, model, tokenizer = self.config, self.setup.model, self.data.tokenizer
        prompt, seed = config.log.sample_prompt, config.run.seed
        # Compiled, each length of the text would be compiled anew.
        eager = torch.compiler.set_stance("force_eager") if config.run.compile else nullcontext()
        with eager:
            text = sample_text(model, tokenizer, prompt, seed=seed, tokens=SAMPLE_TOKENS)
            val = self.data.val
            passage = scored_passage(model, tokenizer, val, self.setup.precision) if val else []
        return {
            "step": step,
            "attempt": self.logger.attempt,
            "prompt": prompt,
            "sample": text,
            "passage": passage,
        }

    def _advise(self, step: int, found: Iterable[Advice]) -> None:
        for about, text in found:
            self.say(f"advice: {text}")
            self.logger.event(step, note=text, about=about)


def command_line(argv: Sequence[str], world: int) -> str:
    """What to type to go on with this run: what was typed, but for --overwrite."""
    words = [word for word in argv if "overwrite" not in word.partition("=")[0]]
    launcher = f"torchrun --nproc_per_node={world}" if world > 1 else "python"
    return f"{launcher} train.py {shlex.join(words)}".rstrip()


def about_data(data: Data) -> dict[str, Any]:
    """The data in a few figures."""
    meta = data.meta
    tokens, n_bytes = meta.tokens["train"], meta.bytes["train"]
    return {
        "source": meta.source,
        "tokenizer": f"{meta.tokenizer}, {meta.vocab_size:,} ids",
        "tokens to train": tokens,
        "tokens to validate": meta.tokens["val"],
        "documents": sum(meta.documents.values()),
        "bytes per token": round(n_bytes / max(1, tokens), 3),
        "fingerprint": meta.fingerprint[:16],
    }


def about_machine(config: Config, setup: Setup) -> dict[str, Any]:
    """Where the run goes on, and how."""
    device = setup.ranks.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type}, {name}",
        "ranks": setup.ranks.world,
        "threads of a rank": torch.get_num_threads(),
        "cores": usable_cores(),
        "dtype": config.run.dtype,
        "compiled": setup.compiled,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "parameters": setup.model.parameter_count(),
    }
