"""Model shape and sampling options. Plain data: reading a config never imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeGuard

from cli.options import ConfigError, wrong_types

DROPOUTS = ("dropout", "attention_dropout")  # these belong to training, not to the weights


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of the decoder. None stands for a derived value, see `resolved`.

    The last word of each option is its kind on resume, see docs/options.md.
    """

    n_layers: Annotated[int, "number of transformer blocks", "fixed"] = 4
    n_heads: Annotated[int, "attention (query) heads per block", "fixed"] = 4
    n_kv_heads: Annotated[
        int | None, "key/value heads (grouped-query attention); default: n_heads", "fixed"
    ] = None
    d_model: Annotated[int, "width of the residual stream", "fixed"] = 128
    d_head: Annotated[int | None, "width of a head; default: d_model / n_heads", "fixed"] = None
    d_mlp: Annotated[
        int | None,
        "hidden width of the MLP; default: 4 x d_model (gated: 8/3 x, rounded up)",
        "fixed",
    ] = None
    context_length: Annotated[int, "longest sequence the model sees, in tokens", "fixed"] = 256
    vocab_size: Annotated[int | None, "vocabulary size; default: the tokenizer's", "fixed"] = None
    norm: Annotated[Literal["rms", "layer"], "normalization", "fixed"] = "rms"
    norm_eps: Annotated[float, "epsilon, added to the variance in a norm", "fixed"] = 1e-6
    mlp: Annotated[
        Literal["swiglu", "gelu", "gelu_erf", "relu2"],
        "MLP type",
        "fixed",
    ] = "swiglu"
    position: Annotated[Literal["rope", "learned"], "positional encoding", "fixed"] = "rope"
    rope_theta: Annotated[float, "base of RoPE's wavelengths", "fixed"] = 10000.0
    rope_scaling: Annotated[
        Literal["none", "llama3"], "stretching of RoPE's long wavelengths", "fixed"
    ] = "none"
    rope_factor: Annotated[float, "llama3 scaling: stretch factor", "fixed"] = 8.0
    rope_original_context: Annotated[
        int, "llama3 scaling: context length before stretching", "fixed"
    ] = 8192
    nope_every: Annotated[
        int, "leave RoPE out in every Nth block, SmolLM3's is 4 (0: in none)", "fixed"
    ] = 0
    qk_norm: Annotated[bool, "RMS-normalize queries and keys per head", "fixed"] = True
    bias: Annotated[bool, "biases in linear layers and LayerNorm", "fixed"] = False
    qkv_bias: Annotated[
        bool, "biases in the query, key and value projections alone, as in Qwen2", "fixed"
    ] = False
    dropout: Annotated[float, "dropout probability in training", "changed"] = 0.0
    attention_dropout: Annotated[
        float | None,
        "dropout on attention weights; default: same as dropout (0 is faster)",
        "changed",
    ] = None
    tie_embeddings: Annotated[bool, "share weights between embedding and head", "fixed"] = False

    def problems(self) -> list[str]:
        """Return all mistakes in these values, as messages; empty if there are none."""
        if found := wrong_types("model", self):
            return found
        for name in ("n_layers", "n_heads", "d_model", "context_length", "rope_original_context"):
            if getattr(self, name) < 1:
                found.append(f"model.{name}={getattr(self, name)}: must be at least 1")
        for name in ("n_kv_heads", "d_head", "d_mlp", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"model.{name}={value}: must be at least 1, or none for the default")
        for name in DROPOUTS:
            if not 0.0 <= (getattr(self, name) or 0.0) < 1.0:
                found.append(f"model.{name}={getattr(self, name)}: must be in [0, 1)")
        for name in ("norm_eps", "rope_theta"):
            if not 0.0 < getattr(self, name) < float("inf"):
                found.append(f"model.{name}={getattr(self, name)}: must be above 0")
        if self.nope_every < 0:
            found.append(f"model.nope_every={self.nope_every}: must be 0 (off) or above")
        if not 1.0 <= self.rope_factor < float("inf"):
            found.append(f"model.rope_factor={self.rope_factor}: must be at least 1")
        if found:
            return found
        C, H, H_kv = self.d_model, self.n_heads, self.n_kv_heads
        d_head = self.d_head or C // H
        if self.d_head is None and C % H:
            found.append(
                f"model.d_model={C} is not a multiple of model.n_heads={H}: "
                "change one of them, or set model.d_head"
            )
        elif self.position == "rope" and d_head % 2:
            found.append(f"model.d_head={d_head}: must be even, because RoPE rotates pairs")
        if H_kv is not None and H % H_kv:
            found.append(f"model.n_kv_heads={H_kv}: must divide model.n_heads={H}")
        if self.rope_scaling != "none" and self.position != "rope":
            found.append("model.rope_scaling=llama3 needs model.position=rope")
        if self.nope_every and self.position != "rope":
            found.append(f"model.nope_every={self.nope_every} needs model.position=rope")
        if self.bias and self.qkv_bias:
            found.append("model.qkv_bias=true: model.bias=true has these biases; set one of them")
        return found

    def resolved(self, vocab_size: int | None = None) -> ResolvedConfig:
        """Return this config with every derived value filled in.

        vocab_size: number of ids the tokenizer has; a larger `vocab_size` in this config (padding
            for the hardware) is kept. Default: the config's own.

        Raises ConfigError if `vocab_size` in this config is smaller than the tokenizer's, and if
        neither is given.
        """
        from model.layers import MLPS  # here: reading a config does not need torch

        known = self.vocab_size or vocab_size
        if known is None:
            raise ConfigError("model.vocab_size=none: give a size, for example vocab_size=257")
        if vocab_size is not None and known < vocab_size:
            raise ConfigError(
                f"model.vocab_size={self.vocab_size}: the tokenizer has {vocab_size} ids; "
                f"use at least {vocab_size}, or none"
            )
        d_mlp = 4 * self.d_model
        if MLPS[self.mlp].gated:
            # A gate makes three matrices of two: 8/3 in place of 4 keeps the number of parameters
            # (Shazeer 2020). Rounded up to a multiple that matrix units like.
            multiple = 64 if self.d_model >= 64 else 8
            d_mlp = -(-8 * self.d_model // (3 * multiple)) * multiple
        config = replace(
            self,
            n_kv_heads=self.n_kv_heads or self.n_heads,
            d_head=self.d_head or self.d_model // self.n_heads,
            d_mlp=self.d_mlp or d_mlp,
            vocab_size=known,
        )
        assert is_resolved(config)
        return config


class ResolvedConfig(ModelConfig):
    """A ModelConfig without None in its sizes, for type checkers.

    No object has this class: it would not equal the same ModelConfig read from run.json.
    """

    n_kv_heads: int
    d_head: int
    d_mlp: int
    vocab_size: int


def is_resolved(config: ModelConfig) -> TypeGuard[ResolvedConfig]:
    """Return whether every derived size is filled in, as `ModelConfig.resolved` does."""
    return None not in (config.n_kv_heads, config.d_head, config.d_mlp, config.vocab_size)


def attention_dropout(config: ModelConfig) -> float:
    """Return the probability that an attention weight is dropped in training."""
    return config.dropout if config.attention_dropout is None else config.attention_dropout


@dataclass(frozen=True)
class SamplingConfig:
    """Choice of the next token. The defaults sample from the model's own distribution."""

    temperature: Annotated[float, "0: always the most likely token; 1: the model's own odds"] = 1.0
    top_k: Annotated[int, "sample among the k most likely tokens (0: all)"] = 0
    top_p: Annotated[float, "nucleus sampling: smallest set of tokens with this probability"] = 1.0
    min_p: Annotated[float, "drop tokens less likely than this times the most likely one"] = 0.0
    repetition_penalty: Annotated[float, "above 1: penalize tokens already in the text"] = 1.0
    max_new_tokens: Annotated[int, "maximum number of tokens to generate"] = 200

    def problems(self) -> list[str]:
        """Return all mistakes in these values, as messages."""
        if found := wrong_types("", self):
            return found
        # The bounds of temperature and penalty keep float32 logits from overflowing.
        if self.temperature != 0.0 and not 1e-6 <= self.temperature <= 1e6:
            found.append(f"temperature={self.temperature}: must be 0 (greedy) or in [1e-6, 1e6]")
        if self.top_k < 0:
            found.append(f"top_k={self.top_k}: must be 0 (off) or above")
        if not 0.0 < self.top_p <= 1.0:
            found.append(f"top_p={self.top_p}: must be in (0, 1]; 1 is off")
        if not 0.0 <= self.min_p <= 1.0:
            found.append(f"min_p={self.min_p}: must be in [0, 1]; 0 is off")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            penalty = self.repetition_penalty
            found.append(f"repetition_penalty={penalty}: must be in [0.01, 100]; 1 is off")
        if self.max_new_tokens < 1:
            found.append(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        return found
