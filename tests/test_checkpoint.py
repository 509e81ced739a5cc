"""A checkpoint is complete or absent, and what is loaded is what was saved."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from faultlib import refit, write_sealed

import training.checkpoint
from cli.command import exit_code_of
from cli.files import warn_once, write_file
from cli.options import ConfigError
from training.checkpoint import (
    MANIFEST,
    Checkpoints,
    DamagedCheckpoint,
    TrainState,
    all_finite,
    find_checkpoint,
    load_checkpoint,
    load_model_tensors,
    read_manifest,
    state_from_json,
    tensor_pieces,
    write_manifest,
)

TOKENIZER = {"plaingpt_tokenizer.json": b'{"kind": "byte"}'}
ABOUT = {"data_fingerprint": "f", "world": 1}


@pytest.fixture
def save(tmp_path):
    """save(1, 2): write small checkpoints of these steps, whose tensors tell the step."""
    ours = Checkpoints(tmp_path / "run" / "checkpoints", say=lambda text: None)

    def save(*steps: int, to: Checkpoints = ours, **state) -> Checkpoints:
        for step in steps:
            model = {"a": torch.full((3, 5), float(step)), "b": torch.arange(4.0) + step}
            optim = {"a::step": torch.tensor(float(step)), "b::exp_avg": torch.ones(4)}
            saved = TrainState(step=step, **state)
            to.save(saved, model, optim, '{"model": {}}', TOKENIZER, ABOUT)
        return to

    return save


def reopened(checkpoints: Checkpoints) -> tuple[Checkpoints, list[str]]:
    """The same folder as another process sees it, and what it says."""
    said: list[str] = []
    return Checkpoints(checkpoints.folder, said.append), said


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 4
    path.write_bytes(content)


class Killed(BaseException):
    pass


def killed(*args, **kwargs) -> None:
    raise Killed


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Loading


def test_what_is_loaded_is_what_was_saved(save):
    state = {"best_loss": 1.5, "best_step": 7, "since_best": 2, "wandb_id": "x"}
    checkpoints = save(7, **state)
    found = checkpoints.newest()
    assert found.state == TrainState(step=7, **state)
    assert found.run == {"model": {}} and found.about == ABOUT
    assert torch.equal(found.model_tensors()["a"], torch.full((3, 5), 7.0))
    assert found.optim_tensors()["a::step"].shape == ()
    before = os.umask(0)
    os.umask(before)
    mode = (found.path / "model.safetensors").stat().st_mode & 0o777
    assert mode == 0o666 & ~before


def test_every_dtype_and_shape_survives_bit_for_bit(tmp_path):
    """Our writer against the library's reader: nan, infinities, -0, empty and 0-dim tensors."""
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 0x00000001], dtype=torch.int32)
    tensors = {
        "odd": bits.view(torch.float32),
        "half": torch.randn(3).half(),
        "brain": torch.randn(2, 3).bfloat16(),
        "long": torch.tensor([-(2**63), 2**63 - 1]),
        "scalar": torch.tensor(0.1),
        "empty": torch.zeros(0, 3),
        "slanted": torch.arange(6.0).reshape(2, 3).T,
    }
    write_file(tmp_path / "t", tensor_pieces(tensors))
    back = safetensors.torch.load_file(tmp_path / "t")
    assert back.keys() == tensors.keys()
    for name, t in tensors.items():
        assert back[name].dtype == t.dtype and back[name].shape == t.shape
        as_bytes = [x.contiguous().reshape(-1).view(torch.uint8) for x in (back[name], t)]
        assert torch.equal(*as_bytes), name


def test_a_damaged_newest_is_reported_and_the_one_before_is_used(save):
    checkpoints = save(1, 2, 3)
    damage(checkpoints.path(3) / "optim.safetensors")
    fresh, said = reopened(checkpoints)
    assert fresh.newest().state.step == 2
    assert len(said) == 1 and "step-3/optim.safetensors is damaged" in said[0]
    for step in (1, 2):
        damage(checkpoints.path(step) / "state.json")
    with pytest.raises(DamagedCheckpoint, match="all checkpoints are damaged .* --init_") as found:
        fresh.newest()
    assert exit_code_of(found.value) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("file", ["model", "optim"])
def test_a_newest_that_is_not_finite_is_passed_over(save, file, value):
    """As versions before this check may have written it."""
    checkpoints = save(1)
    tensors = {"a": torch.tensor([1.0, value, 2.0]), "empty": torch.zeros(0)}
    both = {"model": {"a": torch.ones(3)}, "optim": {"a::step": torch.tensor(1.0)}, file: tensors}
    checkpoints.save(TrainState(step=2), both["model"], both["optim"], "{}", TOKENIZER, ABOUT)
    fresh, said = reopened(checkpoints)
    assert fresh.newest().state.step == 1
    assert "a is not finite" in said[0]
    assert fresh.newest(weights_only=True).state.step == (1 if file == "model" else 2)
    save(2, to=fresh)  # done again, with finite values
    assert fresh.newest().state.step == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_number_among_many_is_seen(value):
    numbers = torch.full((1000,), 1e30)  # whose squares would overflow
    assert all_finite([numbers, torch.zeros(0), torch.tensor(3), torch.ones(2).bfloat16()])
    numbers[567] = value
    assert not all_finite([torch.zeros(3), numbers])


def test_which_checkpoint_of_a_run(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # runs in out/ here are no concern of this test
    checkpoints = save(1, 2, 3)
    run = checkpoints.folder.parent
    assert find_checkpoint(run).state.step == 3
    checkpoints.set_best(2)
    steps = {which: find_checkpoint(run, which).state.step for which in ("", "best", "latest", "1")}
    assert steps == {"": 2, "best": 2, "latest": 3, "1": 1}
    assert find_checkpoint(checkpoints.path(1)).state.step == 1
    checkpoints.set_best(2)
    os.rename(checkpoints.path(2), checkpoints.folder / ".old-step-2")  # killed while replacing it
    for which in ("", "best", "2"):
        with pytest.raises(DamagedCheckpoint, match="interrupted.*Run train.py once"):
            find_checkpoint(run, which)
    assert find_checkpoint(run, "latest").state.step == 3
    checkpoints.clean()  # what train.py does at its start
    assert find_checkpoint(run).state.step == 2
    with pytest.raises(ConfigError, match=r"which=9: .* has the steps 1, 2, 3 and best \(step 2\)"):
        find_checkpoint(run, "9")
    (tmp_path / "file").write_text("")
    for name in ("", "file"):
        with pytest.raises(ConfigError, match="no checkpoint there; expected"):
            find_checkpoint(tmp_path / name)
    with pytest.raises(ConfigError, match="there is no such folder; runs here: .*run$"):
        find_checkpoint(tmp_path / "nowhere")


def test_weights_alone_can_be_started_from_but_not_resumed(save):
    checkpoints = save(3)
    (checkpoints.path(3) / "optim.safetensors").unlink()
    assert find_checkpoint(checkpoints.folder.parent).model_tensors()["a"][0, 0] == 3
    with pytest.raises(DamagedCheckpoint, match=r"optim.safetensors is missing"):
        load_checkpoint(checkpoints.path(3))


def test_weights_that_do_not_fit_are_listed():
    model = torch.nn.Linear(2, 3)
    tensors = {"weight": torch.zeros(3, 3), "bias": torch.zeros(3).half(), "more": torch.zeros(1)}
    with pytest.raises(ConfigError) as found:
        load_model_tensors(dict(model.named_parameters()), tensors, "X")
    assert found.value.problems == [
        "X has an extra tensor 'more'",
        "X: bias is ((3,), torch.float16), the model's is ((3,), torch.float32)",
        "X: weight is ((3, 3), torch.float32), the model's is ((3, 2), torch.float32)",
    ]
    assert model.weight.abs().sum() > 0  # nothing was copied


# best and pruning


def test_pruning_keeps_the_newest_and_the_best(save):
    checkpoints = save(*range(1, 8))
    checkpoints.set_best(2)
    checkpoints.prune(keep=3)
    assert checkpoints.steps() == [2, 5, 6, 7]
    checkpoints.prune(keep=1)  # never below 2
    assert checkpoints.steps() == [2, 6, 7]


def test_damaged_checkpoints_do_not_count_as_kept(save):
    checkpoints = save(*range(1, 6))
    for step in (3, 5):
        damage(checkpoints.path(step) / "model.safetensors")
    fresh, said = reopened(checkpoints)
    for _ in range(2):
        fresh.prune(keep=2)
        assert fresh.steps() == [2, 3, 4, 5]
    assert len(said) == 2  # one warning each


def test_a_process_verifies_each_checkpoint_once(save, monkeypatch):
    fresh, _ = reopened(save(1))
    fresh.newest()
    monkeypatch.setattr(training.checkpoint, "load_checkpoint", killed)
    fresh.prune(2)


@pytest.mark.parametrize("moment", ["rename", "rmtree"])
def test_a_kill_while_pruning_leaves_whole_checkpoints(save, moment, monkeypatch):
    checkpoints = save(1, 2, 3)
    owner, name = {"rename": (os, "rename"), "rmtree": (shutil, "rmtree")}[moment]
    monkeypatch.setattr(owner, name, killed)
    with pytest.raises(Killed):
        checkpoints.prune(2)
    monkeypatch.undo()
    for step in checkpoints.steps():
        read_manifest(checkpoints.path(step))
    checkpoints.clean()
    assert not list(checkpoints.folder.glob(".*"))


@pytest.mark.parametrize(
    "content", [b"", b"step-", b"step-99999999999999999999", b"../step-1", b"step-01", b"\xff" * 99]
)
def test_a_best_that_names_nothing_is_reported_and_ignored(save, content):
    checkpoints, said = reopened(save(1))
    (checkpoints.folder / "best").write_bytes(content)
    assert checkpoints.best_step() is None
    assert "does not name a checkpoint" in said[0]


def test_a_kill_between_the_checkpoint_and_best_is_mended(save):
    checkpoints = save(1)
    checkpoints.set_best(1)
    save(2, best_step=2)
    checkpoints.mend_best(checkpoints.newest().state)
    assert checkpoints.best_step() == 2
    checkpoints.mend_best(TrainState(step=2, best_step=9))  # a step that does not exist
    assert checkpoints.best_step() == 2


def test_names_that_only_look_like_steps_are_left_alone(save):
    checkpoints = save(1)
    for name in ("step-07", "step-٣", "step-1x", "step--1"):
        (checkpoints.folder / name).mkdir()
    (checkpoints.folder / "step-5").write_text("a file")
    assert checkpoints.steps() == [1]


# Saving over what is there


def test_an_intact_step_is_not_written_again(save, monkeypatch):
    checkpoints = save(4)
    monkeypatch.setattr(training.checkpoint, "write_file", killed)
    save(4)
    save(4, to=reopened(checkpoints)[0])  # by another process: verified first


def test_another_state_of_the_same_step_replaces_it(save):
    """A stop before the evaluation at this step, then the evaluation after the resume."""
    checkpoints = save(4)
    save(4, best_loss=2.0, best_step=4, evaluated_at=4)
    assert checkpoints.newest().state.evaluated_at == 4
    assert names(checkpoints.folder) == ["step-4"]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_kill_while_a_step_is_replaced_loses_nothing(save, nth, monkeypatch):
    checkpoints = save(4)
    rename, count = os.rename, iter(range(1, 9))
    monkeypatch.setattr(os, "rename", lambda a, b: killed() if next(count) == nth else rename(a, b))
    try:
        save(4, evaluated_at=4)
    except Killed:
        monkeypatch.setattr(shutil, "rmtree", killed)
    monkeypatch.undo()
    fresh, _ = reopened(checkpoints)
    fresh.clean()
    assert fresh.newest().state.step == 4
    assert names(checkpoints.folder) == ["step-4"]


def test_a_damaged_step_is_moved_aside_when_it_is_saved_again(save):
    checkpoints = save(4)
    damage(checkpoints.path(4) / "model.safetensors")
    fresh, said = reopened(checkpoints)
    save(4, to=fresh)
    assert fresh.newest().state.step == 4
    assert names(fresh.folder) == ["step-4", "step-4.damaged"]
    assert "moved the damaged" in said[-1]


@pytest.mark.parametrize("link", [False, True])
def test_a_file_or_a_dead_link_in_the_place_of_a_step(save, link):
    checkpoints = save(1)
    path = checkpoints.path(2)
    path.symlink_to("nowhere") if link else path.write_text("not a folder")
    save(2)
    assert checkpoints.newest().state.step == 2


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_full_disk_leaves_what_was_there_and_nothing_else(save, nth, monkeypatch):
    """The n-th fsync fails: five files, the manifest, and the folders."""
    checkpoints = save(1)
    checkpoints.set_best(1)
    before = contents(checkpoints.folder)
    fsync, count = os.fsync, iter(range(1, 99))

    def full(handle: int) -> None:
        if next(count) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as found:
        save(2)
    assert exit_code_of(found.value) == 5
    assert nth > 6 or "step-2" in str(found.value)  # the file is named
    assert contents(checkpoints.folder) == before


def test_a_full_disk_while_best_is_written_keeps_the_old_one(save, monkeypatch):
    checkpoints = save(1, 2)
    checkpoints.set_best(1)
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError):
        checkpoints.set_best(2)
    assert checkpoints.best_step() == 1
    assert not list(checkpoints.folder.glob(".*"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_an_interrupted_save_leaves_nothing(save, monkeypatch, error):
    def stop(*args):
        raise error

    checkpoints = save(1)
    monkeypatch.setattr(training.checkpoint, "write_manifest", stop)
    with pytest.raises(error):
        save(2)
    assert names(checkpoints.folder) == ["step-1"]


USERS = ".tmp-mine .tmp-step-2 .tmp-step-2-old .tmp-best-mine .old-step-x .tmp-run.json"


def test_what_a_kill_left_is_removed_and_a_users_files_stay(save, tmp_path):
    folder = save(1).folder
    (folder / ".tmp-step-2-99").mkdir()
    (folder / ".tmp-best-99").write_text("step-2")
    (folder.parent / ".tmp-run.json-99").write_text("{}")
    (tmp_path / "kept").mkdir()
    (folder / ".tmp-best-7").symlink_to(tmp_path / "kept")
    users = [place / name for place in (folder, folder.parent) for name in USERS.split()]
    for path in users:
        path.mkdir()
        (path / "notes").write_text("mine")
    Checkpoints(folder).clean()
    assert sorted(folder.parent.rglob(".*")) == sorted(users)
    assert all((path / "notes").read_text() == "mine" for path in users)
    assert (tmp_path / "kept").is_dir()


# The order of writes, syncs and renames


@pytest.fixture
def happened(monkeypatch):
    """Record the calls in order: ("sync", inode, size at that time) and ("rename", target)."""
    fsync, rename, replace, seen = os.fsync, os.rename, os.replace, []

    def record(handle: int) -> None:
        status = os.fstat(handle)
        seen.append(("sync", status.st_ino, status.st_size))
        fsync(handle)

    def renaming(inner):
        return lambda a, b: (seen.append(("rename", str(b))), inner(a, b))[1]

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", renaming(rename))
    monkeypatch.setattr(os, "replace", renaming(replace))
    return seen


def test_a_file_is_synced_with_all_that_was_written(tmp_path, happened):
    write_file(tmp_path / "f", [b"abc", b"defg"])
    assert happened == [("sync", (tmp_path / "f").stat().st_ino, 7)]


def test_files_are_synced_before_a_name_is_given_and_the_folder_after_it(save, happened):
    checkpoints = save(1)
    final, folder = checkpoints.path(1), checkpoints.folder.stat().st_ino
    renamed = happened.index(("rename", str(final)))
    synced = [event[1] for event in happened[:renamed]]
    for path in [final, *final.rglob("*")]:
        assert path.stat().st_ino in synced, path
    assert folder in [event[1] for event in happened[renamed + 1 :]]
    happened.clear()
    checkpoints.set_best(1)
    renamed = happened.index(("rename", str(checkpoints.folder / "best")))
    assert folder in [event[1] for event in happened[renamed + 1 :]]


@pytest.mark.parametrize("name", ["EINVAL", "ENOSYS", "EOPNOTSUPP", "EACCES", "EPERM", "EBADF"])
def test_a_file_system_that_cannot_sync_is_one_warning(save, monkeypatch, capsys, name):
    def refuse(handle: int) -> None:
        raise OSError(getattr(errno, name), name)

    warn_once.cache_clear()
    monkeypatch.setattr(os, "fsync", refuse)
    checkpoints = save(1, 2)
    checkpoints.set_best(2)
    assert checkpoints.newest().state.step == 2
    assert capsys.readouterr().err.count("warning: ") == 1


@pytest.mark.parametrize("name", ["EIO", "ENOSPC", "EDQUOT"])
def test_a_failing_disk_is_an_error(save, monkeypatch, name):
    def fail(handle: int) -> None:
        raise OSError(getattr(errno, name), name)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=name):
        save(1)


# Damaged and hostile files


def reseal(folder: Path, change) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    write_sealed(folder, change(manifest) or manifest)


ESCAPES = ["../x", "/etc/passwd", "tokenizer/../../x", "tokenizer/", "tokenizer/.x", "a\\b", "CON:"]
HOSTILE = {
    **{
        f"name {name}": lambda m, name=name: m["files"].update({name: {"size": 1, "sha256": ""}})
        for name in ESCAPES
    },
    "a list of files": lambda m: m.update(files=list(m["files"])),
    "no files": lambda m: m.pop("files"),
    "an entry that is text": lambda m: m["files"].update({"run.json": "x"}),
    "an absurd size": lambda m: m["files"]["run.json"].update(size=10**30),
    "a negative size": lambda m: m["files"]["run.json"].update(size=-1),
    "a size that is true": lambda m: m["files"]["run.json"].update(size=True),
    "a size that is text": lambda m: m["files"]["run.json"].update(size="9"),
    "a hash that is a number": lambda m: m["files"]["run.json"].update(sha256=7),
    "a file left out": lambda m: m["files"].pop("optim.safetensors"),
    "no tokenizer": lambda m: [m["files"].pop(n) for n in list(m["files"]) if "tok" in n] and None,
    "another step": lambda m: m.update(step=5),
    "a step that is a float": lambda m: m.update(step=4.0),
    "a step that is text": lambda m: m.update(step="4"),
    "another format": lambda m: m.update(format=2),
    "about that is a list": lambda m: m.update(about=[1]),
    "about that is nested": lambda m: m.update(about={"world": {"a": 1}}),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused_by_name(save, change):
    folder = save(4).path(4)
    reseal(folder, change)
    with pytest.raises(DamagedCheckpoint, match="step-4"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b"[" * 100_000, b'{"seal":' * 50_000],
    ids=["empty", "torn", "list", "null", "number", "no UTF-8", "deep lists", "deep objects"],
)
@pytest.mark.parametrize("name", [MANIFEST, "state.json", "run.json"])
def test_a_json_file_that_is_not_json_is_named(save, name, content):
    folder = save(4).path(4)
    (folder / name).write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=name):
        load_checkpoint(folder)


@pytest.mark.parametrize("place", ["model.safetensors", "tokenizer", MANIFEST])
def test_links_are_refused(save, place, tmp_path):
    folder = save(4).path(4)
    os.rename(folder / place, tmp_path / "elsewhere")
    (folder / place).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="not a plain"):
        read_manifest(folder)


def test_unlisted_and_swapped_files_are_refused(save, tmp_path):
    checkpoints = save(4, 5, 6)
    (checkpoints.path(6) / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(DamagedCheckpoint, match="tokenizer.json does not belong there"):
        read_manifest(checkpoints.path(6))
    for name in ("model.safetensors", "optim.safetensors"):
        shutil.copy(checkpoints.path(4) / name, checkpoints.path(5) / name)
    with pytest.raises(DamagedCheckpoint, match="step-5/model.safetensors is damaged"):
        read_manifest(checkpoints.path(5))
    shutil.rmtree(checkpoints.path(5))
    os.rename(checkpoints.path(4), checkpoints.path(5))
    with pytest.raises(DamagedCheckpoint, match="holds step 4"):
        read_manifest(checkpoints.path(5))
    moved = tmp_path / "any-name"  # so that the folder's own name does not tell
    os.rename(checkpoints.path(5), moved)
    reseal(moved, lambda m: m.update(step=5))
    with pytest.raises(DamagedCheckpoint, match="step 4, not 5"):
        load_checkpoint(moved)


def test_a_changed_manifest_is_found_by_its_seal(save, tmp_path):
    folder = save(4).path(4)
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"world": 1', '"world": 2'))
    with pytest.raises(DamagedCheckpoint, match="its own hash does not match"):
        read_manifest(folder)
    write_manifest(tmp_path, 1, {}, {})  # sealed, but by another program
    with pytest.raises(DamagedCheckpoint, match="is not listed"):
        read_manifest(tmp_path)


def header(text: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


LIES = {
    "empty": b"",
    "length beyond the file": header(b"{}", 10**9),
    "absurd length": header(b"{}", 2**63),
    "no JSON": header(b"hello"),
    "offsets beyond the file": header(
        b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}', data=b"1234"
    ),
    "offsets backwards": header(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', data=b"1234"
    ),
    "shape that does not fit": header(
        b'{"a":{"dtype":"F32","shape":[999999999,999999999],"data_offsets":[0,4]}}', data=b"1234"
    ),
    "unknown dtype": header(
        b'{"a":{"dtype":"PICKLE","shape":[1],"data_offsets":[0,4]}}', data=b"1234"
    ),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_a_safetensors_header_that_lies_is_refused(save, content):
    folder = save(4).path(4)
    (folder / "model.safetensors").write_bytes(content)
    refit(folder, "model.safetensors")  # size and hash match
    with pytest.raises(DamagedCheckpoint, match="model.safetensors"):
        load_checkpoint(folder).model_tensors()


@pytest.mark.parametrize(
    "change",
    [
        {"step": "4"},
        {"step": 4.5},
        {"step": -1},
        {"step": 1 << 70},
        {"step": None},
        {"best_loss": "low"},
        {"best_loss": float("nan")},
        {"since_best": True},
        {"wandb_id": 7},
        {"scaler": {"scale": 1}},
        {"scaler": [1]},
        {"scaler": {**dict.fromkeys(["scale", "growth_factor", "backoff_factor"], 1.0),
                    "growth_interval": 1, "_growth_tracker": "x"}},
        {"scaler": {"scale": 0.0, "growth_factor": 2.0, "backoff_factor": 0.5,
                    "growth_interval": 1, "_growth_tracker": 0}},
        {"fits": [[1]]},
        {"fits": [[5, 3]]},
        {"fits": [[-1, 3]]},
        {"seconds": -1.0},
        {"surprise": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_of_wrong_types_or_ranges_is_refused(save, change):
    folder = save(4).path(4)
    (folder / "state.json").write_text(json.dumps({**asdict(TrainState(step=4)), **change}))
    refit(folder, "state.json")
    with pytest.raises(DamagedCheckpoint, match="state.json"):
        load_checkpoint(folder)


def test_a_state_of_an_older_version_has_defaults():
    assert state_from_json({"step": 3}) == TrainState(step=3, tokens=None)
