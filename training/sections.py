"""The sections of a training config, each a frozen dataclass; model's and data's are beside them.

Every field is an option: `--optim.lr=3e-4`, or `--lr=3e-4`, for names are unique over all sections.
`problems()` lists what is out of range in plain words; types are checked before it is called.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal


def _unless(
    section: str, config: Any, names: str, allowed: str, is_right: Callable[[Any], bool]
) -> list[str]:
    """One line for each field of `names` (with spaces between) whose value `is_right` refuses."""
    values = {name: getattr(config, name) for name in names.split()}
    return [
        f"{section}.{name}={value}: must be {allowed}"
        for name, value in values.items()
        if not is_right(value)
    ]


def _at_least(low: int, section: str, config: Any, names: str) -> list[str]:
    return _unless(section, config, names, f"at least {low}", lambda value: value >= low)


def _above_0(section: str, config: Any, names: str) -> list[str]:
    return _unless(section, config, names, "above 0", lambda value: value > 0)


def seconds_of(text: str) -> float:
    """ "90s", "10m", "1.5h" or "2d" in seconds. Raises ValueError for anything else, and for 0."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(text)
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@dataclass(frozen=True)
class OptimConfig:
    """How gradients become updates."""

    optimizer: Annotated[
        Literal["adamw", "muon"], "muon: Muon for hidden matrices, AdamW for the rest", "fixed"
    ] = "adamw"
    lr: Annotated[float, "peak learning rate of AdamW", "must"] = 1e-3
    muon_lr: Annotated[float, "peak learning rate of Muon", "must"] = 0.02
    momentum: Annotated[float, "Muon's (Nesterov) momentum", "must"] = 0.95
    weight_decay: Annotated[float, "decoupled; matrices only, not norms and biases", "must"] = 0.1
    beta1: Annotated[float, "AdamW's decay of the mean", "must"] = 0.9
    beta2: Annotated[float, "AdamW's decay of the variance", "must"] = 0.95
    eps: Annotated[float, "AdamW's guard against division by zero", "must"] = 1e-8
    grad_clip: Annotated[float, "largest norm of the whole gradient; 0: no clipping", "must"] = 1.0

    def problems(self) -> list[str]:
        return [
            *_above_0("optim", self, "lr muon_lr eps"),
            *_at_least(0, "optim", self, "weight_decay grad_clip"),
            *_unless(
                "optim", self, "momentum beta1 beta2", "in [0, 1)", lambda value: 0 <= value < 1
            ),
        ]


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run, as a factor of its peak."""

    schedule: Annotated[
        Literal["constant", "cosine", "wsd"], "wsd: warm-up, stable, linear decay", "must"
    ] = "wsd"
    warmup_steps: Annotated[int, "steps of linear warm-up", "must"] = 20
    decay_fraction: Annotated[
        float, "wsd: the part of the run, at its end, that decays", "must"
    ] = 0.5
    min_lr_ratio: Annotated[float, "the last learning rate as a part of the peak", "must"] = 0.0

    def problems(self) -> list[str]:
        parts = "decay_fraction min_lr_ratio"
        return [
            *_at_least(0, "schedule", self, "warmup_steps"),
            *_unless("schedule", self, parts, "in [0, 1]", lambda value: 0 <= value <= 1),
        ]


@dataclass(frozen=True)
class ParallelConfig:
    """One process or many."""

    mode: Annotated[Literal["auto", "none", "ddp"], "auto: ddp under torchrun", "start"] = "auto"
    reduction: Annotated[
        Literal["auto", "exact", "fast"], "exact: the same bits on 1, 2, 4 ... ranks", "must"
    ] = "auto"
    timeout: Annotated[float, "longest wait for another rank, in seconds", "start"] = 600.0

    def problems(self) -> list[str]:
        return _above_0("parallel", self, "timeout")


@dataclass(frozen=True)
class RunConfig:
    """One run: its folder, its length, its machine, and when it looks up from the work."""

    out_dir: Annotated[str, "the run's folder; out/<config name> unless given", "start"] = ""
    max_steps: Annotated[int, "optimizer steps, exactly", "longer"] = 1000
    time_budget: Annotated[
        str,
        "instead of max_steps: train for 90s, 10m, 2h ...; fits:RUN repeats that run's lengths",
        "longer",
    ] = ""
    seed: Annotated[int, "of weights, order and dropout", "fixed"] = 1
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps", "must"] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], "of the matrix products", "must"
    ] = "auto"
    attention: Annotated[
        Literal["auto", "reference", "tiled", "sdpa"], "backend; all compute the same", "must"
    ] = "auto"
    compile: Annotated[bool, "torch.compile the model", "must"] = False
    threads: Annotated[
        int | None, "CPU threads of a rank; its share of the cores unless given", "must"
    ] = None
    deterministic: Annotated[bool, "refuse operations that differ from run to run", "must"] = False
    init_from: Annotated[
        str,
        "start from these weights: a run, checkpoint, Hugging Face folder or hub:OWNER/NAME",
        "fixed",
    ] = ""
    resume: Annotated[
        Literal["auto", "must"],
        "auto: go on where the folder's run stopped; must: with new values",
        "start",
    ] = "auto"
    overwrite: Annotated[
        bool, "move an old run in out_dir aside and start anew, once per launch", "start"
    ] = False
    eval_interval: Annotated[int, "steps between evaluations", "must"] = 250
    eval_windows: Annotated[int, "validation windows of an evaluation; 0: all", "must"] = 0
    checkpoint_interval: Annotated[int, "steps between checkpoints", "free"] = 250
    keep_checkpoints: Annotated[int, "checkpoints kept, beside the best; at least 2", "free"] = 2
    patience: Annotated[
        int, "evaluations without a better loss before stopping; 0: never", "longer"
    ] = 0

    def problems(self) -> list[str]:
        found = [
            *_at_least(1, "run", self, "max_steps eval_interval checkpoint_interval"),
            *_at_least(2, "run", self, "keep_checkpoints"),
            *_at_least(0, "run", self, "eval_windows patience"),
            *_unless("run", self, "seed", "in [0, 2**63)", lambda seed: 0 <= seed < 2**63),
            *_unless("run", self, "threads", "at least 1 (or none)", lambda n: n is None or n >= 1),
            *_unless("run", self, "device", "auto, cpu, cuda, cuda:N or mps", _is_device),
        ]
        if not _is_budget(self.time_budget):
            found.append(
                f"run.time_budget={self.time_budget}: must be a time such as 90s, 10m, 1.5h or 2d, "
                "or fits:RUN"
            )
        if self.overwrite and self.resume == "must":
            found.append("run.overwrite=true starts anew, run.resume=must goes on: keep one")
        return found


def _is_budget(text: str) -> bool:
    try:
        return text == "" or re.fullmatch("fits:.+", text) is not None or seconds_of(text) > 0
    except ValueError:
        return False


def _is_device(name: str) -> bool:
    return re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", name) is not None


@dataclass(frozen=True)
class LogConfig:
    """What a run says while it goes on; metrics.jsonl is always written."""

    interval: Annotated[int, "steps between lines of metrics.jsonl", "free"] = 10
    wandb: Annotated[bool, "send the metrics to Weights & Biases too", "free"] = False
    project: Annotated[str, "the wandb project", "free"] = "plainGPT"
    sample_prompt: Annotated[str, "prompt of the sample at the end", "free"] = ""
    report: Annotated[bool, "keep snapshots and report.html, anew at every evaluation", "free"] = (
        True
    )
    quiet: Annotated[bool, "no progress bar; warnings and the result only", "start"] = False

    def problems(self) -> list[str]:
        found = _at_least(1, "log", self, "interval")
        if self.wandb and not self.project:
            found.append("log.project is empty: log.wandb=true needs the project's name")
        return found
