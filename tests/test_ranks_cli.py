"""train.py as real processes: mistakes, Ctrl-C, what is imported, and two ranks under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

import train
from data.config import DataConfig
from data.loader import BatchLoader
from data.shards import Windows
from training.config import Config
from training.distributed import Ranks
from training.metrics import read_metrics
from training.step import Setup

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(*argv: object, **options) -> subprocess.Popen:
    """A Python process in the root, its output caught; Ctrl-C reaches it even where the shell
    ignores it, as for a job in the background."""
    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, *map(str, argv)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **{"env": ENV, **pipes, **options})


def test_a_users_mistake_is_one_line_and_exit_code_2(tiny_argv, tmp_path, command):
    """One as a process of its own, the others in this one: importing torch takes seconds."""
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("a few words of text\n" * 3)
    run, prepared = tmp_path / "run", {"prepared_dir": tmp_path / "prepared"}
    cases = {
        "CONFIG=config/nope.py: no such file": ["config/nope.py"],
        "--model.bach_size is not an option": ["config/debug.py", "--model.bach_size=8"],
        "empty.txt": tiny_argv(run / "1", source=empty, **prepared),
        "has 48 tokens, but one window of model.context_length=64 needs 65": tiny_argv(
            run / "2", source=short, context_length=64, **prepared
        ),
        "run.max_steps=0: must be at least 1": tiny_argv(run / "3", max_steps=0),
    }
    if not torch.cuda.is_available():
        cases["run.device=cuda: GPU 0 is not there"] = tiny_argv(run / "4", device="cuda")
    process = start("train.py", *cases["run.max_steps=0: must be at least 1"])
    ended = {told: command(train.main, *argv) for told, argv in cases.items()}
    out, err = process.communicate(timeout=300)
    ended["max_steps=0"] = (process.returncode, out, err)
    for told, (code, out, err) in ended.items():
        assert code == 2, (told, out, err)
        assert told in err
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1
    assert not list(run.glob("*/checkpoints"))


def test_ctrl_c_saves_and_the_same_command_resumes(tiny_argv, tmp_path, train_tiny, capsys):
    options = {"max_steps": 100_000, "checkpoint_interval": 100_000, "interval": 1}
    options |= {"eval_interval": 100_000, "warmup_steps": 0, "schedule": "constant"}
    process = start("train.py", *tiny_argv(tmp_path, **options), bufsize=1)
    for line in process.stdout:
        if line.startswith("step 5/"):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    step = int(checkpoint.name.removeprefix("step-"))
    assert step >= 5
    assert f"stopped at step {step} of 100000; saved in {checkpoint}" in out
    assert "Traceback" not in err
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == step
    assert train_tiny(tmp_path, **{**options, "max_steps": step + 2}, resume="changed") == 0
    assert f"resuming from {checkpoint}" in capsys.readouterr().out


def test_training_imports_only_what_it_needs(tiny_argv, tmp_path):
    """The compiler alone would take as long as torch."""
    code = "import sys, train; train.main(sys.argv[1:]); print('LOADED', *sys.modules)"
    process = start("-c", code, *tiny_argv(tmp_path, max_steps=1))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    loaded = set(out.rpartition("LOADED ")[2].split())
    assert {"torch", "numpy"} <= loaded
    unwanted = {"torch._dynamo", "torch._inductor", "sympy", "wandb", "datasets", "transformers"}
    unwanted |= {"pyarrow", "pandas", "tokenizers", "tiktoken", "matplotlib"}
    assert sorted(loaded & unwanted) == []


# Two ranks


WANDB = """
import os
from pathlib import Path
from types import SimpleNamespace


def init(**options):
    with open(Path(__file__).with_name("runs"), "a") as file:
        file.write(os.environ["RANK"] + "\\n")
    return SimpleNamespace(id="one", log=lambda values, step: None, finish=lambda: None)
"""


def same_weights(one: Path, other: Path, step: int) -> bool:
    a, b = (load_file(f / f"checkpoints/step-{step}/model.safetensors") for f in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_two_ranks_give_one_ranks_weights_and_only_the_first_writes(
    tiny_argv, train_tiny, tmp_path, capsys
):
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "wandb.py").write_text(WANDB)
    options = {"global_batch": 8, "micro_batch": 2, "max_steps": 4, "eval_windows": 7}
    prepared = tmp_path / "prepared"  # nothing there yet: the first prepares, the other waits
    argv = tiny_argv(tmp_path / "two", prepared_dir=prepared, wandb=True, **options)
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    torchrun.append("--rdzv_endpoint=localhost:0")
    process = start(*torchrun, "train.py", *argv, env={**ENV, "PYTHONPATH": str(stubs)})
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    for once in (
        "prepared ",
        "2 ranks, exact reduction",
        "saved ",
        "finished at step 4",
        "generate more: ",
    ):
        assert out.count(once) == 1, once
    assert (stubs / "runs").read_text() == "0\n"
    assert train_tiny(tmp_path / "one", **options) == 0
    assert same_weights(tmp_path / "one", tmp_path / "two", step=4)
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [(line["step"], line["attempt"]) for line in two] == [(1, 1), (2, 1), (4, 1), (4, 1)]
    for name in ("loss", "val_loss", "grad_norm"):
        assert [line.get(name) for line in two] == [line.get(name) for line in one]
    # One rank resumes what two ranks began, to the same bits.
    more = {**options, "max_steps": 6, "resume": "changed"}
    capsys.readouterr()
    assert train_tiny(tmp_path / "two", **more) == 0
    assert "note: world was 2, now 1" in capsys.readouterr().out
    assert train_tiny(tmp_path / "one", **more) == 0
    assert same_weights(tmp_path / "one", tmp_path / "two", step=6)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_read_windows_of_their_own(trained_once, tiny_folder, world):
    data = next((tiny_folder / "prepared").glob("text_txt-char-*"))
    loader = BatchLoader(Windows(data, "train", 16), seed=1, global_batch=16, micro_batch=2)
    seen = []
    for rank in range(world):
        config = Config(data=DataConfig(global_batch=16, micro_batch=2))
        setup = Setup(config, *[None] * 4, Ranks(rank, world))
        seen.append([place for j in setup.local_micro for place in loader.locate(3 * 8 + j)])
    places = [place for of_rank in seen for place in of_rank]
    assert len(places) == len(set(places)) == 16
    assert len({len(of_rank) for of_rank in seen}) == 1
    together = BatchLoader(Windows(data, "train", 16), seed=1, global_batch=16, micro_batch=16)
    assert places == together.locate(3)
