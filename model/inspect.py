"""Look inside a model: its parts and their cost, and what each head attends to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import CausalSelfAttention, reference_attention
from model.config import ModelConfig
from model.gpt import GPT, Block, inference, matrix_flops

PARTS = ("embedding", "positions", "attention", "mlp", "norms", "head")


@dataclass(frozen=True)
class Row:
    """One line of the module tree: a module, or work that is not done by a module of its own."""

    depth: int
    name: str
    shape: str
    parameters: int
    flops: int  # of forward and backward, per token


def meta_model(config: ModelConfig) -> GPT:
    """Build a model with shapes but no values: no memory, but a second to import torch's compiler,
    which "meta" tensors need to compute."""
    with torch.device("meta"):
        return GPT(config)


def parameters_by_part(model: GPT) -> dict[str, int]:
    """Count the parameters of each of PARTS: {"embedding": ..., ...}; a tied head has none."""
    counts = dict.fromkeys(PARTS, 0)
    for name, p in model.named_parameters():
        top = name.partition(".")[0]
        part = "embedding" if top == "embed" else top
        if "norm" in name:
            part = "norms"
        elif top == "layers":
            part = "attention" if ".attn." in name else "mlp"
        counts[part] += p.numel()
    return counts


def module_rows(model: GPT) -> Iterator[Row]:
    """Yield every module from the top; of the equal layers one, with the figures of one layer.

    The FLOPs are those of GPT.flops_per_token at the full context. The rows of depth 1, the layers'
    times their number, add up to the first row.
    """
    c = model.config
    T = c.context_length
    yield Row(0, "GPT", "", model.parameter_count(), model.flops_per_token(T))
    for name, module in model.named_children():
        if isinstance(module, nn.ModuleList):  # the layers
            yield Row(1, f"layers: {len(module)} alike, each", "", *_cost(module[0], T))
            yield from _inner_rows(module[0], 2, T)
        elif any(True for _ in module.parameters()):
            yield Row(1, name, _shape(module), *_cost(module, T))
    if c.tie_embeddings:
        shape = f"{c.vocab_size} x {c.d_model}"
        yield Row(1, "head: the embedding's", shape, 0, matrix_flops(model.head_weight))


def _inner_rows(parent: nn.Module, depth: int, T: int) -> Iterator[Row]:
    for name, module in parent.named_children():
        if any(True for _ in module.parameters()):
            yield Row(depth, name, _shape(module), *_cost(module, T))
            yield from _inner_rows(module, depth + 1, T)
    if isinstance(parent, CausalSelfAttention):
        yield Row(depth, "scores and mixing", "", 0, _mixing(parent, T))


def _cost(module: nn.Module, T: int) -> tuple[int, int]:
    """Return (parameters, FLOPs per token) of a module and everything in it."""
    flops = 0
    for part in module.modules():
        if isinstance(part, nn.Linear):
            matrices = [p for p in part.parameters(recurse=False) if p.dim() == 2]
            flops += sum(map(matrix_flops, matrices))
        elif isinstance(part, CausalSelfAttention):
            flops += _mixing(part, T)
    return sum(p.numel() for p in module.parameters()), flops


def _mixing(attention: CausalSelfAttention, T: int) -> int:
    """Return the FLOPs of q k^T and weights times v: 2 (H D) T each, backward twice that."""
    return 12 * attention.q_proj.out_features * T


def _shape(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    return "" if weight is None else " x ".join(map(str, weight.shape))


def attention_maps(model: GPT, tokens: Tensor) -> Tensor:
    """Return the attention weights of every layer and head, (L, B, H, T, T), for tokens (B, T).

    [l, b, h, t, s] is how much position t attends to position s; rows sum to 1 and are 0 for s > t.
    The model itself runs, without dropout, with the reference backend: no other backend ever holds
    its weights. Mode and backend are restored.

    Raises ValueError for more tokens than the context.
    """
    maps: list[Tensor] = []

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        out, weights = reference_attention(q, k, v, **options, return_weights=True)
        assert weights is not None
        maps.append(weights)  # (B, H, T, T)
        return out, None

    attend = next(m.attend for m in model.modules() if isinstance(m, CausalSelfAttention))
    model.use_attention(recorded)
    try:
        with inference(model):
            model.forward(tokens)  # not model(...), which a compiler may have replaced
    finally:
        model.use_attention(attend)
    return torch.stack(maps)


@torch.no_grad()
def logit_lens(model: GPT, tokens: Tensor) -> Tensor:
    """Return the logits read from every residual stream, (L + 1, B, T, V), for tokens (B, T).

    [l] is what the model would predict if its last layers were left out: the stream before layer l,
    through the final norm and the head (nostalgebraist 2020, "interpreting GPT: the logit lens").
    [L] is the model's own output. Raises ValueError for more tokens than the context.
    """
    streams: list[Tensor] = []
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    hooks = [b.register_forward_pre_hook(lambda _, args: streams.append(args[0])) for b in blocks]
    hooks.append(model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0])))
    try:
        with inference(model):
            model.forward(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([F.linear(model.norm(x), model.head_weight) for x in streams])
