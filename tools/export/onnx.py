"""ONNX: model.onnx, in operators that TensorRT supports, verified with onnxruntime."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cli.options import ConfigError
from model.config import ModelConfig
from model.gpt import GPT
from tools.export.graph import (
    ExportError,
    GraphGPT,
    cache_names,
    compare_graph,
    dynamic_shapes,
    example_inputs,
    make_cases,
)

OPSET = 20  # the newest that TensorRT 10.0 reads
ONE_FILE = 1_800_000_000  # bytes of weights; protobuf ends at 2 GiB
LIMIT = 1e-4

# Operators marked "Y" in docs/operators.md of github.com/onnx/onnx-tensorrt, TensorRT 10.0.
TENSORRT_OPERATORS = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast
CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum
DeformConv DepthToSpace DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike
Flatten Floor Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool
GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization GRU HardSigmoid HardSwish
Hardmax Identity If ImageScaler InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu
Less LessOrEqual Log LogSoftmax Loop LRN LSTM LpNormalization LpPool MatMul Max MaxPool Mean
MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression NonZero Not OneHot Or Pad
ParametricSoftplus Pow PRelu QuantizeLinear RandomNormal RandomNormalLike RandomUniform
RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence
RNN RoiAlign Round ScaledTanh Scan Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid
Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan
Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
"""


def export_onnx(model: GPT, folder: Path) -> list[str]:
    """Write model.onnx into `folder`, and model.onnx.data for weights over 1.8 GB.

    Returns lines on the difference from the model's own logits, the operators, and how to build a
    TensorRT engine. Raises ExportError if the graph is wrong, ConfigError without the libraries.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 (torch's exporter needs it)
    except ImportError as error:
        raise ConfigError(
            f"format=onnx: pip install onnx onnxruntime onnxscript ({error})"
        ) from None
    cases, config, path = make_cases(model), model.config, folder / "model.onnx"
    _write(GraphGPT(model), path)
    onnx.checker.check_model(str(path), full_check=True)  # with strict shape inference
    operators = _operators(path)
    unsupported = operators - set(TENSORRT_OPERATORS.split())
    if unsupported:
        raise ExportError(f"the graph has operators that TensorRT lacks: {sorted(unsupported)}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(tokens: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        named = zip(input_names(config), (tokens, *past), strict=True)
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in named})
        return [torch.from_numpy(array) for array in outputs]

    return [
        f"onnxruntime: {compare_graph(run, cases, config, LIMIT)}",
        f"opset {OPSET}, checked; operators, all TensorRT's: {' '.join(sorted(operators))}",
        f"for TensorRT: {trtexec_line(path, config)}",
    ]


def input_names(config: ModelConfig) -> list[str]:
    """Name the graph's inputs in order."""
    return ["input_ids", *cache_names(config, "past_key_values")]


def _write(graph: GraphGPT, path: Path) -> None:
    config = graph.model.config
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # notes for the exporter's own authors
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph,
            example_inputs(config),
            str(path),
            input_names=input_names(config),
            output_names=["logits", *cache_names(config, "present")],
            dynamic_shapes=dynamic_shapes(config),
            opset_version=OPSET,
            dynamo=True,
            external_data=4 * graph.model.parameter_count() > ONE_FILE,
            verbose=False,
        )


def _operators(path: Path) -> set[str]:
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    nodes = [*model.graph.node, *(node for f in model.functions for node in f.node)]
    return {node.op_type for node in nodes} - {f.name for f in model.functions}


def trtexec_line(path: Path, config: ModelConfig) -> str:
    """Return the command that builds a TensorRT engine, to be run where TensorRT is installed."""

    def shapes(B: int, T: int, P: int) -> str:
        past = f"{B}x{config.n_kv_heads}x{P}x{config.d_head}"
        tokens, *caches = input_names(config)
        return ",".join([f"{tokens}:{B}x{T}", *(f"{name}:{past}" for name in caches)])

    C = config.context_length
    return (
        f"trtexec --onnx={path} --saveEngine={path.with_suffix('.engine')} "
        f"--minShapes={shapes(1, 1, 0)} --optShapes={shapes(1, 1, C // 4)} "
        f"--maxShapes={shapes(4, C // 2, C // 2)}"
    )
