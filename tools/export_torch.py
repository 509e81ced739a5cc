"""TorchScript (traced) and torch.export: the graph of export_graph.py, for programs without us."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import torch

from model.gpt import GPT
from tools.export_graph import GraphGPT, compare, example_inputs, make_cases

LIMIT = 1e-5


def export_torchscript(model: GPT, folder: Path) -> list[str]:
    """Write model.pt, for torch.jit.load. Returns what to say; ExportError if it is wrong."""
    cases, path = make_cases(model), folder / "model.pt"
    with warnings.catch_warnings(), torch.no_grad():
        # The tracer warns of Python reading a size: here only to check shapes, never to choose.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(GraphGPT(model), example_inputs(model.config), check_trace=False)
        with path.open("wb") as stream:  # given a path, torch aborts when the disk is full
            torch.jit.save(traced, stream)
        loaded = torch.jit.load(str(path))
    said = compare(lambda tokens, past: list(loaded(tokens, *past)), cases, model.config, LIMIT)
    return [f"torch.jit.load: {said}"]


def export_torch_export(model: GPT, folder: Path) -> list[str]:
    """Write model.pt2, for torch.export.load. Returns and raises as above."""
    cases, path, config = make_cases(model), folder / "model.pt2", model.config
    batch = torch.export.Dim("batch", min=1)
    length = torch.export.Dim("length", min=1, max=config.context_length)
    past = torch.export.Dim("past", min=0, max=config.context_length)
    pasts = tuple({0: batch, 2: past} for _ in range(2 * config.n_layers))
    with torch.no_grad():
        program = torch.export.export(
            GraphGPT(model),
            example_inputs(config),
            dynamic_shapes=({0: batch, 1: length}, pasts),
        )
    content = io.BytesIO()  # here it aborts with an open file, too
    torch.export.save(program, content)
    path.write_bytes(content.getbuffer())
    loaded = torch.export.load(str(path)).module()
    said = compare(lambda tokens, past: list(loaded(tokens, *past)), cases, config, LIMIT)
    return [f"torch.export.load: {said}"]
