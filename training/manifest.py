"""Files that are complete or absent, and the manifest that proves each byte of them.

Every file is hashed while it is written and is on the disk before its name counts. What is read
back is believed only after its size and SHA-256 fit. Nothing that is read is ever executed, and no
name that comes from a file leads out of its folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from cli.files import CHUNK, Entry, Piece, json_bytes, write_file

MANIFEST = "MANIFEST.json"
FORMAT = 1
MODEL, OPTIM, RUN, STATE = "model.safetensors", "optim.safetensors", "run.json", "state.json"
FILES = (MODEL, OPTIM, RUN, STATE)
MAX_JSON = 64 << 20  # a larger JSON file is not ours
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


class DamagedCheckpoint(RuntimeError):
    """A checkpoint that is incomplete or whose bytes have changed; the message names the file."""

    exit_code = 3


# Writing


def tensor_pieces(tensors: dict[str, Tensor]) -> Iterator[Piece]:
    """A safetensors file, one tensor at a time: the memory of one is all that this takes.

    The form (github.com/huggingface/safetensors): the length of the header in 8 bytes, the header
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
        yield memoryview(plain.view(torch.uint8).numpy())


def write_manifest(folder: Path, step: int, about: dict[str, Any], files: dict[str, Entry]) -> None:
    """The last file of a checkpoint. `seal` is a hash of the rest: the manifest proves itself."""
    manifest = {"format": FORMAT, "step": step, "about": about, "files": files}
    sealed = {**manifest, "seal": _hash_of(manifest)}
    write_file(folder / MANIFEST, [json_bytes(sealed)])


def _hash_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# Reading


def read_manifest(path: Path, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The manifest of a checkpoint, once every file it names has its size and SHA-256.

    skip: files that are not needed, and so not looked at.
    Raises DamagedCheckpoint naming the file that is missing, changed, strange or too many.
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
    for found in (path / "tokenizer").iterdir():  # one that is not listed might be read first
        if f"tokenizer/{found.name}" not in manifest["files"] and found.name[0] != ".":
            raise DamagedCheckpoint(f"{found} does not belong there: {MANIFEST} does not list it")
    return manifest


def _problem_of(manifest: Any) -> str:
    """What is wrong with a manifest before any file is looked at; "" if nothing is.

    Anyone can compute a seal that fits: it finds accidents. So all else is checked as well.
    """
    if not isinstance(manifest, dict):
        return "not an object"
    try:
        seal = manifest.pop("seal", None)
        if seal != _hash_of(manifest):
            return "its own hash does not fit"
    except RecursionError:
        return "nested too deeply"
    if manifest.get("format") != FORMAT:
        return f"format {manifest.get('format')!r}, not {FORMAT}"
    files, about = manifest.get("files"), manifest.get("about")
    if not _is_count(manifest.get("step")) or not isinstance(files, dict):
        return "step or files missing"
    if not isinstance(about, dict) or not all(_is_plain(value) for value in about.values()):
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


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _check_file(path: Path, expected: Entry) -> None:
    try:
        status = os.lstat(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is missing ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode) or path.parent.is_symlink():
        raise DamagedCheckpoint(f"{path} is not a plain file")
    if status.st_size != expected["size"]:
        raise DamagedCheckpoint(f"{path} has {status.st_size} bytes, not {expected['size']}")
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected["sha256"]:
        raise DamagedCheckpoint(f"{path} is damaged: its SHA-256 does not fit {MANIFEST}")


def read_json(path: Path) -> Any:
    """The content of a small JSON file. Raises DamagedCheckpoint if it cannot be had."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_JSON:
            raise DamagedCheckpoint(f"{path} is not a plain JSON file")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is missing ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: not JSON ({error})") from error


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no number in these tensors is inf or nan, by their largest magnitude."""
    numbers = [t for t in tensors if t.is_floating_point() and t.numel()]
    return math.isfinite(torch.nn.utils.get_total_norm(numbers, norm_type=math.inf))


def check_finite(path: Path) -> None:
    """Raise DamagedCheckpoint if a file holds inf or nan, one tensor at a time, or no tensors."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if not all_finite([file.get_tensor(name)]):
                    raise DamagedCheckpoint(f"{path}: {name} is not finite (inf or nan)")
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. Raises DamagedCheckpoint if it is none."""
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error
