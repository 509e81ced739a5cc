"""The model as one graph with its KV cache as inputs and outputs, and the cases that it must pass.

    input_ids (B, T), past_key_values.N.{key,value} (B, H_kv, P, D) of each layer
    -> logits (B, T, V), present.N.{key,value} (B, H_kv, P + T, D)

B, T and P are free: P = 0 reads a prompt, T = 1 adds a token. P + T is at most the model's context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cli.options import ConfigError
from model.config import ModelConfig
from model.gpt import GPT

# Sizes 0 and 1 would be taken for constants by the exporters; equal ones for the same size.
EXAMPLE_B, EXAMPLE_T, EXAMPLE_P = 2, 3, 5
# (B, T, P) that an export is checked at: prompts, single tokens, tokens after others.
CASES = ((1, 1, 0), (1, 8, 0), (3, 37, 0), (1, 1, 20), (3, 8, 20), (1, 37, 20))

Run = Callable[[Tensor, Sequence[Tensor]], list[Tensor]]


class ExportError(RuntimeError):
    """The exported model does not compute what the model does: a fault of ours or of a library."""

    exit_code = 4


class _Past:
    """KV cache without state, for `GPT.forward`: the past comes in, all keys and values go out."""

    def __init__(self, past: Sequence[Tensor]) -> None:
        self.past, self.present = past, []

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k = torch.cat((self.past[2 * layer], k), dim=2)
        v = torch.cat((self.past[2 * layer + 1], v), dim=2)
        self.present += [k, v]
        return k, v

    def advance(self, T: int) -> None:
        """Nothing is kept."""


class GraphGPT(nn.Module):
    """GPT.forward with a cache as plain inputs and outputs, in terms that exporters can follow.

    Positions are looked up, not checked in Python: a runtime refuses one beyond the context.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        model.use_attention("reference")

    def forward(self, tokens: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        P, T = past[0].shape[2], tokens.shape[1]
        # Not arange(P, P + T): onnxruntime makes a slice of a lookup at those, and beyond
        # the table a slice gives what is left instead of an error.
        positions, cache = torch.arange(T, device=tokens.device) + P, _Past(past)
        logits = self.model(tokens, cache=cache, positions=positions)
        return logits, *cache.present


def empty_past(config: ModelConfig, B: int, P: int = 0) -> list[Tensor]:
    """Keys and values of P positions that are still to be filled, as a graph takes them."""
    shape = (B, config.n_kv_heads, P, config.d_head)
    return [torch.zeros(shape) for _ in range(2 * config.n_layers)]


def input_names(config: ModelConfig) -> list[str]:
    """The graph's inputs, as others name them (Optimum, transformers.js)."""
    return ["input_ids", *_layer_names(config, "past_key_values")]


def output_names(config: ModelConfig) -> list[str]:
    return ["logits", *_layer_names(config, "present")]


def _layer_names(config: ModelConfig, stem: str) -> list[str]:
    return [f"{stem}.{i}.{kind}" for i in range(config.n_layers) for kind in ("key", "value")]


def example_inputs(config: ModelConfig) -> tuple[Tensor, ...]:
    """Inputs to trace the graph with. Raises ConfigError for a context that is too short."""
    if config.context_length < EXAMPLE_T + EXAMPLE_P:
        raise ConfigError(
            f"model.context_length={config.context_length}: tracing takes a context of "
            f"{EXAMPLE_T + EXAMPLE_P} at least"
        )
    tokens = torch.arange(EXAMPLE_B * EXAMPLE_T).view(EXAMPLE_B, EXAMPLE_T) % config.vocab_size
    return tokens, *empty_past(config, EXAMPLE_B, EXAMPLE_P)


@dataclass(frozen=True)
class Case:
    """Inputs, and the logits of the model itself."""

    past_tokens: Tensor  # (B, P)
    tokens: Tensor  # (B, T)
    logits: Tensor  # (B, T, V)


@torch.no_grad()
def make_cases(model: GPT) -> list[Case]:
    """Random ids and the model's own logits of them, with and without a past."""
    config, rng = model.config, torch.Generator().manual_seed(0)
    cases = []
    for B, T, P in CASES:
        if config.context_length >= P + T:
            ids = torch.randint(config.vocab_size, (B, P + T), generator=rng)
            cases.append(Case(ids[:, :P], ids[:, P:], model(ids)[:, P:]))
    return cases


@torch.no_grad()
def compare(run: Run, cases: Sequence[Case], config: ModelConfig, limit: float) -> str:
    """Run the export on every case; a line about the largest difference between the logits.

    run(tokens, past) -> [logits, *present]. A past is what the export itself made of its tokens.
    Raises ExportError above limit x max(1, largest |logit|).
    """
    worst, scale = 0.0, 1.0
    for case in cases:
        past = empty_past(config, case.tokens.shape[0])
        if case.past_tokens.shape[1]:
            _, *past = run(case.past_tokens, past)
        logits, *present = run(case.tokens, past)
        if logits.shape != case.logits.shape:
            raise ExportError(f"logits of shape {tuple(logits.shape)}, not {case.logits.shape}")
        difference = float((logits - case.logits).abs().max())
        worst = max(worst, difference) if difference == difference else float("nan")
        scale = max(scale, float(case.logits.abs().max()))
    said = f"largest difference of a logit {worst:.1e} (the largest logit is {scale:.3g})"
    if not worst <= limit * scale:
        raise ExportError(f"the export differs from the model: {said}, allowed {limit * scale:.1e}")
    shapes = ", ".join("x".join(map(str, shape)) for shape in _shapes(cases))
    return f"{said} at batch x length x past {shapes}"


def _shapes(cases: Sequence[Case]) -> Iterator[tuple[int, int, int]]:
    for case in cases:
        yield *case.tokens.shape, case.past_tokens.shape[1]
