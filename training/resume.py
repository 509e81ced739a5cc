"""Begin a run or resume the one in its folder: what a resume changes, keeps and refuses.

A run keeps the value of every option that the command does not mention. A command asks for a change
if it types an option with another value than at earlier starts, or if the config file says
something else than at the last start. The option's kind decides whether the change is made.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cli.options import ConfigError, typed_text
from training.budget import lengthened, open_budget, rate_note
from training.checkpoint import (
    Checkpoint,
    Checkpoints,
    TrainState,
    load_checkpoint,
    load_model_tensors,
)
from training.config import (
    FULL_NAMES,
    Config,
    differences,
    from_json,
    seconds_of,
    to_json,
    values_of,
    with_values,
)
from training.console import Console
from training.dataset import Data
from training.distributed import Ranks
from training.folder import (
    WRITTEN,
    check_named,
    check_own,
    has_stepped,
    lock_folder,
    mark_cleared,
    move_aside,
    was_cleared,
    write_run_json,
)
from training.inherit import (
    inherit_model,
    start_from_weights,
    with_base_hash,
    with_inherited_tokenizer,
)
from training.step import Setup

# How a resumed run treats another value of an option. Each option names its kind after its help.
KINDS = {
    "fixed": "refused: the checkpoint would not fit, or its step number would mean other windows",
    "changed": "accepted with --resume=changed: the result is not that of an uninterrupted run",
    "longer": "accepted if it makes the run longer, else like changed",
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
        return "free" if _is_longer(name, old, new) else "changed"
    if name == "run.device" and old.partition(":")[0] == new.partition(":")[0]:
        return "start"  # another GPU of the same machine computes the same
    if name == "run.eval_interval":  # patience counts evaluations, and a time budget includes them
        counts = any(c.run.patience or c.run.time_budget for c in (saved, asked))
        return "changed" if counts else "free"
    return kind


def _is_longer(name: str, old: Any, new: Any) -> bool:
    if name == "run.patience":  # 0: endless
        return new == 0 or 0 < old < new
    if name == "run.time_budget":  # 0: no budget, or another run's lengths
        return 0 < seconds_of(old) < seconds_of(new)
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


def has_other_settings(saved: Config, asked: Config) -> bool:
    """Whether a new run with this command would differ from the run that `saved` belongs to."""
    return any(diff.is_change or diff.is_kept for diff in compare(saved, asked))


def refused_changes(saved: Config, asked: Config, can_resume: bool = True) -> list[Difference]:
    """List the changes for which the run cannot be resumed with this command.

    can_resume: there is a checkpoint. Without one no run can be made longer, and the source cannot
    be compared.
    """
    refusing = ("fixed",) if asked.run.resume == "changed" else ("fixed", "changed")
    needs_checkpoint = () if can_resume else ("content", "longer")
    return [
        diff
        for diff in compare(saved, asked)
        if diff.is_change
        and (diff.kind in refusing or FULL_NAMES[diff.name].resume in needs_checkpoint)
    ]


def ways_on(refused: Iterable[Difference], can_resume: bool = True) -> list[str]:
    """Return what can be done after these changes were refused, one line each."""
    lines = []
    if fixed := [diff.name for diff in refused if diff.kind in ("fixed", "content")]:
        lines.append(f"{', '.join(fixed)}: cannot change once a run has begun")
    elif can_resume:
        lines.append("to continue with the changed values: --resume=changed")
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


# The run's folder


def open_run(
    config: Config, ranks: Ranks, stack: contextlib.ExitStack, console: Console
) -> tuple[Config, Path | None]:
    """Lock the run's folder, and decide whether to begin a run or to resume the one in it.

    Returns the config to train with, and the checkpoint to resume from, if any. The folder stays
    locked until `stack` closes. Raises ConfigError if it holds files that are not a run's or a run
    with different settings, FolderHeld if another process trains in it.
    """
    folder = Path(config.run.out_dir)

    def decide() -> dict[str, str]:
        stack.enter_context(lock_folder(folder))
        cleared = was_cleared(folder, ranks.launch.proof)
        if config.run.overwrite and not cleared:  # see take_folder
            return {"config": to_json(_begin(config, console)), "checkpoint": ""}
        if config.run.overwrite:
            console.print(
                f"restarted: this launch has already moved the old run aside; resuming in {folder}"
            )
        now, checkpoint = _begin_or_resume(config, folder, console)
        return {"config": to_json(now), "checkpoint": str(checkpoint.path) if checkpoint else ""}

    found = ranks.share(decide, "opening the run's folder")
    checkpoint = Path(found["checkpoint"]) if found["checkpoint"] else None
    return from_json(found["config"]), checkpoint


def checkpoints_of(config: Config, console: Console) -> Checkpoints:
    """Return the checkpoints in the run's folder."""
    return Checkpoints(Path(config.run.out_dir, "checkpoints"), console.print)


def _begin(config: Config, console: Console) -> Config:
    open_budget(config.run, TrainState())  # raises now if the run in fits:RUN is not there
    return with_base_hash(inherit_model(config, console.print))


def _begin_or_resume(
    config: Config, folder: Path, console: Console
) -> tuple[Config, Checkpoint | None]:
    check_own(folder)
    checkpoints = checkpoints_of(config, console)
    checkpoints.clean()
    newest = checkpoints.newest()
    if newest is not None:
        checkpoints.mend_best(newest.state)
    elif config.run.resume == "changed":
        raise ConfigError(
            f"run.resume=changed: {folder} holds no checkpoint to resume from; remove --resume"
        )
    saved = newest.config() if newest is not None else _read_run_json(folder)
    if saved is None:
        return _begin(config, console), None
    asked = config if newest is None else with_inherited_tokenizer(config, saved, newest)
    stepped = has_stepped(folder) if newest is None else newest.state.step > 0
    if not stepped and has_other_settings(saved, asked):
        console.print(f"{folder}: no step was taken in it; starting over with the new settings")
        aside = newest is not None  # a checkpoint of the initial weights
        return _begin(with_values(config, {"run.overwrite": aside}), console), None
    check_named({diff.name for diff in compare(saved, asked) if diff.is_change}, asked)
    if refused := refused_changes(saved, asked, can_resume=newest is not None):
        problems = [f"{folder} holds a run with different settings:", *map(str, refused)]
        raise ConfigError(problems, ways_on(refused, can_resume=newest is not None))
    now = resumed(saved, asked)
    open_budget(now.run, TrainState())
    unsaved = None
    if newest is not None:
        with contextlib.suppress(OSError, ValueError):  # damaged: it is about to be replaced
            unsaved = _read_run_json(folder)
    rates = rate_note(saved, now, newest.state) if newest is not None else ""
    for line in filter(None, [*resume_notes(saved, asked, unsaved), rates]):
        console.print(line)
    return now, newest


def _read_run_json(folder: Path) -> Config | None:
    """Return the config of the last start in this folder, None if there was none."""
    path = folder / "run.json"
    try:
        return from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ConfigError as error:
        lines = [f"{folder}: {line}" for line in error.problems]
        raise ConfigError(lines, ["to move the folder aside: --overwrite=true"]) from error


def take_folder(
    config: Config, ranks: Ranks, stack: contextlib.ExitStack, console: Console
) -> None:
    """Write run.json into the run's folder; with run.overwrite, first move an old run aside, once
    per launch.

    Called last before training, when no mistake in the command can be found any more.
    """
    folder = Path(config.run.out_dir)
    if not ranks.first:
        return
    if config.run.overwrite and not was_cleared(folder, ranks.launch.proof):
        if any((folder / name).exists() for name in WRITTEN):
            console.print(f"moved the old run to {move_aside(folder)}")
            if not (folder / ".lock").exists():  # it was moved with the folder
                stack.enter_context(lock_folder(folder))
        mark_cleared(folder, ranks.launch.names)
    write_run_json(folder, to_json(config))


def restore(setup: Setup, path: Path | None, data: Data, console: Console) -> TrainState:
    """Load a checkpoint into model and optimizer, and return its state.

    Without a checkpoint: the weights of run.init_from, if that is given, and a new state. A
    checkpoint of a run with LoRA holds the adapters alone, so it needs those weights too.
    """
    config, state = setup.config, TrainState()
    if config.run.init_from and (path is None or config.run.lora_rank):
        start_from_weights(config, setup.model, data.tokenizer)
    if path is not None:
        checkpoint = load_checkpoint(path)
        own = setup.model.trained_parameters()
        load_model_tensors(own, checkpoint.model_tensors(), str(path))
        setup.optimizers.load_state_tensors(checkpoint.optim_tensors())
        if checkpoint.state.scaler and setup.scaler.is_enabled():
            setup.scaler.load_state_dict(checkpoint.state.scaler)
        here = setup.ranks.about
        for name in ("world", "torch", "hardware"):
            if (before := checkpoint.about.get(name)) != here[name]:
                console.say(f"note: {name} was {before!r}, now {here[name]!r}")
        console.say(f"resuming from {path}")
        fits = lengthened(from_json(checkpoint.run).run, config.run, checkpoint.state)
        state = replace(checkpoint.state, fits=fits)
    setup.ranks.check_same(setup.model.parameters(), "weights")
    return state
