"""GPT: token embedding, L blocks of attention and MLP along a residual stream, and a head.

B batch   T tokens of this forward   S tokens seen so far, cache included   C width (d_model)
H query heads   D width of a head   M width of the MLP   V vocabulary   L layers
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cli.options import ConfigError
from model.attention import ATTENTION, Attend, CausalSelfAttention, KVCache, Rotation
from model.config import ModelConfig, ResolvedConfig
from model.layers import MLPS, NORMS
from model.loss import CrossEntropy, Reduction
from model.rope import Rope


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, C) -> (B, T, C).

    This is pre-norm: the norm is inside the branch, so the stream from embedding to head is a plain
    sum, and the gradient reaches every block undamped. With the norm after the sum, as in Vaswani
    et al. 2017, deep models train only with a long warmup (Xiong et al. 2020).
    """

    def __init__(self, config: ResolvedConfig, layer: int, attention: str) -> None:
        super().__init__()
        norm = NORMS[config.norm]
        self.attn_norm = norm(config.d_model, config.norm_eps, config.bias)
        self.attn = CausalSelfAttention(config, layer, attention)
        self.mlp_norm = norm(config.d_model, config.norm_eps, config.bias)
        self.mlp = MLPS[config.mlp](config.d_model, config.d_mlp, config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        x = x + self.drop(self.attn(self.attn_norm(x), rotation, cache, documents))  # (B, T, C)
        x = x + self.drop(self.mlp(self.mlp_norm(x)))  # (B, T, C)
        return x


class GPT(nn.Module):
    """The whole decoder, ready to train: `GPT(ModelConfig(vocab_size=257))`.

    attention: the backend that the layers use, a name in `ATTENTION`.
    seed: of the initial weights, see `initial_weight`. None leaves their values undefined, for a
        model whose weights are about to be loaded.
    Raises ConfigError for a config with problems, or without vocab_size.
    """

    def __init__(
        self, config: ModelConfig, attention: str = "sdpa", *, seed: int | None = 0
    ) -> None:
        super().__init__()
        if problems := config.problems():
            raise ConfigError(problems)
        self.config = config = config.resolved()
        with _WithoutDraws():
            self.embed = nn.Embedding(config.vocab_size, config.d_model)
            self.rope = Rope(config) if config.position == "rope" else None
            self.positions = (
                nn.Embedding(config.context_length, config.d_model)
                if config.position == "learned"
                else None
            )
            self.drop = nn.Dropout(config.dropout)
            self.layers = nn.ModuleList(Block(config, i, attention) for i in range(config.n_layers))
            self.norm = NORMS[config.norm](config.d_model, config.norm_eps, config.bias)
            self.head = (
                None
                if config.tie_embeddings
                else nn.Linear(config.d_model, config.vocab_size, bias=False)
            )
        self.loss = CrossEntropy()
        if seed is not None and not self.embed.weight.is_meta:  # "meta" tensors have no values
            self.init_weights(seed)

    @property
    def head_weight(self) -> Tensor:
        """The matrix from the residual stream to logits, (V, C): the embedding's if it is tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        reduction: Reduction = "mean",
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Return the logits, (B, T, V), or with targets the loss, in nats.

        tokens: (B, T) ids; they come after what `cache` holds, and are added to it.
        targets: (B, T) ids, each the token after; IGNORE_INDEX where there is nothing to predict.
        documents: (B, T) ints, the number of each token's document, if a row holds several in
            sequence: no token sees another document, and positions start at 0 in each.
        reduction: "mean" or "sum" over the targets that are not ignored, or "none": (B, T), 0 where
            ignored.
        positions: (T,) ints; by default they follow the cache. For exporters, where the length of a
            cache is a tensor.
        last_only: without targets, compute the logits of the last position alone, (B, 1, V).

        Raises ValueError for more tokens than the context, and for `documents` with a cache.
        """
        if cache is not None and documents is not None:
            raise ValueError("a KV cache does not keep documents apart: pass one of the two")
        if positions is None:
            positions = self._positions(tokens, 0 if cache is None else cache.length)  # (T,)
        x = self.embed(tokens)  # (B, T, C)
        if self.positions is not None:
            x = x + self.positions(positions if documents is None else positions_within(documents))
        x = self.drop(x)
        # RoPE does not need `documents`: a score depends on the distance of two positions alone.
        rotation = self.rope(positions) if self.rope is not None else None  # cos, sin: (T, D/2)
        for layer in self.layers:
            x = layer(x, rotation, cache, documents)  # (B, T, C)
        if cache is not None:
            cache.advance(tokens.shape[1])
        x = self.norm(x)  # pre-norm leaves the last sum unnormalized
        if targets is None:
            return F.linear(x[:, -1:] if last_only else x, self.head_weight)
        loss: Tensor = self.loss(x, self.head_weight, targets, reduction)
        return loss

    def _positions(self, tokens: Tensor, start: int) -> Tensor:
        end, context = start + tokens.shape[1], self.config.context_length
        if end > context:
            raise ValueError(f"{end} tokens exceed model.context_length={context}")
        return torch.arange(start, end, device=tokens.device)

    def use_attention(self, backend: str | Attend) -> None:
        """Switch every layer to a backend: a name in ATTENTION, or your own function."""
        for module in self.modules():
            if isinstance(module, CausalSelfAttention):
                module.attend = ATTENTION[backend] if isinstance(backend, str) else backend

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter to its initial value, see `initial_weight`."""
        for name, p in self.named_parameters():
            p.copy_(self.initial_weight(name, seed))

    def initial_weight(self, name: str, seed: int) -> Tensor:
        """Return the initial value of one parameter, float32 on the CPU.

        The random numbers depend on (seed, name) alone, not on the parameters drawn before. So
        each part of a model can be made on its own, on any machine (this model may be on "meta").
        """
        shape, config = self.get_parameter(name).shape, self.config
        C, V = config.d_model, config.vocab_size
        # The projections back into the residual stream start at zero: every block starts as the
        # identity, so the scale of the stream does not grow with depth. (GPT-2 has the same aim
        # when it divides their std by sqrt(2 L).) For lora_b see model/lora.py.
        if name.endswith(("bias", "o_proj.weight", "down_proj.weight", "lora_b")):
            return torch.zeros(shape, dtype=torch.float32, device="cpu")
        if len(shape) == 1:  # a norm's weight
            return torch.ones(shape, dtype=torch.float32, device="cpu")
        if name == "head.weight":
            std = 0.2 / math.sqrt(C)  # small: all logits start near 0, so the first loss is ln V
        elif name not in ("embed.weight", "positions.weight"):
            # A sum of fan-in products has their variance times fan-in: 1 / sqrt(fan in) would keep
            # the scale of the input.
            std = 0.5 / math.sqrt(shape[1])
        elif self.head is not None:
            std = 1.0
        else:
            # A tied head gives each token itself as the likeliest next one: after the last norm,
            # which makes its embedding sqrt(C) long, its own logit is about std * C. That logit
            # raises the loss above ln V by e^logit / V; the spread of the other logits raises it by
            # a further logit^2 / 2C. This std keeps the two together below 0.1.
            std = min(max(0.5, math.log(V) - 3.0), 0.3 * math.sqrt(C)) / C
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        rng = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        return values.normal_(0.0, std, generator=rng)

    def parameter_count(self) -> int:
        """Return the number of parameters, each counted once (a tied head is the embedding)."""
        return sum(p.numel() for p in self.parameters())

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are not frozen, by name: all, or LoRA's adapters alone."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def flops_per_token(self, T: int) -> int:
        """Return the floating-point operations per token, forward and backward, in a window of T.

        `matrix_flops` of each matrix. The head counts, tied or not; an embedding lookup costs
        nothing. And 12 L (H D) T for the scores and the weighted sums of attention, the causal half
        not deducted (Chowdhery et al. 2022, "PaLM", appendix B).
        """
        config = self.config
        matrices = [p for p in self.layers.parameters() if p.dim() == 2]
        products = sum(map(matrix_flops, [*matrices, self.head_weight]))
        return products + 12 * config.n_layers * config.n_heads * config.d_head * T


def matrix_flops(weight: Tensor) -> int:
    """Return the FLOPs of a product with this matrix per token, forward and backward.

    Per element 2 forward, 2 for the gradient of the input, and 2 for that of the weight unless it
    is frozen.
    """
    return weight.numel() * (6 if weight.requires_grad else 4)


class _WithoutDraws(TorchFunctionMode):
    """Skip the random values that nn.Linear and nn.Embedding draw when they are made.

    GPT sets every value by its own rule or leaves it to a checkpoint, so theirs would cost time and
    move torch's random state for nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


def with_new_ids(rows: Tensor, known: int, wanted: int) -> Tensor:
    """Return rows (V, C) with those of ids known ... wanted - 1 set to the mean of those before;
    rows beyond, padding of the vocabulary, stay."""
    if wanted <= known:
        return rows
    mean = rows[:known].double().mean(0, keepdim=True).to(rows.dtype)
    return torch.cat([rows[:known], mean.expand(wanted - known, -1), rows[wanted:]])


def positions_within(documents: Tensor) -> Tensor:
    """Return each position within its document, from 0: (B, T) -> (B, T) int64."""
    column = torch.arange(documents.shape[1], device=documents.device)
    starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)  # (B, T)
    return column - (column * starts).cummax(dim=1).values  # minus the start of its document


@contextmanager
def inference(model: GPT) -> Iterator[None]:
    """Turn off gradients and dropout in the block, and restore the model's mode after it."""
    training = model.training
    if training:  # eval() visits every module: too slow to call for each token that is decoded
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if training:
            model.train()
