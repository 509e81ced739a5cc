"""One more token: what `GPT.forward` computes for T = 1 with a cache, in fewer and quicker calls.

Once the weights are read as fast as memory allows, what the modules do around the products shows: a
quarter of a token's time in a GPT-2 of 124M. So the blocks are plain functions here. Tests hold
them to the modules; nothing in this file is needed to understand the model.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Rotation
from model.cache import KVCache
from model.gpt import GPT, Block

MANY_ROWS = 32  # from here on arithmetic bounds a product, and libraries are good at it
FEW_ROWS = 4  # up to here the weight is best the left factor
SLICE = 384  # rows of a weight that are a good slice for more than FEW_ROWS of x


class Decoder:
    """`model.forward(tokens, cache=self.cache, last_only=True)`, without gradients and dropout.

    A single token a sequence goes through plain functions, unless a module has hooks; more of them
    go through the modules. The weights are read where they lie: a model that is moved or cast, or
    given its first hook, needs another decoder.
    """

    def __init__(self, model: GPT, cache: KVCache, batch: int) -> None:
        """batch: B, how many sequences there will be."""
        head = model.embed if model.head is None else model.head
        self.model, self.cache = model, cache
        self.hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        self.blocks = [block_function(block, batch) for block in model.layers]
        self.head = product(head.weight, None, batch)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits after the last of tokens (B, T), which follow what the cache holds: (B, V).

        Raises ValueError beyond the context, as the model does.
        """
        if tokens.shape[1] > 1 or self.hooked:
            return self.head(self.model.hidden(tokens, self.cache)[:, -1])
        x, rotation = self.model.embedded(tokens, self.cache)  # (B, 1, C)
        x = x[:, 0]
        if rotation is not None:
            cos, sin = rotation  # (1, D/2) each
            rotation = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        for block in self.blocks:
            x = block(x, rotation, self.cache)
        self.cache.advance(1)
        return self.head(self.model.norm(x))


def block_function(block: Block, batch: int) -> Callable[[Tensor, Rotation, KVCache], Tensor]:
    """`block.forward` for x (B, C)."""
    attn, layer, D = block.attn, block.attn.layer, block.attn.d_head
    attn_norm, mlp_norm = block.attn_norm.forward, block.mlp_norm.forward
    q_norm, k_norm = attn.q_norm, attn.k_norm
    linears = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj)
    q_proj, k_proj, v_proj, o_proj = (linear_function(m, batch) for m in linears)
    mlp = mlp_function(block.mlp, batch)

    def forward(x: Tensor, rotation: Rotation, cache: KVCache) -> Tensor:
        h = attn_norm(x)
        q, k, v = (proj(h).view(batch, -1, 1, D) for proj in (q_proj, k_proj, v_proj))
        if q_norm is not None:
            q, k = q_norm.forward(q), k_norm.forward(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        k, v = cache.append(layer, k, v)  # (B, H_kv, S, D)
        out, _ = attn.attend(q, k, v)  # (B, H, 1, D)
        x = x + o_proj(out.reshape(batch, -1))
        return x + mlp(mlp_norm(x))

    return forward


def mlp_function(mlp: nn.Module, batch: int) -> Callable[[Tensor], Tensor]:
    """`mlp.forward` for x (B, C): that of a twin whose projections are plain functions."""
    twin = copy(mlp)  # which shares everything
    for name, child in mlp.named_children():
        vars(twin)[name] = linear_function(child, batch)  # found before the child of that name
    return twin.forward


def linear_function(module: nn.Module, rows: int) -> Callable[[Tensor], Tensor]:
    """`module.forward` for x of this many rows."""
    if type(module) is nn.Linear:
        return product(module.weight, module.bias, rows)
    return module.forward


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rope` of x (B, H, 1, D): cos and sin (1, D) of both halves, sin with its sign.

    A coordinate's partner in its plane lies half a head further on, or back.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).type_as(x)


def product(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """x -> F.linear(x, weight, bias), for x of this many rows: (rows, in) -> (rows, out).

    For few rows a product takes as long as reading the weight, and libraries read slowly there: on
    one core, or in a bad order. As a batch of slices it is spread over the cores; and W x^T takes a
    half to a quarter of the time of x W^T for FEW_ROWS.
    """
    out, width = weight.shape
    slices = slice_count(out, rows, torch.get_num_threads()) if on_plain_cpu(weight) else 1
    if slices == 1:
        return lambda x: F.linear(x, weight, bias)
    pieces = weight.view(slices, out // slices, width)

    def left(x: Tensor) -> Tensor:
        y = torch.bmm(pieces, x.t().expand(slices, width, rows))  # (slices, out / slices, rows)
        return y.view(1, out) if rows == 1 else y.view(out, rows).t()

    def right(x: Tensor) -> Tensor:
        y = torch.bmm(x.expand(slices, rows, width), pieces.transpose(1, 2))
        return y.transpose(0, 1).reshape(rows, out)  # (slices, rows, out / slices) before

    multiply = left if rows <= FEW_ROWS else right
    return multiply if bias is None else lambda x: multiply(x) + bias


def on_plain_cpu(weight: Tensor) -> bool:
    """float32 on a CPU, and multiplied as such: in bfloat16 F.linear is the faster one."""
    return weight.is_cpu and weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def slice_count(out: int, rows: int, threads: int) -> int:
    """Into how many equal slices `out` rows of a weight are cut; 1: they are not."""
    if rows >= MANY_ROWS:
        return 1
    fewest = max(2, threads, 1 if rows <= FEW_ROWS else out // SLICE)
    return next((n for n in range(fewest, 4 * fewest) if out % n == 0), 1)
