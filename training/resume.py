"""What a resumed run may change about its recipe, and what it says when it may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from data.options import typed_text
from model.config import DROPOUTS
from training.config import OPTIONS, Config, differences

# How a resumed run treats an option that is given another value than the run has; each option names
# its kind beside its help.
KINDS = {
    "fixed": "refused: the checkpoint would not fit, or its step number would mean other windows",
    "must": "taken with --resume=must: the run is then not the one that was never interrupted",
    "longer": "taken if it makes the run longer, else as must",
    "free": "taken: no weight depends on it",
    "start": "taken without a word: it belongs to the start, not to the run",
}


def _kind(name: str) -> str:
    return OPTIONS[name.partition(".")[2]].resume


def _is_open(asked: Config, name: str, value: Any) -> bool:
    """Whether `asked` leaves the option to what the run settled on when it began."""
    if value is None or value == "auto":
        return True
    brought = name.startswith("model.") or name == "data.tokenizer"
    free = name.removeprefix("model.") in DROPOUTS
    inherited = bool(asked.run.init_from) and brought and not free
    return inherited and value == OPTIONS[name.partition(".")[2]].default


def _is_free(saved: Config, asked: Config, name: str, old: Any, new: Any) -> bool:
    if name == "run.eval_interval":  # patience counts evaluations, a time budget pays for them
        return not any((c.run.patience or c.run.time_budget) for c in (saved, asked))
    if name == "run.device":  # which of several GPUs is no part of the recipe
        return old.partition(":")[0] == new.partition(":")[0]
    return _kind(name) in ("free", "start")


def resume_problems(saved: Config, asked: Config, must: bool, can_resume: bool = True) -> list[str]:
    """Why the run with recipe `saved` cannot go on as `asked`: each difference, then the ways on.

    saved: from run.json, resolved. asked: as typed, so that None and "auto" mean: as it was; and so
    do the model's and the tokenizer's defaults where `run.init_from` brought them.
    must: whether `--resume=must` was given; can_resume: whether it is a way on, there being a
    checkpoint. Returns [] when the run may go on.
    """
    changed = [
        (name, old, new)
        for name, old, new in differences(saved, asked)
        if not _is_free(saved, asked, name, old, new) and not _is_open(asked, name, new)
    ]
    fixed = [difference for difference in changed if _kind(difference[0]) == "fixed"]
    refused = fixed if must else changed
    if not refused:
        return []
    lines = [
        f"{name}: the run has {typed_text(old)}, asked for {typed_text(new)}"
        for name, old, new in refused
    ]
    if fixed:
        lines.append(f"{', '.join(name for name, _, _ in fixed)}: fixed once a run has begun")
    elif can_resume:
        lines.append("to carry on with the new values: --resume=must")
    lines.append("to start anew and move the old run aside: --overwrite=true; elsewhere: --out_dir")
    return lines


def resumed(saved: Config, asked: Config) -> Config:
    """The recipe that a resume goes on with: what is asked, and where that is left open, what was.

    `parallel.mode` alone stays open: the ranks that are there decide it.
    """
    config = saved
    for name, _, new in differences(saved, asked):
        stays_open = _is_open(asked, name, new) and name != "parallel.mode"
        if not stays_open and _kind(name) != "fixed":
            section, _, leaf = name.partition(".")
            values = replace(getattr(config, section), **{leaf: new})
            config = replace(config, **{section: values})
    return config
