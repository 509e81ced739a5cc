"""From a config to a run: resolved options, weights to start from, torch.compile."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faultlib import Job
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

import train
from cli.options import ConfigError
from model.gpt import GPT
from training import startup
from training.config import OPTIONS, Config, OptimConfig, with_values
from training.console import Console
from training.distributed import Ranks


def resolved(world: int = 1, **options) -> Config:
    options = {"device": "cpu", "dtype": "float32", **options}
    values = {OPTIONS[name].full_name: value for name, value in options.items()}
    config = with_values(Config(), values)
    return startup.resolve(config, Ranks(0, world), vocab_size=300, console=Console())


# Resolved options


def test_nothing_stays_open(capsys):
    config = resolved(global_batch=8)
    assert config.data.micro_batch == 8
    assert config.model.vocab_size == 300
    assert config.model.d_head * config.model.n_heads == config.model.d_model
    assert config.run.threads == torch.get_num_threads()
    assert (config.run.attention, config.parallel.reduction) == ("sdpa", "exact")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_ranks_share_the_batch_unless_micro_batch_is_given():
    assert resolved(world=2, global_batch=8).data.micro_batch == 4
    assert resolved(world=2, global_batch=8, micro_batch=1).data.micro_batch == 1


@pytest.mark.parametrize(
    ("world", "options", "numbers"),
    [
        (2, {"global_batch": 5, "micro_batch": 1}, ["5 micro-batches", "2 ranks"]),
        (2, {"global_batch": 5}, ["global_batch=5", "2 ranks"]),
        (4, {"global_batch": 12, "micro_batch": 2}, ["6 micro-batches", "4 ranks"]),
        (8, {"global_batch": 4}, ["4 micro-batches", "8 ranks"]),
        (
            3,
            {"global_batch": 6, "micro_batch": 2, "reduction": "exact"},
            ["parallel.reduction=exact: the number of ranks, 3, "],
        ),
    ],
)
def test_a_batch_that_ranks_cannot_share_is_refused_with_both_numbers(world, options, numbers):
    with pytest.raises(ConfigError) as caught:
        resolved(world, **options)
    assert all(number in str(caught.value) for number in numbers)


def test_the_optimizer_knows_the_format_that_the_run_computes_in():
    config = replace(resolved(global_batch=8), optim=OptimConfig(optimizer="muon"))
    for dtype in ("float32", "bfloat16"):
        of_dtype = with_values(config, {"run.dtype": dtype})
        setup = startup.build_setup(of_dtype, GPT(config.model), Ranks(), Console())
        assert setup.optimizers.parts[1].dtype == getattr(torch, dtype)


def test_only_runs_on_a_cpu_keep_freed_memory(monkeypatch):
    kept = []
    monkeypatch.setattr(startup, "keep_freed_memory", lambda: kept.append(True))
    config = resolved(global_batch=8)
    startup.prepare_process(with_values(config, {"run.device": "cuda"}))
    assert not kept
    startup.prepare_process(config)
    assert kept


def test_a_deterministic_run_tells_cublas_before_anything_is_computed(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    told = []

    def tries(config, ranks):
        told.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return 4

    monkeypatch.setattr(startup, "pick_micro_batch", tries)
    for deterministic in (False, True):
        resolved(global_batch=8, micro_batch="auto", deterministic=deterministic)
    assert told == [None, ":4096:8"]


# Weights to start from


def optimizer_steps(folder: Path, step: int) -> set[float]:
    """AdamW's own counters in a checkpoint."""
    state = load_file(folder / f"checkpoints/step-{step}/optim.safetensors")
    return {float(value) for name, value in state.items() if name.endswith("::step")}


@pytest.fixture
def finetune(tiny_argv, trained, tmp_path, monkeypatch):
    """finetune(...): a run in tmp_path/fine that starts from the tiny run's weights. The model is
    left to the weights, as in a config that says nothing about it."""
    monkeypatch.setattr("training.messages.SAMPLE_TOKENS", 10)

    def run(init_from: Path = trained, **options) -> int:
        options = {"init_from": init_from, "max_steps": 2, **options}
        argv = tiny_argv(tmp_path / "fine", **options)
        left_open = ("--n_layers=1", "--n_heads=2", "--d_model=16", "--context_length=16")
        argv = [text for text in argv if text not in left_open]
        plain = tmp_path / "plain.py"
        plain.write_text("from training.config import Config\nconfig = Config()\n")
        return train.main([str(plain), *argv[1:]])

    return run


def test_a_run_starts_from_another_runs_weights_with_a_new_optimizer(finetune, tmp_path, trained):
    assert finetune(lr=1e-12, warmup_steps=0) == 0
    fine = tmp_path / "fine"
    assert optimizer_steps(trained, 8) == {8}
    assert optimizer_steps(fine, 2) == {2}
    started = load_file(trained / "checkpoints/step-8/model.safetensors")
    for name, tensor in load_file(fine / "checkpoints/step-2/model.safetensors").items():
        assert torch.allclose(tensor, started[name], atol=1e-6)
    model = json.loads((fine / "run.json").read_text())["model"]
    assert model == json.loads((trained / "run.json").read_text())["model"]


def test_options_that_come_from_the_weights_are_printed(finetune, capsys):
    finetune()
    out = capsys.readouterr().out
    assert "step-8 (step 8), the optimizer starts fresh" in out
    said = next(line for line in out.splitlines() if line.startswith("from the weights:"))
    assert "n_layers=1" in said
    assert "d_model=16" in said
    assert "dropout" not in said


@pytest.mark.parametrize("name", ["checkpoints/step-4", "."])
def test_a_checkpoint_or_a_run_can_be_named(finetune, trained, tmp_path, name):
    assert finetune(trained / name, lr=1e-12, warmup_steps=0) == 0
    step = 4 if "step" in name else 8
    started = load_file(trained / f"checkpoints/step-{step}/model.safetensors")
    found = load_file(tmp_path / "fine/checkpoints/step-2/model.safetensors")
    assert torch.allclose(found["embed.weight"], started["embed.weight"], atol=1e-6)


def test_options_that_contradict_the_weights_are_listed(finetune, tmp_path):
    with pytest.raises(ConfigError) as caught:
        finetune(n_layers=3, d_model=32, context_length=32)
    told = str(caught.value)
    assert "model.n_layers=3: the weights in" in told
    assert "model.d_model=32: the weights in" in told
    assert "model.context_length=32: the weights in" in told
    assert "remove these options" in told
    assert not (tmp_path / "fine/run.json").exists()


def test_dropout_and_a_shorter_context_may_differ(finetune, tmp_path):
    assert finetune(dropout=0.3, attention_dropout=0.1, context_length=8) == 0
    model = json.loads((tmp_path / "fine/run.json").read_text())["model"]
    assert (model["dropout"], model["context_length"], model["n_layers"]) == (0.3, 8, 1)
    assert model["attention_dropout"] == 0.1
    assert finetune(dropout=0.3, attention_dropout=0.1, context_length=8) == 0  # goes on


def test_a_shorter_context_takes_the_first_learned_positions(train_tiny, finetune, tmp_path):
    train_tiny(tmp_path / "learned", position="learned", max_steps=1)
    assert finetune(tmp_path / "learned", context_length=8, lr=1e-12, warmup_steps=0) == 0
    before = load_file(tmp_path / "learned/checkpoints/step-1/model.safetensors")
    after = load_file(tmp_path / "fine/checkpoints/step-2/model.safetensors")
    first = before["positions.weight"][:8]
    assert torch.allclose(after["positions.weight"], first, atol=1e-6)


def test_weights_of_another_tokenizer_are_refused(train_tiny, finetune, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("ABCDEFGHIJKLMNOPQRSTUVWX" * 50)  # 24 characters too, but not the same
    options = {"source": other, "val_fraction": 0.3}
    train_tiny(tmp_path / "other", **options, max_steps=1)
    with pytest.raises(ConfigError, match="data.tokenizer=char .* its ids are not those"):
        finetune(**options, tokenizer=f"run:{tmp_path / 'other'}")
    with pytest.raises(ConfigError, match="the char tokenizer does not know 'A'"):
        finetune(**options)


def test_a_checkpoint_without_optimizer_state_is_enough_to_start_from(finetune, trained):
    (trained / "checkpoints/step-8/optim.safetensors").unlink()
    assert finetune() == 0


@pytest.mark.parametrize(
    ("place", "said"),
    [("nowhere", "no such folder"), ("tiny/checkpoints", "no checkpoint there")],
)
def test_missing_weights_are_one_line(finetune, tmp_path, place, said):
    with pytest.raises(ConfigError, match=said) as caught:
        finetune(tmp_path / place)
    assert len(caught.value.problems) == 1


def test_a_resume_no_longer_needs_the_weights_to_start_from(finetune, trained, tmp_path):
    assert finetune() == 0
    shutil.rmtree(trained)
    assert finetune(resume="changed", max_steps=3) == 0
    assert optimizer_steps(tmp_path / "fine", 3) == {3}


# torch.compile


def test_without_a_compiler_the_run_continues_with_a_note(
    train_tiny, trained_once, tmp_path, monkeypatch, capsys
):
    def compile(self):
        def broken(*args, **options):
            raise RuntimeError("InvalidCxxCompiler: no working C++ compiler\nand much more")

        self._compiled_call_impl = broken

    monkeypatch.setattr(GPT, "compile", compile)
    assert train_tiny(tmp_path, compile=True) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "torch.compile" in line]
    assert said == [
        "note: torch.compile does not work here (InvalidCxxCompiler: no working C++ compiler); "
        "continuing without it"
    ]
    found = load_file(tmp_path / "checkpoints/step-8/model.safetensors")
    for name, tensor in load_file(trained_once / "checkpoints/step-8/model.safetensors").items():
        assert torch.equal(found[name], tensor)


def compile_eagerly(monkeypatch) -> list[int]:
    """Graphs that are traced run as they are; the number of nodes of each is added to the list."""
    graphs: list[int] = []

    def backend(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph

    monkeypatch.setattr(GPT, "compile", lambda self: torch.nn.Module.compile(self, backend=backend))
    return graphs


def test_only_the_training_step_is_compiled(train_tiny, tmp_path, monkeypatch):
    """One graph, tried before the first step. Evaluation (its last block is smaller) and samples
    (of every length) would compile others in mid-run, where a failure costs the run."""
    graphs = compile_eagerly(monkeypatch)
    monkeypatch.setattr("training.evaluate.CPU_TOKENS", 3 * 16)
    run = {"compile": True, "eval_interval": 2, "eval_windows": 7, "report": True}
    assert train_tiny(tmp_path, **run, sample_prompt="def ", max_steps=4) == 0
    assert len(graphs) == 1
    start = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["start"]
    assert start["environment"]["compiled"] is True


@pytest.mark.parametrize("broken", [0, 1])
def test_a_compiler_that_fails_on_one_rank_is_used_on_none(broken, tiny_argv, train_tiny, tmp_path):
    def patch() -> None:
        def compile(self):
            def fails(*args, **options):
                raise RuntimeError("no working C++ compiler")

            own = os.environ["RANK"] == str(broken)
            self._compiled_call_impl = fails if own else self._call_impl

        GPT.compile = compile

    argv = tiny_argv(tmp_path / "two", compile=True, timeout=30, reduction="exact")
    job = Job(2, argv, tmp_path / "logs", before=patch)
    assert job.wait() == [0, 0], job.text()
    notes = [line for line in job.text().splitlines() if "torch.compile does not work" in line]
    assert len(notes) == 1 and ("no working" if broken == 0 else "1 of 2 ranks") in notes[0]
    start = json.loads((tmp_path / "two/metrics.jsonl").read_text().splitlines()[0])["start"]
    assert start["environment"]["compiled"] is False
    assert train_tiny(tmp_path / "one") == 0
    two, one = (tmp_path / f"{n}/checkpoints/step-8/model.safetensors" for n in ("two", "one"))
    assert load_file(two)["embed.weight"].equal(load_file(one)["embed.weight"])


def test_running_out_of_memory_is_not_taken_for_a_compiler_error(train_tiny, tmp_path, monkeypatch):
    def compile(self):
        def full(*args, **options):
            raise torch.OutOfMemoryError("CUDA out of memory")

        self._compiled_call_impl = full

    monkeypatch.setattr(GPT, "compile", compile)
    with pytest.raises(torch.OutOfMemoryError):
        train_tiny(tmp_path, compile=True)


def test_a_fast_run_is_compiled_within_ddp_and_sends_nothing(monkeypatch, capsys):
    """Only there does torch cut the graph where DDP's buckets end."""
    calls, quiet = [], []

    class Ddp:
        def __init__(self, model, **options):
            self.model = model
            assert options == {"broadcast_buffers": False}

        def no_sync(self):
            return contextlib.nullcontext(quiet.append(True))

        def __call__(self, *args, **options):
            calls.append(len(quiet))
            return self.model(*args, **options)

    monkeypatch.setattr(startup, "DistributedDataParallel", Ddp)
    monkeypatch.setattr(Ranks, "sum_ints", lambda self, values, what: values)
    monkeypatch.setattr(GPT, "compile", lambda self: None)
    config = resolved(global_batch=8, micro_batch=4)
    config = with_values(config, {"parallel.reduction": "fast", "run.compile": True})
    setup = startup.build_setup(config, GPT(config.model), Ranks(0, 2), Console())
    assert calls == [1] and "note" not in capsys.readouterr().out
    assert all(p.grad is None for p in setup.model.parameters())


def test_ddp_sends_no_buffers_whatever_the_option_is_called(monkeypatch):
    class Newer:
        def __init__(self, module, broadcast_buffers=None, forward_sync_buffers=None):
            pass

    class Older:
        def __init__(self, module, broadcast_buffers=True):
            pass

    (name,) = startup._without_buffers()
    assert name in inspect.signature(DistributedDataParallel).parameters
    for ddp, name in ((Newer, "forward_sync_buffers"), (Older, "broadcast_buffers")):
        monkeypatch.setattr(startup, "DistributedDataParallel", ddp)
        assert startup._without_buffers() == {name: False}


def test_a_compiled_run_saves_plain_names_and_can_be_resumed_uncompiled(
    train_tiny, trained_once, tmp_path, monkeypatch
):
    """Really traced, but the traced graph runs uncompiled: compiling takes a minute."""
    compiled = []

    def compile(self):
        compiled.append(self)
        torch.nn.Module.compile(self, backend="eager")

    monkeypatch.setattr(GPT, "compile", compile)
    assert train_tiny(tmp_path, compile=True, max_steps=2) == 0
    assert len(compiled) == 1
    names = load_file(tmp_path / "checkpoints/step-2/model.safetensors").keys()
    plain = load_file(trained_once / "checkpoints/step-8/model.safetensors").keys()
    assert names == plain
    assert train_tiny(tmp_path, compile=False, max_steps=3, resume="changed") == 0
    assert train_tiny(tmp_path, compile=True, max_steps=4, resume="changed") == 0
    assert len(compiled) == 2
