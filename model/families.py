"""Hugging Face's config.json as a ModelConfig and back: the families gpt2, llama and qwen3.

What the model here does not have is refused by its name in config.json; what no family has is
refused by its name in ModelConfig. Nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from model.config import ModelConfig

Json = Mapping[str, Any]

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class FolderError(ValueError):
    """A Hugging Face folder that this model cannot be, or a model that none of its classes can."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


# In


# The values that a feature may have, None for absent or null. transformers ignores what it does not
# know; these it obeys, or did.
NOWHERE = {
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}
ROTARY = {
    "hidden_act": (None, "silu", "swish"),
    "pretraining_tp": (None, 1),
    "rope_interleaved": (None, False),
    "partial_rotary_factor": (None, 1),
    "use_sliding_window": (None, False),
}
ALLOWED: dict[str, dict[str, tuple]] = {
    "gpt2": {
        "activation_function": (None, "gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
    },
    "llama": {**ROTARY, "sliding_window": (None,)},
    # Qwen3 obeys sliding_window only where use_sliding_window is true.
    "qwen3": {**ROTARY, "attention_bias": (None, False), "mlp_bias": (None, False)},
}


def from_huggingface(found: Json) -> ModelConfig:
    """The ModelConfig of a parsed config.json; dropout is left at 0, it belongs to training.

    Raises FolderError naming every feature that the model does not have.
    """
    family = found.get("model_type")
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise FolderError(f"model_type={family}: not one of those that can be loaded: {known}")
    problems = []
    for name, allowed in {**NOWHERE, **ALLOWED[family]}.items():
        value = found.get(name)
        if not any(value is a or (a is not None and value == a) for a in allowed):
            wanted = " or ".join(str(a) for a in allowed if a is not None) or "none"
            problems.append(f"{name}={_short(value)}: the model here has {wanted} only")
    others = {kind for kind in found.get("layer_types") or () if kind != "full_attention"}
    if others:
        problems.append(f"layer_types: {', '.join(map(str, sorted(others)))} is not known here")
    if family == "llama" and bool(found.get("attention_bias")) != bool(found.get("mlp_bias")):
        problems.append("attention_bias differs from mlp_bias: here all linear layers agree")
    read = {"gpt2": _read_gpt2, "llama": _read_llama, "qwen3": _read_qwen3}[family]
    try:
        config = read(found, problems)
    except (KeyError, TypeError, ValueError) as error:
        problems.append(f"{type(error).__name__}: {error}: a size is missing or no number")
    problems = problems or config.problems()
    if problems:
        raise FolderError([f"config.json ({family}): {problem}" for problem in problems])
    return config


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _read_gpt2(found: Json, problems: list[str]) -> ModelConfig:
    C, H = int(found["n_embd"]), int(found["n_head"])
    if H < 1 or C % H:
        problems.append(f"n_embd={C} is not a multiple of n_head={H}")
    return ModelConfig(
        n_layers=int(found["n_layer"]),
        n_heads=H,
        n_kv_heads=H,
        d_model=C,
        d_head=C // max(1, H),
        d_mlp=int(found.get("n_inner") or 4 * C),
        context_length=int(found.get("n_positions", 1024)),
        vocab_size=int(found["vocab_size"]),
        norm="layer",
        norm_eps=float(found.get("layer_norm_epsilon", 1e-5)),
        mlp="gelu",
        position="learned",
        qk_norm=False,
        bias=True,
        tie_embeddings=bool(found.get("tie_word_embeddings", True)),
    )


def _read_llama(found: Json, problems: list[str]) -> ModelConfig:
    C, H = int(found["hidden_size"]), int(found["num_attention_heads"])
    return ModelConfig(
        n_layers=int(found["num_hidden_layers"]),
        n_heads=H,
        n_kv_heads=int(found.get("num_key_value_heads") or H),
        d_model=C,
        d_head=int(found.get("head_dim") or C // max(1, H)),
        d_mlp=int(found["intermediate_size"]),
        context_length=int(found.get("max_position_embeddings", 2048)),
        vocab_size=int(found["vocab_size"]),
        norm="rms",
        norm_eps=float(found.get("rms_norm_eps", 1e-6)),
        mlp="swiglu",
        position="rope",
        qk_norm=False,
        bias=bool(found.get("attention_bias")),
        tie_embeddings=bool(found.get("tie_word_embeddings", False)),
        **_read_rope(found, problems),
    )


def _read_qwen3(found: Json, problems: list[str]) -> ModelConfig:
    # Qwen3's head_dim is 128 where it is not given, whatever the width.
    llama = _read_llama({"head_dim": 128, **found}, problems)
    return replace(llama, qk_norm=True, bias=False)


def _read_rope(found: Json, problems: list[str]) -> dict[str, Any]:
    """RoPE's options: of transformers 5 (rope_parameters) or before (rope_scaling, rope_theta)."""
    rope = {**(found.get("rope_scaling") or {}), **(found.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in rope.values()):
        problems.append("rope_parameters: differ from layer to layer; here they are the same")
        return {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = {"rope_theta": float(rope.get("rope_theta") or found.get("rope_theta") or 10000.0)}
    if rope.get("partial_rotary_factor") not in (None, 1):
        problems.append(f"partial_rotary_factor={rope['partial_rotary_factor']}: here it is 1")
    if kind == "default":
        return theta
    if kind != "llama3":
        problems.append(f"rope_type={kind}: the model here has default or llama3 only")
        return theta
    for name, fixed in (("low_freq_factor", 1), ("high_freq_factor", 4)):
        if rope.get(name) != fixed:
            problems.append(f"{name}={rope.get(name)}: the model here has {fixed} only")
    return theta | {
        "rope_scaling": "llama3",
        "rope_factor": float(rope["factor"]),
        "rope_original_context": int(rope["original_max_position_embeddings"]),
    }


# Out


# What a model must be to fit a family: option -> value. Options that are not named are free.
FITS: dict[str, dict[str, Any]] = {
    "llama": {"norm": "rms", "mlp": "swiglu", "position": "rope", "qk_norm": False},
    "qwen3": {"norm": "rms", "mlp": "swiglu", "position": "rope", "qk_norm": True, "bias": False},
    "gpt2": {"norm": "layer", "mlp": "gelu", "position": "learned", "qk_norm": False, "bias": True},
}


def family_of(config: ModelConfig) -> str:
    """The family that a (resolved) model fits: gpt2, llama or qwen3.

    Raises FolderError naming what keeps it from the nearest.
    """
    misfits = {family: _misfits(config, family) for family in FITS}
    least = min(map(len, misfits.values()))
    nearest = [family for family in FITS if len(misfits[family]) == least]
    if least:
        ways = ", or ".join(" and ".join(misfits[family]) for family in nearest)
        raise FolderError(
            f"no Hugging Face class has all of this model: {ways}; "
            "export it with --format=onnx, torchscript or torch_export"
        )
    return nearest[0]


def _misfits(config: ModelConfig, family: str) -> list[str]:
    found = [
        f"model.{name}={_typed(getattr(config, name))} where {family} has {_typed(wanted)}"
        for name, wanted in FITS[family].items()
        if getattr(config, name) != wanted
    ]
    C, H, D = config.d_model, config.n_heads, config.d_head
    if family == "gpt2" and config.n_kv_heads != H:
        found.append(f"model.n_kv_heads={config.n_kv_heads} where gpt2 has n_heads={H}")
    if family == "gpt2" and D * H != C:
        found.append(f"model.d_head={D} where gpt2 has d_model / n_heads")
    if family == "llama" and C % H:
        found.append(f"model.d_model={C} where llama has a multiple of n_heads={H}")
    return found


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def to_huggingface(config: ModelConfig, *, bos: int | None, eos: int | None) -> dict[str, Any]:
    """config.json of a (resolved) model whose documents begin with `bos` and end with `eos`.

    Raises FolderError if no family fits.
    """
    family = family_of(config)
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": "float32",
        "torch_dtype": "float32",  # the name before transformers 4.56
        **(_write_gpt2(config) if family == "gpt2" else _write_rotary(config)),
    }


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_embd": config.d_model,
        "n_inner": config.d_mlp,
        "n_positions": config.context_length,
        "n_ctx": config.context_length,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def _write_rotary(config: ModelConfig) -> dict[str, Any]:
    scaling = None
    if config.rope_scaling == "llama3":
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": config.rope_original_context,
        }
    return {
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "hidden_size": config.d_model,
        "head_dim": config.d_head,
        "intermediate_size": config.d_mlp,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": config.dropout,
        # transformers 5 reads the first, those before it and other programs the other two.
        "rope_parameters": {
            "rope_theta": config.rope_theta,
            **(scaling or {"rope_type": "default"}),
        },
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
    }
