"""Checkpoints that are complete or absent, and that never load wrong values.

    checkpoints/step-N/   model.safetensors  optim.safetensors  run.json  state.json  tokenizer/
                          MANIFEST.json      sizes and SHA-256 of all of these, and its own
    checkpoints/best      one line: the folder of the best evaluation

Saving writes into a temporary folder, flushes every file to the disk, the manifest last, and
renames the folder: a kill at any moment leaves the old checkpoints and perhaps a `.tmp-` folder. A
bit flipped later is found by its hash. Nothing that is loaded is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from data.options import ConfigError

MANIFEST = "MANIFEST.json"
FORMAT = 1
FILES = ("model.safetensors", "optim.safetensors", "run.json", "state.json")
CHUNK = 1 << 20  # bytes hashed at a time
MAX_JSON = 64 << 20  # a larger JSON file is not ours


class DamagedCheckpoint(RuntimeError):
    """A checkpoint that is incomplete or whose bytes have changed; the message names the file."""

    exit_code = 3


@dataclass
class TrainState:
    """Every number, besides tensors, that can change a later update."""

    step: int = 0  # updates done
    best_loss: float | None = None
    best_step: int | None = None
    since_best: int = 0  # evaluations
    evaluated_at: int | None = None  # the last step that was evaluated
    last_val_loss: float | None = None
    skipped: int = 0  # float16 steps
    scaler: dict[str, Any] = field(default_factory=dict)
    wandb_id: str | None = None

    def record(self, val_loss: float) -> bool:
        """Note an evaluation at this step; True if it is the best so far."""
        self.evaluated_at, self.last_val_loss = self.step, val_loss
        if self.best_loss is None or val_loss < self.best_loss:
            self.best_loss, self.best_step, self.since_best = val_loss, self.step, 0
            return True
        self.since_best += 1
        return False


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, its small files parsed."""

    path: Path
    run: dict[str, Any]
    state: TrainState
    about: dict[str, Any]

    def model_tensors(self) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self.path / "model.safetensors")

    def optim_tensors(self) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self.path / "optim.safetensors")


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print) -> None:
        self.folder, self.say = folder, say
        self._verified: set[str] = set()  # by this process

    def steps(self) -> list[int]:
        """Steps that have a folder, good or not, ascending."""
        if not self.folder.is_dir():
            return []
        names = (re.fullmatch(r"step-(\d+)", p.name) for p in self.folder.iterdir() if p.is_dir())
        return sorted(int(match[1]) for match in names if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def save(
        self,
        state: TrainState,
        model: dict[str, Tensor],
        optim: dict[str, Tensor],
        run_json: str,
        tokenizer: Path,
        about: dict[str, Any],
    ) -> bool:
        """Write step-N, complete or not at all. False if one is there and good: it is left.

        Raises OSError when the disk is full or not writable; nothing half-written stays.
        """
        final = self.path(state.step)
        if final.exists():
            if self._is_good(state.step):
                return False
            os.replace(final, free_name(final.with_name(final.name + ".damaged")))
        temporary = self.folder / f".tmp-{final.name}-{os.getpid()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            files = _write_files(temporary, state, model, optim, run_json, tokenizer)
            manifest = {"format": FORMAT, "step": state.step, "about": about, "files": files}
            _write(temporary / MANIFEST, _sealed(manifest))
            for folder in (temporary / "tokenizer", temporary):
                _sync_folder(folder)
            os.rename(temporary, final)
            _sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._verified.add(final.name)
        return True

    def set_best(self, step: int) -> None:
        """Point `best` at step-N."""
        replace_file(self.folder / "best", f"step-{step}\n")
        _sync_folder(self.folder)

    def best_step(self) -> int | None:
        """The step that `best` names, or None."""
        try:
            with open(self.folder / "best", "rb") as file:
                match = re.fullmatch(rb"step-(\d{1,18})\s*", file.read(64))
        except FileNotFoundError:
            return None
        if match is None:
            self.say(f"warning: {self.folder / 'best'} does not name a checkpoint; ignored")
        return int(match[1]) if match else None

    def prune(self, keep: int) -> None:
        """Delete the oldest, never `best`, and only while `keep` (>= 2) verified ones remain."""
        good = 0
        for step in reversed(self.steps()):
            if good >= max(2, keep) and step != self.best_step():
                shutil.rmtree(self.path(step), ignore_errors=True)
                self._verified.discard(self.path(step).name)
            elif good < max(2, keep) and self._is_good(step):
                good += 1

    def clean(self) -> None:
        """Remove what a kill left half-written. Only for who holds the run folder."""
        for leftover in self.folder.glob(".tmp-*") if self.folder.is_dir() else ():
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)

    def newest(self) -> Checkpoint | None:
        """The newest good one; what was wrong with a newer one is said. None if there is none.

        Raises DamagedCheckpoint if there are some and all are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                found = load_checkpoint(self.path(step))
            except DamagedCheckpoint as error:
                self.say(f"warning: {error}; trying the one before")
                continue
            self._verified.add(found.path.name)
            return found
        if steps:
            raise DamagedCheckpoint(
                f"{self.folder}: none of the checkpoints {steps} is intact. Restore one from a "
                "backup, or start anew with --overwrite=true (it moves this folder aside)"
            )
        return None

    def _is_good(self, step: int) -> bool:
        path = self.path(step)
        if path.name not in self._verified:
            try:
                read_manifest(path)
            except DamagedCheckpoint as error:
                self.say(f"warning: {error}")
                return False
            self._verified.add(path.name)
        return True


def find_checkpoint(run: Path, which: str = "") -> Checkpoint:
    """The checkpoint that `which` of "best", "latest" or a step names in a run folder.

    With "" it is the best if there is one, else the latest. `run` may be a checkpoint itself.
    Raises ConfigError if there is none, DamagedCheckpoint if it is damaged.
    """
    if (run / MANIFEST).is_file():
        return load_checkpoint(run)
    checkpoints = Checkpoints(run / "checkpoints")
    steps, best = checkpoints.steps(), checkpoints.best_step()
    if not steps:
        raise ConfigError(f"{run}: no checkpoint there; expected {run}/checkpoints/step-N")
    if which in ("", "best") and best is not None:
        return load_checkpoint(checkpoints.path(best))
    if which in ("", "latest"):
        newest = checkpoints.newest()
        assert newest is not None
        return newest
    if which.isascii() and which.isdigit() and int(which) in steps:
        return load_checkpoint(checkpoints.path(int(which)))
    raise ConfigError(
        f"which={which}: {run} has the steps {', '.join(map(str, steps))}"
        f"{'' if best is None else f' and best (step {best})'}; or use latest"
    )


def load_checkpoint(path: Path) -> Checkpoint:
    """Verify every byte of a checkpoint, then read its small files.

    Raises DamagedCheckpoint naming the file that is missing, of another size or hash, or strange.
    """
    manifest = read_manifest(path)
    run, state = _read_json(path / "run.json"), _read_json(path / "state.json")
    try:
        return Checkpoint(path, run, TrainState(**state), manifest["about"])
    except TypeError as error:
        raise DamagedCheckpoint(f"{path / 'state.json'}: {error}") from error


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, after every file it names was found to have its size and SHA-256."""
    manifest = _read_json(path / MANIFEST)
    seal = manifest.pop("seal", None) if isinstance(manifest, dict) else None
    if seal is None or seal != hashlib.sha256(_canonical(manifest)).hexdigest():
        raise DamagedCheckpoint(f"{path / MANIFEST} is damaged: its own hash does not fit")
    if manifest.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{path / MANIFEST}: format {manifest.get('format')}, not {FORMAT}")
    files = manifest["files"]
    for name in FILES:
        if name not in files:
            raise DamagedCheckpoint(f"{path / MANIFEST} does not list {name}")
    for name, expected in files.items():
        # Names come from a file: nothing outside the folder is ever opened.
        if name not in FILES and not re.fullmatch(r"tokenizer/[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise DamagedCheckpoint(f"{path / MANIFEST}: strange file name {name!r}")
        _check_file(path / name, expected)
    if re.fullmatch(r"step-\d+", path.name) and path.name != f"step-{manifest['step']}":
        raise DamagedCheckpoint(f"{path} holds step {manifest['step']}")
    return manifest


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    try:
        status = os.lstat(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is missing ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode) or path.parent.is_symlink():
        raise DamagedCheckpoint(f"{path} is not a plain file")
    if status.st_size != expected["size"]:
        raise DamagedCheckpoint(f"{path} has {status.st_size} bytes, not {expected['size']}")
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected["sha256"]:
        raise DamagedCheckpoint(f"{path} is damaged: its SHA-256 does not fit the manifest")


def _read_json(path: Path) -> Any:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode) or os.path.getsize(path) > MAX_JSON:
            raise DamagedCheckpoint(f"{path} is not a plain JSON file")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is missing ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: not JSON ({error})") from error


def _write_files(
    folder: Path,
    state: TrainState,
    model: dict[str, Tensor],
    optim: dict[str, Tensor],
    run_json: str,
    tokenizer: Path,
) -> dict[str, dict[str, Any]]:
    """Write everything but the manifest; returns its entries, hashed from what was written."""
    entries = {}
    for name, tensors in (("model.safetensors", model), ("optim.safetensors", optim)):
        plain = {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
        entries[name] = _write(folder / name, safetensors.torch.save(plain))
    entries["run.json"] = _write(folder / "run.json", run_json.encode())
    entries["state.json"] = _write(folder / "state.json", _json_bytes(asdict(state)))
    (folder / "tokenizer").mkdir()
    for source in sorted(tokenizer.iterdir()):
        name = f"tokenizer/{source.name}"
        entries[name] = _write(folder / name, source.read_bytes())
    return entries


def replace_file(path: Path, text: str) -> None:
    """Replace a small file by a rename, so that a reader or a kill never meets half of it."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        _write(temporary, text.encode())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write(path: Path, content: bytes) -> dict[str, Any]:
    """Write and flush to the disk; returns the manifest's entry."""
    view, digest = memoryview(content), hashlib.sha256()
    with open(path, "wb") as file:
        for start in range(0, len(view), CHUNK):
            file.write(view[start : start + CHUNK])
            digest.update(view[start : start + CHUNK])
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(view), "sha256": digest.hexdigest()}


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _sealed(manifest: dict[str, Any]) -> bytes:
    return _json_bytes({**manifest, "seal": hashlib.sha256(_canonical(manifest)).hexdigest()})


def free_name(path: Path) -> Path:
    """`path`, or the first of path-1, path-2 ... that does not exist."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by their plain names, a tied one once."""
    return dict(model.named_parameters())


def load_model_tensors(model: torch.nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Copy tensors into the model. Raises ConfigError listing all that does not fit."""
    own = model_tensors(model)
    problems = [f"{source} has no tensor {name}" for name in own.keys() - tensors.keys()]
    problems += [f"{source} has an extra tensor {name}" for name in tensors.keys() - own.keys()]
    for name in sorted(own.keys() & tensors.keys()):
        if own[name].shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, the model's is {tuple(own[name].shape)}"
            problems.append(f"{source}: {name} is {shapes}")
    if problems:
        raise ConfigError(sorted(problems))
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
