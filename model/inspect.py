"""Look inside a model: its parts and their cost, and what each head attends to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import CausalSelfAttention, reference_attention
from model.config import ModelConfig
from model.gpt import GPT, Block, inference

PARTS = ("embedding", "positions", "attention", "mlp", "norms", "head")


@dataclass(frozen=True)
class Row:
    """A line of the module tree: a module, or what it computes beside its own modules."""

    depth: int
    name: str
    shape: str
    parameters: int
    flops: int  # of forward and backward, for one token


def meta_model(config: ModelConfig) -> GPT:
    """The model of a resolved config with shapes and no values: it takes no memory, but the second
    that the import of torch's compiler takes, by which "meta" tensors compute."""
    with torch.device("meta"):
        return GPT(config)


def parameters_by_part(model: GPT) -> dict[str, int]:
    """{"embedding": ..., "attention": ...}: parameters of each of PARTS; a tied head has none."""
    counts = dict.fromkeys(PARTS, 0)
    for name, p in model.named_parameters():
        counts[_part(name)] += p.numel()
    return counts


def _part(name: str) -> str:
    if "norm" in name:
        return "norms"
    for piece, part in ((".attn.", "attention"), (".mlp.", "mlp")):
        if piece in name:
            return part
    return {"embed": "embedding"}.get(name.partition(".")[0], name.partition(".")[0])


def module_rows(model: GPT) -> Iterator[Row]:
    """Every module from the top; of the equal layers one, with one layer's figures.

    The FLOPs are those of GPT.flops_per_token at the full context: that of the rows of depth 1,
    the layers' times their number, is the first row's.
    """
    c = model.config
    T = c.context_length
    yield Row(0, "GPT", "", model.parameter_count(), model.flops_per_token(T))
    for name, module in model.named_children():
        if name == "layers":
            yield Row(1, f"layers: {len(module)} alike, each", "", *_cost(module[0], T))
            yield from _inner_rows(module[0], 2, T)
        elif any(True for _ in module.parameters()):
            yield Row(1, name, _shape(module), *_cost(module, T))
    if c.tie_embeddings:
        shape = f"{c.vocab_size} x {c.d_model}"
        yield Row(1, "head: the embedding's", shape, 0, 6 * c.vocab_size * c.d_model)


def _inner_rows(parent: nn.Module, depth: int, T: int) -> Iterator[Row]:
    for name, module in parent.named_children():
        if any(True for _ in module.parameters()):
            yield Row(depth, name, _shape(module), *_cost(module, T))
            yield from _inner_rows(module, depth + 1, T)
    if isinstance(parent, CausalSelfAttention):
        yield Row(depth, "scores and mixing", "", 0, _mixing(parent, T))


def _cost(module: nn.Module, T: int) -> tuple[int, int]:
    """(parameters, FLOPs a token) of a module with all that is in it."""
    flops = 0
    for part in module.modules():
        if isinstance(part, nn.Linear):
            flops += 6 * part.weight.numel()
        elif isinstance(part, CausalSelfAttention):
            flops += _mixing(part, T)
    return sum(p.numel() for p in module.parameters()), flops


def _mixing(attention: CausalSelfAttention, T: int) -> int:
    """q k^T and weights times v: each 2 (H D) T, and backward twice that."""
    return 12 * attention.q_proj.out_features * T


def _shape(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    return "" if weight is None else " x ".join(map(str, weight.shape))


def attention_maps(model: GPT, tokens: Tensor) -> Tensor:
    """Attention weights of every layer and head, (L, B, H, T, T), for tokens (B, T).

    [l, b, h, t, s] is how much position t takes from position s; rows sum to 1 and are 0 for s > t.
    The model runs as it is, with the reference backend in place of its own while it does: the only
    one whose weights ever exist. Mode and backend are restored; dropout is off.

    Raises ValueError for more tokens than the context.
    """
    maps: list[Tensor] = []

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, None]:
        out, weights = reference_attention(q, k, v, **options, return_weights=True)
        maps.append(weights)  # (B, H, T, T)
        return out, None

    attend = model.layers[0].attn.attend
    model.use_attention(recorded)
    try:
        with inference(model):
            model.forward(tokens)  # not model(...): a compiled one would not be looked into
    finally:
        model.use_attention(attend)
    return torch.stack(maps)


@torch.no_grad()
def logit_lens(model: GPT, tokens: Tensor) -> Tensor:
    """Logits read from every residual stream, (L + 1, B, T, V), for tokens (B, T).

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
