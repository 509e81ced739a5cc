"""The adapters of a run with LoRA, in PEFT's files; the weights of its base stay where they are."""

from __future__ import annotations

from pathlib import Path

import torch

from cli.options import ConfigError
from model.huggingface import is_folder
from model.peft import read_adapters, write_adapters
from tools.export.graph import ExportError
from training.weights import Weights


def export_peft(weights: Weights, folder: Path) -> list[str]:
    """Write the adapters into `folder` and read them back; return lines on what was verified.

    Raises ConfigError if the weights are not a run with LoRA.
    """
    checkpoint = weights.checkpoint
    run = checkpoint and checkpoint.config().run
    if checkpoint is None or not run or not run.lora_rank or checkpoint.path != weights.path:
        raise ConfigError(
            f"format=peft: {weights.name} has no adapters of its own; train some with "
            "--init_from=WEIGHTS --lora_rank=8, or use --format=hf"
        )
    lines, base = [], run.init_from.removeprefix("hub:")
    if not run.init_from.startswith("hub:") and not is_folder(Path(base)):  # a run of ours
        base = f"out/{Path(base).resolve().name}-hf"
        lines.append(
            f"PEFT looks for the base in {base}; write it there with "
            f"python -m tools.export {run.init_from} --format=hf"
        )
    adapters = checkpoint.model_tensors()
    write_adapters(
        folder, weights.config, adapters, base=base, rank=run.lora_rank, alpha=run.lora_alpha
    )
    found = read_adapters(folder, weights.config)
    if found.keys() != adapters.keys() or not all(
        torch.equal(found[name], adapters[name]) for name in adapters
    ):
        raise ExportError("the adapters that were written are not those of the run")
    return [*lines, f"adapters for {base}: {len(adapters)} tensors, read back equal"]
