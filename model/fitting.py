"""Which Hugging Face class a model of ours is, and its config.json.

What no class has is refused by its name in ModelConfig. Nothing is approximated.
"""

from __future__ import annotations

from typing import Any

from model.config import ModelConfig, attention_dropout
from model.families import ARCHITECTURES, FolderError

# What a model must be to fit a family: option -> value, or any of several. Options that are not
# named are free.
GELUS = {"gelu": "gelu_new", "gelu_erf": "gelu"}  # our name -> transformers'
FITS: dict[str, dict[str, Any]] = {
    "llama": {"norm": "rms", "mlp": "swiglu", "position": "rope", "qk_norm": False},
    "qwen3": {"norm": "rms", "mlp": "swiglu", "position": "rope", "qk_norm": True, "bias": False},
    "gpt2": {
        "norm": "layer",
        "mlp": tuple(GELUS),
        "position": "learned",
        "qk_norm": False,
        "bias": True,
    },
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
        if getattr(config, name) not in (wanted if isinstance(wanted, tuple) else (wanted,))
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
    if isinstance(value, tuple):
        return " or ".join(map(_typed, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def to_huggingface(
    config: ModelConfig, *, bos: int | None, eos: int | list[int] | None
) -> dict[str, Any]:
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
        "activation_function": GELUS[config.mlp],
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": attention_dropout(config),
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
        "attention_dropout": attention_dropout(config),
        # transformers 5 reads the first, those before it and other programs the other two.
        "rope_parameters": {
            "rope_theta": config.rope_theta,
            **(scaling or {"rope_type": "default"}),
        },
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
    }
