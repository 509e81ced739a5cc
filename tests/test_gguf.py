"""GGUF: what the file holds, what is refused, and that llama.cpp computes the same from it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cli.options import ConfigError
from data.tokenizer import byte_tokenizer, char_tokenizer, chat_tokenizer, hf_from_json, train_bpe
from model.config import ModelConfig
from model.gpt import GPT
from tools.export import __main__ as export
from tools.export.gguf import FILE, export_gguf, pair_neighbors, tensors_of
from tools.export.graph import ExportError
from tools.export.tokenizer import PROBE

gguf = pytest.importorskip("gguf")

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32, "context_length": 96}
GPT2 = {"norm": "layer", "mlp": "gelu", "position": "learned", "qk_norm": False, "bias": True}
GPT2 |= {"tie_embeddings": True, "n_kv_heads": 4}
LLAMA3 = {"qk_norm": False, "bias": True, "rope_scaling": "llama3", "rope_original_context": 64}
SMOLLM3 = {"qk_norm": False, "nope_every": 4, "n_layers": 4}
QWEN2 = {"qk_norm": False, "qkv_bias": True}
LLAMA = {"qk_norm": False}
SHAPES = {"qwen3": {}, "qwen2": QWEN2, "llama": LLAMA, "llama3": LLAMA3}
SHAPES |= {"smollm3": SMOLLM3, "gpt2": GPT2}
TEXTS = [path.read_text() for path in sorted((ROOT / "model").glob("*.py"))]
LLAMA_BPE = train_bpe("bpe:700:llama", 700, TEXTS)


def make(**options) -> GPT:
    """Return a model whose weights, norms and biases too, are drawn at random."""
    model = GPT(ModelConfig(**{**SIZES, **options}, vocab_size=LLAMA_BPE.vocab_size + 3)).eval()
    rng = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=rng)
    return model


def fields(path: Path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


# Weights


def test_queries_and_keys_of_llama_are_stored_with_neighbors_paired():
    # Two heads of width 4: coordinate i turns with i + 2, in the file they are neighbors.
    config = ModelConfig(n_heads=2, d_model=8, vocab_size=1).resolved()
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    name = "layers.0.attn.q_proj.weight"
    paired = pair_neighbors(rows, name, config, "llama")
    assert paired[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(pair_neighbors(paired, name, config, "llama", back=True), rows)
    assert pair_neighbors(rows, name, config, "qwen3") is rows
    assert pair_neighbors(rows, "layers.0.attn.v_proj.weight", config, "llama") is rows


@pytest.mark.parametrize("kind", SHAPES)
def test_every_weight_is_in_the_file(kind, tmp_path):
    model = make(**SHAPES[kind])
    lines = export_gguf(model, LLAMA_BPE, tmp_path, "float32")
    read = {
        t.name: (t.data, [int(n) for n in t.shape])
        for t in gguf.GGUFReader(tmp_path / FILE).tensors
    }
    assert "largest difference of a logit 0.0e+00" in lines[-1]
    ours = dict(model.named_parameters())
    extra = 32 // 4 // 2 if kind == "llama3" else 0  # RoPE's stretching, a number per plane
    assert sum(data.size for data, _ in read.values()) == model.parameter_count() + extra
    assert np.array_equal(read["token_embd.weight"][0], ours["embed.weight"].detach().numpy())
    assert read["token_embd.weight"][1] == [32, LLAMA_BPE.vocab_size + 3]  # fastest first
    up = ours["layers.1.mlp.up_proj.weight"].detach().numpy()
    assert np.array_equal(read["blk.1.ffn_up.weight"][0], up)
    if kind == "gpt2":
        parts = [ours[f"layers.0.attn.{p}_proj.bias"].detach().numpy() for p in "qkv"]
        assert np.array_equal(read["blk.0.attn_qkv.bias"][0], np.concatenate(parts))
        assert "output.weight" not in read  # tied


def test_llama3_scaling_is_a_divisor_per_plane():
    # 64 positions, factor 8, D = 8: wavelengths 2 pi, 63, 628 and 6283 at theta 10000. The first
    # turns 10 times in the original context and is kept, the third less than once: divided by 8.
    found = tensors_of(make(**LLAMA3), "llama")["rope_freqs.weight"]
    assert found[0] == 1.0 and found[2] == found[3] == 8.0
    assert found[1] == pytest.approx(1 / (0.00619724 + (1 - 0.00619724) / 8), rel=1e-4)


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 10), ("bfloat16", 7), ("q8_0", None)])
def test_smaller_types_round_to_the_nearest(dtype, bits, tmp_path):
    model = make()
    export_gguf(model, LLAMA_BPE, tmp_path, dtype)
    expected = tensors_of(model, "qwen3")
    for tensor in gguf.GGUFReader(tmp_path / FILE).tensors:
        found, exact = gguf.dequantize(tensor.data, tensor.tensor_type), expected[tensor.name]
        off = np.abs(found - exact.numpy())
        if exact.dim() == 1:
            assert tensor.tensor_type.name == "F32" and not off.any()
        elif bits:
            assert (off <= np.abs(exact.numpy()) * 2.0 ** -(bits + 1) + 2.0**-25).all()
        elif exact.shape[-1] % 32:  # the MLP is 88 wide
            assert tensor.name.endswith("ffn_down.weight") and tensor.tensor_type.name == "F16"
        else:  # 32 numbers share a scale, a float16: the largest is 127 steps
            step = np.abs(exact.numpy().reshape(-1, 32)).max(-1, keepdims=True) / 127
            assert (off.reshape(-1, 32) <= step * (0.5 + 127 * 2.0**-11)).all()
    assert fields(tmp_path / FILE)["general.file_type"] == {"float16": 1, "bfloat16": 32}.get(
        dtype, 7
    )


def test_a_file_with_other_weights_is_an_error(tmp_path, monkeypatch):
    model = make()
    monkeypatch.setattr(gguf, "quantize", lambda data, kind: data * np.float32(1.01))
    with pytest.raises(ExportError, match="largest difference"):
        export_gguf(model, LLAMA_BPE, tmp_path, "float32")


# Metadata and tokenizer


def test_the_file_says_how_to_compute_and_to_encode(tmp_path):
    export_gguf(make(rope_theta=5e5), LLAMA_BPE, tmp_path, "float32")
    found = fields(tmp_path / FILE)
    assert found["general.architecture"] == "qwen3"
    assert (found["qwen3.attention.head_count"], found["qwen3.attention.head_count_kv"]) == (4, 2)
    assert found["qwen3.attention.key_length"] == 8 and found["qwen3.context_length"] == 96
    assert found["qwen3.rope.freq_base"] == 5e5
    assert found["tokenizer.ggml.pre"] == "llama-bpe"
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert tokens[LLAMA_BPE.encode("\n")[0]] == "\u010a" and tokens[699] == "<|endoftext|>"
    assert tokens[700:] == ["[PAD700]", "[PAD701]", "[PAD702]"]
    assert types[698:] == [1, 3, 5, 5, 5]  # normal, control, unused
    assert found["tokenizer.ggml.eos_token_id"] == 699
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert len(found["tokenizer.ggml.merges"]) == 699 - 256
    assert "tokenizer.chat_template" not in found


def test_a_chat_template_comes_along_and_the_end_of_a_turn_ends_an_answer(tmp_path):
    tokenizer = chat_tokenizer(LLAMA_BPE)
    export_gguf(make(), tokenizer, tmp_path, "float32")
    found = fields(tmp_path / FILE)
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    assert found["tokenizer.ggml.tokens"][700:702] == ["<|im_start|>", "<|im_end|>"]
    assert found["tokenizer.ggml.token_type"][700:702] == [3, 3]
    assert found["tokenizer.ggml.eos_token_id"] == 699
    assert found["tokenizer.ggml.eot_token_id"] == 701


def digits_and_words() -> object:
    """Return a tokenizer that cuts as SmolLM's does: every digit alone, then GPT-2's words."""
    about = json.loads(LLAMA_BPE.files["tokenizer.json"])
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    about["pre_tokenizer"]["pretokenizers"] = [digits, {**words, "use_regex": True}]
    return hf_from_json("hf:x", json.dumps(about), '{"eos_token": "<|endoftext|>"}')


def test_a_tokenizer_gets_the_pre_tokenizer_that_cuts_as_it_does(tmp_path):
    for at, (tokenizer, pre) in enumerate(
        [(byte_tokenizer(), "gpt-2"), (digits_and_words(), "smollm")]
    ):
        (tmp_path / str(at)).mkdir()
        export_gguf(make(), tokenizer, tmp_path / str(at), "float32")
        assert fields(tmp_path / str(at) / FILE)["tokenizer.ggml.pre"] == pre


def test_what_llama_cpp_does_not_have_is_refused_by_name(tmp_path):
    def refused(model, tokenizer, *words):
        with pytest.raises(ConfigError) as caught:
            export_gguf(model, tokenizer, tmp_path, "float32")
        assert all(word in str(caught.value) for word in words), caught.value
        assert not list(tmp_path.iterdir())

    model = make()
    refused(model, train_bpe("bpe:400", 400, TEXTS[:3]), "tokenizer bpe:400", "bpe:N:llama")
    refused(model, char_tokenizer("ab", True), "tokenizer char", "byte-level")
    refused(make(**GPT2 | {"mlp": "gelu_erf"}), LLAMA_BPE, "model.mlp=gelu_erf", "--format=hf")
    refused(make(mlp="relu2"), LLAMA_BPE, "model.mlp=relu2")
    refused(make(**SMOLLM3 | {"nope_every": 3}), LLAMA_BPE, "model.nope_every=3", "has 4")
    scaled = make(rope_scaling="llama3", rope_original_context=64)
    refused(scaled, LLAMA_BPE, "model.rope_scaling=llama3", "qwen3")
    about = json.loads(LLAMA_BPE.files["tokenizer.json"]) | {"normalizer": {"type": "NFKC"}}
    refused(model, hf_from_json("hf:x", json.dumps(about)), "hf:x", "NFKC")


def test_the_command_writes_one_file(train_tiny, tmp_path, command):
    run, out = tmp_path / "run", tmp_path / "gguf"
    assert train_tiny(run, tokenizer="bpe:300:llama", max_steps=1) == 0
    code, said, _ = command(export.main, run, "--format=gguf", f"--out={out}", "--dtype=float16")
    assert code == 0 and "float16, pre-tokenizer llama-bpe" in said
    assert [path.name for path in out.iterdir()] == [FILE]
    code, _, err = command(export.main, run, "--format=onnx", "--dtype=q8_0")
    assert code == 2 and "dtype=q8_0: not for format=onnx" in err and "--format=gguf" in err


# llama.cpp

LLAMA_CPP = os.environ.get("PLAINGPT_LLAMA_CPP", sys.executable)  # a Python with llama-cpp-python
ASK = """
import json, sys
from llama_cpp import Llama
asked = json.load(sys.stdin)
float32 = {"type_k": 0, "type_v": 0}  # of the cache; its default is float16
model = Llama(asked["path"], n_ctx=96, logits_all=True, verbose=False, n_threads=1, **float32)
ids = [model.tokenize(text.encode(), add_bos=False, special=False) for text in asked["texts"]]
back = [model.detokenize(found).decode() for found in ids]
model.eval(asked["prompt"])
logits, greedy = model.scores[model.n_tokens - 1].tolist(), []
for _ in range(64):
    greedy.append(int(model.scores[model.n_tokens - 1].argmax()))
    model.eval(greedy[-1:])
print(json.dumps({"ids": ids, "back": back, "logits": logits, "greedy": greedy}))
"""


def two_hundred_texts() -> list[str]:
    """Return code, prose, and random mixtures of scripts, digits, emoji and white space."""
    rng = random.Random(0)
    source = "".join(TEXTS) + (ROOT / "README.md").read_text()
    cuts = [rng.randrange(len(source)) for _ in range(100)]
    mixed = " \n\t\r'\u2019aZ\u00e9\u0416\u4f60\u597d\u304b\u306a\ud55c\U0001f600\u200d\U0001f525"
    mixed += "e\u0301 \u00a0\u2003\u3000x0123456789\u0665\u00bd.,:;()_=#$+"
    found = [source[at : at + rng.randint(5, 300)] for at in cuts]
    found += ["".join(rng.choices(mixed, k=rng.randint(1, 60))) for _ in range(100)]
    ends = ["  ", "\n \n", "a\n\n  ", " \r\n\t b", "'S 'LL 'Re", " 1234567 ", "<|endoftext|>"]
    return [PROBE, *found, *ends]


@pytest.mark.peers
@pytest.mark.parametrize("kind", SHAPES)
def test_llama_cpp_encodes_and_continues_as_we_do(kind, tmp_path):
    probe = subprocess.run([LLAMA_CPP, "-c", "import llama_cpp"], capture_output=True)
    if probe.returncode:
        pytest.skip("PLAINGPT_LLAMA_CPP must name a Python with llama-cpp-python")
    model = make(**SHAPES[kind])
    tokenizer = {"llama": digits_and_words(), "gpt2": byte_tokenizer()}.get(kind, LLAMA_BPE)
    export_gguf(model, tokenizer, tmp_path, "float32")
    texts, prompt = two_hundred_texts(), LLAMA_BPE.encode("def f(")
    asked = {"path": str(tmp_path / FILE), "texts": texts, "prompt": prompt}
    ran = subprocess.run(
        [LLAMA_CPP, "-c", ASK], input=json.dumps(asked), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for text, ids, back in zip(texts, found["ids"], found["back"], strict=True):
        assert ids == tokenizer.encode(text), text
        assert back == text
    ids = list(prompt)
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0, -1]
        for _ in range(64):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    difference = (torch.tensor(found["logits"]) - logits).abs().max()
    limit = 1e-3 if kind == "gpt2" else 1e-4  # llama.cpp looks GELU up in a float16 table
    assert difference < limit * logits.abs().max()
    assert found["greedy"] == ids[len(prompt) :]
