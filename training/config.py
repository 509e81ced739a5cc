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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

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
from training.sections import LogConfig, OptimConfig, ParallelConfig, RunConfig, ScheduleConfig

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
