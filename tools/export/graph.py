"""The model as one graph with its KV cache as inputs and outputs, written for torch alone.

    input_ids (B, T), past_key_values.N.{key,value} (B, H_kv, P, D) for each layer N
    -> logits (B, T, V), present.N.{key,value} (B, H_kv, P + T, D)

B, T and P are dynamic: P = 0 reads a prompt, T = 1 adds a token. P + T must fit the context.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cli.options import ConfigError
from model.config import ModelConfig, ResolvedConfig
from model.gpt import GPT

# Exporters take sizes 0 and 1 for constants, and equal sizes for the same dimension.
EXAMPLE_B, EXAMPLE_T, EXAMPLE_P = 2, 3, 5
# (B, T, P) at which every export is compared: prompts, single tokens, tokens after a past.
SHAPES = ((1, 1, 0), (1, 8, 0), (3, 37, 0), (1, 1, 20), (3, 8, 20), (1, 37, 20))
LIMIT = 1e-5  # for torch's own formats; other runtimes sum in another order

Run = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]  # (tokens, past) -> logits, *present


class ExportError(RuntimeError):
    """The exported model computes something else: a bug in plainGPT or in a library."""

    exit_code = 4


class _Past:
    """A stateless KV cache for `GPT.forward`: takes the past, collects all keys and values."""

    def __init__(self, past: Sequence[Tensor]) -> None:
        self.past = past
        self.present: list[Tensor] = []

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k = torch.cat((self.past[2 * layer], k), dim=2)
        v = torch.cat((self.past[2 * layer + 1], v), dim=2)
        self.present += [k, v]
        return k, v

    def advance(self, T: int) -> None:
        """Do nothing: the caller passes `present` back in as the next past."""


class GraphGPT(nn.Module):
    """GPT.forward with the cache as plain tensors, in operations that exporters can trace.

    Positions are looked up in a table, not checked in Python: a runtime refuses one beyond it.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        model.use_attention("reference")

    def forward(self, tokens: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        P, T = past[0].shape[2], tokens.shape[1]
        # Not arange(P, P + T): onnxruntime turns a lookup of that into a slice, and a slice beyond
        # the end of the table returns fewer rows instead of an error.
        positions, cache = torch.arange(T, device=tokens.device) + P, _Past(past)
        logits = self.model(tokens, cache=cache, positions=positions)
        return logits, *cache.present


# Inputs and outputs


def empty_past(config: ResolvedConfig, B: int, P: int = 0) -> list[Tensor]:
    """Return keys and values of P positions, all zero, as the graph takes them."""
    shape = (B, config.n_kv_heads, P, config.d_head)
    return [torch.zeros(shape) for _ in range(2 * config.n_layers)]


def cache_names(config: ModelConfig, stem: str) -> list[str]:
    """Name the cache tensors: stem past_key_values or present, as in Optimum, transformers.js."""
    return [f"{stem}.{i}.{kind}" for i in range(config.n_layers) for kind in ("key", "value")]


def example_inputs(config: ResolvedConfig) -> tuple[Tensor, ...]:
    """Return inputs to trace the graph with. Raises ConfigError if the context is too short."""
    shortest = EXAMPLE_T + EXAMPLE_P
    if config.context_length < shortest:
        raise ConfigError(
            f"model.context_length={config.context_length}: too short to trace; at least {shortest}"
        )
    tokens = torch.arange(EXAMPLE_B * EXAMPLE_T).view(EXAMPLE_B, EXAMPLE_T) % config.vocab_size
    return tokens, *empty_past(config, EXAMPLE_B, EXAMPLE_P)


def dynamic_shapes(config: ModelConfig) -> tuple[Any, ...]:
    """Return the dynamic dimensions of `example_inputs`, for torch's exporters."""
    C = config.context_length
    batch = torch.export.Dim("batch", min=1)
    length = torch.export.Dim("length", min=1, max=C)
    past = torch.export.Dim("past", min=0, max=C)
    return {0: batch, 1: length}, tuple({0: batch, 2: past} for _ in range(2 * config.n_layers))


# Verification


class Case(NamedTuple):
    """Token ids, of which the first P are the past, and the model's own logits after it."""

    ids: Tensor  # (B, P + T)
    P: int
    logits: Tensor  # (B, T, V)


@torch.no_grad()
def make_cases(model: GPT) -> list[Case]:
    """Draw random ids of each of SHAPES that fits the context, and compute their logits."""
    config, rng = model.config, torch.Generator().manual_seed(0)
    cases = []
    for B, T, P in SHAPES:
        if config.context_length >= P + T:
            ids = torch.randint(config.vocab_size, (B, P + T), generator=rng)
            cases.append(Case(ids, P, model(ids)[:, P:]))
    return cases


@torch.no_grad()
def compare(logits_of: Callable[[Case], Tensor], cases: Sequence[Case], limit: float) -> str:
    """Compute every case by the export; return a line on the largest difference of a logit.

    Raises ExportError above limit x max(1, largest |logit|), and for a NaN.
    """
    differences, shapes = [], []
    for case in cases:
        logits = logits_of(case)
        if logits.shape != case.logits.shape:
            raise ExportError(f"logits of shape {tuple(logits.shape)}, not {case.logits.shape}")
        differences.append((logits - case.logits).abs().max())
        shapes.append(f"{logits.shape[0]}x{logits.shape[1]}x{case.P}")
    worst = float(torch.stack(differences).max())  # NaN if there is one
    scale = max(float(case.logits.abs().max()) for case in cases)
    found = f"largest difference of a logit {worst:.1e} (largest logit {scale:.3g})"
    allowed = limit * max(1.0, scale)
    if not worst <= allowed:
        raise ExportError(f"the export differs from the model: {found}, allowed {allowed:.1e}")
    return f"{found} at batch x length x past {', '.join(shapes)}"


def compare_graph(run: Run, cases: Sequence[Case], config: ResolvedConfig, limit: float) -> str:
    """Compare an exported graph, with each past computed by the graph itself."""

    def logits_of(case: Case) -> Tensor:
        past: Sequence[Tensor] = empty_past(config, case.ids.shape[0])
        if case.P:
            _, *past = run(case.ids[:, : case.P], past)
        return run(case.ids[:, case.P :], past)[0]

    return compare(logits_of, cases, limit)


# torch's own formats


def export_torchscript(model: GPT, folder: Path) -> list[str]:
    """Write model.pt, for torch.jit.load; return what was verified, or raise ExportError."""
    cases, config, path = make_cases(model), model.config, folder / "model.pt"
    with warnings.catch_warnings(), torch.no_grad():
        # The tracer warns where Python reads a size: here to check shapes only, never to branch.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(GraphGPT(model), example_inputs(config), check_trace=False)
        with path.open("wb") as stream:  # given a path, torch aborts when the disk is full
            torch.jit.save(traced, stream)
        loaded = torch.jit.load(str(path))
    line = compare_graph(lambda tokens, past: loaded(tokens, *past), cases, config, LIMIT)
    return [f"torch.jit.load: {line}"]


def export_torch_export(model: GPT, folder: Path) -> list[str]:
    """Write model.pt2, for torch.export.load; return what was verified, or raise ExportError."""
    cases, config, path = make_cases(model), model.config, folder / "model.pt2"
    with torch.no_grad():
        program = torch.export.export(
            GraphGPT(model), example_inputs(config), dynamic_shapes=dynamic_shapes(config)
        )
    content = io.BytesIO()  # on a full disk, torch.export.save aborts with an open file, too
    torch.export.save(program, content)
    path.write_bytes(content.getbuffer())
    loaded = torch.export.load(str(path)).module()
    line = compare_graph(lambda tokens, past: loaded(tokens, *past), cases, config, LIMIT)
    return [f"torch.export.load: {line}"]
