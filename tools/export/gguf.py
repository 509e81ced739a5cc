"""GGUF: model.gguf, weights and tokenizer in one file, for llama.cpp, Ollama and LM Studio.

llama.cpp computes Llama's RoPE on neighboring rows, Qwen's on halves as transformers does. The file
has no regular expressions, only names of patterns that llama.cpp knows: a tokenizer that cuts text
into words in any other way is refused.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cli.options import ConfigError
from data.tokenizer import LLAMA_PATTERN, Tokenizer
from model.config import ResolvedConfig
from model.gpt import GPT
from model.huggingface import FAMILIES, family_of, their_names
from model.rope import rope_frequencies
from tools.export.graph import ExportError, compare, make_cases
from tools.export.tokenizer import PROBE, verified_tokenizer

FILE = "model.gguf"
# --dtype -> names in the library, and the largest difference of a logit, times the largest logit.
DTYPES = {
    "float32": ("F32", "ALL_F32", 1e-6),
    "float16": ("F16", "MOSTLY_F16", 2e-2),
    "bfloat16": ("BF16", "MOSTLY_BF16", 1e-1),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0", 1e-1),
}
ARCHITECTURES = {  # our families -> the library's names
    "gpt2": "GPT2",
    "llama": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "smollm3": "SMOLLM3",
}
NEIGHBORS = ("llama", "smollm3")  # these rotate neighboring rows of queries and keys
Q8_BLOCK = 32  # numbers that share a scale

# How llama.cpp cuts text into words, by its own names (src/llama-vocab.cpp of
# github.com/ggml-org/llama.cpp), as pre-tokenizers of `tokenizers`. Whoever has the same words has
# the same ids: the merges are in the file.
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "llama-bpe": [{"type": "Split", "pattern": {"Regex": LLAMA_PATTERN}}],
    "qwen2": [{"type": "Split", "pattern": {"Regex": LLAMA_PATTERN.replace("{1,3}", "")}}],
    "gpt-2": [{**BYTES, "use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}],
}
NEVER = "\u00ff \u00ff"  # two bytes 0xFF: a merge that no text needs, where there must be one


def export_gguf(model: GPT, tokenizer: Tokenizer, folder: Path, dtype: str) -> list[str]:
    """Write model.gguf into `folder`, read it back and compare; return lines on what was verified.

    Raises ConfigError naming what llama.cpp does not have, ExportError if the file is wrong.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError("format=gguf: needs its library: pip install gguf") from None
    config = model.config
    family = family_of(config)
    problems = _unsupported(config, family)
    if problems:
        raise ConfigError(problems)
    vocabulary, notes = read_vocabulary(tokenizer, config)
    kind, file_type, limit = DTYPES[dtype]
    writer = gguf.GGUFWriter(folder / FILE, ARCHITECTURES[family].lower())
    _add_model(writer, config, family)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, tokenizer, vocabulary)
    stored = {}
    for name, tensor in tensors_of(model, family).items():
        stored[name] = gguf.GGMLQuantizationType[_stored_as(name, tensor, kind)]
        packed = gguf.quantize(tensor.numpy(), stored[name])
        writer.add_tensor(name, packed, raw_dtype=stored[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = [name for name, has in stored.items() if kind == "Q8_0" and has.name == "F16"]
    if whole:
        notes.append(
            f"{len(whole)} of {len(stored)} tensors are float16: q8_0 needs rows of a multiple of "
            f"{Q8_BLOCK}"
        )
    loaded = read_back(folder / FILE, model, family)
    line = compare(lambda case: loaded(case.ids)[:, case.P :], make_cases(model), limit)
    how = f"{len(stored)} tensors, {dtype}, pre-tokenizer {vocabulary.pre}"
    return [*notes, f"{FILE}: {how}; read back: {line}"]


def _unsupported(config: ResolvedConfig, family: str) -> list[str]:
    """Return what llama.cpp's class of this family does not compute."""
    ways = "export it with --format=hf, onnx, torchscript or torch_export"
    if family not in ARCHITECTURES:
        return [f"format=gguf: {family} is not supported; {ways}"]
    found = []
    if config.mlp == "gelu_erf":
        found.append(f"model.mlp=gelu_erf: llama.cpp's {family} has gelu; {ways}")
    if config.nope_every not in (0, 4):
        found.append(f"model.nope_every={config.nope_every}: llama.cpp's {family} has 4")
    if config.rope_scaling != "none" and family != "llama":
        found.append(f"model.rope_scaling={config.rope_scaling}: not in llama.cpp's {family}")
    return found


def _add_model(writer: Any, config: ResolvedConfig, family: str) -> None:
    """Add the sizes of the model."""
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.d_mlp)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_vocab_size(config.vocab_size)
    if family == "gpt2":
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_key_length(config.d_head)
    writer.add_value_length(config.d_head)
    writer.add_rope_dimension_count(config.d_head)
    writer.add_rope_freq_base(config.rope_theta)


# Tensors


def tensors_of(model: GPT, family: str) -> dict[str, Tensor]:
    """Return the tensors by llama.cpp's names, float32, matrices as (out, in)."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    config, ours = model.config, dict(model.named_parameters())
    names = get_tensor_name_map(MODEL_ARCH[ARCHITECTURES[family]], config.n_layers)
    found = {}
    for theirs, parts in their_names(ours, FAMILIES[family]).items():
        stem, _, kind = theirs.rpartition(".")
        rows = [pair_neighbors(ours[name].detach(), name, config, family) for name in parts]
        found[f"{names.get_name(stem)}.{kind}"] = torch.cat(rows).contiguous()
    if config.rope_scaling != "none":  # llama.cpp divides each plane's frequency by its number
        plain = rope_frequencies(replace(config, rope_scaling="none"))
        found["rope_freqs.weight"] = (plain / rope_frequencies(config)).float()
    return found


def pair_neighbors(
    tensor: Tensor, name: str, config: ResolvedConfig, family: str, back: bool = False
) -> Tensor:
    """Reorder the rows of queries and keys: RoPE's planes from halves to neighbors."""
    if family not in NEIGHBORS or ".q_proj." not in name and ".k_proj." not in name:
        return tensor
    D, rest = config.d_head, tensor.shape[1:]
    planes = (D // 2, 2) if back else (2, D // 2)
    return tensor.reshape(-1, *planes, *rest).transpose(1, 2).reshape(tensor.shape)


def _stored_as(name: str, tensor: Tensor, kind: str) -> str:
    """Return the type of a tensor in the file: vectors and positions stay float32."""
    if tensor.dim() == 1 or name.startswith("position_embd"):
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % Q8_BLOCK else kind


def read_back(path: Path, model: GPT, family: str) -> GPT:
    """Return a copy of the model with the weights of a file."""
    from gguf import GGUFReader, dequantize

    read = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}
    loaded = deepcopy(model)
    ours, expected = dict(loaded.named_parameters()), tensors_of(model, family)
    if read.keys() != expected.keys():
        raise ExportError(f"{path}: holds {sorted(read.keys() ^ expected.keys())} or lacks them")
    by_names = zip(their_names(ours, FAMILIES[family]).values(), expected, strict=False)
    with torch.no_grad():
        for parts, name in by_names:
            whole = torch.from_numpy(np.array(read[name])).view(expected[name].shape)
            for part, rows in zip(parts, whole.split([len(ours[p]) for p in parts]), strict=True):
                ours[part].copy_(pair_neighbors(rows, part, model.config, family, back=True))
    return loaded


# Tokenizer


class Vocabulary(NamedTuple):
    """What llama.cpp needs to know of a byte-level BPE."""

    pre: str  # its name for how the text is cut into words
    tokens: list[str]
    types: list[int]
    merges: list[str]


def read_vocabulary(tokenizer: Tokenizer, config: ResolvedConfig) -> tuple[Vocabulary, list[str]]:
    """Return the vocabulary of all the model's ids, and notes on what differs in llama.cpp.

    Raises ConfigError naming the tokenizer if GGUF cannot express it.
    """
    from gguf import TokenType

    content, _, _ = verified_tokenizer(tokenizer, config.context_length)
    about, notes = json.loads(content), []
    bpe, name = about["model"], f"tokenizer {tokenizer.name}"
    if bpe["type"] != "BPE" or '"ByteLevel"' not in json.dumps(about["decoder"]):
        raise ConfigError(
            f"{name}: GGUF is written for byte-level BPE only; train with --tokenizer=byte or "
            "bpe:N:llama, or export with --format=hf"
        )
    if tokenizer.eot is None:
        raise ConfigError(f"{name}: has no end-of-text token, which llama.cpp needs")
    if about["normalizer"] is not None:
        if about["normalizer"]["type"] != "NFC":
            raise ConfigError(f"{name}: llama.cpp has no {about['normalizer']['type']} normalizer")
        notes.append("llama.cpp does not normalize text to NFC as this tokenizer does")
    pre = "gpt-2" if not bpe["merges"] else _pre_tokenizer(about, name)
    tokens = [f"[PAD{i}]" for i in range(config.vocab_size)]
    types = [TokenType.UNUSED] * config.vocab_size
    for text, i in bpe["vocab"].items():
        tokens[i], types[i] = text, TokenType.NORMAL
    for token in about["added_tokens"]:
        tokens[token["id"]], types[token["id"]] = token["content"], TokenType.USER_DEFINED
    for text, i in tokenizer.special.items():
        tokens[i], types[i] = text, TokenType.CONTROL
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    return Vocabulary(pre, tokens, [int(t) for t in types], merges or [NEVER]), notes


def _pre_tokenizer(about: dict[str, Any], name: str) -> str:
    """Return llama.cpp's name for the way this tokenizer cuts PROBE into words."""

    def words(steps: list[dict[str, Any]]) -> list[tuple[int, int]]:
        from tokenizers import Tokenizer as Loaded

        small = {"type": "BPE", "vocab": {}, "merges": []}
        defaults = {"behavior": "Isolated", "invert": False}
        steps = [defaults | step if step["type"] == "Split" else step for step in steps]
        made = {"version": "1.0", "model": small}
        made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        cut = Loaded.from_str(json.dumps(made)).pre_tokenizer.pre_tokenize_str(PROBE)
        return [span for _, span in cut]

    steps = about["pre_tokenizer"]
    found = words(steps["pretokenizers"] if steps["type"] == "Sequence" else [steps])
    for pre, theirs in PRE_TOKENIZERS.items():
        if words(theirs) == found:
            return pre
    raise ConfigError(
        f"{name}: llama.cpp cannot cut text into words as this tokenizer does; it knows "
        f"{', '.join(PRE_TOKENIZERS)}. Train with --tokenizer=bpe:N:llama, or export with "
        "--format=hf"
    )


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")  # any byte-level BPE
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(tokenizer.bos[0] if tokenizer.bos else tokenizer.eot)
    writer.add_eos_token_id(tokenizer.eot)
    writer.add_pad_token_id(tokenizer.eot)
    turn_ends = [i for i in tokenizer.ends if i != tokenizer.eot]
    if turn_ends:  # the file has room for one
        writer.add_eot_token_id(turn_ends[0])
    writer.add_add_bos_token(bool(tokenizer.bos))
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
