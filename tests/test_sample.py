"""sample.py: prompts, settings, stopping, streaming and errors."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sample
from data.tokenizer import StreamDecoder, byte_tokenizer, char_tokenizer, start_ids
from model.config import ModelConfig, SamplingConfig
from model.gpt import GPT
from training.inference import Row

BYTES = byte_tokenizer()


@pytest.fixture
def sampled(trained_once, capsys):
    """sampled("--prompt=def ") -> output of sample.py for the tiny run, 20 tokens by default."""

    def run(*argv: str, run: Path = trained_once) -> str:
        if "max_new_tokens" not in "".join(argv):
            argv = (*argv, "--max_new_tokens=20")
        capsys.readouterr()
        assert sample.main([str(run), *argv]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    return run


@pytest.fixture
def refused(trained_once, command):
    """refused("--top_k=-1") -> the error lines; the exit code must be 2 and the output empty."""

    def run(*argv: str, run: Path | str = trained_once) -> str:
        code, out, err = command(sample.main, run, *argv)
        assert code == 2
        assert out == ""
        assert all(line.startswith(("error: ", "  usage: ")) for line in err.splitlines())
        return err

    return run


# Prompts


def test_the_prompt_may_follow_the_run(sampled, refused):
    options = ("--max_new_tokens=30", "--seed=3")
    assert sampled("def ", *options) == sampled("--prompt=def ", *options)
    assert sampled("def ", *options) != sampled(*options)
    for other in ("--prompt=x", "--prompt_file=y"):
        assert "the prompt is given twice, as 'def ' and as an option" in refused("def ", other)
    assert "unexpected argument 'f(x)'" in refused("def", "f(x)")


def test_a_seed_gives_one_continuation_streamed_or_not(sampled):
    first = sampled("--prompt=def ", "--max_new_tokens=30")
    assert first.startswith("def ")
    assert len(first) == 4 + 30
    assert sampled("--prompt=def ", "--max_new_tokens=30", "--stream=false") == first
    assert sampled("--prompt", "def ", "--max_new_tokens=30", "--seed=2") != first


def test_an_empty_prompt_is_the_start_of_a_document(sampled):
    assert len(sampled("--max_new_tokens=10")) == 10
    assert start_ids(BYTES) == [256]
    assert start_ids(char_tokenizer("\nab", with_eot=False)) == [0]
    assert start_ids(char_tokenizer("ab", with_eot=False)) == [0]
    assert start_ids(char_tokenizer("ab", with_eot=True)) == [2]


def test_a_prompt_longer_than_the_context_is_cut_with_a_note(trained_once, command):
    long = "def f1(x):\n    return x + 1\n" * 3  # 84 characters, the model sees 16
    options = ["--temperature=0", "--max_new_tokens=5"]
    code, out, err = command(sample.main, trained_once, f"--prompt={long}", *options)
    assert code == 0
    assert err == "note: the prompt has 84 tokens; the model sees only the last 16\n"
    assert out.startswith(long)
    _, end, err = command(sample.main, trained_once, f"--prompt={long[-16:]}", *options)
    assert err == ""
    assert end == out[-len(end) :]


def test_unknown_characters_are_listed(refused):
    told = refused("--prompt=naïve🙂")
    assert "'ï' (U+00EF)" in told
    assert "'🙂' (U+1F642)" in told
    assert "--tokenizer=byte" in told


def test_a_prompt_can_come_from_a_file_or_standard_input(sampled, tmp_path, monkeypatch):
    raw = b"\xef\xbb\xbfdef f1(x):\r\n    return\r"
    (tmp_path / "prompt.txt").write_bytes(raw)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    expected = sampled("--prompt=def f1(x):\n    return\n")
    assert sampled(f"--prompt_file={tmp_path / 'prompt.txt'}") == expected
    assert sampled("--prompt_file=-") == expected


def test_an_unreadable_prompt_is_refused(refused, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"def caf\xe9")
    assert "not UTF-8 at byte 7" in refused(f"--prompt_file={tmp_path}/latin.txt")
    assert "No such file" in refused(f"--prompt_file={tmp_path}/none.txt")
    assert "prompt_file are both given" in refused(
        f"--prompt_file={tmp_path}/latin.txt", "--prompt=x"
    )


def test_bytes_hidden_by_the_locale_are_restored():
    hidden = "naïve".encode().decode("ascii", "surrogateescape")  # what Python makes of argv
    assert sample.read_prompt(sample.SampleOptions(prompt=hidden)) == "naïve"


# Which model


def test_the_best_checkpoint_is_the_default(trained, sampled):
    best = sampled("--prompt=def", "--temperature=0")
    (trained / "checkpoints/best").write_text("step-4\n")
    older = sampled("--prompt=def", "--temperature=0", run=trained)
    assert older != best
    for expected, folder, which in [
        (older, trained, "4"),
        (older, trained / "checkpoints/step-4", ""),
        (best, trained, "latest"),
        (best, trained, "8"),
    ]:
        options = ["--prompt=def", "--temperature=0", f"--which={which}"]
        assert sampled(*options, run=folder) == expected, which


def test_a_missing_checkpoint_is_refused(refused, tmp_path):
    assert "which=5: " in refused("--which=5")
    assert "4, 8 and best (step 8)" in refused("--which=nose")
    for run in (tmp_path / "nowhere", tmp_path, ""):
        assert len(refused("--temperature", "0", run=run).splitlines()) == 1


def test_the_tokenizer_travels_with_the_checkpoint(train_tiny, tmp_path, sampled):
    """The data may be prepared again with other characters, moved or deleted."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh\n" * 60)
    options = {"source": text, "prepared_dir": tmp_path / "prepared"}
    train_tiny(tmp_path / "run", **options, max_steps=2)
    expected = sampled("--prompt=abc", run=tmp_path / "run")
    text.unlink()
    shutil.rmtree(tmp_path / "prepared")
    moved = tmp_path / "elsewhere"
    (tmp_path / "run").rename(moved)
    assert sampled("--prompt=abc", run=moved) == expected
    assert set(expected) <= set("abcdefgh\n")


def test_damage_is_exit_code_3(trained, command):
    path = trained / "checkpoints/step-8/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, out, err = command(sample.main, trained)
    assert (code, out) == (3, "")
    assert "model.safetensors is damaged" in err


# Settings


def test_neutral_settings_are_off_and_narrow_ones_greedy(sampled):
    drawn, greedy = sampled(), sampled("--temperature=0")
    assert drawn != greedy
    for off in ("--top_k=0", "--top_k=24", "--top_k=1000000", "--top_p=1"):
        assert sampled(off) == drawn, off
    for narrow in ("--top_k=1", "--top_p=1e-9", "--temperature=1e-4"):
        assert sampled(narrow) == greedy, narrow
    assert sampled("--temperature=0", "--seed=2") == greedy


def test_all_mistakes_are_reported_at_once(refused):
    wrong = ("top_p=2.0", "num_samples=0", "seed=-1", "threads=0")  # of both sections
    text = refused(*(f"--{typed}" for typed in wrong), "--stop=", "--dtype=fp8")
    assert all(f"error: {typed}: must be" in text for typed in wrong)
    assert "stop is empty" in text and "dtype=fp8" in text
    assert "did you mean --sampling.temperature?" in refused("--tempreature=1")
    assert "--start is not an option: did you mean --prompt?" in refused("--start=a")
    assert "--length is not an option: did you mean --sampling.max_new_tokens?" in refused(
        "--length=9"
    )


def test_a_missing_gpu_is_refused(refused):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "torch sees 0 CUDA GPUs" in refused("--device=cuda")


# Several samples


def test_several_samples_are_one_batch(sampled):
    out = sampled("--prompt=def ", "--num_samples=3", "--max_new_tokens=10")
    texts = [part.partition("\n")[2] for part in out.split("--- sample ")[1:]]
    assert len(texts) == 3
    assert all(text.startswith("def ") for text in texts)
    assert len(set(texts)) > 1
    greedy = ["--prompt=def f", "--temperature=0", "--max_new_tokens=40"]
    alone = sampled(*greedy)
    assert sampled(*greedy, "--num_samples=2") == f"--- sample 1\n{alone}\n--- sample 2\n{alone}"


# Stopping


def network(vocab_size: int = 257) -> GPT:
    model = GPT(ModelConfig(n_layers=1, d_model=8, n_heads=2).resolved(vocab_size)).eval()
    model.init_weights(1)
    return model


@pytest.fixture
def says(monkeypatch, capsys):
    """says("ab", [256], ...) -> the output when the model draws these bytes, one row each."""

    def run(*rows: str | list[int], prompt: str = "", ended: bool = True, **options) -> str:
        drawn = [list(row.encode()) if isinstance(row, str) else row for row in rows]
        pulled = []

        def rigged(*args, **kwargs):
            for column in zip(*drawn, strict=True):
                pulled.append(column)
                yield torch.tensor(column)
            if not ended:
                raise KeyboardInterrupt

        monkeypatch.setattr("training.inference.generate", rigged)
        chosen = sample.SampleOptions(num_samples=len(rows), **options)
        with nullcontext() if ended else pytest.raises(KeyboardInterrupt):
            sample.write_samples(network(), BYTES, prompt, chosen, SamplingConfig())
        run.drawn = len(pulled)
        return capsys.readouterr().out.removesuffix("\n")

    return run


def test_the_end_of_text_ends_each_row_and_is_not_printed(says):
    out = says([104, 105, 256, 256, 256], [104, 111, 33, 33, 256])
    assert out == "--- sample 1\nhi\n--- sample 2\nho!!"
    assert says([104, 256, 105]) == "h"
    assert says([104, 256, 105], ignore_eot=True) == "hi"


def test_a_stop_text_ends_the_sample_and_is_not_printed(says):
    assert says("one\n\ntwo", stop=("\n\n",)) == "one"
    assert says.drawn == 5  # nothing is drawn after it
    assert says("one two", stop=("x", "e t")) == "on"
    assert says("aab", stop=("ab",)) == "a"
    assert says("xab", stop=("b", "ab")) == "x"  # both are complete: the one that begins first
    assert says("one\n", stop=("\n\n",)) == "one\n"
    assert says("stop", stop=("stop",), prompt="no stop: ") == "no stop: "


def test_ctrl_c_prints_the_text_so_far(says):
    assert says("ab", prompt="> ", ended=False) == "> ab"
    assert says("ab", prompt="> ", ended=False, stream=False) == "> ab"
    both = "--- sample 1\n> ab\n--- sample 2\n> cd"
    assert says("ab", "cd", prompt="> ", ended=False) == both


def test_padding_of_the_vocabulary_is_never_drawn(capsys):
    settings, options = SamplingConfig(max_new_tokens=50), sample.SampleOptions(ignore_eot=True)
    sample.write_samples(network(4096), BYTES, "", options, settings)
    assert len(capsys.readouterr().out) > 25  # padding has no text


@pytest.mark.parametrize("stream", [True, False])
def test_only_complete_characters_are_printed(says, stream):
    assert says("naïve 🙂", stream=stream) == "naïve 🙂"
    assert says([0xC3, 0x28], stream=stream) == "\ufffd("
    assert says([0xF0, 0x9F], stream=stream) == "\ufffd"


@settings(max_examples=200, deadline=None)
@example("ab", ["b", "ab"])
@given(
    st.text("ab\nï", max_size=12),
    st.lists(st.text("ab\nï", min_size=1, max_size=3), max_size=3),
)
def test_a_row_gives_the_text_before_the_first_stop(text, stops):
    row, got = Row(StreamDecoder(BYTES), tuple(stops)), ""
    for i, byte in enumerate(text.encode()):
        got += "" if row.ended else row.push(byte)
        so_far = text.encode()[: i + 1].decode(errors="ignore")
        assert so_far.startswith(got)
    got += "" if row.ended else row.finish()
    # The stop that is complete first wins, and of those the one that begins first.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert got == text
    else:
        starts = [text[: min(ends)].find(s) for s in stops if s in text[: min(ends)]]
        assert got == text[: min(starts)]


# Terminals


def test_an_ascii_terminal_gets_question_marks(train_tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("ïïïïïüüüüü" * 40, encoding="utf-8")
    train_tiny(tmp_path / "run", source=text, prepared_dir=tmp_path / "prepared", max_steps=1)
    ended = subprocess.run(
        [sys.executable, "sample.py", tmp_path / "run", "--prompt=ü", "--max_new_tokens=5"],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=300,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"??????\n", b"")
