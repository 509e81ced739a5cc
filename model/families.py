"""Hugging Face's config.json as a ModelConfig: the families gpt2, llama and qwen3.

What the model here does not have is refused by its name in config.json. Nothing is approximated.
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
        "activation_function": (None, "gelu_new", "gelu_pytorch_tanh", "gelu"),
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
    if not isinstance(family, str) or family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise FolderError(
            f"model_type={_short(family)}: not one of those that can be loaded: {known}"
        )
    problems = []
    for name, allowed in {**NOWHERE, **ALLOWED[family]}.items():
        value = found.get(name)
        if not any(value is a or (a is not None and value == a) for a in allowed):
            wanted = " or ".join(str(a) for a in allowed if a is not None) or "none"
            problems.append(f"{name}={_short(value)}: the model here has {wanted} only")
    kinds = found.get("layer_types") or []
    others = {str(k) for k in (kinds if isinstance(kinds, list) else [kinds])} - {"full_attention"}
    if others:
        problems.append(f"layer_types: {_short(', '.join(sorted(others)))} is not known here")
    if family == "llama" and bool(found.get("attention_bias")) != bool(found.get("mlp_bias")):
        problems.append("attention_bias differs from mlp_bias: here all linear layers agree")
    read = {"gpt2": _read_gpt2, "llama": _read_llama, "qwen3": _read_qwen3}[family]
    try:
        config = read(found, problems)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
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
        mlp="gelu_erf" if found.get("activation_function") == "gelu" else "gelu",
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
