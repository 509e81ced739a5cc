"""Export a trained model: `python -m tools.export out/small --format=hf`.

hf            config.json, model.safetensors, tokenizer.json: for transformers, vLLM
gguf          model.gguf, weights and tokenizer in one file: for llama.cpp, Ollama
onnx          model.onnx, with the KV cache as inputs and outputs: for onnxruntime, TensorRT
torchscript   model.pt, the same graph: for torch.jit.load, also from C++
torch_export  model.pt2, the same graph: for torch.export.load, AOTInductor
peft          the adapters of a run with LoRA alone, for PEFT; the other formats merge them
Every export is compared with the model's own logits before it is moved to --out.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cli.command import run_command
from cli.options import ConfigError, parse_options

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from data.tokenizer import Tokenizer
    from model.gpt import GPT

USAGE = "python -m tools.export RUN --format=hf|gguf|onnx|torchscript|torch_export|peft [--out=DIR]"
DTYPES = {  # which formats hold other numbers than float32
    "float16": ("hf", "gguf"),
    "bfloat16": ("hf", "gguf"),
    "q8_0": ("gguf",),
}


@dataclass(frozen=True)
class ExportOptions:
    """Format, destination and checkpoint."""

    format: Annotated[
        Literal["hf", "gguf", "onnx", "torchscript", "torch_export", "peft"], "file format"
    ] = "hf"
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "q8_0"],
        "type of the weights: float16 and bfloat16 for hf and gguf, q8_0 (8 bits) for gguf",
    ] = "float32"
    out: Annotated[str, "folder to create; default: out/RUN-FORMAT"] = ""
    which: Annotated[str, "checkpoint: best, latest or a step; default: best if there is one"] = ""


def main(argv: list[str]) -> int:
    """Load, export into a temporary folder, verify, rename, and print what was verified."""
    options, (run,) = parse_options(argv, ExportOptions, usage=USAGE, positionals=["RUN"])
    out = Path(options.out or f"out/{Path(run).resolve().name}-{options.format}")
    if options.dtype != "float32" and options.format not in DTYPES[options.dtype]:
        raise ConfigError(
            f"dtype={options.dtype}: not for format={options.format}; use --dtype=float32, or "
            f"--format={' or '.join(DTYPES[options.dtype])}"
        )
    if out.exists():
        raise ConfigError(f"out={out}: already exists; choose another folder, or remove it")

    import torch

    from training.weights import find_weights

    weights = find_weights(run, options.which)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        if options.format == "peft":
            from tools.export.peft import export_peft

            lines = export_peft(weights, partial)
        else:
            model, tokenizer = weights.load(torch.device("cpu"))
            lines = export(model, tokenizer, options.format, partial, options.dtype)
        # Some libraries create files that only their owner can read.
        for path in (partial, *partial.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.rename(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno:  # a failed write does not name its file
            error.filename = str(error.filename or out).replace(str(partial), str(out))
        raise
    print("\n".join([*lines, f"exported {run} to {out}"]).replace(str(partial), str(out)))
    return 0


def export(
    model: GPT, tokenizer: Tokenizer, kind: str, folder: Path, dtype: str = "float32"
) -> list[str]:
    """Write one format into an empty folder and verify it; return lines on what was verified."""
    if kind == "hf":
        from tools.export.huggingface import export_huggingface

        return export_huggingface(model, tokenizer, folder, dtype)
    if kind == "gguf":
        from tools.export.gguf import export_gguf

        return export_gguf(model, tokenizer, folder, dtype)
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    if kind == "onnx":
        from tools.export.onnx import export_onnx

        return export_onnx(model, folder)
    from tools.export.graph import export_torch_export, export_torchscript

    write = export_torchscript if kind == "torchscript" else export_torch_export
    return write(model, folder)


if __name__ == "__main__":
    run_command(main)
