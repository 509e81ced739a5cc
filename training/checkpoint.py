"""Checkpoints: written complete or not at all, verified before they are used.

    checkpoints/step-N/   model.safetensors  optim.safetensors  run.json  state.json  tokenizer/
                          MANIFEST.json      size and SHA-256 of each of these, and of itself
    checkpoints/best      one line: the name of the folder with the best evaluation

A save writes into a temporary folder, syncs every file to disk (the manifest last) and renames the
folder. A kill at any moment leaves the old checkpoints, and at most a `.tmp-` folder that the next
start removes. A bit that flips later is found by its hash. Nothing that is read is ever executed,
and no name found in a file leads out of its folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import Parameter

from cli.command import Say
from cli.files import (
    CHUNK,
    Entry,
    Piece,
    free_name,
    json_bytes,
    replace_file,
    seal,
    sync_folder,
    write_file,
)
from cli.options import ConfigError, conform
from data.prepare import prepared_root
from data.prepared import find_fingerprint
from training.config import Config, from_json
from training.folder import no_such_run

MANIFEST, FORMAT = "MANIFEST.json", 1
MODEL, OPTIM, RUN, STATE = "model.safetensors", "optim.safetensors", "run.json", "state.json"
FILES = (MODEL, OPTIM, RUN, STATE)
MAX_JSON = 64 << 20  # bytes; plainGPT writes no larger JSON file


class DamagedCheckpoint(RuntimeError):
    """A checkpoint is incomplete or its bytes have changed; the message names the file."""

    exit_code = 3


# The state of a run, besides tensors


@dataclass
class TrainState:
    """Every number, besides tensors, that can change a later update; saved as state.json."""

    step: int = 0  # updates done
    best_loss: float | None = None
    best_step: int | None = None
    since_best: int = 0  # evaluations
    evaluated_at: int | None = None  # the last step that was evaluated
    last_val_loss: float | None = None
    skipped: int = 0  # float16 steps
    tokens: int | None = 0  # targets trained on; None: the run began before they were counted
    scaler: dict[str, Any] = field(default_factory=dict)  # of torch's GradScaler, for float16
    wandb_id: str | None = None
    seconds: float = 0.0  # of the time budget used so far
    fits: tuple[tuple[int, ...], ...] = ()  # of the budget: (step, max_steps from there on)

    def record(self, val_loss: float) -> bool:
        """Record an evaluation at this step; return True if it is the best so far."""
        self.evaluated_at, self.last_val_loss = self.step, val_loss
        if self.best_loss is None or val_loss < self.best_loss:
            self.best_loss, self.best_step, self.since_best = val_loss, self.step, 0
            return True
        self.since_best += 1
        return False


SCALER = {
    "scale": float,
    "growth_factor": float,
    "backoff_factor": float,
    "growth_interval": int,
    "_growth_tracker": int,
}


def state_from_json(saved: Any) -> TrainState:
    """Check what a state.json holds. A field newer than the file has its default.

    Raises ValueError naming a field that is unknown, of a wrong type or out of range.
    """
    if not isinstance(saved, dict):
        raise ValueError("must be an object")
    unknown = saved.keys() - {f.name for f in fields(TrainState)}
    if unknown:
        raise ValueError(f"unknown {', '.join(sorted(map(repr, unknown)))}")
    types, values = get_type_hints(TrainState), {"tokens": None, **saved}
    scaler = values.pop("scaler", {})
    state = TrainState(**{name: conform(types[name], v, name) for name, v in values.items()})
    counts = (state.step, state.since_best, state.skipped, state.best_step or 0, state.tokens or 0)
    if min(counts) < 0 or max(counts) >= 1 << 62:
        raise ValueError("a count is out of range")
    bad_fits = [fit for fit in state.fits if len(fit) != 2 or not 0 <= fit[0] <= fit[1] < 1 << 62]
    if bad_fits or state.seconds < 0:
        raise ValueError("the numbers of the time budget are out of range")
    if scaler != {}:
        if not isinstance(scaler, dict) or scaler.keys() != SCALER.keys():
            raise ValueError(f"scaler must hold {', '.join(SCALER)}")
        state.scaler = {name: conform(SCALER[name], v, name) for name, v in scaler.items()}
        if not 0 < state.scaler["scale"] < 2.0**128:  # a float32 above 0
            raise ValueError(f"scaler.scale={state.scaler['scale']} is out of range")
    return state


# Writing

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def tensor_pieces(tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    """Yield a safetensors file tensor by tensor; only one is in memory at a time.

    The format (github.com/huggingface/safetensors): the length of the header in 8 bytes, the header
    in JSON, then the tensors, little-endian, without gaps.
    """
    header, end = {}, 0
    for name, t in tensors.items():
        start, end = end, end + t.numel() * t.element_size()
        offsets = [start, end]
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for t in tensors.values():
        plain = t.detach().cpu().contiguous().reshape(-1)
        yield plain.view(torch.uint8).numpy().data


def write_manifest(folder: Path, step: int, about: dict[str, Any], files: dict[str, Entry]) -> None:
    """Write the last file of a checkpoint. Its `seal` is the hash of the rest of it."""
    manifest = {"format": FORMAT, "step": step, "about": about, "files": files}
    sealed = {**manifest, "seal": seal(manifest)}
    write_file(folder / MANIFEST, [json_bytes(sealed)])


# Reading: every byte is verified before it is used


def read_manifest(path: Path, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Verify size and SHA-256 of every file of a checkpoint, then return its manifest.

    skip: files that are not needed and so are not verified.
    Raises DamagedCheckpoint naming the file that is missing, changed or not listed.
    """
    manifest = read_json(path / MANIFEST)
    problem = _problem_of(manifest)
    if problem:
        raise DamagedCheckpoint(f"{path / MANIFEST} is damaged: {problem}")
    if re.fullmatch(r"step-\d+", path.name) and path.name != f"step-{manifest['step']}":
        raise DamagedCheckpoint(f"{path} holds step {manifest['step']}")
    for name, entry in manifest["files"].items():
        if name not in skip:
            _check_file(path / name, entry)
    for found in (path / "tokenizer").iterdir():  # an extra file might be preferred by a reader
        if f"tokenizer/{found.name}" not in manifest["files"] and found.name[0] != ".":
            raise DamagedCheckpoint(f"{found} does not belong there: {MANIFEST} does not list it")
    return manifest


def _problem_of(manifest: Any) -> str:
    """Describe what is wrong with a manifest before any file is opened; "" if nothing is.

    The seal only catches accidents, since anyone can compute it, so the rest is checked too.
    """
    if not isinstance(manifest, dict):
        return "not an object"
    try:
        if manifest.pop("seal", None) != seal(manifest):
            return "its own hash does not match"
    except RecursionError:
        return "nested too deeply"
    if manifest.get("format") != FORMAT:
        return f"format {manifest.get('format')!r}, not {FORMAT}"
    files, about = manifest.get("files"), manifest.get("about")
    if not _is_count(manifest.get("step")) or not isinstance(files, dict):
        return "step or files missing"
    plain = (str, int, float, type(None))
    if not isinstance(about, dict) or not all(isinstance(v, plain) for v in about.values()):
        return "about must hold plain values"
    for name in FILES:
        if name not in files:
            return f"{name} is not listed"
    if not any(name.startswith("tokenizer/") for name in files):
        return "no tokenizer is listed"
    for name, entry in files.items():
        if name not in FILES and not re.fullmatch(r"tokenizer/[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            return f"strange file name {name!r}"  # nothing outside the folder is ever opened
        if not isinstance(entry, dict) or not _is_count(entry.get("size")):
            return f"{name} has no size"
        if not isinstance(entry.get("sha256"), str):
            return f"{name} has no SHA-256"
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_file(path: Path, expected: Entry) -> None:
    size = _size_of(path)
    if size != expected["size"]:
        raise DamagedCheckpoint(f"{path} has {size} bytes, not {expected['size']}")
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected["sha256"]:
        raise DamagedCheckpoint(f"{path} is damaged: its SHA-256 does not match {MANIFEST}")


def _size_of(path: Path) -> int:
    try:
        status = os.lstat(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is missing ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode) or path.parent.is_symlink():
        raise DamagedCheckpoint(f"{path} is not a plain file")
    return status.st_size


def read_json(path: Path) -> Any:
    """Read a small JSON file. Raises DamagedCheckpoint if it is missing or damaged."""
    if _size_of(path) > MAX_JSON:
        raise DamagedCheckpoint(f"{path} is larger than any JSON file that plainGPT writes")
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: not JSON ({error})") from error


BAD_TENSORS = (safetensors.SafetensorError, OSError, ValueError, KeyError)  # raised by safetensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Load a safetensors file to the CPU. Raises DamagedCheckpoint if it is not one."""
    try:
        return safetensors.torch.load_file(path)
    except BAD_TENSORS as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error


def check_finite(path: Path) -> None:
    """Raise DamagedCheckpoint if a tensor of the file is not finite; one is loaded at a time."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if not all_finite([file.get_tensor(name)]):
                    raise DamagedCheckpoint(f"{path}: {name} is not finite (inf or nan)")
    except BAD_TENSORS as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether every number is finite; only the largest magnitude is examined."""
    numbers = [t for t in tensors if t.is_floating_point() and t.numel()]
    return math.isfinite(torch.nn.utils.get_total_norm(numbers, norm_type=math.inf))


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint with its small files parsed; tensors are loaded on request."""

    path: Path
    run: dict[str, Any]
    state: TrainState
    about: dict[str, Any]  # where it was made: data, ranks, threads, versions

    def model_tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.path / MODEL)

    def optim_tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.path / OPTIM)

    def config(self) -> Config:
        """Parse the config of the run that this is a checkpoint of.

        Raises DamagedCheckpoint if it is not valid, or describes a larger model than the file of
        weights can hold: sizes from a file are checked before anything is allocated.
        """
        path = self.path / RUN
        try:
            config = from_json(self.run)
            problems = config.problems()
            if config.model.vocab_size is None:
                problems.append("model.vocab_size is missing")
            if problems:
                raise ConfigError(problems)
            c = config.model.resolved(config.model.vocab_size)
        except ValueError as error:
            raise DamagedCheckpoint(f"{path} is damaged: {error}") from error
        heads = 2 * (c.n_heads + c.n_kv_heads) * c.d_head  # q, o, k and v
        block = c.d_model * (heads + 2 * c.d_mlp)  # at least: an MLP may have a gate
        at_least = 4 * (c.vocab_size * c.d_model + c.n_layers * block)
        if config.run.lora_rank:  # only adapters: inputs and outputs of the same matrices
            block = config.run.lora_rank * (6 * c.d_model + heads + 2 * c.d_mlp)
            at_least = 4 * c.n_layers * block
        size = (self.path / MODEL).stat().st_size
        if at_least > size:
            raise DamagedCheckpoint(
                f"{path} describes a model of at least {at_least:,} bytes, but {MODEL} has {size:,}"
            )
        return config

    def data_folder(self, config: Config) -> Path:
        """Find the prepared data that the run was trained on. Raises ConfigError if it is gone."""
        wanted, hint = str(self.about["data_fingerprint"]), str(self.about.get("data_folder", ""))
        root = prepared_root(config.data)
        folder = find_fingerprint(root, wanted, hint)
        if folder is None:
            raise ConfigError(
                f"{root} has no data with fingerprint {wanted[:12]}, which the run was trained on: "
                f"prepare data.source={config.data.source} again"
            )
        return folder


def load_checkpoint(path: Path, *, weights_only: bool = False) -> Checkpoint:
    """Verify every byte of a checkpoint, then read its small files.

    weights_only: ignore the optimizer's state, which may then be missing.
    Raises DamagedCheckpoint naming the file that is missing, changed or invalid.
    """
    manifest = read_manifest(path, skip=(OPTIM,) if weights_only else ())
    run, saved = read_json(path / RUN), read_json(path / STATE)
    try:
        state = state_from_json(saved)
    except ValueError as error:
        raise DamagedCheckpoint(f"{path / STATE} is damaged: {error}") from error
    if state.step != manifest["step"]:
        raise DamagedCheckpoint(f"{path / STATE}: step {state.step}, not {manifest['step']}")
    return Checkpoint(path, run, state, manifest["about"])


# The checkpoints of a run

STEP_NAME = r"step-(0|[1-9][0-9]{0,17})"
# What a kill can leave half-written: exactly the names that plainGPT makes, never a user's files.
LEFT_IN_CHECKPOINTS = rf"\.old-{STEP_NAME}|\.tmp-({STEP_NAME}|pruned-[0-9]+|best)-[0-9]+"
LEFT_IN_RUN = r"\.tmp-(run\.json|report\.html|wandb_id|\.launch)-[0-9]+"


class Checkpoints:
    """The checkpoints of one run folder: save, find the newest, mark the best, prune."""

    def __init__(self, folder: Path, say: Say = print) -> None:
        self.folder, self.say = folder, say
        self.save_failed = False  # the last save did not complete
        self._known: dict[int, bool] = {}  # step -> intact? Each is verified once per process

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a folder, intact or not, ascending."""
        if not self.folder.is_dir():
            return []
        names = (re.fullmatch(STEP_NAME, p.name) for p in self.folder.iterdir() if p.is_dir())
        return sorted(int(match[1]) for match in names if match)

    def save(
        self,
        state: TrainState,
        model: Mapping[str, Tensor],
        optim: dict[str, Tensor],
        run_json: str,
        tokenizer: dict[str, bytes],
        about: dict[str, Any],
    ) -> bool:
        """Write step-N completely or not at all. Return False if it holds this state already.

        Raises OSError if the disk is full or not writable; nothing half-written stays.
        """
        if self._holds(state):
            return False
        self.save_failed = True
        temporary = self.folder / f".tmp-step-{state.step}-{os.getpid()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        contents: dict[str, Iterable[Piece]] = {
            MODEL: tensor_pieces(model),
            OPTIM: tensor_pieces(optim),
            RUN: [run_json.encode()],
            STATE: [json_bytes(asdict(state))],
            **{f"tokenizer/{name}": [tokenizer[name]] for name in sorted(tokenizer)},
        }
        try:
            (temporary / "tokenizer").mkdir(parents=True)
            files = {name: write_file(temporary / name, parts) for name, parts in contents.items()}
            write_manifest(temporary, state.step, about, files)
            for folder in (temporary / "tokenizer", temporary):
                sync_folder(folder)
            self._put(temporary, state.step)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._known[state.step] = True
        self.save_failed = False
        return True

    def _holds(self, state: TrainState) -> bool:
        path = self.path(state.step)
        if not os.path.lexists(path) or not self._is_intact(state.step):
            return False
        return (path / STATE).read_bytes() == json_bytes(asdict(state))

    def _put(self, temporary: Path, step: int) -> None:
        """Rename a complete folder to step-N.

        An intact one of that name is replaced (`clean` restores it if a kill comes between the two
        renames); a damaged one is kept under another name.
        """
        final, old = self.path(step), self.folder / f".old-step-{step}"
        if os.path.lexists(final):
            if self._is_intact(step):
                os.rename(final, old)
            else:
                aside = free_name(final.with_name(f"{final.name}.damaged"))
                os.rename(final, aside)
                self.say(f"moved the damaged {final} to {aside}")
        os.rename(temporary, final)
        sync_folder(self.folder)  # only now is the new name itself on disk
        shutil.rmtree(old, ignore_errors=True)

    def _is_intact(self, step: int) -> bool:
        if step not in self._known:
            try:
                load_checkpoint(self.path(step))
                self._known[step] = True
            except DamagedCheckpoint as error:
                self.say(f"warning: {error}")
                self._known[step] = False
        return self._known[step]

    def newest(self, *, weights_only: bool = False) -> Checkpoint | None:
        """Load the newest intact checkpoint, warning of newer damaged ones; None if there is none.

        Raises DamagedCheckpoint if all are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                found = load_checkpoint(self.path(step), weights_only=weights_only)
                for name in (MODEL,) if weights_only else (MODEL, OPTIM):
                    check_finite(found.path / name)
            except DamagedCheckpoint as error:
                self._known[step] = False
                self.say(f"warning: {error}; trying the previous checkpoint")
                continue
            if not weights_only:
                self._known[step] = True
            return found
        if steps:
            raise DamagedCheckpoint(
                f"{self.folder}: all checkpoints are damaged ({steps}). Restore one from a backup, "
                "start over with --overwrite=true (it moves this folder aside), or, if the weights "
                "of one are intact, start another run from them with --init_from=FOLDER"
            )
        return None

    def set_best(self, step: int) -> None:
        """Point `best` at step-N."""
        replace_file(self.folder / "best", f"step-{step}\n")
        sync_folder(self.folder)

    def best_step(self) -> int | None:
        """Return the step that `best` names, or None."""
        try:
            with open(self.folder / "best", "rb") as file:
                match = re.fullmatch(STEP_NAME.encode() + rb"\s*", file.read(64))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if match is None:
            self.say(f"warning: {self.folder / 'best'} does not name a checkpoint; ignoring it")
        return int(match[1]) if match else None

    def mend_best(self, state: TrainState) -> None:
        """Point `best` at the best step of `state`: a kill can come between a save and `best`."""
        step = state.best_step
        if step is not None and step != self.best_step() and step in self.steps():
            self.set_best(step)

    def prune(self, keep: int) -> None:
        """Delete old checkpoints, but keep the best and the newest `keep` (>= 2) intact ones."""
        intact, best = 0, self.best_step()
        for step in reversed(self.steps()):
            if intact < max(2, keep):
                intact += self._is_intact(step)
            elif step != best:
                # Renamed first, so that a kill never leaves half a step-N.
                doomed = self.folder / f".tmp-pruned-{step}-{os.getpid()}"
                os.rename(self.path(step), doomed)
                shutil.rmtree(doomed, ignore_errors=True)
                self._known.pop(step, None)

    def clean(self) -> None:
        """Remove what a kill left half-written. Only for the holder of the run folder's lock."""
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


def _matching(folder: Path, pattern: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))


def find_checkpoint(run: Path, which: str = "") -> Checkpoint:
    """Load a checkpoint for its weights, without the optimizer's state.

    run: a checkpoint, or a run folder in which `which` is "best", "latest" or a step; "" means the
    best if there is one, else the latest.
    Raises ConfigError if it does not exist, DamagedCheckpoint if it is damaged.
    """
    if (run / MANIFEST).is_file():
        return load_checkpoint(run, weights_only=True)
    checkpoints = Checkpoints(run / "checkpoints")
    steps, best = checkpoints.steps(), checkpoints.best_step()
    named = f"step-{best if which in ('', 'best') else which}"
    old, final = checkpoints.folder / f".old-{named}", checkpoints.folder / named
    if re.fullmatch(STEP_NAME, named) and old.is_dir() and not os.path.lexists(final):
        raise DamagedCheckpoint(
            f"{final} is missing because replacing it was interrupted; {old.name} is the complete "
            f"earlier save. Run train.py once with this run's command: it restores {named}"
        )
    if not run.exists():
        raise ConfigError(no_such_run(run))
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


def load_model_tensors(own: dict[str, Parameter], tensors: dict[str, Tensor], source: str) -> None:
    """Copy tensors into parameters of the same names. Raises ConfigError listing every mismatch."""
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
