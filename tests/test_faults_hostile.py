"""Hostile inputs are understood or refused with a message; no traceback, and nothing is run."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
from faultlib import refit, train, write_sealed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.command import exit_code_of
from cli.options import ConfigError
from data.meta import read_meta
from data.shards import Windows
from data.tokenizer import load_tokenizer
from training.checkpoint import (
    FILES,
    MANIFEST,
    Checkpoints,
    DamagedCheckpoint,
    find_checkpoint,
    load_checkpoint,
)
from training.config import OPTIONS, Config, from_json, load_config, to_json

CONFIG = str(Path(__file__).parents[1] / "config" / "debug.py")
QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

words = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["none", "auto", "true", "1e3", "-1", "0", "1e999", "nan", "bpe:9", "cuda:x"]),
)
names = st.one_of(
    st.sampled_from([*OPTIONS, *(option.full_name for option in OPTIONS.values())]),
    st.text(max_size=12),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.parametrize("n", [200, pytest.param(10_000, marks=pytest.mark.faults)])
def test_any_command_line_is_understood_or_refused_with_a_message(n, figure, capsys):
    arguments = st.lists(
        st.tuples(names, words).map(lambda pair: f"--{pair[0]}={pair[1]}") | words, max_size=5
    )

    @settings(max_examples=n, **QUIET)
    @given(arguments)
    def check(extra: list[str]) -> None:
        try:
            config = load_config([CONFIG, *extra])
        except ConfigError as error:
            assert error.problems and all(error.problems)
        except SystemExit as error:  # --help
            assert error.code == 0
        else:
            assert config.problems() == [] and from_json(to_json(config)) == config

    check()
    figure(f"hypothesis on overrides, {n:,} examples", "uncaught 0")


@pytest.mark.parametrize("n", [200, pytest.param(10_000, marks=pytest.mark.faults)])
def test_any_run_json_is_understood_or_refused_with_a_message(n, figure):
    good = json.loads(to_json(Config()))

    @settings(max_examples=n, **QUIET)
    @given(st.sampled_from(list(OPTIONS)), json_values, st.booleans())
    def check(name: str, value, whole: bool) -> None:
        section, _, leaf = OPTIONS[name].full_name.partition(".")
        saved = json.loads(json.dumps(good))
        if whole:
            saved[section] = value
        else:
            saved[section][leaf] = value
        try:
            from_json(json.dumps(saved)).problems()
        except ConfigError as error:
            assert error.problems

    check()
    figure(f"hypothesis on run.json, {n:,} examples", "uncaught 0")


@pytest.mark.parametrize("n", [200, pytest.param(10_000, marks=pytest.mark.faults)])
def test_any_manifest_and_header_is_understood_or_refused(n, trained_once, tmp_path, figure):
    """With seals and hashes that match, as an attacker would make them."""
    folder = Path(shutil.copytree(trained_once / "checkpoints" / "step-8", tmp_path / "step-8"))
    good = json.loads((folder / MANIFEST).read_text())
    tensors = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(tensors[:8], "little")
    header = json.loads(tensors[8 : 8 + length])

    def attempt() -> None:
        try:
            found = load_checkpoint(folder)
            found.model_tensors()
            from_json(found.run)
        except (DamagedCheckpoint, ConfigError):
            pass

    @settings(max_examples=n // 2, **QUIET)
    @given(st.sampled_from([*good, "entry", "name"]), json_values, st.sampled_from(FILES))
    def manifests(where: str, value, name: str) -> None:
        manifest = json.loads(json.dumps(good))
        if where == "entry":
            manifest["files"][name] = value
        elif where == "name":
            manifest["files"][str(value)] = manifest["files"][name]
        else:
            manifest[where] = value
        write_sealed(folder, manifest)
        attempt()

    @settings(max_examples=n // 2, **QUIET)
    @given(st.sampled_from(list(header)), st.sampled_from(["dtype", "shape", "data_offsets"]),
           json_values, st.integers(0, 2**64 - 1) | st.none())  # fmt: skip
    def headers(tensor: str, field: str, value, lie: int | None) -> None:
        changed = json.loads(json.dumps(header))
        changed[tensor][field] = value
        text = json.dumps(changed).encode()
        size = (len(text) if lie is None else lie).to_bytes(8, "little")
        (folder / "model.safetensors").write_bytes(size + text + tensors[8 + length :])
        write_sealed(folder, json.loads(json.dumps(good)))
        refit(folder, "model.safetensors")
        attempt()

    manifests()
    headers()
    figure(f"hypothesis on manifests and safetensors headers, {n:,} examples", "uncaught 0")


# Nothing that is read is ever run


class Trap:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def traps(marker: Path) -> list[bytes]:
    code = f"open({str(marker)!r}, 'w')"
    as_json = json.dumps({"kind": "hf", "auto_map": {"AutoTokenizer": code}, "py/reduce": code})
    return [
        pickle.dumps(Trap(marker)),
        pickle.dumps(Trap(marker), protocol=0),
        f"import os\n{code}\n".encode(),
        f"!!python/object/apply:builtins.open [{str(marker)!r}, w]".encode(),
        as_json.encode(),
        b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(128)
        + pickle.dumps([Trap(marker)]),
    ]


def test_the_traps_work(tmp_path):
    pickle.loads(traps(tmp_path / "sprung")[0])
    assert (tmp_path / "sprung").exists()


def test_booby_trapped_files_are_not_run(trained, tiny_folder, tmp_path, figure):
    """Every file of a checkpoint, a run and prepared data in turn is replaced by each trap, and
    for a checkpoint the manifest is made to fit."""
    marker, tried = tmp_path / "sprung", 0
    data = next((tiny_folder / "prepared").glob("text_txt-*"))
    data = Path(shutil.copytree(data, tmp_path / "data"))
    step = trained / "checkpoints" / "step-8"
    for folder in (trained, data):
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            good, manifest = path.read_bytes(), (step / MANIFEST).read_bytes()
            for trap in traps(marker):
                path.write_bytes(trap)
                if path.is_relative_to(step) and path.name != MANIFEST:
                    refit(step, str(path.relative_to(step)))
                tried += 1
                read_everything(trained, data)
                assert not marker.exists(), path
                (step / MANIFEST).write_bytes(manifest)
            path.write_bytes(good)
    figure(f"{tried} booby-trapped files of a run, a checkpoint, prepared data", "run 0")


def read_everything(run: Path, data: Path) -> None:
    """Read all that training, resuming and sampling read; every failure must be a known one."""

    def resume() -> None:
        found = Checkpoints(run / "checkpoints", lambda text: None).newest()
        found.model_tensors(), found.optim_tensors(), from_json(found.run)

    def sample() -> None:
        found = find_checkpoint(run, "latest")
        from_json(found.run), found.model_tensors(), load_tokenizer(found.path / "tokenizer")

    def read() -> None:
        read_meta(data)
        load_tokenizer(data / "tokenizer")
        windows = Windows(data, "train", 16)
        for i in range(len(windows)):
            windows[i]

    for do in (resume, sample, read):
        try:
            do()
        except Exception as error:
            assert exit_code_of(error) in (2, 3), repr(error)


def test_a_config_that_lies_about_its_sizes_is_refused(trained, tmp_path):
    """run.json of a checkpoint made to fit its manifest: sizes that the weights do not have."""
    from sample import main

    step = trained / "checkpoints" / "step-8"
    good = (step / "run.json").read_bytes()
    for name, value in (
        ("d_model", 10**9), ("n_layers", 10**9), ("vocab_size", 10**12), ("d_mlp", 10**12),
        ("n_layers", -1), ("d_model", 0), ("n_heads", 0), ("context_length", -5),
    ):  # fmt: skip
        saved = json.loads(good)
        saved["model"][name] = value
        (step / "run.json").write_text(json.dumps(saved))
        refit(step, "run.json")
        with pytest.raises((ConfigError, DamagedCheckpoint)):
            main([str(step), "--prompt", "def "])
        assert train([CONFIG, f"--out_dir={tmp_path / 'x'}", f"--init_from={step}"]) in (2, 3)
