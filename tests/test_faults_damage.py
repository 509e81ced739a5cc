"""Flipped bits and truncated files: refused by name or harmless, and never silently wrong."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from faultlib import train, verified

from cli.command import exit_code_of
from data.config import DataConfig
from data.meta import DamagedData, check_tokenizer, read_meta, read_tokenizer
from data.prepare import prepare
from data.prepared import read_made_from
from data.shards import Windows
from data.tokenizer import load_tokenizer
from training.checkpoint import Checkpoints


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def flips(files: list[Path], n: int, rng: random.Random):
    """Flip one bit of a file, n times, while the body of the loop runs. Every other time each file
    is equally likely, so that small ones get their share; otherwise each byte is."""
    sizes = [path.stat().st_size for path in files]
    for number in range(n):
        path = rng.choices(files, sizes if number % 2 else None)[0]
        good = path.read_bytes()
        at = rng.randrange(len(good))
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        yield f"{path.name} byte {at}"
        path.write_bytes(good)


def cuts(files: list[Path], n: int, rng: random.Random):
    """Truncate, zero or delete a file, n times, while the body of the loop runs."""
    for number in range(n):
        path = rng.choice(files)
        good = path.read_bytes()
        if number % 10 == 0:
            path.unlink()
        elif number % 10 == 1:
            path.write_bytes(bytes(len(good)))
        else:
            path.write_bytes(good[: rng.randrange(len(good))])
        yield f"{path.name} cut"
        path.write_bytes(good)


@pytest.mark.parametrize(
    "n_flips, n_cuts", [(200, 20), pytest.param(2000, 200, marks=pytest.mark.faults)]
)
def test_a_damaged_checkpoint_is_never_silently_wrong(trained, n_flips, n_cuts, figure):
    """There are checkpoints of steps 4 and 8; step 8 is damaged."""
    folder, rng, found = trained / "checkpoints", random.Random(1), Counter()
    good = Checkpoints(folder).newest()
    wanted = (good.state, good.run, good.model_tensors(), good.optim_tensors())
    files = files_of(folder / "step-8")
    for kind, damages in (("flip", flips(files, n_flips, rng)), ("cut", cuts(files, n_cuts, rng))):
        for what in damages:
            said: list[str] = []
            newest = Checkpoints(folder, said.append).newest()
            if newest.state.step == 4:
                found[f"{kind}: previous used"] += 1
                assert "step-8/" in said[0], what  # by name
                continue
            now = (newest.state, newest.run, newest.model_tensors(), newest.optim_tensors())
            found[f"{kind}: {'harmless' if same(now, wanted) else 'silently wrong'}"] += 1
    assert not any("wrong" in outcome for outcome in found), found
    assert sum(found.values()) == n_flips + n_cuts
    figure(f"{n_flips} flipped bits, {n_cuts} truncations of a checkpoint", told(found))


def same(a: tuple, b: tuple) -> bool:
    tensors = zip(a[2:], b[2:], strict=True)
    return a[:2] == b[:2] and all(
        x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
        for x, y in tensors
    )


def told(found: Counter) -> str:
    wrong = sum(count for outcome, count in found.items() if "wrong" in outcome)
    return "; ".join(f"{outcome} {count}" for outcome, count in sorted(found.items())) + (
        f"; silently wrong {wrong}"
    )


@pytest.mark.parametrize(
    "n_flips, n_cuts", [(200, 20), pytest.param(2000, 200, marks=pytest.mark.faults)]
)
@pytest.mark.parametrize("tokenizer", ["bpe:300", "char"])
def test_damaged_shards_are_never_silently_wrong(
    tokenizer, n_flips, n_cuts, tiny_folder, tmp_path, figure
):
    """Everything that training reads from prepared data: ids, tokenizer, counts, fingerprint."""
    config = DataConfig(
        source=str(tiny_folder / "text.txt"), tokenizer=tokenizer, prepared_dir=str(tmp_path),
        workers=0, split="tail", val_fraction=0.2,
    )  # fmt: skip
    folder = prepare(config, say=lambda text: None, progress=False)
    rng, found, wanted = random.Random(2), Counter(), everything(folder)
    files = files_of(folder)
    for kind, damages in (("flip", flips(files, n_flips, rng)), ("cut", cuts(files, n_cuts, rng))):
        for what in damages:
            try:
                outcome = "harmless" if everything(folder) == wanted else f"wrong ({what})"
            except Exception as error:
                outcome = "refused" if exit_code_of(error) in (2, 3) else f"uncaught {error!r}"
            found[f"{kind}: {outcome}"] += 1
    assert not any("wrong" in o or "uncaught" in o for o in found), found
    figure(
        f"{n_flips} flipped bits, {n_cuts} truncations of a shard set ({tokenizer})", told(found)
    )


@pytest.mark.parametrize("key", ["vocab_size", "weights", "dtype", "splits", "shards"])
def test_the_seal_of_meta_json_covers_every_value(key, trained, tiny_folder, tmp_path):
    data = next((tiny_folder / "prepared").glob("text_txt-*"))
    data = Path(shutil.copytree(data, tmp_path / "data"))
    about = json.loads((data / "meta.json").read_text())
    if key == "shards":
        about["shards"][0]["documents"] += 1
    else:
        about[key] = {"vocab_size": about["vocab_size"] + 1, "dtype": "uint32"}.get(key, [0.5])
    (data / "meta.json").write_text(json.dumps(about))
    with pytest.raises(DamagedData, match="meta.json is damaged"):
        read_meta(data)


def everything(folder: Path) -> tuple:
    """What training reads from the folder. source.json only describes its origin."""
    read_made_from(folder)
    meta = read_meta(folder)
    check_tokenizer(folder, meta, read_tokenizer(folder))
    tokenizer = load_tokenizer(folder / "tokenizer")
    windows = [Windows(folder, split, 16) for split in ("train", "val")]
    ids = [np.concatenate([w[i] for i in range(len(w))]).tobytes() for w in windows]
    table = (tokenizer.name, list(tokenizer.table), tokenizer.eot)
    text = tokenizer.encode("def f(x): return x + 1")
    return ids, table, text, meta.fingerprint, meta.weights, meta.vocab_size


def test_training_on_a_damaged_shard_stops_and_keeps_its_checkpoints(tiny_argv, tmp_path):
    argv = tiny_argv(tmp_path / "run", prepared_dir=tmp_path / "prepared")
    assert train(argv) == 0
    shard = next((tmp_path / "prepared").rglob("train-*.bin"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes(content)
    log = tmp_path / "log"
    more = {"max_steps": 200, "resume": "changed", "prepared_dir": tmp_path / "prepared"}
    assert train(tiny_argv(tmp_path / "run", **more), log=log) == 3
    assert f"{shard}: the block at byte" in log.read_text()
    assert verified(tmp_path / "run") == [4, 8]


def test_a_run_without_optimizer_state_can_still_be_fine_tuned(trained, tiny_argv, tmp_path):
    for path in trained.rglob("optim.safetensors"):
        path.unlink()
    log = tmp_path / "log"
    assert train(tiny_argv(trained, max_steps=20, resume="changed"), log=log) == 3
    told = log.read_text()
    assert "optim.safetensors is missing" in told and "--init_from" in told
    assert train(tiny_argv(tmp_path / "new", init_from=trained)) == 0
    assert verified(tmp_path / "new") == [4, 8]


def test_the_comparison_notices_every_difference(trained, tmp_path):
    """The tests above can fail: a wrong tensor is noticed."""
    good = Checkpoints(trained / "checkpoints").newest()
    a = (good.state, good.run, good.model_tensors(), good.optim_tensors())
    b = (good.state, good.run, good.model_tensors(), good.optim_tensors())
    assert same(a, b)
    next(iter(b[3].values())).view(-1)[0] += 1
    assert not same(a, b)
    shutil.rmtree(trained)
