"""The planner's figures: worked out by hand, held to autograd's own count and to real runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from data.config import DataConfig
from model.config import ModelConfig
from model.fast import speed_up
from model.gpt import GPT
from model.inspect import meta_model, module_rows, parameters_by_part
from model.layers import MLPS
from tools import plan
from training.config import Config, OptimConfig, ParallelConfig, RunConfig
from training.device import PEAKS
from training.memory import activation_bytes, estimate_memory, logits_bytes, partial_sums

ROOT = Path(__file__).parents[1]

# C 8, H 2, K 1, D 4, M 16, V 10, T 6, L 2: small enough to do on paper.
SMALL = ModelConfig(
    n_layers=2, n_heads=2, n_kv_heads=1, d_model=8, d_mlp=16, context_length=6, vocab_size=10
).resolved(10)


def test_parameters_of_a_model_done_on_paper():
    # attention: q 8x8, k and v 8x4, o 8x8; mlp: three of 8x16; norms: two of 8 and two of 4 a layer
    expected = {
        "embedding": 10 * 8,
        "positions": 0,
        "attention": 2 * (64 + 32 + 32 + 64),
        "mlp": 2 * 3 * 128,
        "norms": 2 * (8 + 8 + 4 + 4) + 8,
        "head": 10 * 8,
    }
    assert parameters_by_part(meta_model(SMALL)) == expected


@pytest.mark.parametrize("bias", [True, False])
def test_parts_make_up_the_model(bias):
    config = ModelConfig(
        norm="layer", mlp="gelu", position="learned", bias=bias, tie_embeddings=True
    ).resolved(50)
    parts = parameters_by_part(meta_model(config))
    assert sum(parts.values()) == GPT(config).parameter_count()
    assert parts["positions"] == 256 * 128
    assert parts["head"] == 0


def test_flops_of_the_tree_done_on_paper():
    rows = {row.name: row for row in module_rows(meta_model(SMALL))}
    assert rows["q_proj"].flops == 6 * 8 * 8
    assert rows["scores and mixing"].flops == 12 * 2 * 4 * 6  # 12 H D T
    assert rows["attn"].flops == 6 * 192 + 576
    assert rows["embed"].flops == 0
    assert rows["head"].flops == 6 * 10 * 8
    assert rows["GPT"].flops == 2 * (6 * 192 + 576 + 6 * 384) + 480


@pytest.mark.parametrize("tied", [True, False])
def test_the_tree_adds_up_to_its_first_row(tied):
    config = ModelConfig(n_layers=3, tie_embeddings=tied).resolved(100)
    top, *rows = module_rows(meta_model(config))
    times = [(3 if row.name.startswith("layers") else 1, row) for row in rows if row.depth == 1]
    assert sum(n * row.flops for n, row in times) == top.flops
    assert sum(n * row.parameters for n, row in times) == top.parameters


def test_time_is_work_over_speed():
    # 3.6e18 FLOPs on 2 devices of 100 TFLOP/s at half their peak: 36,000 s
    assert plan.training_seconds(3.6e18, 100e12, 0.5, 2) == 36_000
    assert set(plan.GPUS) <= set(PEAKS)


# Memory


@pytest.mark.parametrize(("M", "held"), [(1, 0), (2, 1), (3, 1), (4, 2), (6, 2), (8, 3), (12, 3)])
def test_gradients_that_are_held_while_the_last_is_computed(M, held):
    assert partial_sums(M) == held


class Branches(nn.Module):
    """An MLP of the user's own: child modules in a list, 3-D shapes, another path in training."""

    gated = True  # as wide as swiglu, which it replaces

    def __init__(self, d_model: int, d_mlp: int, bias: bool) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(d_model, d_mlp) for _ in range(3))
        self.down_proj = nn.Linear(d_mlp, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        hidden = sum(F.gelu(up(x)) for up in self.ups).view(B, T, -1)
        return self.down_proj(F.dropout(hidden, 0.1) if self.training else hidden)


class Routed(nn.Module):
    """An MLP for some of the tokens: its shapes depend on values."""

    gated = False

    def choose(self, x: torch.Tensor) -> int:
        return len((x[..., 0] < 1e9).nonzero())

    def __init__(self, d_model: int, d_mlp: int, bias: bool) -> None:
        super().__init__()
        self.down_proj = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(x.flatten(0, 1)[: self.choose(x)]).view(x.shape)


class Counted(Routed):
    """The same, by a number that leaves torch."""

    def choose(self, x: torch.Tensor) -> int:
        return int((x[..., 0] < 1e9).sum())


@pytest.fixture(autouse=True)
def _mlps_of_our_own(monkeypatch):
    monkeypatch.setitem(MLPS, "branches", Branches)
    monkeypatch.setitem(MLPS, "routed", Routed)
    monkeypatch.setitem(MLPS, "counted", Counted)
    monkeypatch.setattr("model.config.wrong_types", lambda *given: [])  # not among the choices


def autograd_bytes(config: Config) -> int:
    """Bytes that autograd keeps of a real forward pass and loss, weights apart."""
    model = GPT(config.model, config.run.attention)
    speed_up(model)
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(config.data.micro_batch, config.model.context_length, dtype=torch.int64)
    documents = tokens if config.data.document_mask else None
    narrow = torch.autocast("cpu", torch.bfloat16, enabled=config.run.dtype != "float32")
    with narrow, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens, documents, reduction="sum")
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


LEARNED = {"norm": "layer", "mlp": "gelu", "position": "learned", "qk_norm": False, "bias": True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("options", "document_mask", "attention"),
    [
        ({}, False, "sdpa"),
        ({}, False, "reference"),
        ({}, True, "tiled"),
        ({"mlp": "relu2", "n_kv_heads": 2}, False, "sdpa"),
        (LEARNED, True, "sdpa"),
        ({"d_head": 32, "qk_norm": False, "tie_embeddings": True}, False, "sdpa"),
        ({"dropout": 0.1}, False, "sdpa"),
        ({"dropout": 0.1, "attention_dropout": 0.0}, True, "sdpa"),
        ({"mlp": "branches"}, False, "sdpa"),
        ({"mlp": "routed"}, False, "sdpa"),
        ({"mlp": "counted"}, False, "sdpa"),
    ],
)
def test_activations_are_what_autograd_keeps(options, document_mask, attention, dtype):
    model = ModelConfig(n_layers=2, d_model=64, context_length=32, **options).resolved(100)
    data = DataConfig(global_batch=4, micro_batch=4, document_mask=document_mask)
    config = Config(model=model, data=data, run=RunConfig(dtype=dtype, attention=attention))
    loss = 4 * 32 * (4 * 100 + 9)  # log-probabilities; targets, and whether they count
    expected = autograd_bytes(config) - loss
    assert activation_bytes(config) == expected
    ours = GPT(model, attention)  # with values, as at the start of a run
    speed_up(ours)
    assert activation_bytes(config, model=ours) == expected


def test_activations_on_a_gpu_done_on_paper():
    """What PyTorch's fused kernels keep there, for a machine that has no GPU."""
    C, A, K, M, H, Hkv, T, L = 8, 8, 4, 16, 2, 1, 32, 2
    config = config_of(replace(SMALL, context_length=T))
    ids, tables, tokens = 8, 2 * 4 * T * 2, 8 * T
    norms = 4 * (C + 1)  # a norm keeps its input and 1 / rms
    heads = A + K + 2 * (H + Hkv)  # 1 / rms is float32
    full = 2 * norms + 4 * (A + K + H + Hkv) + 2 * 4 * C  # QK-norm; inputs of q, k, v and the MLP
    full += 4 * (2 * A + 2 * K + H) + 4 * M * 4  # q, k, v, out, log of the sums; the MLP
    total = tokens * (L * full + norms + 4 * C + ids) + tables
    assert activation_bytes(config, "cuda") == pytest.approx(total, abs=64)
    # bfloat16: each product casts a copy of its input; rotated heads are copied side by side
    half = 2 * norms + 2 * heads + 2 * 5 * C
    half += 2 * (2 * A + 2 * K) + 4 * H + 2 * A + 2 * M * 4
    copies = 2 * (2 * (C * 2 * A + C * 2 * K + 3 * C * M) + 10 * C)
    total = tokens * (L * half + norms + 2 * C + ids) + tables + copies
    narrow = replace(config, run=RunConfig(dtype="bfloat16"))
    assert activation_bytes(narrow, "cuda") == pytest.approx(total, abs=64)
    routed = replace(config, model=replace(config.model, mlp="routed"))
    assert activation_bytes(routed, "cuda") == activation_bytes(routed, "cpu")
    with_dropout = replace(narrow, model=replace(narrow.model, attention_dropout=0.5))
    assert activation_bytes(with_dropout, "cuda") == activation_bytes(narrow, "cuda")
    masked = replace(narrow, data=replace(narrow.data, document_mask=True))
    more = tokens * L * (2 * T - 2 * A)  # a mask; the kernel with a mask has heads side by side
    assert activation_bytes(masked, "cuda") == pytest.approx(total + more, abs=64)


def config_of(model: ModelConfig, world: int = 1, **options) -> Config:
    return Config(
        model=model,
        data=DataConfig(global_batch=8, micro_batch=8 // world),
        optim=OptimConfig(optimizer=options.pop("optimizer", "adamw")),
        parallel=ParallelConfig(reduction=options.pop("reduction", "exact")),
        run=RunConfig(dtype="float32", **options),
    )


def test_memory_done_on_paper():
    memory = estimate_memory(config_of(SMALL), device="cuda")
    weights = 4 * (80 + 384 + 768 + 56 + 80)
    assert memory.weights == weights
    assert memory.gradients == weights
    assert memory.optimizer == 2 * weights  # mean and variance
    assert memory.logits == 8 * 6 * 10 * 12  # 48 tokens, three times 10 floats
    assert memory.activations == activation_bytes(config_of(SMALL), "cuda")
    assert memory.peak == 3 * weights + max(weights, memory.activations + memory.logits)


def test_muon_keeps_one_slot_for_a_matrix():
    adamw, muon = (
        estimate_memory(config_of(SMALL, optimizer=name), device="cuda")
        for name in ("adamw", "muon")
    )
    assert adamw.optimizer - muon.optimizer == 4 * (384 + 768)


def test_two_ranks_halve_activations_and_add_what_is_exchanged():
    one = estimate_memory(config_of(SMALL), 1, "cuda")
    two = estimate_memory(config_of(SMALL, world=2), 2, "cuda")
    assert two.activations * 2 == pytest.approx(one.activations, abs=200)  # tables are there once
    assert two.weights == one.weights
    assert two.gradients == 3 * one.weights  # the sum, what is sent, what is received


def test_fast_reduction_adds_in_place_and_keeps_ddps_buckets():
    config = config_of(SMALL, reduction="fast")
    one = estimate_memory(config, 1, "cuda")
    assert one.gradients == one.weights
    split = replace(config, data=DataConfig(global_batch=8, micro_batch=4))
    several = estimate_memory(split, 1, "cuda")  # the second micro-batch beside the first's
    assert several.gradients == one.weights
    assert several.peak == 4 * one.weights + several.activations + several.logits
    assert several.activations * 2 == pytest.approx(one.activations, abs=200)
    two = estimate_memory(split, 2, "cuda")  # a micro-batch each
    assert two.gradients == 2 * one.weights
    assert two.peak == 4 * one.weights + two.activations + two.logits


def test_logits_of_a_large_vocabulary_are_made_in_chunks():
    small, large = (ModelConfig(d_model=64).resolved(V) for V in (1_000, 50_000))
    assert logits_bytes(small, 5_000, "float32", "cuda") == 5_000 * 1_000 * 12
    assert logits_bytes(large, 1_024, "float32", "cuda") == 1_024 * 50_000 * 12
    assert logits_bytes(large, 5_000, "float16", "cuda") == 1_024 * 50_000 * 14
    gradients = 4 * 64 * (50_000 + 5_000)  # of the head and of what it is given
    assert logits_bytes(small, 5_000, "float32") == 5_000 * (1_000 * 8 + 9)
    assert logits_bytes(large, 5_000, "float32") == 1_024 * 50_000 * 8 + gradients
    assert logits_bytes(large, 5_000, "bfloat16", "cuda") == 1_024 * 50_000 * 10 + gradients
    wide = ModelConfig(d_model=4096).resolved(50_000)
    assert logits_bytes(wide, 5_000, "float32") == 2 * 64 * gradients


MEASURE = """
import contextlib, io, os, sys
sys.path.insert(0, "tests")
import numpy, safetensors.torch, tokenizers, tiktoken, torch, tqdm
import test_plan, train, data.prepare, training.run, training.messages, training.startup
from model.layers import MLPS
from training.config import from_json
from training.memory import estimate_memory

training.messages.SAMPLE_TOKENS = 2

def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

for number, options in enumerate(sys.argv[2:]):
    read, write = os.pipe()
    if os.fork() == 0:  # each size in a process of its own, from the same start
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
        before, out = resident("VmRSS"), f"{sys.argv[1]}/{number}"
        if options.startswith("own "):
            MLPS["swiglu"] = test_plan.Branches
        argv = options.removeprefix("own ").split()
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(["config/debug.py", f"--out_dir={out}", *argv])
        peak = resident("VmHWM") - before
        estimate = estimate_memory(from_json(open(out + "/run.json").read())).peak
        os.write(write, f"{peak} {estimate}".encode())
        os._exit(0)
    os.close(write)
    print(os.read(read, 1000).decode(), flush=True)
    os.wait()
"""

SMALL_RUNS = {
    "activations": "--n_layers=6 --d_model=64 --context_length=128 --batch=64",
    "logits": "--n_layers=1 --d_model=64 --context_length=256 --batch=10 --vocab_size=16000",
}
LARGE_RUNS = {
    "an MLP of the user's own": "--n_layers=6 --d_model=64 --context_length=256 --batch=64",
    "activations": "--n_layers=6 --d_model=64 --context_length=256 --batch=64",
    "weights": "--n_layers=2 --d_model=1280 --n_heads=8 --context_length=32 --batch=4",
    "logits": "--n_layers=1 --d_model=64 --context_length=256 --batch=20 --vocab_size=16000",
    "chunks": "--n_layers=1 --d_model=512 --context_length=256 --batch=8 --vocab_size=40000",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("runs", "least"),
    [(SMALL_RUNS, 200e6), pytest.param(LARGE_RUNS, 500e6, marks=pytest.mark.faults)],
    ids=["small", "large"],
)
def test_memory_is_what_real_runs_take(tmp_path, runs, least):
    common = "--tokenizer=char --workers=0 --dtype=float32 --device=cpu --threads=1 --max_steps=2 "
    common += "--eval_interval=2 --eval_windows=1 --optimizer=adamw --report=false "
    (tmp_path / "text.txt").write_text("a quick brown fox\n" * 2000)
    common += f"--source={tmp_path / 'text.txt'} --prepared_dir={tmp_path / 'prepared'} "
    sizes = []
    for name, options in runs.items():
        rest, _, batch = options.partition("--batch=")
        batch, _, more = batch.partition(" ")
        own = "own " if "own" in name else ""
        sizes.append(f"{own}{common} {rest} {more} --global_batch={batch} --micro_batch={batch}")
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    found = [tuple(map(int, line.split())) for line in ended.stdout.splitlines()]
    assert len(found) == len(runs), ended.stdout
    for name, (measured, estimate) in zip(runs, found, strict=True):
        print(f"{name}: {estimate / 1e6:.0f} MB estimated, {measured / 1e6:.0f} measured")
        assert measured > least, name
        assert estimate == pytest.approx(measured, rel=0.15), name


# The command


def test_the_plan_of_a_config(command, tmp_path):
    code, out, err = command(
        plan.main, ROOT / "config/debug.py", "--ranks=2", "--mfu=0.5", f"--prepared_dir={tmp_path}"
    )
    assert code == 0, err
    # 20 steps of 8 x 64 tokens; two matrices of 257 x 64, two layers, norms
    count = 2 * 257 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64 + 2 * 32) + 64
    assert f"{count:,} parameters, 20 steps of 8 x 64 = 512 tokens: 10,240 tokens" in out
    assert f"{10_240 / count:.2f} tokens per parameter" in out
    assert "2 ranks" in out
    assert "time on 2 of these at 50% of the peak" in out
    assert "gate_proj" in out


@pytest.mark.parametrize("config", sorted((ROOT / "config").glob("*.py")), ids=lambda p: p.stem)
def test_every_config_that_is_shipped_has_a_plan(config, command, tmp_path, monkeypatch):
    monkeypatch.setattr("training.device.measured_peak", lambda *args, **options: 1e11)
    code, out, err = command(plan.main, config, f"--prepared_dir={tmp_path}")
    assert (code, err) == (0, "")
    assert "memory per rank, MB         1 rank" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--mfu=2"], "mfu=2.0: must be in (0, 1]"),
        (["--ranks=8"], "ranks=8: 8 windows in micro-batches of 4 do not spread"),
        (["--ranks", "0"], "ranks=0: must be at least 1"),
        (["--n_layer=3"], "did you mean --model.n_layers?"),
        (["--vocab_size=5"], "model.vocab_size=5: the tokenizer has 257 ids"),
    ],
)
def test_mistakes_are_told(command, argv, said, tmp_path):
    nothing_prepared = f"--prepared_dir={tmp_path}"
    code, out, err = command(plan.main, ROOT / "config/debug.py", nothing_prepared, *argv)
    assert code == 2
    assert said in err
    assert out == ""


def test_weights_to_start_from_bring_their_shape(command, trained, tmp_path):
    config, prepared = ROOT / "config/finetune_shakespeare.py", f"--prepared_dir={tmp_path}"
    argv = [config, "--context_length=16", "--tokenizer=char", prepared]
    code, out, err = command(plan.main, *argv, f"--init_from={trained}")
    assert code == 0, err
    weights = load_file(trained / "checkpoints/step-8/model.safetensors")
    count = sum(weight.numel() for weight in weights.values())
    assert out.startswith(f"{count:,} parameters, ")
    code, out, err = command(plan.main, *argv, f"--init_from={tmp_path / 'nowhere'}")
    assert code == 0, err
    assert f"run.init_from={tmp_path / 'nowhere'}: not here; the shape is the config's" in out


def test_a_vocabulary_that_nobody_knows_yet_is_said_to_be_assumed(tmp_path):
    data = DataConfig(source=str(tmp_path / "none.txt"), tokenizer="char")
    size, meta, note = plan.vocabulary(Config(data=data))
    assert (size, meta) == (128, None)
    assert "assumed" in note
