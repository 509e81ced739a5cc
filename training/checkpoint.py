"""Checkpoints that are complete or absent, and that never load wrong values.

    checkpoints/step-N/   model.safetensors  optim.safetensors  run.json  state.json  tokenizer/
                          MANIFEST.json      sizes and SHA-256 of all of these, and its own
    checkpoints/best      one line: the folder of the best evaluation

Saving writes into a temporary folder, flushes every file to the disk, the manifest last, and
renames the folder: a kill at any moment leaves the old checkpoints and perhaps a `.tmp-` folder. A
bit flipped later is found by its hash.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cli.files import Entry, free_name, json_bytes, replace_file, sync_folder, write_file
from cli.options import ConfigError
from training.loading import Checkpoint, load_checkpoint
from training.manifest import (
    MANIFEST,
    MODEL,
    OPTIM,
    RUN,
    STATE,
    DamagedCheckpoint,
    check_finite,
    tensor_pieces,
    write_manifest,
)
from training.state import TrainState

STEP_NAME = r"step-(0|[1-9][0-9]{0,17})"
# What a kill can leave half-written: the names that this project makes, and no others.
LEFT_IN_CHECKPOINTS = rf"\.old-{STEP_NAME}|\.tmp-({STEP_NAME}|pruned-[0-9]+|best)-[0-9]+"
LEFT_IN_RUN = r"\.tmp-(run\.json|report\.html|wandb_id|\.launch)-[0-9]+"


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print) -> None:
        self.folder, self.say = folder, say
        self._known: dict[int, bool] = {}  # step -> whether it is good, as this process found

    def steps(self) -> list[int]:
        """Steps that have a folder, good or not, ascending."""
        if not self.folder.is_dir():
            return []
        names = (re.fullmatch(STEP_NAME, p.name) for p in self.folder.iterdir() if p.is_dir())
        return sorted(int(match[1]) for match in names if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def save(
        self,
        state: TrainState,
        model: dict[str, Tensor],
        optim: dict[str, Tensor],
        run_json: str,
        tokenizer: dict[str, bytes],
        about: dict[str, Any],
    ) -> bool:
        """Write step-N, complete or not at all. False if this state is there and good already.

        Raises OSError when the disk is full or not writable; nothing half-written stays.
        """
        if self._holds(state):
            return False
        final = self.path(state.step)
        temporary = self.folder / f".tmp-{final.name}-{os.getpid()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            files = _write_files(temporary, state, model, optim, run_json, tokenizer)
            write_manifest(temporary, state.step, about, files)
            for folder in (temporary / "tokenizer", temporary):
                sync_folder(folder)
            self._put(temporary, state.step)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._known[state.step] = True
        return True

    def _holds(self, state: TrainState) -> bool:
        """Whether step-N is there, good, and says what would be written now."""
        path = self.path(state.step)
        if not os.path.lexists(path) or not self._is_good(state.step):
            return False
        return (path / STATE).read_bytes() == json_bytes(asdict(state))

    def _put(self, temporary: Path, step: int) -> None:
        """Rename a complete folder to step-N. One that is there already is replaced if it is good
        (`clean` undoes it if a kill comes between), and else kept under another name."""
        final, old = self.path(step), self.folder / f".old-step-{step}"
        if os.path.lexists(final):
            if self._is_good(step):
                os.rename(final, old)
            else:
                aside = free_name(final.with_name(f"{final.name}.damaged"))
                os.rename(final, aside)
                self.say(f"moved the damaged {final} to {aside}")
        os.rename(temporary, final)
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def set_best(self, step: int) -> None:
        """Point `best` at step-N."""
        replace_file(self.folder / "best", f"step-{step}\n")
        sync_folder(self.folder)

    def best_step(self) -> int | None:
        """The step that `best` names, or None."""
        try:
            with open(self.folder / "best", "rb") as file:
                match = re.fullmatch(STEP_NAME.encode() + rb"\s*", file.read(64))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if match is None:
            self.say(f"warning: {self.folder / 'best'} does not name a checkpoint; ignored")
        return int(match[1]) if match else None

    def mend_best(self, state: TrainState) -> None:
        """Let `best` name what `state` knows as best: a kill may have come between the two."""
        step = state.best_step
        if step is not None and step != self.best_step() and step in self.steps():
            self.set_best(step)

    def prune(self, keep: int) -> None:
        """Delete the oldest, never `best`, and only while `keep` (>= 2) verified ones remain."""
        good, best = 0, self.best_step()
        for step in reversed(self.steps()):
            if good < max(2, keep):
                good += self._is_good(step)
            elif step != best:
                # By another name first: a kill in the middle must not leave half a step-N.
                doomed = self.folder / f".tmp-pruned-{step}-{os.getpid()}"
                os.rename(self.path(step), doomed)
                shutil.rmtree(doomed, ignore_errors=True)
                self._known.pop(step, None)

    def clean(self) -> None:
        """Remove what a kill left half-written. Only for who holds the run folder."""
        for old in _matching(self.folder, rf"\.old-{STEP_NAME}"):
            final = old.with_name(old.name.removeprefix(".old-"))
            if not os.path.lexists(final):
                os.rename(old, final)
        leftovers = _matching(self.folder, LEFT_IN_CHECKPOINTS)
        for leftover in [*leftovers, *_matching(self.folder.parent, LEFT_IN_RUN)]:
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)

    def newest(self, *, weights_only: bool = False) -> Checkpoint | None:
        """The newest good one; what was wrong with a newer one is said. None if there is none.

        Raises DamagedCheckpoint if there are some and all are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                found = load_checkpoint(self.path(step), weights_only=weights_only)
                for name in (MODEL,) if weights_only else (MODEL, OPTIM):
                    check_finite(found.path / name)
            except DamagedCheckpoint as error:
                self._known[step] = False
                self.say(f"warning: {error}; trying the one before")
                continue
            if not weights_only:
                self._known[step] = True
            return found
        if steps:
            raise DamagedCheckpoint(
                f"{self.folder}: none of the checkpoints {steps} is intact. Restore one from a "
                "backup, start anew with --overwrite=true (it moves this folder aside), or, if the "
                "weights are all that is left, start from them with --init_from=FOLDER elsewhere"
            )
        return None

    def _is_good(self, step: int) -> bool:
        """Whether step-N is intact; each is read once by a process, and what is wrong said once."""
        if step not in self._known:
            try:
                load_checkpoint(self.path(step))
                self._known[step] = True
            except DamagedCheckpoint as error:
                self.say(f"warning: {error}")
                self._known[step] = False
        return self._known[step]


def find_checkpoint(run: Path, which: str = "") -> Checkpoint:
    """The checkpoint whose weights are meant: the state of the optimizer is not looked at.

    run: a run folder, in which `which` is "best", "latest" or a step; with "" the best if there is
    one, else the latest. Or a checkpoint itself.
    Raises ConfigError if there is none, DamagedCheckpoint if it is damaged.
    """
    if (run / MANIFEST).is_file():
        return load_checkpoint(run, weights_only=True)
    checkpoints = Checkpoints(run / "checkpoints")
    steps, best = checkpoints.steps(), checkpoints.best_step()
    if not steps:
        raise ConfigError(f"{run}: no checkpoint there; expected {run}/checkpoints/step-N")
    if which in ("", "best") and best is not None:
        return load_checkpoint(checkpoints.path(best), weights_only=True)
    if which in ("", "latest"):
        newest = checkpoints.newest(weights_only=True)
        assert newest is not None
        return newest
    if which.isascii() and which.isdigit() and int(which) in steps:
        return load_checkpoint(checkpoints.path(int(which)), weights_only=True)
    raise ConfigError(
        f"which={which}: {run} has the steps {', '.join(map(str, steps))}"
        f"{'' if best is None else f' and best (step {best})'}; or use latest"
    )


def _write_files(
    folder: Path,
    state: TrainState,
    model: dict[str, Tensor],
    optim: dict[str, Tensor],
    run_json: str,
    tokenizer: dict[str, bytes],
) -> dict[str, Entry]:
    """Write everything but the manifest; returns its entries, hashed from what was written."""
    entries = {
        MODEL: write_file(folder / MODEL, tensor_pieces(model)),
        OPTIM: write_file(folder / OPTIM, tensor_pieces(optim)),
        RUN: write_file(folder / RUN, [run_json.encode()]),
        STATE: write_file(folder / STATE, [json_bytes(asdict(state))]),
    }
    (folder / "tokenizer").mkdir()
    for name in sorted(tokenizer):
        entries[f"tokenizer/{name}"] = write_file(folder / "tokenizer" / name, [tokenizer[name]])
    return entries


def _matching(folder: Path, pattern: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by their plain names, a tied one once."""
    return dict(model.named_parameters())


def load_model_tensors(model: torch.nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Copy tensors into the model. Raises ConfigError listing all that does not fit."""
    own = model_tensors(model)
    problems = [f"{source} has no tensor {name}" for name in own.keys() - tensors.keys()]
    problems += [f"{source} has an extra tensor {name!r}" for name in tensors.keys() - own.keys()]
    for name in own.keys() & tensors.keys():
        found, needed = ((tuple(t.shape), t.dtype) for t in (tensors[name], own[name]))
        if found != needed:
            problems.append(f"{source}: {name} is {found}, the model's is {needed}")
    if problems:
        raise ConfigError(sorted(problems))
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
