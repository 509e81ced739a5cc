"""sample.py: prompts, settings, stopping, streaming, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st

import model.generate
import sample
from data.tokenizer import StreamDecoder, byte_tokenizer, char_tokenizer, start_ids
from model.config import ModelConfig, SamplingConfig
from model.gpt import GPT

BYTES = byte_tokenizer()


@pytest.fixture
def sampled(trained_once, capsys):
    """sampled("--prompt=def "): what sample.py prints for the tiny run, but for the last newline;
    20 tokens unless it is told how many."""

    def run(*argv: str, run: Path = trained_once) -> str:
        if not any("max_new_tokens" in text for text in argv):
            argv = (*argv, "--max_new_tokens=20")
        capsys.readouterr()
        assert sample.main([str(run), *argv]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    return run


@pytest.fixture
def refused(trained_once, command):
    """refused("--top_k=-1"): the error lines, for what ends with exit code 2 and prints nothing."""

    def run(*argv: str, run: Path | str = trained_once) -> str:
        code, out, err = command(sample.main, run, *argv)
        assert code == 2
        assert out == ""
        assert all(line.startswith("error: ") for line in err.splitlines())
        return err

    return run


# Prompts


def test_a_prompt_is_continued_and_one_seed_gives_one_text(sampled):
    first = sampled("--prompt=def ", "--max_new_tokens=30")
    assert first.startswith("def ")
    assert len(first) == 4 + 30
    assert sampled("--prompt=def ", "--max_new_tokens=30") == first
    assert sampled("--prompt", "def ", "--max_new_tokens=30", "--seed=2") != first


def test_streaming_prints_what_waiting_prints(sampled):
    assert sampled("--prompt=def ") == sampled("--prompt=def ", "--stream=false")


def test_without_a_prompt_a_document_begins(sampled):
    assert len(sampled("--max_new_tokens=10")) == 10
    assert start_ids(BYTES) == [256]
    assert start_ids(char_tokenizer("\nab", with_eot=False)) == [0]
    assert start_ids(char_tokenizer("ab", with_eot=False)) == [0]
    assert start_ids(char_tokenizer("ab", with_eot=True)) == [2]


def test_a_prompt_longer_than_the_context_is_said_and_its_end_is_used(trained_once, capsys):
    long = "def f1(x):\n    return x + 1\n" * 3  # 84 characters, the model sees 16
    sample.main([str(trained_once), f"--prompt={long}", "--temperature=0", "--max_new_tokens=5"])
    out, err = capsys.readouterr()
    assert err == "note: the prompt has 84 tokens; the model sees the last 16\n"
    assert out.startswith(long)
    sample.main(
        [str(trained_once), f"--prompt={long[-16:]}", "--temperature=0", "--max_new_tokens=5"]
    )
    end, err = capsys.readouterr()
    assert err == ""
    assert end == out[-len(end) :]


def test_unknown_characters_are_listed(refused):
    told = refused("--prompt=naïve🙂")
    assert "'ï' (U+00EF)" in told
    assert "'🙂' (U+1F642)" in told
    assert "--tokenizer=byte" in told


def test_a_prompt_can_come_from_a_file(sampled, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfdef f1(x):\r\n    return\r")
    expected = sampled("--prompt=def f1(x):\n    return\n")
    assert sampled(f"--prompt_file={path}") == expected


def test_a_prompt_can_come_from_standard_input(sampled, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def f")))
    assert sampled("--prompt_file=-") == sampled("--prompt=def f")


def test_a_prompt_that_cannot_be_read_is_one_line(refused, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"def caf\xe9")
    assert "not UTF-8 at byte 7" in refused(f"--prompt_file={tmp_path}/latin.txt")
    assert "No such file" in refused(f"--prompt_file={tmp_path}/none.txt")
    assert "keep one" in refused(f"--prompt_file={tmp_path}/latin.txt", "--prompt=x")


def test_bytes_that_the_locale_hid_are_found_again():
    hidden = "naïve".encode().decode("ascii", "surrogateescape")  # what Python makes of argv
    assert sample.read_prompt(sample.SampleOptions(prompt=hidden)) == "naïve"


# Which model


def test_the_best_is_sampled_unless_another_is_named(trained, sampled):
    best = sampled("--prompt=def", "--temperature=0")
    assert sampled("--prompt=def", "--temperature=0", run=trained) == best
    (trained / "checkpoints/best").write_text("step-4\n")
    older = sampled("--prompt=def", "--temperature=0", run=trained)
    assert older != best
    assert older == sampled("--prompt=def", "--temperature=0", "--which=4", run=trained)
    assert older == sampled("--prompt=def", "--temperature=0", run=trained / "checkpoints/step-4")
    assert best == sampled("--prompt=def", "--temperature=0", "--which=latest", run=trained)
    assert best == sampled("--prompt=def", "--temperature=0", "--which=8", run=trained)


def test_a_checkpoint_that_is_not_there_is_one_line(refused, tmp_path):
    assert "which=5: " in refused("--which=5")
    assert "4, 8 and best (step 8)" in refused("--which=nose")
    assert "there is no such folder" in refused(run=tmp_path / "nowhere")
    assert "no checkpoint there" in refused(run=tmp_path)
    told = refused("--temperature", "0", run="").splitlines()
    assert len(told) == 1


def test_the_tokenizer_travels_with_the_checkpoint(train_tiny, tmp_path, sampled):
    """The data may be prepared anew with other characters, moved or deleted."""
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


@pytest.mark.parametrize("top_k", [1_000_000, 24, 1, 0])
def test_top_k_may_be_anything_from_0(sampled, top_k):
    assert len(sampled(f"--top_k={top_k}", "--max_new_tokens=5")) == 5


def test_top_k_beyond_the_vocabulary_is_no_limit(sampled):
    assert sampled("--top_k=1000000") == sampled("--top_k=0") == sampled("--top_k=24")
    assert sampled("--top_k=1") == sampled("--temperature=0")


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [
        ("--top_k=-1", "top_k=-1: must be 0"),
        ("--top_p=0", "top_p=0.0: must be in (0, 1]"),
        ("--top_p=1.1", "top_p=1.1: must be in (0, 1]"),
        ("--min_p=1.5", "min_p=1.5: must be in [0, 1]"),
        ("--temperature=-1", "temperature=-1.0: must be 0"),
        ("--temperature=nan", "temperature"),
        ("--repetition_penalty=0", "repetition_penalty=0.0: must be in [0.01, 100]"),
        ("--max_new_tokens=0", "max_new_tokens=0: must be at least 1"),
        ("--num_samples=0", "num_samples=0: must be at least 1"),
        ("--seed=-1", "seed=-1: must be in [0, 2**63)"),
        ("--threads=0", "threads=0: must be at least 1"),
        ("--stop=", "stop is empty"),
        ("--dtype=fp8", "float32"),
        ("--tempreature=1", "did you mean --sampling.temperature?"),
    ],
)
def test_a_setting_out_of_range_is_refused(refused, typed, allowed):
    assert allowed in refused(typed)


def test_all_mistakes_are_told_at_once(refused):
    told = refused("--top_p=2", "--top_k=-3", "--num_samples=0")
    assert all(name in told for name in ("top_p=2", "top_k=-3", "num_samples=0"))


def test_top_p_of_1_is_off_and_a_small_one_leaves_the_likeliest(sampled):
    assert sampled("--top_p=1") == sampled()
    assert sampled("--top_p=1e-9") == sampled("--temperature=0")


def test_temperature_0_is_greedy_and_a_tiny_one_finite(sampled):
    greedy = sampled("--temperature=0", "--seed=1")
    assert sampled("--temperature=0", "--seed=2") == greedy
    assert sampled("--temperature=1e-4", "--top_p=1") == greedy


def test_a_gpu_that_is_not_there_is_one_line(refused):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "torch sees 0 CUDA GPUs" in refused("--device=cuda")


# Several samples


def test_several_samples_are_drawn_side_by_side(sampled):
    out = sampled("--prompt=def ", "--num_samples=3", "--max_new_tokens=10")
    texts = [part.partition("\n")[2] for part in out.split("--- sample ")[1:]]
    assert len(texts) == 3
    assert all(text.startswith("def ") for text in texts)
    assert len(set(texts)) > 1


def test_greedy_samples_side_by_side_are_the_one_alone(sampled):
    alone = sampled("--prompt=def f", "--temperature=0", "--max_new_tokens=40")
    out = sampled("--prompt=def f", "--temperature=0", "--max_new_tokens=40", "--num_samples=2")
    assert out == f"--- sample 1\n{alone}\n--- sample 2\n{alone}"


# Stopping


@pytest.fixture
def says(monkeypatch, capsys):
    """says(["ab", [256]], ...): what is printed when the model draws these bytes, a row each."""

    def run(*rows: str | list[int], prompt: str = "", **options) -> str:
        drawn = [list(row.encode()) if isinstance(row, str) else row for row in rows]
        pulled = []

        def rigged(*args, **kwargs):
            for column in zip(*drawn, strict=True):
                pulled.append(column)
                yield torch.tensor(column)

        monkeypatch.setattr(model.generate, "generate", rigged)
        network = GPT(ModelConfig(n_layers=1, d_model=8, n_heads=2).resolved(257))
        chosen = sample.SampleOptions(num_samples=len(rows), **options)
        sample.write_samples(network, BYTES, prompt, chosen, SamplingConfig())
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


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({}, "> ab\n"),
        ({"stream": False}, "> ab\n"),
        ({"num_samples": 2}, "--- sample 1\n> ab\n--- sample 2\n> ab\n"),
    ],
    ids=str,
)
def test_what_is_there_at_ctrl_c_is_printed(monkeypatch, capsys, options, printed):
    def interrupted(network, prompt, *args, **kwargs):
        for byte in b"ab":
            yield torch.tensor([byte] * len(prompt))
        raise KeyboardInterrupt

    monkeypatch.setattr(model.generate, "generate", interrupted)
    network = GPT(ModelConfig(n_layers=1, d_model=8, n_heads=2).resolved(257))
    with pytest.raises(KeyboardInterrupt):
        sample.write_samples(
            network, BYTES, "> ", sample.SampleOptions(**options), SamplingConfig()
        )
    assert capsys.readouterr().out == printed


def test_characters_are_printed_when_they_are_complete(says):
    assert says("naïve 🙂") == "naïve 🙂"
    assert says("naïve 🙂", stream=False) == "naïve 🙂"
    assert says([0xC3, 0x28]) == "\ufffd("
    assert says([0xF0, 0x9F]) == "\ufffd"


@settings(max_examples=200, deadline=None)
@example("ab", ["b", "ab"])
@given(
    st.text("ab\nï", max_size=12),
    st.lists(st.text("ab\nï", min_size=1, max_size=3), max_size=3),
)
def test_a_row_gives_the_text_before_the_first_stop_however_it_comes(text, stops):
    row, got = sample.Row(StreamDecoder(BYTES), tuple(stops)), ""
    for i, byte in enumerate(text.encode()):
        got += row.push(byte)
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


# Consoles


def test_a_console_of_ascii_gets_question_marks(train_tiny, tmp_path):
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


def test_only_json_and_tensors_are_read(trained):
    """A checkpoint is data: its config is run.json, never the Python file it came from."""
    assert json.loads((trained / "checkpoints/step-8/run.json").read_text())["model"]
    assert not list(trained.rglob("*.py"))
    assert not list(trained.rglob("*.pt"))
