"""A run's folder as training would leave it, written by hand, for tests of what reads it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from data.config import DataConfig
from model.config import ModelConfig
from training.config import Config, LogConfig, OptimConfig, RunConfig, to_json

START = {
    "command": "python train.py config/small.py --lr=0.003",
    "data": {"source": "stdlib", "tokens to train": 123456, "fingerprint": "abc123"},
    "environment": {"device": "cpu, x86_64", "torch": "2.13.0"},
}
PASSAGE = [
    ["def", 4.0, [["class", 0.5], ["def", 0.018], ["import", 0.01], ["\n", 0.01], ["@", 0.0]]],
    [" <b>f</b>", 2.0, [[" f", 0.4], [" <b>f</b>", 0.135], [" g", 0.1], [" x", 0.1], [" y", 0.1]]],
    ["\n", 0.01, [["\n", 0.99], [" ", 0.002], ["#", 0.001], ["x", 0.001], ["y", 0.001]]],
]


def write_run(folder: Path, steps: int = 200, **run_options) -> Path:
    """200 steps of 8 x 64 tokens, logged every 2, evaluated every 50; resumed once at step 100."""
    folder.mkdir(parents=True)
    config = Config(
        model=ModelConfig(context_length=64).resolved(256),
        data=DataConfig(global_batch=8, micro_batch=8),
        optim=OptimConfig(lr=0.003),
        run=RunConfig(out_dir=str(folder), max_steps=200, eval_interval=50, **run_options),
        log=LogConfig(sample_prompt="def "),
    )
    (folder / "run.json").write_text(to_json(config))
    lines = [{"step": 0, "attempt": 1, "time": 1e9, "start": START}]
    for step in range(2, steps + 1, 2):
        attempt = 1 if step <= 100 else 2
        about = {"step": step, "attempt": attempt, "time": 1e9 + step}
        if step == 102:
            lines.append({**about, "step": 100, "start": START})
        loss = 5.5 * math.exp(-step / 80) + 1
        # 512 tokens a step at 1,024 tokens a second: half a second a step
        figures = {"loss": loss, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 1024.0}
        lines.append({**about, **figures, "mfu": 0.42, "data_wait": 0.0})
        if step % 50 == 0:
            scored = {"val_loss": loss + 0.1, "perplexity": math.exp(loss + 0.1)}
            lines.append({**about, **scored, "bits_per_byte": loss / 2})
        if step == 60:
            lines.append({**about, "note": "it <i>repeats</i>", "about": "repeating"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = {"prompt": "def ", "passage": PASSAGE}
    snapshots = [
        {"step": step, "attempt": 1 if step <= 100 else 2, "sample": f"def <{step}>&", **said}
        for step in range(50, steps + 1, 50)
    ]
    text = "".join(json.dumps(entry) + "\n" for entry in snapshots)
    (folder / "snapshots.jsonl").write_text(text)
    return folder
