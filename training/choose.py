"""Choose a config for a text: `python train.py my_text.txt`.

The choice depends on the amount of text, the machine and the time. It is made once: it is written
into the run's folder as a config file, which is read from then on and may be edited. The rules were
tuned by `python -m tools.bench auto`; docs/data.md has the table.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cli.files import replace_file
from cli.limits import usable_cores
from cli.options import ConfigError
from data.config import DataConfig
from data.sources import parse_mixture
from data.survey import Survey, bytes_per_token, survey, vocabulary_of
from training.config import (
    FULL_NAMES,
    SECTIONS,
    USAGE,
    Config,
    differences,
    load_config,
    no_such_config,
    read_config,
    seconds_of,
    with_values,
)

CONFIG_FILE = "config.py"  # in the run's folder
DEFAULT_TIME = "10m"

# Bytes of text up to which a vocabulary is the best: the text has to teach each of its ids.
TOKENIZERS = [
    (200_000, "bpe:300"),
    (600_000, "bpe:512"),
    (3_000_000, "bpe:1024"),
    (10_000_000, "bpe:2048"),
    (100_000_000, "bpe:4096"),
    (math.inf, "bpe:8192"),
]

# (layers, width) of the models, by size. A model's blocks have 12 x layers x width^2 parameters.
SIZES = [(2, 64), (3, 96), (4, 128), (5, 192), (6, 256), (6, 384), (8, 512), (12, 768)]
# The best number of parameters grows with the square root of the FLOPs, up to what the text can
# teach and the memory can hold.
BEST_PARAMETERS = 0.3e6, 4e12  # parameters, FLOPs
PARAMETERS_PER_BYTE = 5.0
MEMORY_PER_PARAMETER = 64  # bytes: weights, gradients, optimizer, and as much for activations

PLENTY = 4e9  # bytes of memory, in which every batch fits; otherwise --micro_batch=auto measures
MAX_EPOCHS = 40.0  # passes over the text
# (epochs, dropout): the more often a text is repeated, the less may be learned by heart.
DROPOUTS = [(5.0, 0.0), (12.0, 0.1), (25.0, 0.2), (math.inf, 0.3)]

LITTLE_TEXT = 30_000  # bytes; below it the advice is to find more
EVALUATIONS = 8
EVALUATION_SHARE = 0.02  # of the run's tokens, scored by one evaluation

RECIPE = {
    "optim.optimizer": "muon",
    "optim.lr": 1e-2,
    "optim.muon_lr": 0.02,
    "schedule.decay_fraction": 0.7,
    "model.attention_dropout": 0.0,  # it is slow, and dropout elsewhere does as well
}


@dataclass(frozen=True)
class Machine:
    """What the choice depends on."""

    name: str  # "2 CPU cores"
    flops: float  # per second, that training reaches
    layer_seconds: float  # of a step, per layer: starting a GPU's kernels takes time
    memory: float | None  # bytes that are free; None: unknown
    is_gpu: bool = False


def load_or_choose(argv: Sequence[str], *, usage: str = USAGE) -> Config:
    """Return the config for a command line that names a config file or a text.

    Prints and exits like `load_config`. Raises ConfigError listing all problems at once.
    """
    return load_config(argv, usage=usage, choose=config_for)


def config_for(spec: str, typed: Mapping[str, Any]) -> Config:
    """Return the config for the text `spec`: its run's own, or a new one with `reasons`.

    Raises ConfigError if there is no such text, or if its folder holds another run.
    """
    if typed.get("data.source", spec) != spec:
        raise ConfigError(f"data.source={typed['data.source']}: the text is {spec} already")
    folder = Path(typed.get("run.out_dir") or f"out/{name_of(spec)}")
    begun = (folder / "run.json").is_file() and not typed.get("run.overwrite")
    if begun and not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"run.out_dir={folder}: holds a run that another command began; choose another "
            "--out_dir, or start over with --overwrite=true (the old run is moved aside)"
        )
    if begun:
        reasons = (f"settings: {folder / CONFIG_FILE}, chosen when the run began",)
        own = with_values(read_config(folder / CONFIG_FILE), {"data.source": spec})
        return replace(own, reasons=reasons)
    data = {name[5:]: value for name, value in typed.items() if name.startswith("data.")}
    text = _survey(spec, replace(DataConfig(**data), source=spec))
    given = {**typed, "data.source": spec, "run.out_dir": str(folder)}
    return choose(text, this_machine(typed.get("run.device", "auto")), given)


def name_of(spec: str) -> str:
    """Name the run on a text: "notes" for notes/**/*.md, "my_text" for texts/my_text.txt.gz."""
    first = parse_mixture(spec)[0][0].removeprefix("hub:").partition("@")[0]
    plain = re.split(r"[*?\[]", first)[0] or "."
    path = Path(plain).expanduser().absolute()
    name = path.name if path.is_dir() else path.name.partition(".")[0] or path.name
    return re.sub(r"[^\w-]+", "_", name).strip("_") or "text"


def _survey(spec: str, data: DataConfig) -> Survey:
    try:
        return survey(data)
    except ConfigError as error:
        if str(error).endswith("no such file or folder"):
            raise ConfigError(no_such_config(spec)) from error
        raise


def this_machine(device: str) -> Machine:
    """Measure the machine. Raises ConfigError if it has no such device."""
    import torch

    from training.device import measured_peak, peak_flops
    from training.distributed import pick_device
    from training.memory import available_bytes

    found = pick_device(device)
    if found.type == "cuda":
        peak = peak_flops(found, torch.bfloat16) or 1e14
        all_of_it = torch.cuda.get_device_properties(found).total_memory
        return Machine(torch.cuda.get_device_name(found), 0.3 * peak, 3e-3, all_of_it, is_gpu=True)
    memory = available_bytes()
    if found.type == "mps":
        return Machine("an Apple GPU", 1e12, 3e-3, memory, is_gpu=True)
    cores = usable_cores()
    torch.set_num_threads(cores)
    peak = measured_peak(found, torch.float32, size=768)
    return Machine(f"{cores} CPU core{'s' * (cores > 1)}", 0.45 * peak, 0.0, memory)


# The choice


def choose(text: Survey, machine: Machine, typed: Mapping[str, Any]) -> Config:
    """Return a config with `reasons`, a line each.

    typed: options that are given, by their full names; the others are chosen around them.
    """
    asked = typed.get("run.time_budget", "")
    seconds = seconds_of(asked) or seconds_of(DEFAULT_TIME)
    best, limit = best_parameters(text.n_bytes, machine, seconds)
    layers, width = size_for(best, typed)
    held_out = typed.get("data.val_fraction", validation_share(text.n_bytes))
    values = {**shape_for(layers, width, machine, text.n_bytes * held_out), **typed}
    values.setdefault("model.n_heads", heads_of(values["model.d_model"]))
    values.setdefault("log.sample_prompt", text.prompt)
    tokenizer = values.setdefault("data.tokenizer", tokenizer_for(text.n_bytes))
    values["data.val_fraction"] = held_out
    n_tokens = text.n_bytes * (1 - held_out) / bytes_per_token(tokenizer)

    rate = tokens_per_second(machine, values)
    if "run.max_steps" in values and not asked:
        seen = values["run.max_steps"] * tokens_per_step(values)
    else:
        if not asked:
            enough = max(1, math.ceil(MAX_EPOCHS * n_tokens / rate))
            values["run.time_budget"] = DEFAULT_TIME if enough >= seconds else f"{enough}s"
            seconds = min(seconds, enough)
        seen = rate * seconds
    epochs = seen / n_tokens
    dropout = next(dropout for most, dropout in DROPOUTS if epochs <= most)
    held_out_tokens = held_out * text.n_bytes / bytes_per_token(tokenizer)
    values = {"model.dropout": dropout, **RECIPE, **pace(seen, held_out_tokens, values), **values}
    config = with_values(Config(), values)
    return replace(config, reasons=tuple(reasons(config, text, machine, typed, epochs, limit)))


def tokenizer_for(n_bytes: float) -> str:
    return next(name for most, name in TOKENIZERS if n_bytes <= most)


def validation_share(n_bytes: int) -> float:
    """Return the fraction held out: a tenth of a small text, about 1 MB of a large one."""
    return 0.1 if n_bytes < 3e6 else max(0.001, min(0.05, 1e6 / n_bytes))


def best_parameters(n_bytes: int, machine: Machine, seconds: float) -> tuple[float, str]:
    """Return the best number of parameters, and what sets it."""
    parameters, at = BEST_PARAMETERS
    memory = math.inf if machine.memory is None else machine.memory
    return min(
        (parameters * math.sqrt(machine.flops * seconds / at), "what the time is enough for"),
        (PARAMETERS_PER_BYTE * n_bytes, "what so much text can teach"),
        (memory / MEMORY_PER_PARAMETER, "what the memory holds"),
    )


def size_for(best: float, given: Mapping[str, Any]) -> tuple[int, int]:
    """Return layers and width: of SIZES the nearest to the best number of parameters."""
    heads = given.get("model.n_heads", 1)
    sizes = [size for size in SIZES if size[1] % heads == 0] or SIZES
    return min(sizes, key=lambda size: abs(math.log(12 * size[0] * size[1] ** 2 / best)))


def shape_for(layers: int, width: int, machine: Machine, held_out: float) -> dict[str, Any]:
    """Return size, batch and context. held_out: bytes of validation text, which has to fill a
    window.

    Muon works per step, not per token, so a wide model needs more tokens per step; a GPU needs many
    to be busy.
    """
    batch = 64 if machine.is_gpu else 32 if width >= 256 else 16
    context = 256 if machine.is_gpu else 128
    fits = 2 ** int(math.log2(max(16, held_out / 5)))
    scarce = machine.is_gpu or (machine.memory or math.inf) < PLENTY
    return {
        "model.n_layers": layers,
        "model.d_model": width,
        "model.context_length": min(context, fits),
        "data.global_batch": batch,
        "data.micro_batch": "auto" if scarce else None,
    }


def heads_of(width: int) -> int:
    """Return the number of heads: of 64 dimensions in a wide model, of 32 in a narrow one."""
    head = 64 if width >= 384 else 32
    return width // head if width % head == 0 else 1


def tokens_per_step(values: Mapping[str, Any]) -> int:
    return values["data.global_batch"] * values["model.context_length"]


def tokens_per_second(machine: Machine, values: Mapping[str, Any]) -> float:
    """Guess the speed of training: 6 FLOPs per parameter and token, and a cost per step."""
    layers, width = values["model.n_layers"], values["model.d_model"]
    parameters = 12 * layers * width**2 + width * vocabulary_of(values["data.tokenizer"])
    tokens = tokens_per_step(values)
    return tokens / (6 * parameters * tokens / machine.flops + layers * machine.layer_seconds)


def pace(seen: float, held_out: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return how often to evaluate, save and log in a run that sees so many tokens.

    held_out: validation tokens; if they are many, an evaluation scores some of them.
    """
    steps = max(1, int(seen / tokens_per_step(values)))
    often = max(1, steps // EVALUATIONS)
    scored = max(EVALUATION_SHARE * seen, 20 * values["model.context_length"])
    windows = 0 if held_out <= scored else int(scored / values["model.context_length"])
    return {
        "run.eval_interval": often,
        "run.checkpoint_interval": often,
        "run.eval_windows": windows,
        "log.interval": max(1, steps // 100),
    }


def reasons(
    config: Config,
    text: Survey,
    machine: Machine,
    typed: Mapping[str, Any],
    epochs: float,
    limit: str,
) -> list[str]:
    """Return what was chosen and why. limit: of the model's size."""
    model, data, run = config.model, config.data, config.run
    length = run.time_budget or f"{run.max_steps:,} steps"
    repeated = "against learning by heart" if model.dropout else "the text hardly repeats"
    lines = [
        (
            "tokenizer",
            data.tokenizer,
            "what so much text can teach",
            "data.tokenizer",
        ),
        (
            "model",
            f"{model.n_layers} layer{'s' * (model.n_layers > 1)} of width {model.d_model}",
            limit,
            "model.d_model",
        ),
        ("length", length, f"about {epochs:.2g} passes over the text", "run.time_budget"),
        ("dropout", f"{model.dropout:g}", repeated, "model.dropout"),
        ("prompt", repr(config.log.sample_prompt), "a common beginning", "log.sample_prompt"),
    ]
    size = amount(text)
    found = [f"chosen for {data.source} ({size}) on {machine.name}:"]
    found += [
        f"  {what:<9}  {value}: {'as given' if option in typed else why}"
        for what, value, why, option in lines
    ]
    found.append(f"  to change it: edit {Path(run.out_dir, CONFIG_FILE)}, and run that")
    if text.n_bytes < LITTLE_TEXT:
        found.append(
            f"advice: {size} of text is very little: the model learns it by heart; add more, or "
            "fine-tune a pretrained model (config/finetune_shakespeare.py)"
        )
    return found


def amount(text: Survey) -> str:
    """Return the size of a text: "49 KB", "about 20 MB"."""
    size = f"{text.n_bytes / 1e3:.0f} KB" if text.n_bytes < 1e6 else f"{text.n_bytes / 1e6:.3g} MB"
    return size if text.is_whole else f"about {size}"


# The config file


def save_choice(config: Config) -> None:
    """Write the config that was chosen into the run's folder, unless it is there already."""
    path = Path(config.run.out_dir, CONFIG_FILE)
    if config.reasons and not path.exists():
        replace_file(path, config_text(config))


def config_text(config: Config) -> str:
    """Return a config file with the values that are not the defaults.

    Options that belong to a start, such as --quiet, are left out.
    """
    sections: dict[str, list[str]] = {}
    for full_name, _, value in differences(Config(), config):
        section, _, name = full_name.partition(".")
        if FULL_NAMES[full_name].resume != "start" or full_name == "run.out_dir":
            sections.setdefault(section, []).append(f"{name}={literal(value)},")
    kinds = {section: SECTIONS[section] for section in sections}
    modules: dict[str, list[str]] = {"training.config": ["Config"]}
    for kind in kinds.values():
        modules.setdefault(kind.__module__, []).append(kind.__name__)
    lines = [f"# {line}".encode("unicode_escape").decode() for line in config.reasons]
    lines.append("")
    lines += [f"from {name} import {', '.join(sorted(modules[name]))}" for name in sorted(modules)]
    lines += ["", "config = Config("]
    for section, kind in kinds.items():
        body = "".join(f"\n        {option}" for option in sections[section])
        lines.append(f"    {section}={kind.__name__}({body}\n    ),")
    return "\n".join([*lines, ")", ""])


def literal(value: Any) -> str:
    """Return a value as Python source, texts in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
