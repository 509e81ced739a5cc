"""Many processes at once: one of them gets a run folder, one prepares the data."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
from faultlib import Shared, ended, fork_command, wait_for

from data.config import DataConfig
from data.prepare import prepare
from training.folder import lock_folder

RACERS = 8


def race(command, n: int) -> list[int]:
    """Run the command in n processes that start at the same moment; returns their exit codes."""
    shared = Shared(n + 1)

    def begin(number: int):
        def racer(argv: list[str]) -> int:
            shared[number] = 1
            while not shared[n]:
                pass
            return command()

        return racer

    pids = [fork_command(begin(number), []) for number in range(n)]
    wait_for(lambda: all(shared[number] for number in range(n)))
    shared[n] = 1
    return [ended(pid) for pid in pids]


@pytest.mark.parametrize("races", [10, pytest.param(100, marks=pytest.mark.faults)])
def test_races_for_one_folder(races, tmp_path, figure):
    shared = Shared()

    def command() -> int:
        with lock_folder(tmp_path / "run"):
            deadline = time.monotonic() + 30
            while not shared[0] and time.monotonic() < deadline:  # until the others are refused
                time.sleep(0.001)
        return 0

    def refused() -> int:
        try:
            return command()
        except BaseException:
            with open(tmp_path / "away", "ab", buffering=0) as file:
                file.write(b"x")
            if (tmp_path / "away").stat().st_size >= 3:
                shared[0] = 1
            raise

    for _ in range(races):
        shared[0] = 0
        (tmp_path / "away").unlink(missing_ok=True)
        assert sorted(race(refused, 4)) == [0, 6, 6, 6]
    figure(f"{races} races of 4 training processes for one folder", "one winner each")


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.faults)])
def test_simultaneous_preparations_build_once(rounds, tiny_folder, tmp_path, figure):
    """Eight processes at once; one builds, the others wait, and all get the same files."""
    found = set()
    for number in range(rounds):
        place = tmp_path / str(number)
        config = DataConfig(
            source=str(tiny_folder / "text.txt"), tokenizer="bpe:280", prepared_dir=str(place),
            split="tail", val_fraction=0.2, workers=0,
        )  # fmt: skip

        log = tmp_path / f"{number}.log"

        def command(config: DataConfig = config, log: Path = log) -> int:
            def say(text: str) -> None:
                with open(log, "a") as stream:
                    stream.write(text + "\n")

            prepare(config, say=say, progress=False)
            return 0

        assert race(command, RACERS) == [0] * RACERS
        (folder,) = (path for path in place.iterdir() if path.name[0] != ".")
        found.add((folder.name, digest_of(folder)))
        assert log.read_text().count("training bpe:280") == 1
    assert len(found) == 1
    figure(f"{rounds} preparations by {RACERS} processes", "one folder each; one SHA-256")


def digest_of(place: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(place.rglob("*")):
        if path.is_file() and path.name[0] != ".":
            digest.update(str(path.relative_to(place)).encode() + path.read_bytes())
    return digest.hexdigest()
