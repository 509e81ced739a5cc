"""Where our tensors lie in Hugging Face's files: under which name, in which layout.

Llama's and Qwen3's tensors are ours under other names. GPT-2's have q, k and v side by side in one
matrix, and its matrices are stored (in, out): that layout exists only here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

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


def to_theirs(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Our tensors by the family's names and in its layout."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():  # q, k and v come in this order
        place = place_of(name, family)
        plain = tensor.detach().cpu()
        parts.setdefault(place.name, []).append(plain.t() if place.transposed else plain)
    return {name: torch.cat(some, dim=-1).contiguous() for name, some in parts.items()}
