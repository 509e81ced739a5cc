"""A run keeps its data: whatever happens to the text or to the prepared folder while it trains, it
ends as if nothing had happened, and can be resumed."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faultlib import around_steps

from cli.options import ConfigError
from data.meta import DamagedData, read_meta
from data.prepare import main as prepare_command
from training import dataset
from training.checkpoint import Checkpoints, find_checkpoint
from training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
OLD = "".join(f"def f{i}(x):\n    return x + {i * i % 97}\n" for i in range(90))[:3000]
NEW = OLD.translate(str.maketrans("defrtunx", "ΔEFRTUNX")).encode()[:3000].decode(errors="ignore")


class Stdin(io.TextIOWrapper):
    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))

    def isatty(self) -> bool:
        return False


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "n.txt").write_text(OLD)
    return tmp_path / "n.txt"


@pytest.fixture
def options(text, tmp_path) -> dict:
    return {"source": text, "prepared_dir": tmp_path / "prepared", "tokenizer": "bpe:280"}


@pytest.fixture
def at_step(monkeypatch):
    """at_step(3, action): call `action` once, in the middle of a run, before that step."""

    def at_step(step: int, action) -> None:
        done = []

        def acting(state, setup):
            if state.step == step and not done:
                done.append(True)
                action()

        monkeypatch.setattr("training.run.take_step", around_steps(before=acting))

    return at_step


def losses(run: Path) -> list[tuple]:
    entries = read_metrics(run / "metrics.jsonl")
    return [(e["step"], e.get("loss"), e.get("val_loss")) for e in entries]


def ends_equal(one: Path, other: Path) -> bool:
    """Whether two runs logged the same losses and saved the same weights, state and tokenizer."""
    files = []
    for folder in (one, other):
        last = Checkpoints(folder / "checkpoints").newest().path
        kept = [p for p in sorted(last.rglob("*")) if p.is_file()]
        kept = [p for p in kept if p.name not in ("MANIFEST.json", "run.json", "state.json")]
        files.append({str(p.relative_to(last)): p.read_bytes() for p in kept})
    return files[0] == files[1] and losses(one) == losses(other)


def tokenizers(run: Path) -> set[str]:
    return {p.read_text() for p in run.glob("checkpoints/*/tokenizer/tokenizer.json")}


@pytest.mark.parametrize("tokenizer", ["bpe:280", "byte"])
def test_a_changed_text_does_not_reach_a_running_run(
    train_tiny, at_step, options, text, tmp_path, tokenizer
):
    """Run B prepares the changed text with the same options while A trains on the old one.

    byte: the text keeps its size and the tokenizer is the same, so the new ids would even fit.
    """
    a, b, alone = tmp_path / "a", tmp_path / "b", tmp_path / "alone"
    options["tokenizer"] = tokenizer
    new = OLD.upper() if tokenizer == "byte" else NEW
    train_tiny(alone, **options)

    def begin_b() -> None:
        text.write_text(new)
        train_tiny(b, **options, max_steps=2)

    at_step(3, begin_b)
    assert train_tiny(a, **options) == 0
    assert ends_equal(a, alone)
    assert len(list((tmp_path / "prepared").glob("n_txt-*"))) == 2
    assert tokenizer == "byte" or len(tokenizers(a)) == 1 and tokenizers(a) != tokenizers(b)
    text.write_text(OLD)
    more = {**options, "max_steps": 12, "resume": "changed"}
    assert train_tiny(a, **more) == train_tiny(alone, **more) == 0
    assert ends_equal(a, alone)
    text.write_text(new)
    assert train_tiny(b, **{**options, "max_steps": 4, "resume": "changed"}) == 0


def test_two_pipes_do_not_share_a_folder_and_resuming_needs_no_pipe(
    train_tiny, at_step, options, tmp_path, monkeypatch, capsys
):
    """Resuming finds the data of the run by the fingerprint in its checkpoint."""
    options["source"] = "-"

    def pipe(content: str) -> None:
        monkeypatch.setattr(sys, "stdin", Stdin(content.encode()))

    pipe(OLD)
    train_tiny(tmp_path / "alone", **options)

    def begin_b() -> None:
        pipe(NEW)
        train_tiny(tmp_path / "b", **options, max_steps=2)

    pipe(OLD)
    at_step(3, begin_b)
    assert train_tiny(tmp_path / "a", **options) == 0
    assert ends_equal(tmp_path / "a", tmp_path / "alone")
    more = {**options, "max_steps": 12}
    for run, content in (("a", ""), ("alone", OLD)):
        pipe(content)
        capsys.readouterr()
        assert train_tiny(tmp_path / run, **more) == 0
        assert ("standard input is empty" in capsys.readouterr().out) == (content == "")
    assert ends_equal(tmp_path / "a", tmp_path / "alone")
    pipe(NEW)
    with pytest.raises(ConfigError, match="not what the run was trained on"):
        train_tiny(tmp_path / "a", **{**options, "max_steps": 16})
    pipe("")
    with pytest.raises(ConfigError, match="standard input is empty"):
        train_tiny(tmp_path / "new", **options)


@pytest.mark.parametrize("kind", ["deleted", "damaged tokenizer"])
def test_a_run_survives_the_loss_of_its_prepared_folder(
    train_tiny, at_step, options, tmp_path, kind
):
    train_tiny(tmp_path / "alone", **options)
    prepared = tmp_path / "prepared"

    def harm() -> None:
        if kind == "deleted":
            shutil.rmtree(prepared)
        else:
            (file,) = prepared.glob("n_txt-*/tokenizer/tokenizer.json")
            file.write_text("{}")

    at_step(3, harm)
    assert train_tiny(tmp_path / "a", **options) == 0
    assert ends_equal(tmp_path / "a", tmp_path / "alone")
    shutil.rmtree(prepared, ignore_errors=True)
    assert train_tiny(tmp_path / "a", **{**options, "max_steps": 12}) == 0


def test_a_tokenizer_changed_in_memory_is_not_saved(train_tiny, options, monkeypatch, tmp_path):
    train_tiny(tmp_path / "a", **options, max_steps=4)
    open_data = dataset.open_data

    def changed(*arguments):
        data = open_data(*arguments)
        data.tokenizer_files["tokenizer.json"] += b" "
        return data

    monkeypatch.setattr(dataset, "open_data", changed)
    with pytest.raises(DamagedData, match="tokenizer"):
        train_tiny(tmp_path / "a", **options, max_steps=8)
    assert find_checkpoint(tmp_path / "a", "latest").state.step == 4


@pytest.mark.parametrize("how", ["moved", "another spelling", "gone", "mixture"])
def test_the_same_content_elsewhere_is_resumed(
    train_tiny, options, text, tmp_path, monkeypatch, capsys, how
):
    monkeypatch.chdir(tmp_path)
    if how == "mixture":
        (tmp_path / "m.txt").write_text(NEW * 2)
        options["source"] = "n.txt*0.5+m.txt*0.5"
    train_tiny(tmp_path / "a", **options, max_steps=4)
    after = dict(options)
    if how == "moved":
        (tmp_path / "deep").mkdir()
        after["source"] = text.rename(tmp_path / "deep/other.txt")
    elif how == "another spelling":
        after["source"] = "n.txt"
    elif how == "mixture":
        text.rename(tmp_path / "k.txt")
        after["source"] = "./k.txt*1+./m.txt*1"
    else:
        text.unlink()
    capsys.readouterr()
    assert train_tiny(tmp_path / "a", **after, max_steps=8) == 0
    said = "no such file" if how == "gone" else "same content"
    assert any(said in line and "resuming" in line for line in capsys.readouterr().out.splitlines())
    assert (len(list((tmp_path / "prepared").glob("[!.]*")))) == 1


@pytest.mark.parametrize("source", ["other.txt", "nope.txt", "n.txt*0.5+other.txt*0.5"])
def test_different_content_is_refused_before_it_is_prepared(
    train_tiny, options, tmp_path, monkeypatch, source
):
    monkeypatch.chdir(tmp_path)
    train_tiny(tmp_path / "a", **options, max_steps=4)
    (tmp_path / "other.txt").write_text(NEW)
    prepared = sorted((tmp_path / "prepared").glob("[!.]*"))
    for resume in ("auto", "changed"):
        with pytest.raises(ConfigError, match=r"data\.source"):
            train_tiny(
                tmp_path / "a", **{**options, "source": source, "max_steps": 8, "resume": resume}
            )
    assert sorted((tmp_path / "prepared").glob("[!.]*")) == prepared


def test_data_in_use_cannot_be_removed(train_tiny, at_step, options, tmp_path, command):
    said = []

    def try_to_remove() -> None:
        (folder,) = (tmp_path / "prepared").glob("n_txt-*")
        argv = [f"--remove={folder.name}", f"--prepared_dir={folder.parent}"]
        said.append(command(prepare_command, *argv))

    at_step(3, try_to_remove)
    assert train_tiny(tmp_path / "a", **options) == 0
    try_to_remove()
    assert said[0][0] == 2 and "used by a run" in said[0][2]
    assert said[1][0] == 0 and "removed" in said[1][1]


def test_a_changed_text_does_not_reach_another_process(
    tiny_argv, train_tiny, options, text, tmp_path
):
    """A is its own process; it is stopped while B prepares the changed text, then continues."""
    long = {**options, "max_steps": 200, "checkpoint_interval": 10, "eval_interval": 100}
    a, b = tmp_path / "a", tmp_path / "b"
    argv = [sys.executable, str(ROOT / "train.py"), *tiny_argv(a, **long, quiet=True)]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not list(a.glob("checkpoints/step-*")) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
        stopped_at = max(e["step"] for e in read_metrics(a / "metrics.jsonl"))
        text.write_text(NEW)
        assert train_tiny(b, **options, max_steps=2) == 0
    finally:
        process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, b"")
    assert stopped_at < 200
    assert len(tokenizers(a)) == 1 and tokenizers(a) != tokenizers(b)
    text.write_text(OLD)
    assert train_tiny(tmp_path / "alone", **long) == 0
    assert ends_equal(a, tmp_path / "alone")
    about = json.loads((Checkpoints(a / "checkpoints").newest().path / "MANIFEST.json").read_text())
    assert (
        read_meta(Path(about["about"]["data_folder"])).fingerprint
        == (about["about"]["data_fingerprint"])
    )
    assert train_tiny(a, **{**long, "max_steps": 202, "resume": "changed"}) == 0
