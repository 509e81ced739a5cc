"""The config of a run: sections, the file that fills them, overrides, JSON. Never imports torch.

config, a short Python module:  config = Config(model=ModelConfig(n_layers=4), ...)
overrides on the command line:  --model.n_layers=6, or --n_layers=6
what the run then saves:        run.json, read back without executing any Python
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cli.options import (
    ConfigError,
    conform,
    exit_for_help,
    in_short,
    nearest,
    options_of,
    parse_arguments,
    print_once,
    typed_text,
)
from data.config import DataConfig
from model.config import ModelConfig

# The sections of a training config, each a frozen dataclass; model's and data's are beside them.
#
# Every field is an option: `--optim.lr=3e-4`, or `--lr=3e-4`, for names are unique over all
# sections. `problems()` lists what is out of range in plain words; types are checked before it is
# called.


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


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "parallel": ParallelConfig,
    "run": RunConfig,
    "log": LogConfig,
}
OPTIONS = {option.name: option for option in options_of(SECTIONS)}

USAGE = (
    "python train.py CONFIG [--name=value ...], such as: python train.py config/small.py --lr=3e-4"
)

# What the options are called elsewhere: for suggestions only.
ELSEWHERE = {
    "learning_rate": "lr",
    "batch_size": "global_batch",
    "gradient_accumulation_steps": "micro_batch",
    "block_size": "context_length",
    "seq_len": "context_length",
    "n_layer": "n_layers",
    "n_head": "n_heads",
    "n_embd": "d_model",
    "hidden_size": "d_model",
    "max_iters": "max_steps",
    "warmup_iters": "warmup_steps",
    "eval_iters": "eval_windows",
    "min_lr": "min_lr_ratio",
    "dataset": "source",
    "num_workers": "workers",
    "save_interval": "checkpoint_interval",
    "rope_base": "rope_theta",
    "log_interval": "interval",
    "wandb_log": "wandb",
    "wandb_project": "project",
}


@dataclass(frozen=True)
class Config:
    """Everything that makes a run what it is."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig = RunConfig()
    log: LogConfig = LogConfig()
    # Where the values come from, for a resume: {full name: value} of the options that were typed,
    # and of all options in the config file; None: not known.
    typed: Mapping[str, Any] | None = field(default=None, compare=False)
    in_file: Mapping[str, Any] | None = field(default=None, compare=False)

    def problems(self) -> list[str]:
        """All that is wrong in any section, in plain words: types first, then ranges."""
        found: list[str] = []
        for name, section in sections_of(self):
            wrong_types = _conformed(name, section)[1]
            found += wrong_types or section.problems()
        return found


def sections_of(config: Config) -> list[tuple[str, Any]]:
    """[("model", config.model), ...], in the order of SECTIONS."""
    return [(name, getattr(config, name)) for name in SECTIONS]


def values_of(config: Config) -> dict[str, Any]:
    """{"model.n_layers": value, ...} of every option."""
    return {
        option.full_name: getattr(getattr(config, option.section), option.name)
        for option in OPTIONS.values()
    }


@dataclass(frozen=True)
class CommandOptions:
    """What is asked of the command rather than of the run."""

    print_config: Annotated[bool, "print the config as run.json will hold it, and stop"] = False


# Loading


def load_config(argv: Sequence[str], *, usage: str = USAGE) -> Config:
    """The config that a command line asks for: the file CONFIG, then the overrides.

    Prints and exits 0 for --help (CONFIG may be left out) and --print_config.
    Raises ConfigError with everything that is wrong, at once.
    """
    sections = {**SECTIONS, "": CommandOptions}
    exit_for_help(argv, usage, sections)
    asked = parse_arguments(argv, sections, positionals=["CONFIG"], hints=ELSEWHERE)
    if not asked.positionals:
        raise ConfigError([*asked.problems, f"usage: {usage}"])
    path = Path(asked.positionals[0])
    try:
        in_file = read_config(path)
        config = _override(in_file, asked.values)
    except ConfigError as error:
        raise ConfigError([*asked.problems, *error.problems]) from error
    problems = asked.problems + config.problems()
    if problems:
        raise ConfigError(problems)
    names = [f"{name}.{leaf}" for name in SECTIONS for leaf in asked.values[name]]
    typed = {name: values_of(config)[name] for name in names}
    config = replace(config, typed=typed, in_file=values_of(_override(in_file)))
    if asked.values[""].get("print_config"):
        print_once(to_json(config))
        raise SystemExit(0)
    return config


def _override(config: Config, values: Mapping[str, Mapping[str, Any]] = {}) -> Config:
    changed = {}
    for name, section in sections_of(config):
        changed[name] = _conformed(name, replace(section, **values.get(name, {})))[0]
    return Config(**changed)


def _conformed(name: str, section: Any) -> tuple[Any, list[str]]:
    """The section with its values as their types want them (1 as 1.0), and what does not fit."""
    values, problems = {}, []
    for option in options_of({name: type(section)}):
        value = getattr(section, option.name)
        try:
            values[option.name] = conform(option.annotation, value, option.full_name)
        except ValueError as error:
            problems.append(str(error))
    return replace(section, **values), problems


def read_config(path: Path) -> Config:
    """Run the Python file at `path` and return what it binds to `config`, its values unchecked;
    run.out_dir is out/<name of the file> unless given.

    Raises ConfigError, one line a mistake. A name that is set and never used but looks like an
    option, as `bach_size = 8`, is a mistake too.
    """
    if not os.path.isfile(path):
        shipped = ", ".join(sorted(str(file) for file in Path("config").glob("*.py")))
        raise ConfigError(f"CONFIG={path}: no such file; there are {shipped or 'no configs here'}")
    _refuse_stray_names(path)
    try:
        config = runpy.run_path(str(path)).get("config")
    except Exception as error:
        raise ConfigError(_explain(path, error)) from error
    if not isinstance(config, Config):
        raise ConfigError(f"{path}: must bind config = Config(...) (of training.config)")
    for name, section in sections_of(config):
        if type(section) is not SECTIONS[name]:
            raise ConfigError(f"{path}: {name}={section!r}: must be {SECTIONS[name].__name__}(...)")
    if not config.run.out_dir:
        config = replace(config, run=replace(config.run, out_dir=f"out/{path.stem}"))
    return config


def _refuse_stray_names(path: Path) -> None:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        where = f"{path}: line {getattr(error, 'lineno', 1)}"
        raise ConfigError(f"{where}: {getattr(error, 'msg', error)}") from error
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)} | {"config"}
    problems = []
    for node in names:
        meant = None if node.id in used else _meant(node.id)
        if meant:
            problems.append(f"{path}: line {node.lineno}: {node.id} is set and never used{meant}")
    if problems:
        raise ConfigError(problems)


def _meant(name: str) -> str:
    """Advice on a name that does nothing where it stands: the option that it is like."""
    if name in SECTIONS:
        return f": did you mean Config({name}={name})?"
    near = nearest(name, OPTIONS, ELSEWHERE)
    if near is None:
        return ""
    section, _, leaf = near.partition(".")
    return f": did you mean {SECTIONS[section].__name__}({leaf}=...)?"


def _explain(path: Path, error: Exception) -> str:
    """One line on an error that the config file raised: where, what, and which name was meant."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f"{path}: line {lines[-1]}: " if lines else f"{path}: "
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    advice = _meant(unknown[1]) if unknown else ""
    return f"{where}{type(error).__name__}: {error}{advice}"


# JSON


def to_json(config: Config) -> str:
    """The config as run.json holds it: {section: {name: value}}; under "command_line" what was
    typed, under "config_file" where the file says otherwise, both {"section.name": value}."""
    saved = {name: asdict(section) for name, section in sections_of(config)}
    if config.typed is not None:
        saved["command_line"] = dict(config.typed)
    if config.in_file is not None:
        values = values_of(config)
        others = {name: value for name, value in config.in_file.items() if value != values[name]}
        saved["config_file"] = others
    return json.dumps(saved, indent=2)


def from_json(source: str | Mapping[str, Any]) -> Config:
    """The config in run.json, from its text or its parsed form. An option that is newer than the
    file has its default.

    Raises ConfigError that names what is unknown or of a wrong type; ranges are not checked.
    """
    try:
        saved = json.loads(source) if isinstance(source, str) else source
    except ValueError as error:
        raise ConfigError(f"run.json is not JSON: {error}") from error
    if not isinstance(saved, Mapping) or not all(isinstance(v, Mapping) for v in saved.values()):
        raise ConfigError("run.json: must hold an object of sections, each an object of options")
    saved = dict(saved)
    typed, others = saved.pop("command_line", None), saved.pop("config_file", None)
    problems = [f"run.json: unknown section {name}" for name in saved if name not in SECTIONS]
    sections = {}
    for name, cls in SECTIONS.items():
        values = dict(saved.get(name, {}))
        known = {option.name for option in options_of({name: cls})}
        problems += [f"run.json: unknown option {name}.{leaf}" for leaf in values.keys() - known]
        section = cls(**{leaf: value for leaf, value in values.items() if leaf in known})
        sections[name], wrong_types = _conformed(name, section)
        problems += wrong_types
    if problems:
        raise ConfigError(problems)
    config = Config(**sections, typed=typed)
    return config if others is None else replace(config, in_file=values_of(config) | dict(others))


def differences(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """[("optim.lr", value in a, value in b), ...] of every option that differs."""
    of_b = values_of(b)
    return [(name, old, of_b[name]) for name, old in values_of(a).items() if old != of_b[name]]


def options_table() -> str:
    """Every option as a Markdown table: for docs/options.md."""
    lines = ["| option | default | what it is |", "|---|---|---|"]
    for option in OPTIONS.values():
        typed = f"`--{option.full_name}={in_short(option.annotation)}`".replace("|", r"\|")
        lines.append(f"| {typed} | `{typed_text(option.default)}` | {option.help} |")
    return "\n".join(lines)
