"""LoRA: adapters beside frozen weights, saved alone, merged when read, and PEFT's files."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from faultlib import around_steps
from safetensors.torch import load_file, save_file
from torch import nn

import sample
from cli.options import ConfigError
from data.config import DataConfig
from model.config import ModelConfig
from model.gpt import GPT
from model.huggingface import write_folder
from model.inspect import module_rows
from model.lora import LoraLinear, add_lora, merged
from model.peft import read_adapters, read_settings, write_adapters
from tools.export import __main__ as export
from training.checkpoint import find_checkpoint, load_model_tensors
from training.config import Config, OptimConfig, RunConfig, from_json
from training.memory import estimate_memory, logits_bytes
from training.network import new_network
from training.optimizer import Optimizers
from training.weights import content_hash, find_weights

# C 8, H 2, K 1, D 4, M 16, V 10, T 6, L 2. Rank 2 on q 8x8, k and v 4x8, o 8x8, three of 8x16:
# 2 (16 + 12 + 12 + 16 + 24 + 24 + 24) = 256 per layer.
SMALL = ModelConfig(
    n_layers=2, n_heads=2, n_kv_heads=1, d_model=8, d_mlp=16, context_length=6, vocab_size=10
).resolved(10)
TRAINED = 512
LORA = {"lora_rank": 2, "lora_alpha": 8.0}


def filled(model: GPT, seed: int = 3) -> GPT:
    """The model with random numbers everywhere: projections and B start at zero."""
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.normal_(0.0, 0.2, generator=rng)
    return model


def with_adapters(config: ModelConfig = SMALL) -> GPT:
    model = GPT(config)
    add_lora(model, 2, 8.0, seed=1)
    return filled(model)


def logits(model: GPT) -> torch.Tensor:
    tokens = torch.arange(model.config.context_length)[None] % model.config.vocab_size
    with torch.no_grad():
        return model(tokens)


# The module


def test_a_layer_done_on_paper():
    layer = nn.Linear(2, 2)
    layer.weight.data, layer.bias.data = torch.tensor([[1.0, 0], [0, 2]]), torch.tensor([0.5, 0])
    layer.__class__ = LoraLinear
    layer.scale = 2.0
    layer.lora_a = nn.Parameter(torch.tensor([[1.0, 1.0]]))
    layer.lora_b = nn.Parameter(torch.tensor([[3.0], [0.0]]))
    # W x = (1, 4), A x = 3, B A x = (9, 0)
    assert layer(torch.tensor([1.0, 2.0])).tolist() == [1 + 0.5 + 18, 4]


def test_only_adapters_train_and_the_model_begins_as_it_was():
    model, plain = GPT(SMALL, seed=1), GPT(SMALL, seed=1)
    filled(model, 5), filled(plain, 5)
    add_lora(model, 2, 8.0, seed=1)
    trained = model.trained_parameters()
    assert sum(p.numel() for p in trained.values()) == TRAINED
    assert {name.rpartition(".")[2] for name in trained} == {"lora_a", "lora_b"}
    assert len(trained) == 2 * 7 * 2
    assert torch.equal(logits(model), logits(plain))
    for name, p in trained.items():
        assert bool(p.any()) == name.endswith("lora_a")
    again = GPT(SMALL, seed=None)
    add_lora(again, 2, 8.0, seed=1)
    assert all(torch.equal(p, trained[name]) for name, p in again.trained_parameters().items())
    assert model.layers[0].attn.q_proj.scale == 4.0  # alpha / rank


def test_merged_computes_what_the_adapters_compute():
    model = with_adapters()
    tensors = dict(model.named_parameters())
    adapters = model.trained_parameters()
    base = {name: p for name, p in tensors.items() if name not in adapters}
    plain = GPT(SMALL, seed=None)
    load_model_tensors(dict(plain.named_parameters()), merged(base, adapters, 4.0), "merged")
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=0)
    load_model_tensors(dict(plain.named_parameters()), base, "base")
    assert (logits(plain) - logits(model)).abs().max() > 0.1


def test_adapters_that_do_not_fit_are_listed():
    base = {"a.weight": torch.zeros(4, 3), "b.weight": torch.zeros(4, 3)}
    adapters = {"a.lora_a": torch.zeros(2, 3), "b.lora_a": torch.zeros(2, 3)}
    adapters |= {"b.lora_b": torch.zeros(5, 2)}
    with pytest.raises(ConfigError) as raised:
        merged(base, adapters, 1.0)
    assert [problem[:2] for problem in raised.value.problems] == ["a:", "b:"]


def test_muon_is_off_for_adapters():
    config = OptimConfig(optimizer="muon")
    optimizers = Optimizers(with_adapters(), config, torch.device("cpu"))
    assert [type(part).__name__ for part in optimizers.parts] == ["AdamW"]
    (decay, no_decay) = optimizers.param_groups
    assert (len(decay["params"]), len(no_decay["params"])) == (28, 0)


# Memory


def test_flops_and_memory_done_on_paper():
    model = with_adapters()
    rows = {row.name: row for row in module_rows(model)}
    # Frozen: 4 per weight, not 6. Adapters: 6. Scores and mixing: 12 H D T = 576 per layer.
    assert rows["q_proj"].flops == 4 * 64 + 6 * 32
    assert rows["GPT"].flops == 4 * (2 * (192 + 384) + 80) + 6 * TRAINED + 2 * 576
    data = DataConfig(global_batch=4, micro_batch=4)
    runs = RunConfig(dtype="float32"), RunConfig(dtype="float32", init_from="base", **LORA)
    full, lora = (estimate_memory(Config(SMALL, data, run=run), device="cuda") for run in runs)
    count = GPT(SMALL).parameter_count()
    assert full.weights == 4 * count and lora.weights == 4 * (count + TRAINED)
    assert full.optimizer == 8 * count and lora.optimizer == 8 * TRAINED
    large = replace(SMALL, vocab_size=50_000)  # a loss in chunks: the gradient of the head counts
    saved = logits_bytes(large, 9_000, "float32") - logits_bytes(
        large, 9_000, "float32", trains_head=False
    )
    assert saved == 4 * 8 * 50_000
    assert full.gradients == 4 * count and lora.gradients == 4 * TRAINED


def test_a_frozen_head_gets_no_gradient_and_the_others_are_right(monkeypatch):
    monkeypatch.setattr("model.loss.LARGE_VOCAB", 1)
    monkeypatch.setattr("model.loss.CHUNK_TOKENS", 4)
    run = RunConfig(attention="sdpa", init_from="base", **LORA)
    fast = filled(new_network(SMALL, run, seed=1))
    tokens = torch.arange(12).view(2, 6) % 10
    for model in (fast, plain := with_adapters()):
        model(tokens, tokens.roll(-1)).backward()
    chunked = fast(tokens, tokens.roll(-1), reduction="sum").grad_fn
    assert chunked.name() == "ChunkedLossFunctionBackward"
    assert chunked.saved_tensors[1] is None  # as large as the head
    for (name, p), q in zip(fast.named_parameters(), plain.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-4)
            assert name.endswith(("lora_a", "lora_b"))
        else:
            assert p.grad is None


# Runs


class Killed(BaseException):
    """Ends a run at once, as a kill does."""


@pytest.fixture(scope="module")
def tuned(train_tiny, trained_once, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "tuned"
    assert train_tiny(folder, init_from=trained_once, **LORA) == 0
    return folder


def newest(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints/step-8/model.safetensors")


def test_a_run_saves_its_adapters_alone_and_names_its_base_by_content(tuned, trained_once):
    adapters, base = newest(tuned), find_weights(trained_once)
    assert {name.rpartition(".")[2] for name in adapters} == {"lora_a", "lora_b"}
    assert all(tensor.any() for tensor in adapters.values())
    run = json.loads((tuned / "run.json").read_text())["run"]
    assert run["init_from"] == str(trained_once)
    assert run["base_hash"] == content_hash(base.tensors())
    optim = load_file(tuned / "checkpoints/step-8/optim.safetensors")
    assert {name.partition("::")[0] for name in optim} == adapters.keys()


def test_a_run_is_read_with_its_adapters_merged(tuned, trained_once):
    config = from_json((tuned / "run.json").read_text())
    model = new_network(config.model, config.run, seed=1).eval()
    adapters, base = newest(tuned), find_weights(trained_once).tensors()
    own = dict(model.named_parameters())
    load_model_tensors(own, {**base, **adapters}, "both")
    loaded, _ = find_weights(tuned, "8").load(torch.device("cpu"))
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)
    name = "layers.0.mlp.up_proj"
    low = adapters[f"{name}.lora_b"] @ adapters[f"{name}.lora_a"] * 4.0  # alpha / rank
    merged_weight = loaded.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(merged_weight - base[f"{name}.weight"], low, atol=1e-6, rtol=0)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_killed_run_resumes_to_the_same_bits(
    reduction, train_tiny, trained_once, tuned, tmp_path, monkeypatch
):
    def kill(state, setup):
        if state.step == 6:
            raise Killed

    options = {"init_from": trained_once, "reduction": reduction, **LORA}
    folder = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("training.run.take_step", around_steps(before=kill))
        train_tiny(folder, **options)
    assert train_tiny(folder, **options) == 0
    whole = tuned
    if reduction == "fast":
        whole = tmp_path / "whole"
        assert train_tiny(whole, **options) == 0
    found, wanted = newest(folder), newest(whole)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_both_reductions_and_micro_batches_agree(train_tiny, trained_once, tuned, tmp_path):
    for name, options in {"fast": {"reduction": "fast"}, "whole": {"micro_batch": 4}}.items():
        assert train_tiny(tmp_path / name, init_from=trained_once, **LORA, **options) == 0
        for tensor, wanted in newest(tuned).items():
            torch.testing.assert_close(newest(tmp_path / name)[tensor], wanted, atol=1e-4, rtol=0)


def test_another_base_is_refused_on_resume_and_by_sampling(train_tiny, trained, tmp_path, command):
    options = {"init_from": trained, **LORA}
    folder = tmp_path / "run"
    assert train_tiny(folder, **options) == 0
    path = trained / "checkpoints/step-8"
    shutil.rmtree(trained / "checkpoints/step-4", ignore_errors=True)
    other = trained.parent / "other"
    assert train_tiny(other, seed=2, max_steps=8) == 0
    shutil.rmtree(path)
    shutil.copytree(other / "checkpoints/step-8", path)
    with pytest.raises(ConfigError, match="the adapters were trained beside"):
        train_tiny(folder, **options, max_steps=10)
    code, out, err = command(sample.main, folder)
    assert code == 2 and out == ""
    assert err.startswith(f"error: run.init_from={trained}: the weights there have SHA-256")
    shutil.rmtree(trained)
    code, _, err = command(sample.main, folder)
    assert code == 2 and f"adapters for the weights in {trained}, which cannot be read" in err


def test_adapters_need_weights_and_ids(train_tiny, tmp_path, trained_once):
    with pytest.raises(ConfigError, match=r"run.lora_rank=2: adapters need weights to adapt"):
        train_tiny(tmp_path / "run", **LORA)
    base, talks = tmp_path / "base", tmp_path / "talks.jsonl"
    assert train_tiny(base, tokenizer="byte", max_steps=1) == 0
    lines = [f'{{"prompt": "def f{i}", "completion": "x"}}\n' for i in range(40)]
    talks.write_text("".join(lines))
    chat = {"source": talks, "format": "chat", "split": "document", "prepared_dir": tmp_path / "p"}
    with pytest.raises(ConfigError, match=r"lack 2 ids of the chat template"):
        train_tiny(tmp_path / "run", init_from=base, **LORA, **{**chat, "tokenizer": "byte"})


def test_a_description_of_another_size_is_damage(tuned):
    checkpoint = find_checkpoint(tuned, "8")
    run = json.loads(json.dumps(checkpoint.run)) if isinstance(checkpoint.run, dict) else None
    assert run is not None
    run["model"]["n_layers"] = 10_000
    with pytest.raises(RuntimeError, match="describes a model of at least"):
        replace(checkpoint, run=run).config()


# PEFT's files


@pytest.fixture
def llama(tmp_path) -> tuple[Path, ModelConfig, GPT]:
    """A Hugging Face folder of a small Llama with its config, and a model with adapters on it."""
    config = replace(SMALL, qk_norm=False)
    model = with_adapters(config)
    own, adapters = dict(model.named_parameters()), model.trained_parameters()
    base = {name: p for name, p in own.items() if name not in adapters}
    folder = tmp_path / "base"
    folder.mkdir()
    write_folder(folder, config, base, bos=None, eos=None, never=())
    return folder, config, model


def write_peft(path: Path, llama, **settings) -> Path:
    folder, config, model = llama
    path.mkdir()
    adapters = {name: p.detach() for name, p in model.trained_parameters().items()}
    write_adapters(path, config, adapters, base=str(folder), rank=2, alpha=8.0)
    about = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**about, **settings}))
    return path


def test_the_files_are_those_of_peft(llama, tmp_path):
    path = write_peft(tmp_path / "adapter", llama)
    about = json.loads((path / "adapter_config.json").read_text())
    assert about["peft_type"] == "LORA" and about["r"] == 2 and about["lora_alpha"] == 8
    assert about["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    tensors = load_file(path / "adapter_model.safetensors")
    start = "base_model.model.model.layers.1.self_attn.k_proj"
    assert len(tensors) == 28
    assert tensors[f"{start}.lora_A.weight"].shape == (2, 8)
    assert tensors[f"{start}.lora_B.weight"].shape == (4, 2)
    config, model = llama[1:]
    ours = read_adapters(path, config)
    assert ours.keys() == model.trained_parameters().keys()
    assert all(torch.equal(ours[name], p) for name, p in model.trained_parameters().items())


def test_an_adapter_is_read_with_its_base(llama, tmp_path):
    config, model = llama[1:]
    weights = find_weights(write_peft(tmp_path / "adapter", llama))
    assert weights.config == find_weights(llama[0]).config
    assert weights.origin == f"LoRA adapter of {llama[0]}"
    loaded = GPT(weights.config, seed=None)
    load_model_tensors(dict(loaded.named_parameters()), weights.tensors(), "adapter")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)


def test_gpt2s_joined_matrix_gives_q_k_and_v_their_adapters(tmp_path):
    config = ModelConfig(
        n_layers=1, n_heads=1, d_model=2, norm="layer", mlp="gelu", position="learned", bias=True,
        qk_norm=False, context_length=4,
    ).resolved(5)  # fmt: skip
    a, b = torch.randn(1, 2), torch.arange(6.0).view(6, 1)
    prefix = "base_model.model.transformer.h.0.attn.c_attn"
    tensors = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    found = read_adapters(tmp_path, config)
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        assert torch.equal(found[f"layers.0.attn.{name}.lora_a"], a)
        assert found[f"layers.0.attn.{name}.lora_b"].flatten().tolist() == [2 * i, 2 * i + 1]
    with pytest.raises(ConfigError, match="gpt2 has one matrix for q, k and v"):
        write_adapters(tmp_path, config, found, base="x", rank=1, alpha=1.0)


def test_what_is_not_plain_lora_is_refused_by_name(llama, tmp_path):
    settings = {"use_dora": True, "rank_pattern": {"q_proj": 4}, "init_lora_weights": "pissa"}
    path = write_peft(tmp_path / "adapter", llama, r=0, **settings)
    with pytest.raises(ConfigError) as raised:
        find_weights(path)
    said = str(raised.value)
    for name in ("use_dora=true", 'rank_pattern={"q_proj": 4}', '="pissa"', "r=0: must be"):
        assert name in said
    assert f'("{path}").merge_and_unload()' in said


def test_rank_stabilized_scale(llama, tmp_path):
    path = write_peft(tmp_path / "adapter", llama, use_rslora=True)
    assert read_settings(path).scale == 8 / math.sqrt(2)
    assert read_settings(write_peft(tmp_path / "plain", llama)).scale == 4


def test_tensors_that_do_not_belong_are_named(llama, tmp_path):
    path = write_peft(tmp_path / "adapter", llama)
    tensors = load_file(path / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(2, 8)
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head.lora_A.weight does not belong to a linear"):
        find_weights(path).tensors()
    (path / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_weights(path).tensors()


def test_a_run_is_exported_for_peft(tuned, trained_once, tmp_path, command):
    out = tmp_path / "adapter"
    code, said, err = command(export.main, tuned, "--format=peft", f"--out={out}", "--which=8")
    assert code == 0, err
    base = f"out/{trained_once.name}-hf"
    assert f"write it there with python -m tools.export {trained_once} --format=hf" in said
    assert f"adapters for {base}: 14 tensors, read back equal" in said
    assert read_settings(out).base == base and read_settings(out).scale == 4
    config = find_checkpoint(tuned, "8").config().model
    assert all(
        torch.equal(t, newest(tuned)[name]) for name, t in read_adapters(out, config).items()
    )
    code, _, err = command(export.main, trained_once, "--format=peft", f"--out={tmp_path / 'no'}")
    assert code == 2 and "has no adapters of its own" in err
    assert not (tmp_path / "no").exists()


@pytest.mark.peers
def test_peft_and_we_read_each_other(llama, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder, config, model = llama
    tokens = torch.arange(6)[None]
    path = write_peft(tmp_path / "ours", llama)
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), path
    )
    with torch.no_grad():
        found = theirs.eval()(tokens).logits
    torch.testing.assert_close(found, logits(model), atol=1e-5, rtol=0)

    asked = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=7, target_modules="all-linear")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), asked)
    torch.manual_seed(1)
    for name, p in theirs.named_parameters():
        if "lora_" in name:
            p.data.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        wanted = theirs.eval()(tokens).logits
    weights = find_weights(tmp_path / "theirs")
    loaded = GPT(weights.config, seed=None)
    load_model_tensors(dict(loaded.named_parameters()), weights.tensors(), "theirs")
    torch.testing.assert_close(logits(loaded), wanted, atol=1e-5, rtol=0)
    assert (wanted - found).abs().max() > 0.1


# SmolLM2-135M: memory

MEASURED = """
import resource, sys
from unittest import mock
import train

with mock.patch("training.run.save"), mock.patch("training.messages.say_result"):
    assert train.main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.pretrained
def test_rank_8_needs_less_than_half_the_memory(tmp_path, figure):
    folder = os.environ.get("PLAINGPT_PRETRAINED") or pytest.skip("PLAINGPT_PRETRAINED is not set")
    text = tmp_path / "text.txt"
    text.write_text("It is the east, and Juliet is the sun. Arise, fair sun!\n" * 2000)
    argv = [str(ROOT / "config/finetune_shakespeare.py"), f"--init_from={folder}"]
    argv += [f"--source={text}", f"--prepared_dir={tmp_path / 'prepared'}", "--max_steps=2"]
    argv += ["--context_length=128", "--micro_batch=1", "--global_batch=2", "--eval_windows=1"]
    argv += ["--dtype=float32", "--report=false", "--reduction=fast"]
    peaks, estimates = [], []
    for name, options in {"full": [], "lora": ["--lora_rank=8"]}.items():
        run = tmp_path / name
        command = [sys.executable, "-c", MEASURED, *argv, *options, f"--out_dir={run}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
        estimates.append(estimate_memory(from_json((run / "run.json").read_text())).peak)
    for what, (full, lora) in {"peak RSS": peaks, "estimate": estimates}.items():
        figure(f"memory of rank 8, {what}", f"{lora / full:.0%} of all weights'")
        assert lora <= 0.45 * full, what
