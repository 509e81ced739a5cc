"""What a resumed run takes from a command, what it keeps, and what it says about both.

A run keeps the value of every option that the command does not type. An option asks for a change if
it is typed with another value, or if the config file says something else than it did at the last
start. Whether the change is then taken depends on the option's kind.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cli.options import typed_text
from training.config import OPTIONS, Config, differences, seconds_of, values_of

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

    saved: from run.json, resolved. asked: as `load_config` returns it. None and "auto" leave an
    option to what the run settled on when it began.
    """
    found = []
    for name, old, new in differences(saved, asked):
        kind = _kind_here(saved, asked, name, old, new)
        if kind != "start" and _is_news(saved, asked, name) and new not in (None, "auto"):
            was = new if name in _typed(asked) else _was_in_file(saved, asked, name)
            found.append(Change(name, old, new, kind, was))
    return found


def kept(saved: Config, asked: Config) -> list[str]:
    """["--lr=0.0005", ...]: what the run keeps although it was typed at an earlier start and is not
    typed now, or is to be derived or automatic from now on."""
    changed = {change.name for change in changes(saved, asked)}
    return [
        _as_typed(name, old)
        for name, old, new in differences(saved, asked)
        if name not in changed
        and _kind_here(saved, asked, name, old, new) != "start"
        and (_is_news(saved, asked, name) or _was_typed(saved, asked, name, new))
    ]


def _typed(config: Config) -> Mapping[str, Any]:
    return config.typed or {}


def _is_news(saved: Config, asked: Config, name: str) -> bool:
    """Whether the command says something of the option that earlier starts did not."""
    if name in _typed(asked):
        return name not in _typed(saved) or _typed(saved)[name] != _typed(asked)[name]
    return _was_in_file(saved, asked, name) != _in_file(asked, name)


def _was_typed(saved: Config, asked: Config, name: str, new: Any) -> bool:
    """Whether the run's value was typed before; if the run did not note it, whether it may have."""
    if name in _typed(asked):
        return False
    return name in saved.typed if saved.typed is not None else new not in (None, "auto")


def _in_file(config: Config, name: str) -> Any:
    return (config.in_file or {}).get(name)


def _was_in_file(saved: Config, asked: Config, name: str) -> Any:
    """The config file's value at the last start; the present one where that was not noted."""
    return _in_file(asked if saved.in_file is None else saved, name)


def _as_typed(name: str, value: Any) -> str:
    return shlex.quote(f"--{_option(name).name}={typed_text(value) if value != '' else ''}")


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
        "to start over: --overwrite=true (the old run is moved aside), or choose another --out_dir"
    )
    return lines


def resumed(saved: Config, asked: Config) -> Config:
    """The recipe that a resume goes on with: the run's, with the changes, and each option that
    belongs to the start as it is asked."""
    values = {change.name: change.new for change in changes(saved, asked)}
    for name, old, new in differences(saved, asked):
        if _kind_here(saved, asked, name, old, new) == "start":
            values[name] = new
    edited = {change.name for change in changes(saved, asked)} - _typed(asked).keys()
    before = {name: value for name, value in _typed(saved).items() if name not in edited}
    config = replace(saved, typed={**before, **_typed(asked)}, in_file=asked.in_file)
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
        _as_typed(name, value)
        for name, value, now in differences(unsaved or going_on, going_on)
        if _option(name).resume != "start" and now == values_of(saved)[name]
    ]:
        lines.append(f"nothing was saved since the start with {' '.join(lost)}: not taken over")
    return lines
