"""Config of a run: sections of options, config files, overrides and JSON. Never imports torch.

config file, a short Python module:  config = Config(model=ModelConfig(n_layers=4), ...)
overrides on the command line:       --model.n_layers=6, or --n_layers=6
saved with the run:                  run.json, read back without executing any Python
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import runpy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cli import elsewhere
from cli.options import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    AT_LEAST_1_OR_NONE,
    AT_LEAST_2,
    BELOW_1,
    FRACTION,
    SEED,
    ConfigError,
    Rule,
    conform,
    exit_for_help,
    in_short,
    nearest,
    options_of,
    out_of_range,
    parse_arguments,
    print_once,
    typed_text,
)
from cli.web import require_packages
from data.config import DataConfig
from model.config import ModelConfig

# Sections. Every field is an option, `--optim.lr=3e-4` or `--lr=3e-4` (names are unique over all
# sections): its type, its help, and how a resumed run treats another value (training/resume.py).


def seconds_of(text: str) -> float:
    """Convert "90s", "10m", "1.5h", "2d", "2:00" or "1:30:00" to seconds; 0 for anything else."""
    if re.fullmatch(r"[0-9]+(:[0-5][0-9]){1,2}", text):
        return float(sum(int(n) * 60**i for i, n in enumerate(reversed(text.split(":")))))
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] if match else 0.0


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer: how gradients become updates."""

    optimizer: Annotated[
        Literal["adamw", "muon"], "muon: Muon for hidden matrices, AdamW for the rest", "fixed"
    ] = "adamw"
    lr: Annotated[float, "peak learning rate of AdamW", "changed"] = 1e-3
    muon_lr: Annotated[float, "peak learning rate of Muon", "changed"] = 0.02
    momentum: Annotated[float, "Nesterov momentum of Muon", "changed"] = 0.95
    weight_decay: Annotated[float, "decoupled; matrices only, not norms or biases", "changed"] = 0.1
    beta1: Annotated[float, "AdamW: decay rate of the gradient's running mean", "changed"] = 0.9
    # 0.95 as in GPT-3 and Llama, not Adam's 0.999: an average over 20 steps instead of 1,000 soon
    # follows a sudden change of the gradient's size, which makes loss spikes rarer.
    beta2: Annotated[float, "AdamW: decay rate of the squared gradient's mean", "changed"] = 0.95
    eps: Annotated[float, "AdamW: added to the denominator, against division by 0", "changed"] = (
        1e-8
    )
    grad_clip: Annotated[float, "maximum norm of the whole gradient; 0: no clipping", "changed"] = (
        1.0
    )

    def problems(self) -> list[str]:
        rules = {
            "lr muon_lr eps": ABOVE_0,
            "weight_decay grad_clip": AT_LEAST_0,
            "momentum beta1 beta2": BELOW_1,
        }
        return out_of_range("optim", self, rules)


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule: a factor of the peak rate for each step."""

    # wsd does not depend on the length of the run before its decay begins (cosine does from the
    # start), so a run can still be made longer.
    schedule: Annotated[
        Literal["constant", "cosine", "wsd"], "wsd: warmup, stable, linear decay", "changed"
    ] = "wsd"
    warmup_steps: Annotated[int, "steps of linear warmup", "changed"] = 20
    decay_fraction: Annotated[
        float, "wsd: final fraction of the run, spent decaying", "changed"
    ] = 0.5
    min_lr_ratio: Annotated[float, "final learning rate, as a fraction of the peak", "changed"] = (
        0.0
    )

    def problems(self) -> list[str]:
        rules = {"warmup_steps": AT_LEAST_0, "decay_fraction min_lr_ratio": FRACTION}
        return out_of_range("schedule", self, rules)


@dataclass(frozen=True)
class ParallelConfig:
    """Data parallel training: one process or many."""

    mode: Annotated[
        Literal["auto", "none", "ddp"], "auto: ddp under torchrun, otherwise none", "start"
    ] = "auto"
    reduction: Annotated[
        Literal["auto", "exact", "fast"],
        "how gradients are summed over ranks; exact: the same bits on 1, 2, 4 ... ranks",
        "changed",
    ] = "auto"
    timeout: Annotated[float, "longest wait for another rank, in seconds", "start"] = 600.0

    def problems(self) -> list[str]:
        return out_of_range("parallel", self, {"timeout": ABOVE_0})


@dataclass(frozen=True)
class RunConfig:
    """One run: its folder, length and hardware, and how often it evaluates and saves."""

    out_dir: Annotated[str, "run folder; default: out/<config name>", "start"] = ""
    max_steps: Annotated[int, "number of optimizer steps", "longer"] = 1000
    time_budget: Annotated[
        str,
        "instead of max_steps: train for 90s, 10m, 2:00 ...; fits:RUN repeats that run's lengths",
        "longer",
    ] = ""
    seed: Annotated[int, "random seed (weights, data order, dropout)", "fixed"] = 1
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps", "changed"] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "compute precision (dtype of matrix multiplications)",
        "changed",
    ] = "auto"
    attention: Annotated[
        Literal["auto", "reference", "tiled", "sdpa"],
        "attention implementation; all give the same result up to rounding",
        "changed",
    ] = "auto"
    compile: Annotated[bool, "torch.compile the model", "changed"] = False
    threads: Annotated[
        int | None, "CPU threads per rank; default: the rank's share of the cores", "changed"
    ] = None
    deterministic: Annotated[bool, "deterministic kernels only, or an error", "changed"] = False
    init_from: Annotated[
        str,
        "start from these weights: a run, checkpoint, Hugging Face folder or hub:OWNER/NAME",
        "fixed",
    ] = ""
    lora_rank: Annotated[
        int, "train LoRA adapters of this rank beside the weights of init_from; 0: off", "fixed"
    ] = 0
    lora_alpha: Annotated[
        float, "LoRA: the adapters' part is multiplied by lora_alpha / lora_rank", "fixed"
    ] = 16.0
    base_hash: Annotated[
        str, "SHA-256 that the weights of init_from must have; recorded with lora_rank", "fixed"
    ] = ""
    resume: Annotated[
        Literal["auto", "changed"],
        "auto: resume if out_dir holds a run; changed: also with changed values",
        "start",
    ] = "auto"
    overwrite: Annotated[bool, "start over; the old run is moved aside", "start"] = False
    eval_interval: Annotated[int, "steps between evaluations", "changed"] = 250
    eval_windows: Annotated[int, "validation windows per evaluation; 0: all", "changed"] = 0
    checkpoint_interval: Annotated[int, "steps between checkpoints", "free"] = 250
    keep_checkpoints: Annotated[int, "checkpoints to keep, besides the best", "free"] = 2
    patience: Annotated[int, "stop after N evaluations without improvement; 0: never", "longer"] = 0

    def problems(self) -> list[str]:
        rules: dict[str, Rule] = {
            "max_steps eval_interval checkpoint_interval": AT_LEAST_1,
            "keep_checkpoints": AT_LEAST_2,
            "eval_windows patience lora_rank": AT_LEAST_0,
            "lora_alpha": ABOVE_0,
            "seed": SEED,
            "threads": AT_LEAST_1_OR_NONE,
            "device": (
                "auto, cpu, cuda, cuda:N or mps",
                re.compile(r"auto|cpu|mps|cuda(:[0-9]+)?").fullmatch,
            ),
            "time_budget": (
                "a time such as 90s, 10m, 1.5h, 2d or 2:00 (two minutes), or fits:RUN",
                lambda text: text == "" or seconds_of(text) > 0 or re.match("fits:.", text),
            ),
        }
        found = out_of_range("run", self, rules)
        if self.init_from == "resume":  # nanoGPT's word
            found.append("run.init_from=resume: remove it; the same command again resumes")
        if self.lora_rank > 0 and not self.init_from:
            found.append(
                f"run.lora_rank={self.lora_rank}: adapters need weights to adapt; add "
                "--init_from=RUN, a Hugging Face folder or hub:OWNER/NAME"
            )
        if self.overwrite and self.resume == "changed":
            found.append("run.overwrite=true starts over, run.resume=changed resumes: use only one")
        return found


@dataclass(frozen=True)
class LogConfig:
    """Logging and reports; metrics.jsonl is always written."""

    interval: Annotated[int, "log training metrics every N steps", "free"] = 10
    wandb: Annotated[bool, "also log to Weights & Biases", "free"] = False
    project: Annotated[str, "Weights & Biases project", "free"] = "plainGPT"
    sample_prompt: Annotated[str, "prompt of the sample at the end", "free"] = ""
    report: Annotated[bool, "write report.html and snapshots at every evaluation", "free"] = True
    live: Annotated[bool, "serve a page on this machine that follows the run", "start"] = False
    quiet: Annotated[bool, "print only warnings and the result; no progress bar", "start"] = False

    def problems(self) -> list[str]:
        found = out_of_range("log", self, {"interval": AT_LEAST_1})
        if self.wandb and not self.project:
            found.append("log.project is empty: log.wandb=true needs a project name")
        return found


@dataclass(frozen=True)
class Config:
    """All options of a run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig = RunConfig()
    log: LogConfig = LogConfig()
    # Where the values come from, which a resume needs to know: {full name: value} of the options
    # that were typed, and of all options in the config file. None: unknown.
    typed: Mapping[str, Any] | None = field(default=None, compare=False)
    in_file: Mapping[str, Any] | None = field(default=None, compare=False)
    # Lines for the user about a config that was chosen for a text (training/choose.py).
    reasons: tuple[str, ...] = field(default=(), compare=False)

    def problems(self) -> list[str]:
        """List everything that is wrong: values of a wrong type, else values out of range."""
        return _conformed(self)[1]


SECTIONS: dict[str, type] = {
    name: type(section)
    for name, section in vars(Config()).items()
    if name not in ("typed", "in_file", "reasons")
}
OPTIONS = {option.name: option for option in options_of(SECTIONS)}
FULL_NAMES = {option.full_name: option for option in OPTIONS.values()}


def sections_of(config: Config) -> list[tuple[str, Any]]:
    """Return [("model", config.model), ...], in the order of SECTIONS."""
    return [(name, getattr(config, name)) for name in SECTIONS]


def values_of(config: Config) -> dict[str, Any]:
    """Return {"model.n_layers": value, ...} for every option."""
    return {
        name: getattr(getattr(config, option.section), option.name)
        for name, option in FULL_NAMES.items()
    }


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the config with other values of some options: {"model.n_layers": value, ...}."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, leaf = name.partition(".")
        sections.setdefault(section, {})[leaf] = value
    changed = {name: replace(getattr(config, name), **new) for name, new in sections.items()}
    return replace(config, **changed)


def differences(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """Return [("optim.lr", value in a, value in b), ...] for every option that differs."""
    of_b = values_of(b)
    return [(name, old, of_b[name]) for name, old in values_of(a).items() if old != of_b[name]]


def _conformed(config: Config) -> tuple[Config, list[str]]:
    """Return the config with its values as their declared types (1 as 1.0), and all problems."""
    values, wrong_types = _conform_all(values_of(config))
    problems: list[str] = []
    for name, section in sections_of(config):
        in_section = [text for full_name, text in wrong_types if full_name.startswith(f"{name}.")]
        problems += in_section or section.problems()
    return with_values(config, values), problems


def _conform_all(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Convert each value to its option's type; return those that fit and [(name, problem), ...]."""
    fitting, wrong = {}, []
    for name, value in values.items():
        try:
            fitting[name] = conform(FULL_NAMES[name].annotation, value, name)
        except ValueError as error:
            wrong.append((name, str(error)))
    return fitting, wrong


# From a command line

USAGE = "python train.py CONFIG [--name=value ...], for example: python train.py small --lr=3e-4"
CONFIGS = Path(__file__).parents[1] / "config"  # a file in it may be named without folder and .py


@dataclass(frozen=True)
class CommandOptions:
    """Options of the command, not of the run."""

    print_config: Annotated[bool, "print the config as run.json will hold it, and stop"] = False


Choose = Callable[[str, Mapping[str, Any]], "Config"]  # (text, typed options) -> config


def load_config(argv: Sequence[str], *, usage: str = USAGE, choose: Choose | None = None) -> Config:
    """Read the config file named on the command line and apply the overrides that follow it.

    choose: returns the config for a text that is named instead of a config file.

    Prints and exits 0 for --help (CONFIG may be left out) and --print_config.
    Raises ConfigError listing all problems at once.
    """
    sections = {**SECTIONS, "": CommandOptions}
    exit_for_help(argv, usage, sections)
    given = parse_arguments(argv, sections, positionals=["CONFIG"], hints=elsewhere.TRAINING)
    if not given.positionals:
        raise ConfigError(given.problems, [f"usage: {usage}"])
    typed = {f"{name}.{leaf}": v for name in SECTIONS for leaf, v in given.values[name].items()}
    name = given.positionals[0]
    path = config_path(name)
    try:
        if path is not None or choose is None:
            in_file = read_config(path or Path(name))
        elif given.problems:  # choosing may take seconds
            raise ConfigError([] if os.path.exists(name) else no_such_config(name))
        else:
            in_file = choose(name, typed)
    except ConfigError as error:
        raise ConfigError([*given.problems, *error.problems], error.hints) from error
    config, problems = _conformed(with_values(in_file, typed))
    if "run.max_steps" in typed and (budget := config.run.time_budget):
        problems.append(
            f"run.max_steps={typed['run.max_steps']}: has no effect with run.time_budget={budget}; "
            "leave it out, or count steps instead of time with --time_budget="
        )
    if problems := given.problems + problems:
        raise ConfigError(problems)
    config = replace(config, typed=typed, in_file=values_of(_conformed(in_file)[0]))
    if given.values[""].get("print_config"):
        print_once(to_json(config))
        raise SystemExit(0)
    if config.log.live:
        require_packages("log.live=true")
    return config


def config_path(name: str) -> Path | None:
    """Return the config file called `config/small.py`, `config/small` or `small`; None without one.

    The bare word comes before a text of that name, which is `./small`.
    """
    if name.endswith(".py"):
        found = [Path(name)]
    elif re.fullmatch(r"\w+", name):
        found = [Path("config", f"{name}.py"), CONFIGS / f"{name}.py"]
    else:
        found = [] if os.path.exists(name) else [Path(f"{name}.py")]
    return next((path for path in found if os.path.isfile(path)), None)


def read_config(path: Path) -> Config:
    """Run the Python file at `path` and return what it binds to `config`, not yet checked.

    run.out_dir becomes out/<name of the file> unless the file sets it. Raises ConfigError, one line
    per mistake. A name that is set but never used and looks like an option (`bach_size = 8`) is a
    mistake: it would have no effect.
    """
    if not os.path.isfile(path):
        raise ConfigError(no_such_config(str(path)))
    _refuse_unused_names(path)
    try:
        config = runpy.run_path(str(path)).get("config")
    except Exception as error:
        raise ConfigError(_explain(path, error)) from error
    if not isinstance(config, Config):
        raise ConfigError(f"{path}: must bind config = Config(...), imported from training.config")
    for name, section in sections_of(config):
        if type(section) is not SECTIONS[name]:
            raise ConfigError(f"{path}: {name}={section!r}: must be {SECTIONS[name].__name__}(...)")
    if not config.run.out_dir:
        config = with_values(config, {"run.out_dir": f"out/{path.stem}"})
    return config


def no_such_config(name: str) -> str:
    """Return the message for a name that is neither a file nor a config, with the nearest names."""
    configs = sorted(
        {file.stem for folder in ("config", CONFIGS) for file in Path(folder).glob("*.py")}
    )
    folder = os.path.dirname(name)
    beside = sorted(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []
    known = {entry: os.path.join(folder, entry) for entry in beside} | {
        word: word for word in configs
    }
    leaf = os.path.basename(name)
    near = difflib.get_close_matches(leaf, known, n=2, cutoff=0.75)
    near += difflib.get_close_matches(leaf.removesuffix(".py"), configs, n=1, cutoff=0.75)
    meant = " or ".join(dict.fromkeys(known[entry] for entry in near))
    hint = f"; did you mean {meant}?" if meant else ""
    return f"CONFIG={name}: no such file or config{hint} (configs: {', '.join(configs)})"


def _refuse_unused_names(path: Path) -> None:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        where = f"{path}: line {getattr(error, 'lineno', 1)}"
        raise ConfigError(f"{where}: {getattr(error, 'msg', error)}") from error
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    problems = [
        f"{path}: line {node.lineno}: {node.id} is set but never used{advice}"
        for node in names
        if node.id not in used and (advice := _advice(node.id))
    ]
    if problems:
        raise ConfigError(problems)


def _advice(name: str) -> str:
    """Suggest the option that a misplaced or misspelled name probably means; "" if none is near."""
    if name in SECTIONS:
        return f": did you mean Config({name}={name})?"
    near = nearest(name, OPTIONS, elsewhere.TRAINING)
    if near is None:
        return ""
    section, _, leaf = near.partition(".")
    return f": did you mean {SECTIONS[section].__name__}({leaf}=...)?"


def _explain(path: Path, error: Exception) -> str:
    """Return one line about an exception in a config file: its line, the error and a suggestion."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f"{path}: line {lines[-1]}: " if lines else f"{path}: "
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    advice = _advice(unknown[1]) if unknown else ""
    return f"{where}{type(error).__name__}: {error}{advice}"


# JSON


def to_json(config: Config) -> str:
    """Return the text of run.json: {section: {name: value}}, and where the values came from.

    "command_line" holds what was typed, "config_file" the values of the file that differ from the
    run's, both as {"section.name": value}.
    """
    saved = {name: asdict(section) for name, section in sections_of(config)}
    if config.typed is not None:
        saved["command_line"] = dict(config.typed)
    if config.in_file is not None:
        values = values_of(config)
        others = {name: value for name, value in config.in_file.items() if value != values[name]}
        saved["config_file"] = others
    return json.dumps(saved, indent=2)


def from_json(source: str | Mapping[str, Any]) -> Config:
    """Return the config in run.json, given as text or parsed.

    An option that is newer than the file gets its default. Raises ConfigError naming what is
    unknown or of a wrong type; ranges are not checked.
    """
    try:
        saved = json.loads(source) if isinstance(source, str) else source
    except ValueError as error:
        raise ConfigError(f"run.json is not JSON: {error}") from error
    if not isinstance(saved, Mapping) or not all(isinstance(v, Mapping) for v in saved.values()):
        raise ConfigError("run.json: must be an object of sections, each an object of options")
    saved = dict(saved)
    typed, others = saved.pop("command_line", None), saved.pop("config_file", None)
    values = {f"{name}.{leaf}": v for name, options in saved.items() for leaf, v in options.items()}
    if values.get("run.resume") == "must":
        values["run.resume"] = "changed"  # as it is called now
    unknown = [f"section {name}" for name in saved if name not in SECTIONS]
    unknown = unknown or [f"option {name}" for name in values if name not in FULL_NAMES]
    if unknown:
        raise ConfigError([f"run.json: unknown {name}" for name in unknown])
    values, wrong_types = _conform_all(values)
    if wrong_types:
        raise ConfigError([problem for _, problem in wrong_types])
    config = replace(with_values(Config(), values), typed=typed)
    return config if others is None else replace(config, in_file=values_of(config) | dict(others))


def options_table() -> str:
    """Return every option as a Markdown table, for docs/options.md."""
    lines = ["| option | default | what it is |", "|---|---|---|"]
    for option in OPTIONS.values():
        typed = f"`--{option.full_name}={in_short(option.annotation)}`".replace("|", r"\|")
        lines.append(f"| {typed} | `{typed_text(option.default)}` | {option.help} |")
    return "\n".join(lines)
