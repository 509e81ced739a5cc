"""Exports run elsewhere: in transformers, onnxruntime and a fresh process with torch alone."""

from __future__ import annotations

import base64
import errno
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sample
from cli.options import ConfigError
from data.tokenizer import (
    Tokenizer,
    byte_tokenizer,
    char_tokenizer,
    chat_tokenizer,
    hf_from_json,
    load_tokenizer,
    tiktoken_from_ranks,
    train_bpe,
)
from model.config import ModelConfig
from model.gpt import GPT
from tools.export import __main__ as export
from tools.export import graph, huggingface
from tools.export import onnx as export_onnx
from tools.export.graph import GraphGPT, empty_past, make_cases
from tools.export.tokenizer import PROBE, write_tokenizer
from training.weights import find_weights

CONTEXT = 96
# The architecture of config/small.py (Qwen3's) with grouped heads, and GPT-2's with a tied head.
SMALL = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32, "context_length": CONTEXT}
GPT2 = {"norm": "layer", "mlp": "gelu", "position": "learned", "qk_norm": "false", "bias": "true"}
GPT2 |= {"tie_embeddings": "true", "n_kv_heads": "none"}
FORMATS = ["hf", "onnx", "torchscript", "torch_export"]


@pytest.fixture(scope="module")
def small(train_tiny, tmp_path_factory) -> Path:
    """A run of 12 steps with BPE and Muon, as in config/small.py."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    options = {"tokenizer": "bpe:300", "optimizer": "muon", "max_steps": 12, "eval_interval": 12}
    assert train_tiny(folder, **SMALL, **options, checkpoint_interval=12) == 0
    return folder


@pytest.fixture(scope="module")
def model(small) -> GPT:
    return find_weights(small).load(torch.device("cpu"))[0]


@pytest.fixture(scope="module")
def exported(small, tmp_path_factory):
    """exported("onnx") -> the folder of the small run in that format, exported once."""
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("exports") / kind
            before = os.umask(0o077)  # where others may not read new files
            try:
                export.main([str(small), f"--format={kind}", f"--out={made[kind]}"])
            finally:
                os.umask(before)
        return made[kind]

    return folder_of


@pytest.fixture
def greedy_text(command, small) -> str:
    options = ["--temperature=0", "--max_new_tokens=64", "--ignore_eot", "--device=cpu"]
    code, out, _ = command(sample.main, small, "--prompt=def f1(", *options)
    assert code == 0
    return out.removesuffix("\n")


# The output folder


@pytest.mark.parametrize("kind", FORMATS)
def test_everybody_may_read_an_export_and_its_tokenizer(exported, kind):
    folder = exported(kind)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o755
    ids = load_tokenizer(folder if kind == "hf" else folder / "tokenizer").encode("def f1(x):")
    assert ids == load_tokenizer(exported("onnx") / "tokenizer").encode("def f1(x):")


def test_an_existing_folder_is_not_touched(small, tmp_path, command):
    (tmp_path / "mine").write_text("precious")
    code, _, err = command(export.main, small, f"--out={tmp_path}")
    assert code == 2
    assert f"out={tmp_path}: already exists" in err
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_model_that_fits_no_class_leaves_nothing_behind(train_tiny, tmp_path, command):
    run, out = tmp_path / "run", tmp_path / "hf"
    train_tiny(run, mlp="relu2", max_steps=1)
    code, _, err = command(export.main, run, f"--out={out}")
    assert code == 2
    assert "model.mlp=relu2" in err and "--format=onnx" in err
    assert not list(tmp_path.glob("*hf*"))


SLOW = pytest.param("onnx", marks=pytest.mark.faults)  # its exporter takes half a minute


@pytest.mark.parametrize("kind", ["hf", SLOW, "torchscript", "torch_export"])
def test_a_full_disk_is_reported_with_the_file(kind, small, tmp_path, command):
    out, before = tmp_path / kind, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))  # the weights alone are larger
    try:
        code, _, err = command(export.main, small, f"--format={kind}", f"--out={out}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 5 and err.count("error: ") == 1
    assert f"'{out}" in err and "partial" not in err
    assert not list(tmp_path.iterdir())


def test_a_read_only_disk_is_reported_with_the_folder(small, tmp_path, command, monkeypatch):
    def refused(path, *arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    code, _, err = command(export.main, small, f"--out={tmp_path / 'hf'}")
    assert code == 5 and err.endswith(f"'{tmp_path / 'hf'}'\n")


# An export that computes something else


def other_theta(monkeypatch):
    write = huggingface.write_folder

    def wrong(folder, config, *rest, **options):
        write(folder, replace(config, rope_theta=20000.0), *rest, **options)

    monkeypatch.setattr(huggingface, "write_folder", wrong)


def late_positions(monkeypatch):
    forward = GraphGPT.forward

    def wrong(self, tokens, *past):  # positions are one too low, but only after a past
        self.model.rope.cos = self.model.rope.cos.roll(-int(past[0].shape[2] > 0), 0)
        return forward(self, tokens, *past)

    monkeypatch.setattr(GraphGPT, "forward", wrong)


MISTAKES = [("hf", other_theta), ("torchscript", late_positions)]


@pytest.mark.parametrize(("kind", "mistake"), MISTAKES)
def test_an_export_that_computes_something_else_is_an_error(
    kind, mistake, small, tmp_path, command, monkeypatch
):
    mistake(monkeypatch)
    code, _, err = command(export.main, small, f"--format={kind}", f"--out={tmp_path / 'x'}")
    assert code == 4
    assert "largest difference" in err and "allowed" in err
    assert not list(tmp_path.iterdir())


def test_an_operator_that_tensorrt_lacks_is_an_error(
    small, exported, tmp_path, command, monkeypatch
):
    made = exported("onnx") / "model.onnx"
    monkeypatch.setattr(torch.onnx, "export", lambda *given, **_: shutil.copy(made, given[2]))
    monkeypatch.setattr(export_onnx, "TENSORRT_OPERATORS", "Add Mul")
    code, _, err = command(export.main, small, "--format=onnx", f"--out={tmp_path / 'x'}")
    assert code == 4
    assert "operators that TensorRT lacks" in err and "Softmax" in err
    assert not list(tmp_path.iterdir())


def test_a_nan_or_one_wrong_logit_is_beyond_the_limit(model):
    cases = make_cases(model)
    assert {(*case.logits.shape[:2], case.P) for case in cases} >= {(1, 1, 20), (3, 37, 0)}
    for wrong in (float("nan"), 1.0):
        logits = iter([case.logits for case in cases[:-1]] + [cases[-1].logits + wrong])
        with pytest.raises(graph.ExportError, match=re.escape(f"{wrong:.1e}")):
            graph.compare(lambda case, logits=logits: next(logits), cases, 1e-4)
    assert "0.0e+00" in graph.compare(lambda case: case.logits, cases, 1e-4)


def test_a_context_too_short_to_trace_is_refused():
    config = ModelConfig(n_layers=1, d_model=16, context_length=7).resolved(20)
    with pytest.raises(ConfigError, match="model.context_length=7"):
        graph.example_inputs(config)


# Hugging Face


def test_transformers_continues_as_sample_py_does(exported, greedy_text):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(exported("hf"), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported("hf"))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == len(tokenizer) - 1
    given = tokenizer("def f1(", return_tensors="pt")
    model.generation_config.eos_token_id = None  # as with --ignore_eot
    found = model.generate(**given, max_new_tokens=64, do_sample=False)
    assert found.shape[1] == given["input_ids"].shape[1] + 64
    assert tokenizer.decode(found[0]).replace("<|endoftext|>", "") == greedy_text


PROMPTS = ["def f1(", "x", "def f2(x):\n    return"]


def test_the_first_lines_of_a_user_of_transformers_work(exported):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(exported("hf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported("hf"))
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)  # on the left
    together = model.generate(**batch, **options)
    for prompt, ids in zip(PROMPTS, together.tolist(), strict=True):
        alone = tokenizer(prompt, return_tensors="pt")
        assert model.generate(**alone, **options)[0].tolist() == ids[-len(alone[0]) - 8 :]
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    written = pipe(PROMPTS[0], return_full_text=False, **options)[0]["generated_text"]
    assert written == tokenizer.decode(together[0, -8:], skip_special_tokens=True)
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    rows = collate([tokenizer(prompt) for prompt in PROMPTS])
    n_pads = rows["labels"].shape[1] - 1
    assert rows["labels"][1].tolist() == [-100] * n_pads + tokenizer("x")["input_ids"]
    assert model(**rows).loss.isfinite()


def test_a_chat_template_is_exported_with_the_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    tokenizer = chat_tokenizer(train_bpe("bpe:400", 400, TEXTS))
    write_tokenizer(tokenizer, tmp_path, 64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    expected = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert loaded.apply_chat_template(turns, tokenize=False) == expected
    assert loaded("<|im_end|>")["input_ids"] == [tokenizer.special["<|im_end|>"]]


def test_a_bfloat16_folder_is_half_as_large_and_loads_as_bfloat16(
    small, exported, command, tmp_path
):
    import transformers

    out = tmp_path / "half"
    code, said, _ = command(export.main, small, f"--out={out}", "--dtype=bfloat16")
    assert code == 0 and "largest difference" in said
    sizes = [(path / "model.safetensors").stat().st_size for path in (out, exported("hf"))]
    assert 0.5 * sizes[1] < sizes[0] < 0.6 * sizes[1]
    half, whole = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        for path in (out, exported("hf"))
    )
    assert half.dtype == torch.bfloat16 and whole.dtype == torch.float32
    assert torch.equal(half.lm_head.weight, whole.lm_head.weight.bfloat16())


def test_a_tied_head_stays_tied_and_padding_is_never_drawn(train_tiny, command, tmp_path):
    import transformers

    # The vocabulary is padded to 64: the text has fewer characters.
    train_tiny(tmp_path / "run", **SMALL | GPT2, vocab_size=64, max_steps=4)
    code, out, _ = command(export.main, tmp_path / "run", f"--out={tmp_path / 'hf'}")
    assert code == 0
    assert "GPT2LMHeadModel" in out and "largest difference" in out
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert model.lm_head.weight is model.transformer.wte.weight
    n_ids = load_tokenizer(tmp_path / "hf").vocab_size
    assert n_ids < model.config.vocab_size == 64
    torch.manual_seed(0)
    prompts, mask = torch.zeros(20, 1, dtype=torch.int64), torch.ones(20, 1, dtype=torch.int64)
    options = {"do_sample": True, "temperature": 5.0, "top_k": 0, "max_new_tokens": 90}
    assert int(model.generate(prompts, attention_mask=mask, **options).max()) < n_ids


# Tokenizers

TEXTS = [
    "The cat's 12345 hats, we've seen 3.14!\n\n  x = f(y)\n",
    PROBE,
    "def f(x):\n    return x\n",
]


def as_tiktoken(pattern: str) -> Tokenizer:
    """Train a BPE, as tiktoken's ranks; its end-of-text is two ids above the last piece."""
    trained = train_bpe("bpe:500", 500, TEXTS * 3)
    pieces = [piece for piece in trained.table if piece]
    lines = [f"{base64.b64encode(piece).decode()} {i}\n" for i, piece in enumerate(pieces)]
    about = {"name": "cl100k_base", "pattern": pattern}
    special = {"<|fim|>": len(pieces) + 1, "<|endoftext|>": len(pieces) + 2}
    about |= {"vocab_size": len(pieces) + 3, "special": special}
    return tiktoken_from_ranks(about, "".join(lines))


# From tiktoken's source: possessive quantifiers, and $ for the end of the text.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
OURS = {
    "byte": byte_tokenizer,
    "char": lambda: char_tokenizer("".join(sorted(set(PROBE) | {"\u2581", "<", "|"})), True),
    "char without an end": lambda: char_tokenizer("\n abc", False),
    "bpe": lambda: train_bpe("bpe:400", 400, TEXTS),
    "gpt2": lambda: as_tiktoken(GPT2_PATTERN),
    "cl100k_base": lambda: as_tiktoken(CL100K_PATTERN),
}


@pytest.mark.parametrize("kind", OURS)
def test_an_exported_tokenizer_gives_the_same_ids_and_text(kind, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = OURS[kind]()
    write_tokenizer(tokenizer, tmp_path, 64)
    theirs, back = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    texts = ["", " ", "a b\n\nc  "] if kind == "char without an end" else ["", " ", *TEXTS]
    if kind == "char":
        texts = ["", " ", PROBE]
    for text in texts:
        ids = tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == text
        assert back.encode(text) == ids
        assert back.decode(ids) == text
    assert theirs.eos_token_id == tokenizer.eot == back.eot
    assert back.special == tokenizer.special
    assert back.table == tokenizer.table


def test_a_tokenizer_that_tokenizer_json_cannot_express_is_refused_by_name(tmp_path):
    # Oniguruma takes \d{1,2}+ for a repetition, so longer numbers would be one piece.
    odd = as_tiktoken(r"\d{1,3}+|[^\d\n]+|\n+")
    name = "plaingpt_tokenizer.json"
    odd.files[name] = odd.files[name].replace("1,3", "1,2")
    with pytest.raises(ConfigError, match="tokenizer cl100k_base: cannot become"):
        write_tokenizer(odd, tmp_path, 64)


def test_an_imported_tokenizer_json_is_kept_as_it_was(tmp_path):
    text = train_bpe("bpe:300", 300, TEXTS).files["tokenizer.json"]
    config = '{"eos_token": "<|endoftext|>", "bos_token": {"content": "!"}, "chat": 1}'
    tokenizer = hf_from_json("hf:x", text, config)
    _, named = write_tokenizer(tokenizer, tmp_path, 64)
    assert (tmp_path / "tokenizer.json").read_text() == text
    assert '"chat": 1' in (tmp_path / "tokenizer_config.json").read_text()
    assert named == {"bos_token": tokenizer.encode("!")[0], "pad_token": tokenizer.eot}


# Graphs


def open_onnx(path: Path):
    """Return run(tokens, past) -> [logits, *present] of a model.onnx."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options)
    names = [given.name for given in session.get_inputs()]

    def run(tokens, past) -> list[torch.Tensor]:
        tensors = zip(names, (tokens, *past), strict=True)
        found = session.run(None, {name: tensor.numpy() for name, tensor in tensors})
        return [torch.from_numpy(array) for array in found]

    return run


@torch.no_grad()
def test_onnx_computes_the_same_at_every_shape(model, exported):
    run, config = open_onnx(exported("onnx") / "model.onnx"), model.config
    rng = torch.Generator().manual_seed(3)
    for B, T, P in itertools.product((1, 3), (1, 8, 37), (0, 20)):
        ids = torch.randint(config.vocab_size, (B, P + T), generator=rng)
        expected, past = model(ids), empty_past(config, B)
        if P:
            _, *past = run(ids[:, :P], past)
        logits, *present = run(ids[:, P:], past)
        assert present[0].shape == (B, config.n_kv_heads, P + T, config.d_head)
        scale = max(1.0, float(expected.abs().max()))
        assert float((logits - expected[:, P:]).abs().max()) <= 1e-4 * scale, (B, T, P)


def test_onnxruntime_continues_as_sample_py_does(model, exported, greedy_text):
    run = open_onnx(exported("onnx") / "model.onnx")
    tokenizer = load_tokenizer(exported("onnx") / "tokenizer")
    ids = tokenizer.encode("def f1(")
    logits, *past = run(torch.tensor([ids]), empty_past(model.config, 1))
    for _ in range(64):
        ids.append(int(logits[0, -1].argmax()))
        logits, *past = run(torch.tensor([ids[-1:]]), past)
    assert tokenizer.decode(ids) == greedy_text


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_onnx_refuses_positions_beyond_the_context(position, tmp_path):
    shape = {"n_layers": 1, "n_heads": 2, "d_model": 16, "context_length": 16}
    model = GPT(ModelConfig(**shape, position=position).resolved(20)).eval()
    model.init_weights(1)
    export_onnx.export_onnx(model, tmp_path)
    run = open_onnx(tmp_path / "model.onnx")
    for P, T in itertools.product(range(17), (1, 2, 5, 17)):
        tokens, past = torch.zeros(1, T, dtype=torch.int64), empty_past(model.config, 1, P)
        if P + T <= 16:
            assert run(tokens, past)[0].shape == (1, T, 20)
            continue
        with pytest.raises(Exception, match="out of data bounds|invalid index"):
            run(tokens, past)


def test_onnx_is_well_formed_and_made_of_tensorrt_operators(exported):
    import onnx

    path = exported("onnx") / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    found = onnx.load(str(path)).graph
    listed = set(export_onnx.TENSORRT_OPERATORS.split())
    assert 100 < len(listed) < 160
    assert {node.op_type for node in found.node} <= listed
    sizes = [d for i in found.input for d in i.type.tensor_type.shape.dim]
    assert {d.dim_param for d in sizes if d.dim_param} == {"batch", "length", "past"}
    assert [i.name for i in found.input][:2] == ["input_ids", "past_key_values.0.key"]
    assert [output.name for output in found.output][:2] == ["logits", "present.0.key"]


def test_the_tensorrt_command_names_every_input(model):
    line = export_onnx.trtexec_line(Path("x/model.onnx"), model.config)
    assert line.startswith("trtexec --onnx=x/model.onnx --saveEngine=x/model.engine ")
    for option in ("min", "opt", "max"):
        assert line.count(f"--{option}Shapes=input_ids:") == 1
    assert line.count("past_key_values.1.value:") == 3
    assert "--minShapes=input_ids:1x1,past_key_values.0.key:1x2x0x8," in line
    assert line.endswith("past_key_values.1.value:4x2x48x8")


FRESH = """
import json, sys, torch
path, n_layers, H, D, ids = json.loads(sys.argv[1])
module = torch.jit.load(path) if path.endswith(".pt") else torch.export.load(path).module()
past, new = [torch.zeros(1, H, 0, D)] * (2 * n_layers), ids
with torch.no_grad():
    for _ in range(64):
        logits, *past = module(torch.tensor([new]), *past)
        new = [int(logits[0, -1].argmax())]
        ids = ids + new
print(json.dumps(ids))
assert not [name for name in sys.modules if name.split(".")[0] in ("model", "tools", "training")]
"""


@pytest.mark.parametrize("name", ["torchscript/model.pt", "torch_export/model.pt2"])
def test_torch_alone_continues_as_sample_py_does(name, model, exported, greedy_text, tmp_path):
    kind, file = name.split("/")
    tokenizer = load_tokenizer(exported(kind) / "tokenizer")
    config, ids = model.config, tokenizer.encode("def f1(")
    path = str(exported(kind) / file)
    given = json.dumps([path, config.n_layers, config.n_kv_heads, config.d_head, ids])
    ended = subprocess.run(
        [sys.executable, "-c", FRESH, given], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert tokenizer.decode(json.loads(ended.stdout)) == greedy_text
