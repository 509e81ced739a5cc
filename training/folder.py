"""The folder of a run: one training process at a time, and an old run is never overwritten."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import socket
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from cli.command import make_folder
from cli.files import free_name, replace_file, try_lock, warn_once
from cli.options import ConfigError
from data.prepare import find_sources
from training.config import CONFIGS, Config
from training.metrics import STEP_MARK, iter_lines

# What a run writes into its folder, run.json first.
WRITTEN = ("run.json", "metrics.jsonl", "snapshots.jsonl", "checkpoints", "report.html", "wandb_id")
LAUNCH = ".launch"


class FolderHeld(RuntimeError):
    """Another process is training in this folder."""

    exit_code = 6


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder` until the block ends. Raises FolderHeld naming the process that has it.

    The kernel's lock (flock) ends with its process, however that ends; the .lock file that stays
    behind blocks nobody.
    """
    make_folder(folder, "run.out_dir")
    with open(folder / ".lock", "a+", encoding="utf-8", errors="replace") as file:
        found = try_lock(file)
        if found == "held":
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise FolderHeld(
                f"{folder} is in use by {holder}; wait for it, or choose another --out_dir"
            )
        if found == "no locks":
            warn_once(f"no file locks here: do not start a second training process in {folder}")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def holder_lives(folder: Path) -> bool | None:
    """Whether the last process that held `folder` still runs; None: on another machine.

    The lock itself is not tried: a process that starts at this moment must get it.
    """
    try:
        text = (folder / ".lock").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    holder = re.match(r"process (\d{1,9}) on (.+)", text)
    if holder is None:
        return False
    if holder[2] != socket.gethostname() or os.name == "nt":  # there, signal 0 is Ctrl-C
        return None
    try:
        os.kill(int(holder[1]), 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # of another user
    return True


def check_own(folder: Path) -> None:
    """Raise ConfigError if the folder holds files of someone else under the names that a run uses.

    Files with other names, such as a log, may be there.
    """
    if (folder / "run.json").exists() or any(folder.glob("checkpoints/step-*")):
        return
    if found := [name for name in WRITTEN if (folder / name).exists()]:
        raise ConfigError(
            f"run.out_dir={folder}: holds {', '.join(found)} but no run.json, so it is not a run's "
            "folder; choose another --out_dir, or move it aside with --overwrite=true"
        )


def no_such_run(path: Path) -> str:
    """Return the message for a folder that does not exist, with the runs that may be meant."""
    nearby = [folder for place in (path.parent, Path("out")) for folder in place.glob("*")]
    runs = sorted({str(folder) for folder in nearby if (folder / "checkpoints").is_dir()})
    names = difflib.get_close_matches(path.name, {Path(run).name for run in runs}, n=2)
    if close := [run for name in names for run in runs if Path(run).name == name]:
        return f"{path}: there is no such folder; did you mean {' or '.join(close)}?"
    if str(path.parent) == "out" and (CONFIGS / f"{path.name}.py").is_file():
        return f"{path}: there is no such run yet; make it with: python train.py {path.name}"
    is_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.is_dir()
    hub = f"; a repository of the Hugging Face Hub is named hub:{path}" if is_hub else ""
    here = f"; runs here: {', '.join(runs[:12])}" if runs else ""
    return f"{path}: there is no such folder{hub}{here}"


def check_named(names: Container[str], config: Config) -> None:
    """Raise ConfigError if one of these options names a source or weights that are not there."""
    if "data.source" in names or "data.val_source" in names:
        find_sources(config.data)
    weights = config.run.init_from
    if "run.init_from" in names and not weights.startswith("hub:") and not Path(weights).exists():
        raise ConfigError(no_such_run(Path(weights)))


def has_stepped(folder: Path) -> bool:
    """Whether a run without checkpoints has taken a step; the first step is always logged."""
    if any((folder / name).exists() for name in ("snapshots.jsonl", "report.html")):
        return True
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            return any(STEP_MARK in line for line in iter_lines(file))
    except FileNotFoundError:
        return False


def move_aside(folder: Path) -> Path:
    """Rename an old run's folder to the first free name of folder.old, folder.old-1, ...

    A link stays, and leads to a new folder in the old place. A folder that cannot be renamed (the
    working directory, a mount point) stays too: what the run wrote is moved to folder/old.
    """
    real = folder.resolve()
    if not Path.cwd().resolve().is_relative_to(real):  # else relative paths would lead elsewhere
        aside = free_name(real.with_name(real.name + ".old"))
        try:
            os.rename(real, aside)
        except OSError:  # a mount point, a container's layer, a parent that is not ours to write
            pass
        else:
            real.mkdir()
            return aside
    aside = free_name(real / "old")
    aside.mkdir()
    for name in filter(lambda name: os.path.lexists(real / name), WRITTEN):
        os.rename(real / name, aside / name)
    return aside


# --overwrite moves the old run aside once per launch: torchrun or Slurm may start the same command
# again, and that start must resume the new run instead of moving it aside, too.


def was_cleared(folder: Path, proof: Sequence[str]) -> bool:
    """Whether an earlier start of this launch has already moved an old run aside.

    proof: names of the launch, any of which `mark_cleared` has then left here.
    """
    try:
        left = (folder / LAUNCH).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return False
    return not set(proof).isdisjoint(left)


def write_run_json(folder: Path, text: str) -> None:
    replace_file(folder / "run.json", text)


def mark_cleared(folder: Path, names: Sequence[str]) -> None:
    """Record which launch has emptied this folder, if it is one that may start again."""
    if names:
        replace_file(folder / LAUNCH, "".join(f"{name}\n" for name in names))
