"""Rules of a resume: which options change, which stay as the run has them, and what is refused.

A run keeps the value of every option that the command does not mention. A command asks for a change
if it types an option with another value than at earlier starts, or if the config file says
something else than at the last start. The option's kind decides whether the change is made.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cli.options import typed_text
from training.config import FULL_NAMES, Config, differences, seconds_of, values_of, with_values

# How a resumed run treats another value of an option. Each option names its kind after its help.
KINDS = {
    "fixed": "refused: the checkpoint would not fit, or its step number would mean other windows",
    "must": "accepted with --resume=must: the result is then not that of an uninterrupted run",
    "longer": "accepted if it makes the run longer, else like must",
    "content": "accepted: the data itself is compared when it is opened",
    "free": "accepted: no weight depends on it",
    "start": "accepted without a message: it belongs to the start, not to the run",
}


@dataclass(frozen=True)
class Difference:
    """An option whose value in the run is not the one the command gives."""

    name: str
    old: Any  # the run's
    new: Any  # the command's: typed, from the config file, or the default
    kind: str  # of KINDS, as it counts here
    was_in_file: Any  # before the config file was edited; `new` if it is typed
    is_change: bool  # the command asks for the new value
    is_kept: bool  # the old value stays, and the user may expect the new one

    def __str__(self) -> str:
        old, new, was = map(typed_text, (self.old, self.new, self.was_in_file))
        if was == new:
            return f"{self.name}: the run has {old}, the command says {new}"
        return f"{self.name}: the run has {old}, the config file now says {new} (before: {was})"


def compare(saved: Config, asked: Config) -> list[Difference]:
    """List every option that differs between a run and a command to resume it.

    saved: from run.json, resolved. asked: as `load_config` returns it. None and "auto" leave an
    option at what the run resolved when it began.
    """
    typed, typed_before = asked.typed or {}, saved.typed or {}
    file = asked.in_file or {}
    file_before = file if saved.in_file is None else saved.in_file
    found = []
    for name, old, new in differences(saved, asked):
        kind, is_open = _kind(saved, asked, name, old, new), new in (None, "auto")
        if name in typed:
            is_news = name not in typed_before or typed_before[name] != typed[name]
            was_typed = False
        else:
            is_news = file_before.get(name) != file.get(name)
            # A run that did not record what was typed may have been given any of its values.
            was_typed = name in typed_before if saved.typed is not None else not is_open
        is_change = kind != "start" and is_news and not is_open
        is_kept = kind != "start" and not is_change and (is_news or was_typed)
        was_in_file = new if name in typed else file_before.get(name)
        found.append(Difference(name, old, new, kind, was_in_file, is_change, is_kept))
    return found


def _kind(saved: Config, asked: Config, name: str, old: Any, new: Any) -> str:
    """Return the option's kind, where it depends on the values the one that counts here."""
    kind = FULL_NAMES[name].resume
    if kind == "longer":
        return "free" if _is_longer(name, old, new) else "must"
    if name == "run.device" and old.partition(":")[0] == new.partition(":")[0]:
        return "start"  # another GPU of the same machine computes the same
    if name == "run.eval_interval":  # patience counts evaluations, and a time budget includes them
        counts = any(c.run.patience or c.run.time_budget for c in (saved, asked))
        return "must" if counts else "free"
    return kind


def _is_longer(name: str, old: Any, new: Any) -> bool:
    if name == "run.patience":  # 0: endless
        return new == 0 or 0 < old < new
    if name == "run.time_budget":
        try:
            return seconds_of(old) < seconds_of(new)
        except ValueError:  # no budget, or another run's lengths
            return False
    return old < new


def _as_typed(values: Iterable[tuple[str, Any]]) -> str:
    """Return options as they would be typed: "--lr=0.0005 '--sample_prompt=def '"."""
    return " ".join(
        shlex.quote(f"--{FULL_NAMES[name].name}={typed_text(value) if value != '' else ''}")
        for name, value in values
    )


def kept(saved: Config, asked: Config) -> str:
    """Return, as typed, the options that the run keeps although the user may expect otherwise:
    they were typed at an earlier start and are not now, or are left open from now on."""
    return _as_typed((diff.name, diff.old) for diff in compare(saved, asked) if diff.is_kept)


def is_other_recipe(saved: Config, asked: Config) -> bool:
    """Whether a new run with this command would differ from the run that `saved` belongs to."""
    return any(diff.is_change or diff.is_kept for diff in compare(saved, asked))


def resume_problems(saved: Config, asked: Config, can_resume: bool = True) -> list[str]:
    """List why the run cannot be resumed with this command: each change, then what to do.

    can_resume: there is a checkpoint. Without one no run can be made longer, the source cannot be
    compared, and --resume=must does not help.
    """
    refusing = ("fixed",) if asked.run.resume == "must" else ("fixed", "must")
    needs_checkpoint = () if can_resume else ("content", "longer")
    refused = [
        diff
        for diff in compare(saved, asked)
        if diff.is_change
        and (diff.kind in refusing or FULL_NAMES[diff.name].resume in needs_checkpoint)
    ]
    if not refused:
        return []
    lines = [str(diff) for diff in refused]
    if fixed := [diff.name for diff in refused if diff.kind in ("fixed", "content")]:
        lines.append(f"{', '.join(fixed)}: cannot change once a run has begun")
    elif can_resume:
        lines.append("to continue with the new values: --resume=must")
    lines.append(
        "to start over (the old run is moved aside): --overwrite=true; or choose another --out_dir"
    )
    return lines


def resumed(saved: Config, asked: Config) -> Config:
    """Return the config of the resumed run: the run's own, with the changes and with the options of
    kind "start" as the command gives them."""
    diffs = compare(saved, asked)
    values = {diff.name: diff.new for diff in diffs if diff.is_change or diff.kind == "start"}
    typed = {**(saved.typed or {}), **(asked.typed or {})}
    for diff in diffs:
        if diff.is_change and diff.name not in (asked.typed or {}):
            typed.pop(diff.name, None)  # the edited config file has replaced what was typed
    return replace(with_values(saved, values), typed=typed, in_file=asked.in_file)


def resume_notes(saved: Config, asked: Config, unsaved: Config | None = None) -> list[str]:
    """Return messages about a resume: each change that is made, and one line of what is kept.

    unsaved: the config of the last start, if it was killed before it saved a checkpoint.
    """
    lines = []
    for diff in compare(saved, asked):
        if diff.is_change:
            edited = " (edited in the config file)" if diff.was_in_file != diff.new else ""
            new, old = typed_text(diff.new), typed_text(diff.old)
            lines.append(f"changed from here on: {diff.name}={new}, was {old}{edited}")
    if stays := kept(saved, asked):
        lines.append(f"kept from earlier starts of this run: {stays}")
    now = resumed(saved, asked)
    lost = [
        (name, value)
        for name, value, value_now in differences(unsaved or now, now)
        if FULL_NAMES[name].resume != "start" and value_now == values_of(saved)[name]
    ]
    if lost:
        lines.append(
            f"dropped, as nothing was saved since the start that used it: {_as_typed(lost)}"
        )
    return lines
