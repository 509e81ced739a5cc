"""Look inside a model: what each head attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention import reference_attention
from model.gpt import GPT, inference


def attention_maps(model: GPT, tokens: Tensor) -> Tensor:
    """Attention weights of every layer and head, (L, B, H, T, T), for tokens (B, T).

    [l, b, h, t, s] is how much position t takes from position s; rows sum to 1 and are 0 for s > t.
    Computed by the reference backend, whatever the model uses. The model is not changed: no
    backend is switched, its mode is restored, dropout is off.

    Raises ValueError for more tokens than the context.
    """
    maps = []
    with inference(model):
        x, rotation = model.embedded(tokens)  # (B, T, C)
        for layer in model.layers:
            q, k, v = layer.attn.project(layer.attn_norm(x), rotation)
            maps.append(reference_attention(q, k, v, return_weights=True)[1])  # (B, H, T, T)
            x = layer(x, rotation)
    return torch.stack(maps)
