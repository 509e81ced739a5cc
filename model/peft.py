"""LoRA adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

    settings = read_settings(folder)          the base's name, alpha / r
    adapters = read_adapters(folder, config)  by our names, for model.lora.merged
    write_adapters(folder, config, ...)       for PeftModel.from_pretrained

Kinds of adapters that model/lora.py does not have are refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from cli.options import ConfigError
from model.config import ResolvedConfig
from model.huggingface import (
    FAMILIES,
    DamagedFolder,
    conversion,
    family_of,
    parameter_names,
    read_json,
    their_names,
)

SETTINGS, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
HALVES = {"lora_A": "lora_a", "lora_B": "lora_b"}  # theirs -> ours

# Field -> the values that mean plain LoRA. The others of adapter_config.json either say how the
# adapters were trained, or show in the names of the tensors.
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    # Others, such as pissa, change the weights of the base as they begin.
    "init_lora_weights": (True, False, None, "gaussian", "eva"),
}


@dataclass(frozen=True)
class Settings:
    """The fields of adapter_config.json that merging needs."""

    base: str  # a folder, or OWNER/NAME on the Hugging Face Hub
    scale: float  # of B A


def is_adapter(path: Path) -> bool:
    """Tell whether this is a folder with an adapter that PEFT wrote."""
    return (path / SETTINGS).is_file()


def read_settings(path: Path) -> Settings:
    """Read adapter_config.json.

    Raises ConfigError listing what differs from plain LoRA, with the command that merges it.
    """
    about = read_json(path / SETTINGS)
    problems = [
        f"{name}={json.dumps(about[name])} is not supported"
        for name, plain in PLAIN.items()
        if name in about and about[name] not in plain
    ]
    rank, alpha, base = (about.get(n) for n in ("r", "lora_alpha", "base_model_name_or_path"))
    if not isinstance(rank, int) or rank < 1:
        problems.append(f"r={json.dumps(rank)}: must be an integer, at least 1")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        problems.append(f"lora_alpha={json.dumps(alpha)}: must be a number")
    if not isinstance(base, str) or not base:
        problems.append(f"base_model_name_or_path={json.dumps(base)}: must name the base")
    if problems:
        raise ConfigError(f"{path / SETTINGS}: {'; '.join(problems)}. This is {conversion(path)}")
    # rsLoRA (Kalajdzievski 2023): the square root keeps the update's size at every rank.
    return Settings(base, alpha / (math.sqrt(rank) if about.get("use_rslora") else rank))


def read_adapters(path: Path, config: ResolvedConfig) -> dict[str, Tensor]:
    """Return the adapters by our names, `layers.N.attn.q_proj.lora_a` ..., in float32.

    config: the base's. Raises ConfigError for tensors that do not belong to its linear layers,
    DamagedFolder if the file cannot be read.
    """
    try:
        found = safetensors.torch.load_file(path / ADAPTERS)
    except (safetensors.SafetensorError, OSError) as error:
        raise DamagedFolder(f"{path / ADAPTERS} cannot be read: {error}") from error
    modules, adapters, problems = _modules(config), {}, []
    for name, tensor in found.items():
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.(lora_[AB])\.weight", name)
        ours = modules.get(match[1]) if match else None
        if match is None or ours is None or tensor.dim() != 2:
            problems.append(f"{path / ADAPTERS}: {name} does not belong to a linear layer")
            continue
        # GPT-2's c_attn is our q, k and v side by side: one A, and a part of B for each.
        parts = [tensor] * len(ours) if match[2] == "lora_A" else tensor.chunk(len(ours))
        for module, part in zip(ours, parts, strict=False):
            adapters[f"{module}.{HALVES[match[2]]}"] = part.float()
    if problems:
        raise ConfigError(problems)
    return adapters


def write_adapters(
    path: Path,
    config: ResolvedConfig,
    adapters: Mapping[str, Tensor],
    *,
    base: str,
    rank: int,
    alpha: float,
) -> None:
    """Write both files into an existing folder. base: a Hugging Face folder or OWNER/NAME.

    Raises ConfigError if no family fits the model, or if its class joins q, k and v in one matrix.
    """
    name, theirs = family_of(config), {}
    for module, ours in _modules(config).items():
        if len(ours) > 1:
            raise ConfigError(
                f"format=peft: {name} has one matrix for q, k and v, with an adapter of its own; "
                "use --format=hf, which merges the adapters"
            )
        for their_half, half in HALVES.items():
            tensor = adapters[f"{ours[0]}.{half}"]
            theirs[f"{PREFIX}{module}.{their_half}.weight"] = tensor.contiguous()
    about: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in _modules(config)}),
    }
    (path / SETTINGS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (path / ADAPTERS).write_bytes(safetensors.torch.save(theirs, metadata={"format": "pt"}))


def _modules(config: ResolvedConfig) -> dict[str, list[str]]:
    """Map each linear layer of their blocks to those of our modules that it contains."""
    weights = [name for name in parameter_names(config) if name.endswith("_proj.weight")]
    names = their_names(weights, FAMILIES[family_of(config)])
    return {
        theirs.removesuffix(".weight"): [name.removesuffix(".weight") for name in ours]
        for theirs, ours in names.items()
    }
