"""Scaled dot-product attention, written three times, and the layer around it.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(D)) V          Vaswani et al. 2017, eq. 1

`reference` is that formula; `tiled` computes it without ever holding all (T, S) scores, as
FlashAttention does; `sdpa` is PyTorch's fused kernel, the default. All take

    q (B, H, T, D), k and v (B, H_kv, S, D)  ->  out (B, H, T, D), weights (B, H, T, S) or None

where H is a multiple of H_kv: each key/value head serves H / H_kv query heads (grouped-query
attention, Ainslie et al. 2023), which makes the KV cache that much smaller. The T queries are the
last T of S positions: query t stands at position S - T + t and, if causal, sees keys up to its own
position. With `documents` (B, T), the number of each position's document (T = S), it sees keys of
its own document only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ResolvedConfig, attention_dropout
from model.layers import RMSNorm
from model.rope import rotate

Rotation = tuple[Tensor, Tensor] | None
Attend = Callable[..., tuple[Tensor, Tensor | None]]


def future_mask(T: int, S: int, device: torch.device | None = None) -> Tensor:
    """Return the causal mask, (T, S) bool: True where key s is in the future of query t.

    That is where s > S - T + t; for T = S, the triangle above the diagonal.
    """
    return torch.ones(T, S, dtype=torch.bool, device=device).triu(S - T + 1)


def document_mask(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Return (B, 1, t, s) bool: True where query (B, t) and key (B, s) differ in document."""
    return of_queries[:, None, :, None] != of_keys[:, None, None, :]


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention as in the textbook; tests compare the others with this one.

    Scores are divided by sqrt(D) because a dot product of D terms of unit variance has variance D.
    Undivided, softmax would saturate in wide heads, and its gradient vanish.

    The weights returned are those before dropout. Raises ValueError for shapes that do not fit.
    """
    T, S, D = _check(q, k, v, causal, documents)
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # (B, H, T, S)
    if causal:
        # -inf, because softmax turns it into a weight of exactly 0.
        scores = scores.masked_fill(future_mask(T, S, q.device), -math.inf)
    if documents is not None:
        scores = scores.masked_fill(document_mask(documents, documents), -math.inf)
    weights = torch.softmax(scores, dim=-1)  # each row sums to 1
    out = F.dropout(weights, dropout_p) @ v  # (B, H, T, D)
    return out, weights if return_weights else None


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    documents: Tensor | None = None,
    tile: int = 64,
) -> tuple[Tensor, None]:
    """Compute the same with tile^2 scores at a time: FlashAttention's online softmax (Dao et al.
    2022).

    Softmax needs the largest score and the sum of exponentials of a whole row. Both can be updated
    as key tiles come in one by one: when a larger score appears, the sums so far are rescaled by
    exp(old maximum - new maximum). (This is to be read and tested, not to be fast: autograd keeps
    every tile for the backward pass, where FlashAttention computes it again.)

    Raises ValueError for return_weights: the weights never exist as a whole.
    """
    T, S, D = _check(q, k, v, causal, documents)
    if return_weights:
        raise ValueError("tiled attention never holds the weights; use the reference backend")
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    # Not -inf: all keys of a tile may belong to other documents, and inf - inf is nan.
    lowest = torch.finfo(q.dtype).min
    rows = []
    for top in range(0, T, tile):
        q_tile = q[:, :, top : top + tile]  # (B, H, t, D)
        largest = q_tile.new_full((*q_tile.shape[:3], 1), lowest)  # (B, H, t, 1)
        total = torch.zeros_like(largest)
        out = torch.zeros_like(q_tile)
        t = q_tile.shape[2]
        visible = S - T + top + t if causal else S  # later keys are in the future of all t queries
        future = future_mask(t, visible, q.device)
        for left in range(0, visible, tile):
            right = min(left + tile, visible)
            k_tile, v_tile = k[:, :, left:right], v[:, :, left:right]
            scores = q_tile @ k_tile.transpose(-2, -1) / math.sqrt(D)  # (B, H, t, s)
            if causal:
                scores = scores.masked_fill(future[:, left:right], -math.inf)
            if documents is not None:
                of_queries, of_keys = (
                    documents[:, top : top + tile],
                    documents[:, left:right],
                )
                scores = scores.masked_fill(document_mask(of_queries, of_keys), -math.inf)
            new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            rescale = torch.exp(largest - new_largest)
            p = torch.exp(scores - new_largest)
            total = total * rescale + p.sum(-1, keepdim=True)
            out = out * rescale + F.dropout(p, dropout_p) @ v_tile
            largest = new_largest
        rows.append(out / total)
    return torch.cat(rows, dim=2), None  # (B, H, T, D)


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    documents: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Call PyTorch's fused kernels (flash attention where the hardware has it).

    Raises ValueError for return_weights.
    """
    T, S, _ = _check(q, k, v, causal, documents)
    if return_weights:
        raise ValueError("sdpa does not return weights; use the reference backend")
    # PyTorch's is_causal aligns query 0 with key 0, which is wrong for T < S (a KV cache). In that
    # case we pass a mask that is True where a key may be seen. A single query sees every key and
    # needs no mask.
    mask = ~future_mask(T, S, q.device) if causal and T < S and T > 1 else None
    if documents is not None:
        hidden = document_mask(documents, documents)
        mask = ~(hidden | future_mask(T, S, q.device) if causal else hidden)  # (B, 1, T, T)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=bool(causal and T == S and mask is None),  # in a tracer, sizes are tensors
        enable_gqa=bool(q.shape[1] != k.shape[1]),
    )
    return out, None


ATTENTION: dict[str, Attend] = {
    "reference": reference_attention,
    "tiled": tiled_attention,
    "sdpa": sdpa_attention,
}


def _check(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Tensor | None
) -> tuple[int, int, int]:
    (_, H, T, D), (_, H_kv, S, _) = q.shape, k.shape
    if k.shape != v.shape or k.shape[3] != D or q.shape[0] != k.shape[0] or H % H_kv:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"attention: shapes do not fit: {shapes}")
    if causal and T > S:
        raise ValueError(f"causal attention: {T} queries, but only {S} keys")
    if documents is not None and (T != S or documents.shape != (q.shape[0], T)):
        shapes = f"documents {tuple(documents.shape)}, q {tuple(q.shape)}, k {tuple(k.shape)}"
        raise ValueError(f"attention: documents must be (B, T), with T = S: {shapes}")
    return T, S, D


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """(B, H_kv, S, D) -> (B, H, S, D): query head h reads key/value head h // (H / H_kv)."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


class KVCache:
    """Keys and values of each layer, (B, H_kv, capacity, D), the first `length` positions filled.

    With it, each new token needs the work of one position, not another pass over the whole text.
    It is passed to `GPT.forward`, whose layers append to it and which advances `length` once at the
    end; no module keeps it. Keys are stored rotated, because their positions never change. It is
    written in place, so use it under `torch.no_grad`. Memory is allocated at the first append.
    """

    def __init__(self, n_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: list[Tensor | None] = [None] * n_layers
        self._values: list[Tensor | None] = [None] * n_layers

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v (B, H_kv, T, D) after `length`; return all so far, (B, H_kv, length + T, D).

        Raises ValueError if they do not fit.
        """
        B, H_kv, T, D = k.shape
        end = self.length + T
        if end > self.capacity:
            raise ValueError(f"KV cache: {end} positions do not fit its capacity {self.capacity}")
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            keys = self._keys[layer] = k.new_zeros(B, H_kv, self.capacity, D)
            values = self._values[layer] = v.new_zeros(B, H_kv, self.capacity, D)
        if keys.shape[0] != B:
            raise ValueError(f"KV cache: it holds a batch of {keys.shape[0]}, not of {B}")
        keys.narrow(2, self.length, T).copy_(k)  # slicing would take twice as long
        values.narrow(2, self.length, T).copy_(v)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def advance(self, T: int) -> None:
        """Count T more positions as filled, after every layer has appended its own."""
        self.length += T

    def truncate(self, length: int) -> None:
        """Forget what comes after the first `length` positions, but keep the memory."""
        self.length = min(self.length, length)

    def clear(self) -> None:
        """Forget everything, but keep the memory."""
        self.length = 0


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention with rotary positions: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ResolvedConfig, layer: int, backend: str = "sdpa") -> None:
        super().__init__()
        C, D = config.d_model, config.d_head
        self.layer, self.d_head, self.dropout = layer, D, attention_dropout(config)
        self.attend = ATTENTION[backend]
        # Without RoPE (Kazemnejad et al. 2023, "NoPE") a layer knows the order of the tokens from
        # the causal mask alone; a few such layers among others help with long contexts.
        self.rotates = config.nope_every == 0 or (layer + 1) % config.nope_every != 0
        qkv_bias = config.bias or config.qkv_bias
        self.q_proj = nn.Linear(C, config.n_heads * D, bias=qkv_bias)
        self.k_proj = nn.Linear(C, config.n_kv_heads * D, bias=qkv_bias)
        self.v_proj = nn.Linear(C, config.n_kv_heads * D, bias=qkv_bias)
        self.o_proj = nn.Linear(config.n_heads * D, C, bias=config.bias)
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.d_head)  # (B, T, H, D)
        k = self.k_proj(x).view(B, T, -1, self.d_head)  # (B, T, H_kv, D)
        v = self.v_proj(x).view(B, T, -1, self.d_head)  # (B, T, H_kv, D)
        if self.q_norm is not None and self.k_norm is not None:
            # QK-norm bounds the scores, so softmax cannot saturate at high learning rates (Henry et
            # al. 2020). Done before the transpose, while each head is contiguous in memory.
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or H_kv, T, D)
        if rotation is not None and self.rotates:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, H_kv, S, D)
        dropout_p = self.dropout if self.training else 0.0
        out, _ = self.attend(q, k, v, causal=True, dropout_p=dropout_p, documents=documents)
        out = out.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H D): the heads side by side
        mixed: Tensor = self.o_proj(out)  # (B, T, C): of what the heads found
        return mixed
