"""Model shape and sampling options, as plain data: reading a config never imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

DROPOUTS = ("dropout", "attention_dropout")  # options of training, not of the weights


@dataclass(frozen=True)
class ModelConfig:
    """Every size and choice of the decoder. `None` means: derived, see `resolved`."""

    n_layers: Annotated[int, "number of blocks", "fixed"] = 4
    n_heads: Annotated[int, "query heads per block", "fixed"] = 4
    n_kv_heads: Annotated[
        int | None, "key/value heads, grouped-query; n_heads unless given", "fixed"
    ] = None
    d_model: Annotated[int, "width of the residual stream", "fixed"] = 128
    d_head: Annotated[int | None, "width of a head; d_model / n_heads unless given", "fixed"] = None
    d_mlp: Annotated[
        int | None, "MLP's width; 4 x d_model (swiglu 8/3 x) unless given", "fixed"
    ] = None
    context_length: Annotated[int, "longest window the model sees, in tokens", "fixed"] = 256
    vocab_size: Annotated[
        int | None, "ids the model knows; the tokenizer's unless given", "fixed"
    ] = None
    norm: Annotated[Literal["rms", "layer"], "normalisation", "fixed"] = "rms"
    norm_eps: Annotated[float, "added to the variance in a norm", "fixed"] = 1e-6
    mlp: Annotated[Literal["swiglu", "gelu", "gelu_erf", "relu2"], "the MLP's kind", "fixed"] = (
        "swiglu"
    )
    position: Annotated[Literal["rope", "learned"], "how a token knows its place", "fixed"] = "rope"
    rope_theta: Annotated[float, "base of RoPE's wavelengths", "fixed"] = 10000.0
    rope_scaling: Annotated[
        Literal["none", "llama3"], "stretch RoPE's long wavelengths", "fixed"
    ] = "none"
    rope_factor: Annotated[float, "llama3 scaling: by how much", "fixed"] = 8.0
    rope_original_context: Annotated[
        int, "llama3 scaling: the context before stretching", "fixed"
    ] = 8192
    qk_norm: Annotated[bool, "RMS-normalise queries and keys per head", "fixed"] = True
    bias: Annotated[bool, "biases in linear layers and LayerNorm", "fixed"] = False
    dropout: Annotated[float, "dropout probability in training", "must"] = 0.0
    attention_dropout: Annotated[
        float | None, "of the attention weights; as dropout unless given (0 is faster)", "must"
    ] = None
    tie_embeddings: Annotated[bool, "the head uses the embedding's weights", "fixed"] = False

    def problems(self) -> list[str]:
        """Everything wrong with these values, in plain words; empty when all is well."""
        found = []
        for name in ("n_layers", "n_heads", "d_model", "context_length", "rope_original_context"):
            if getattr(self, name) < 1:
                found.append(f"model.{name}={getattr(self, name)}: must be at least 1")
        for name in ("n_kv_heads", "d_head", "d_mlp", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"model.{name}={value}: must be at least 1 (or none: derived)")
        for name in DROPOUTS:
            if not 0.0 <= (getattr(self, name) or 0.0) < 1.0:
                found.append(f"model.{name}={getattr(self, name)}: must be in [0, 1)")
        for name in ("norm_eps", "rope_theta"):
            if not 0.0 < getattr(self, name) < float("inf"):
                found.append(f"model.{name}={getattr(self, name)}: must be above 0")
        if not 1.0 <= self.rope_factor < float("inf"):
            found.append(f"model.rope_factor={self.rope_factor}: must be at least 1")
        return found or self._shape_problems()

    def _shape_problems(self) -> list[str]:
        found = []
        d_head = self.d_head or self.d_model // self.n_heads
        if self.d_head is None and self.d_model % self.n_heads:
            found.append(
                f"model.d_model={self.d_model} is not a multiple of model.n_heads={self.n_heads}: "
                "change one of them, or give model.d_head"
            )
        elif self.position == "rope" and d_head % 2:
            found.append(
                f"model.d_head={d_head} (width of a head): RoPE rotates pairs, so it must be even"
            )
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            found.append(
                f"model.n_kv_heads={self.n_kv_heads}: must divide model.n_heads={self.n_heads}"
            )
        if self.rope_scaling != "none" and self.position != "rope":
            found.append("model.rope_scaling=llama3 needs model.position=rope")
        return found

    def resolved(self, vocab_size: int) -> ModelConfig:
        """The same config with every derived value filled in.

        vocab_size: number of ids the tokenizer has; a larger `vocab_size` given here (padding
            for the hardware) is kept.

        Raises ValueError if `vocab_size` here is smaller than the tokenizer's.
        """
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            raise ValueError(
                f"model.vocab_size={self.vocab_size}: the tokenizer has {vocab_size} ids; "
                f"give at least {vocab_size}, or none"
            )
        return replace(
            self,
            n_kv_heads=self.n_kv_heads or self.n_heads,
            d_head=self.d_head or self.d_model // self.n_heads,
            d_mlp=self.d_mlp or self._default_d_mlp(),
            vocab_size=self.vocab_size or vocab_size,
        )

    def _default_d_mlp(self) -> int:
        if self.mlp != "swiglu":
            return 4 * self.d_model
        # SwiGLU has three matrices: 8/3 keeps the parameter count of 4x with two (Shazeer 2020),
        # rounded up to a multiple that matrix units like.
        step = 64 if self.d_model >= 64 else 8
        return -(-8 * self.d_model // (3 * step)) * step


def attention_dropout(config: ModelConfig) -> float:
    """The probability that an attention weight is dropped in training."""
    return config.dropout if config.attention_dropout is None else config.attention_dropout


@dataclass(frozen=True)
class SamplingConfig:
    """How the next id is chosen. The defaults draw from the model's own distribution."""

    temperature: Annotated[float, "0: always the likeliest; 1: the model's own odds"] = 1.0
    top_k: Annotated[int, "draw among the k likeliest (0: all)"] = 0
    top_p: Annotated[float, "draw among the likeliest that together hold this probability"] = 1.0
    min_p: Annotated[float, "drop what is less likely than this times the likeliest"] = 0.0
    repetition_penalty: Annotated[float, "above 1: what was said becomes less likely"] = 1.0
    max_new_tokens: Annotated[int, "how many tokens to add at most"] = 200

    def problems(self) -> list[str]:
        """Everything wrong with these values, in plain words."""
        found = []
        # The bounds of temperature and penalty keep float32's division from overflowing.
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
