"""What a resumed run takes from a command, what it keeps, and what it says about both.

A run keeps the value of every option that the command does not type. An option asks for a change if
it is typed with another value, or if the config file says something else than it did at the last
start. Whether the change is then taken depends on the option's kind.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any

from data.options import typed_text
from model.config import DROPOUTS
from training.config import OPTIONS, Config, differences, values_of
from training.sections import seconds_of

# How a resumed run treats an option that is given another value than the run has; each option names
# its kind beside its help.
KINDS = {
    "fixed": "refused: the checkpoint would not fit, or its step number would mean other windows",
    "must": "taken with --resume=must: the run is then not the one that was never interrupted",
    "longer": "taken if it makes the run longer, else as must",
    "content": "taken: the data itself is compared when it is opened",
    "free": "taken: no weight depends on it",
    "start": "taken without a word: it belongs to the start, not to the run",
}


@dataclass(frozen=True)
class Change:
    """An option that shall have another value than the run has."""

    name: str
    old: Any  # the run's
    new: Any
    kind: str  # of KINDS, as it counts here
    was_in_file: Any  # before the config file was edited; the new value if it is typed

    def __str__(self) -> str:
        old, new, was = map(typed_text, (self.old, self.new, self.was_in_file))
        if was == new:
            return f"{self.name}: the run has {old}, asked for {new}"
        return f"{self.name}: the run has {old}, the config file now says {new} (it said {was})"


def changes(saved: Config, asked: Config) -> list[Change]:
    """Each option for which a command asks for another value than the run has.

    saved: from run.json, resolved. asked: as `load_config` returns it.
    """
    found = []
    for name, old, new in differences(saved, asked):
        kind = _kind_here(saved, asked, name, old, new)
        was = new if name in asked.typed else _was_in_file(saved, asked, name)
        asks = name in asked.typed or was != new
        if kind != "start" and asks and not _is_open(asked, name, new):
            found.append(Change(name, old, new, kind, was))
    return found


def kept(saved: Config, asked: Config) -> list[str]:
    """["--lr=0.0005", ...]: what the run keeps although the config file says something else,
    having been typed before and not now; and where the command says "auto" or none."""
    changed = {change.name for change in changes(saved, asked)}
    return [
        _typed(name, old)
        for name, old, new in differences(saved, asked)
        if name not in changed
        and _kind_here(saved, asked, name, old, new) != "start"
        and (
            name in asked.typed
            or not _is_open(asked, name, new)
            or _was_in_file(saved, asked, name) != new
        )
    ]


def _typed(name: str, value: Any) -> str:
    return shlex.quote(f"--{_option(name).name}={typed_text(value) if value != '' else ''}")


def _was_in_file(saved: Config, asked: Config, name: str) -> Any:
    """The config file's value at the last start; the present one where that was not noted."""
    now = asked.in_file or {}
    return (saved.in_file or now).get(name, now.get(name))


def _is_open(asked: Config, name: str, value: Any) -> bool:
    """Whether `value` leaves the option to what the run settled on when it began."""
    if value is None or value == "auto":
        return True
    brought = name.startswith("model.") or name == "data.tokenizer"
    free = name.removeprefix("model.") in DROPOUTS
    inherited = bool(asked.run.init_from) and brought and not free
    return inherited and value == _option(name).default


def _option(name: str) -> Any:
    return OPTIONS[name.partition(".")[2]]


def _kind_here(saved: Config, asked: Config, name: str, old: Any, new: Any) -> str:
    kind = _option(name).resume
    if kind == "longer":
        return "free" if _is_longer(name, old, new) else "must"
    if name == "run.device" and old.partition(":")[0] == new.partition(":")[0]:
        return "start"  # which of several GPUs is no part of the recipe
    if name == "run.eval_interval":  # patience counts evaluations, a time budget pays for them
        depends = any(c.run.patience or c.run.time_budget for c in (saved, asked))
        return "must" if depends else "free"
    return kind


def _is_longer(name: str, old: Any, new: Any) -> bool:
    if name == "run.patience":  # 0: endless
        return new == 0 or 0 < old < new
    if name == "run.time_budget":
        try:
            return seconds_of(old) < seconds_of(new)
        except ValueError:  # none, or another run's lengths
            return False
    return old < new


def is_other_recipe(saved: Config, asked: Config) -> bool:
    """Whether a new run with the command would not be the run that `saved` is of."""
    return bool(changes(saved, asked) or kept(saved, asked))


def resume_problems(saved: Config, asked: Config, can_resume: bool = True) -> list[str]:
    """Why the run with recipe `saved` cannot go on as `asked`: each change, then what to do.

    can_resume: whether there is a checkpoint. Without one nothing can be made longer, and
    `--resume=must` is no help. Returns [] if the run may go on.
    """
    must = asked.run.resume == "must"
    changed = [
        change
        for change in changes(saved, asked)
        if change.kind in ("fixed", "must")
        or (_option(change.name).resume in ("longer", "content") and not can_resume)
    ]
    fixed = [change for change in changed if change.kind in ("fixed", "content")]
    refused = fixed if must else changed
    if not refused:
        return []
    lines = [str(change) for change in refused]
    if fixed:
        lines.append(f"{', '.join(change.name for change in fixed)}: fixed once a run has begun")
    elif can_resume:
        lines.append("to go on with the new values: --resume=must")
    lines.append(
        "to start over with the old run moved aside: --overwrite=true; elsewhere: --out_dir"
    )
    return lines


def resumed(saved: Config, asked: Config) -> Config:
    """The recipe that a resume goes on with: the run's, with the changes, and each option that
    belongs to the start as it is asked."""
    values = {change.name: change.new for change in changes(saved, asked)}
    for name, old, new in differences(saved, asked):
        if _kind_here(saved, asked, name, old, new) == "start":
            values[name] = new
    config = replace(saved, in_file=asked.in_file)
    for name, value in values.items():
        section, _, leaf = name.partition(".")
        changed = replace(getattr(config, section), **{leaf: value})
        config = replace(config, **{section: changed})
    return config


def resume_notes(saved: Config, asked: Config, unsaved: Config | None = None) -> list[str]:
    """What to tell about a resume: each change that is taken, and in a line what is kept.

    unsaved: the recipe of the last start, of which a kill may have left no checkpoint.
    """
    lines = []
    for change in changes(saved, asked):
        edited = " (the config file has changed)" if change.was_in_file != change.new else ""
        lines.append(
            f"from here on {change.name}={typed_text(change.new)}, "
            f"before {typed_text(change.old)}{edited}"
        )
    if stays := kept(saved, asked):
        lines.append(f"kept as the run has it: {' '.join(stays)}")
    going_on = resumed(saved, asked)
    if lost := [
        _typed(name, value)
        for name, value, now in differences(unsaved or going_on, going_on)
        if _option(name).resume != "start" and now == values_of(saved)[name]
    ]:
        lines.append(f"nothing was saved since the start with {' '.join(lost)}: not taken over")
    return lines
