"""Hugging Face folders, read and written: config.json and model.safetensors, by torch alone.

    config, tensors = read_folder(path)       tensors by our names, for GPT(config)
    write_folder(path, config, tensors, ...)  for AutoModelForCausalLM

Llama's and Qwen3's tensors are ours under other names. GPT-2's have q, k and v side by side in one
matrix, and matrices are stored (in, out): its layout exists only here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from model.config import ModelConfig
from model.families import FolderError, from_huggingface, to_huggingface
from model.gpt import GPT

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Replaced one after the other.
LLAMA_NAMES = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^(norm|layers)\.", r"model.\1."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
)
GPT2_NAMES = (
    (r"^embed\.", "transformer.wte."),
    (r"^positions\.", "transformer.wpe."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "transformer.ln_f."),
    (r"^layers\.", "transformer.h."),
    (r"\.attn_norm\.", ".ln_1."),
    (r"\.mlp_norm\.", ".ln_2."),
    (r"\.attn\.[qkv]_proj\.", ".attn.c_attn."),
    (r"\.attn\.o_proj\.", ".attn.c_proj."),
    (r"\.mlp\.up_proj\.", ".mlp.c_fc."),
    (r"\.mlp\.down_proj\.", ".mlp.c_proj."),
)
# Tables that older versions saved with the weights: masks and frequencies, made anew here.
BUFFERS = r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$"


class DamagedFolder(FolderError):
    """Weights that are cut short or are no safetensors."""

    exit_code = 3


class Place(NamedTuple):
    """Where one of our tensors lies in a Hugging Face file."""

    name: str
    transposed: bool = False
    part: int | None = None  # of three in the last dimension: q, k, v


def place_of(name: str, family: str) -> Place:
    """The place of our tensor of this name."""
    theirs = name
    for ours, replacement in GPT2_NAMES if family == "gpt2" else LLAMA_NAMES:
        theirs = re.sub(ours, replacement, theirs)
    if family != "gpt2":
        return Place(theirs)
    projection = re.search(r"\.([a-z]+)_proj\.", name)
    part = "qkv".find(projection[1]) if projection else -1
    matrix = projection is not None and name.endswith(".weight")
    return Place(theirs, transposed=matrix, part=part if part >= 0 else None)


# In


def is_folder(path: Path) -> bool:
    """Whether this is a Hugging Face folder: what it is decides config.json."""
    return (path / "config.json").is_file()


def read_folder(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and tensors, by our names and in the file's dtype.

    Raises FolderError naming what the model does not have, before any weight is read, and what does
    not fit; DamagedFolder for weights that are cut short.
    """
    config = read_config(path)
    return config, read_tensors(path, config)


def read_config(path: Path) -> ModelConfig:
    """The ModelConfig of a folder. Raises FolderError naming what the model does not have."""
    try:
        return from_huggingface(_read_json(path / "config.json"))
    except FolderError as error:
        raise FolderError([f"{path}: {problem}" for problem in error.problems]) from None


def read_tensors(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The folder's tensors by our names; `config` is what `read_config` gave. Raises as above."""
    family = _read_json(path / "config.json")["model_type"]
    try:
        return _read_tensors(path, config, family)
    except (safetensors.SafetensorError, OSError) as error:
        raise DamagedFolder(f"{path}: the weights cannot be read: {error}") from error


def _read_tensors(path: Path, config: ModelConfig, family: str) -> dict[str, Tensor]:
    prefix = "transformer." if family == "gpt2" else "model."
    there = {}  # by the full name: files of the bare model leave the prefix out
    for name, file in _tensor_files(path).items():
        full = name if name.startswith((prefix, "lm_head.")) else prefix + name
        there[full] = (file, name)
    wanted: dict[str, dict[str, Place]] = {}  # their name -> our names
    for ours in own_shapes(config):
        place = place_of(ours, family)
        wanted.setdefault(place.name, {})[ours] = place
    found = {name: where for name, where in there.items() if not re.search(BUFFERS, name)}
    tied_head = found.pop("lm_head.weight", None) if config.tie_embeddings else None
    _check_shapes(path, config, family, found, wanted)
    tensors = {}
    for name, places in wanted.items():
        whole = _tensor(*found[name])
        for ours, place in places.items():
            part = whole if place.part is None else whole.chunk(3, dim=-1)[place.part]
            tensors[ours] = part.t() if place.transposed else part
    if tied_head is not None and not torch.equal(_tensor(*tied_head), tensors["embed.weight"]):
        raise FolderError(
            f"{path}: tie_word_embeddings=true, but lm_head.weight is not the embedding: "
            "set it to false in config.json if the head is its own"
        )
    return tensors


def own_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Names and shapes of the tensors of GPT(config); no memory is taken for them."""
    with torch.device("meta"):
        return {name: p.shape for name, p in GPT(config).named_parameters()}


def _tensor_files(path: Path) -> dict[str, tuple]:
    """{tensor's name: file} of a folder, from the index if the weights are in several files."""
    if (path / INDEX).is_file():
        files = _read_json(path / INDEX).get("weight_map", {})
        # Names come from a file: nothing outside the folder is ever opened.
        strange = [file for file in files.values() if not re.fullmatch(r"[\w-][\w.-]*", str(file))]
        missing = sorted({file for file in files.values() if not (path / str(file)).is_file()})
        if strange or missing:
            raise DamagedFolder(f"{path / INDEX} names {(strange or missing)[0]!r}: not there")
        return {name: path / file for name, file in files.items()}
    if not (path / WEIGHTS).is_file():
        pickled = sorted(file.name for file in path.glob("*.bin"))
        hint = f", only {pickled[0]}, which is never unpickled" if pickled else ""
        raise FolderError(f"{path}: there is no {WEIGHTS}{hint}: save it as safetensors")
    with safetensors.safe_open(path / WEIGHTS, "pt") as file:
        return dict.fromkeys(file.keys(), path / WEIGHTS)


def _tensor(file: Path, name: str) -> Tensor:
    with safetensors.safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


def _check_shapes(
    path: Path,
    config: ModelConfig,
    family: str,
    found: dict[str, tuple],
    wanted: dict[str, dict[str, Place]],
) -> None:
    """Raises FolderError listing all tensors that are missing, too many or of another shape."""
    problems = [f"has no tensor {name}" for name in wanted.keys() - found.keys()]
    problems += [f"has {name}, for which {family} has no use" for name in found.keys() - wanted]
    shapes = own_shapes(config)
    for name in wanted.keys() & found.keys():
        first, place = next(iter(wanted[name].items()))
        shape = list(shapes[first])[::-1] if place.transposed else list(shapes[first])
        if place.part is not None:
            shape[-1] *= 3
        file, stored = found[name]
        with safetensors.safe_open(file, "pt") as opened:
            has = list(opened.get_slice(stored).get_shape())
        if has != shape:
            problems.append(f"has {name} of shape {has}, config.json says {shape}")
    if problems:
        raise FolderError([f"{path} {problem}" for problem in sorted(problems)])


def _read_json(path: Path) -> Any:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FolderError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise FolderError(f"{path} holds no JSON object")
    return found


# Out


def to_theirs(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Our tensors by the family's names and in its layout."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():  # q, k and v come in this order
        place = place_of(name, family)
        plain = tensor.detach().cpu()
        parts.setdefault(place.name, []).append(plain.t() if place.transposed else plain)
    return {name: torch.cat(some, dim=-1).contiguous() for name, some in parts.items()}


def write_folder(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    bos: int | None,
    eos: int | None,
    n_ids: int,
) -> None:
    """Write config.json, generation_config.json and model.safetensors into an existing folder.

    bos, eos: ids that begin and end a document. n_ids: ids that the tokenizer has; the rows of a
    vocabulary padded beyond it are kept, and `generate` is told never to draw them.

    Raises FolderError if no family fits, before anything is written.
    """
    about = to_huggingface(config, bos=bos, eos=eos)
    generation: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": eos}
    if config.vocab_size > n_ids:
        generation["suppress_tokens"] = list(range(n_ids, config.vocab_size))
    theirs = to_theirs(tensors, about["model_type"])
    _write_json(path / "config.json", about)
    _write_json(path / "generation_config.json", generation)
    # Not save_file: it makes files that nobody else may read.
    (path / WEIGHTS).write_bytes(safetensors.torch.save(theirs, metadata={"format": "pt"}))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
