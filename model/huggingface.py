"""Read and write Hugging Face folders: config.json and model.safetensors.

    config = read_config(path)                reads no weights yet
    tensors = read_tensors(path, config)      by our names, for GPT(config)
    write_folder(path, config, tensors, ...)  for AutoModelForCausalLM

FAMILIES has one table per family, used in both directions. Features that the model here does not
have are refused by name; nothing is approximated.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from cli.options import ConfigError
from model.config import ModelConfig, ResolvedConfig, attention_dropout
from model.gpt import GPT

Json = Mapping[str, Any]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Masks and frequencies that older versions saved with the weights. They are computed, not learned.
BUFFERS = r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$"


class DamagedFolder(ConfigError):
    """The weights are truncated or are not safetensors."""

    exit_code = 3


# The families


def derived_or_int(value: Any) -> int | None:
    """Return None for null or 0: the size follows from others, see ModelConfig."""
    return int(value) if value else None


class Field(NamedTuple):
    """A field of config.json that holds one of our options."""

    name: str
    type: Callable[[Any], Any] = int
    default: Any = ...  # if the field is absent; ...: it must be given


@dataclass(frozen=True)
class Family:
    """A model class of transformers."""

    architecture: str
    fixed: dict[str, Any]  # option -> the only value, or tuple of values, that the class has
    fields: dict[str, Field]  # option -> the field that holds it
    features: dict[str, tuple[Any, ...]]  # field -> the values we support, None for absent or null
    tensors: dict[str, str]  # module -> theirs; modules with the same one lie in it side by side
    transposed: bool = False  # the matrices of the layers are stored (in, out)
    absent: Json | None = None  # what fields mean that config.json leaves out


# transformers ignores fields that it does not know. These it uses, or once did.
ANYWHERE = {
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}
GELUS = {"gelu_new": "gelu", "gelu": "gelu_erf", "gelu_pytorch_tanh": "gelu"}  # theirs -> ours

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    fixed={
        "norm": "layer",
        "mlp": ("gelu", "gelu_erf"),
        "position": "learned",
        "qk_norm": False,
        "bias": True,
    },
    fields={
        "n_layers": Field("n_layer"),
        "n_heads": Field("n_head"),
        "d_model": Field("n_embd"),
        "d_mlp": Field("n_inner", derived_or_int, None),
        "context_length": Field("n_positions", default=1024),
        "vocab_size": Field("vocab_size"),
        "norm_eps": Field("layer_norm_epsilon", float, 1e-5),
        "tie_embeddings": Field("tie_word_embeddings", bool, True),
    },
    features={
        **ANYWHERE,
        "activation_function": (None, *GELUS),
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
    },
    tensors={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.N.attn_norm": "transformer.h.N.ln_1",
        "layers.N.attn.q_proj": "transformer.h.N.attn.c_attn",
        "layers.N.attn.k_proj": "transformer.h.N.attn.c_attn",
        "layers.N.attn.v_proj": "transformer.h.N.attn.c_attn",
        "layers.N.attn.o_proj": "transformer.h.N.attn.c_proj",
        "layers.N.mlp_norm": "transformer.h.N.ln_2",
        "layers.N.mlp.up_proj": "transformer.h.N.mlp.c_fc",
        "layers.N.mlp.down_proj": "transformer.h.N.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    transposed=True,  # GPT-2 calls its linear layers Conv1D
)

LLAMA = Family(
    architecture="LlamaForCausalLM",
    fixed={
        "norm": "rms",
        "mlp": "swiglu",
        "position": "rope",
        "nope_every": 0,
        "qk_norm": False,
        "qkv_bias": False,
    },
    fields={
        "n_layers": Field("num_hidden_layers"),
        "n_heads": Field("num_attention_heads"),
        "n_kv_heads": Field("num_key_value_heads", derived_or_int, None),
        "d_model": Field("hidden_size"),
        "d_head": Field("head_dim", derived_or_int, None),
        "d_mlp": Field("intermediate_size"),
        "context_length": Field("max_position_embeddings", default=2048),
        "vocab_size": Field("vocab_size"),
        "norm_eps": Field("rms_norm_eps", float, 1e-6),
        "bias": Field("attention_bias", bool, False),
        "tie_embeddings": Field("tie_word_embeddings", bool, False),
    },
    features={
        **ANYWHERE,
        "hidden_act": (None, "silu", "swish"),
        "pretraining_tp": (None, 1),
        "rope_interleaved": (None, False),
        "partial_rotary_factor": (None, 1),
        "use_sliding_window": (None, False),
        "sliding_window": (None,),
    },
    tensors={
        "embed": "model.embed_tokens",
        "layers.N.attn_norm": "model.layers.N.input_layernorm",
        "layers.N.attn.q_proj": "model.layers.N.self_attn.q_proj",
        "layers.N.attn.k_proj": "model.layers.N.self_attn.k_proj",
        "layers.N.attn.v_proj": "model.layers.N.self_attn.v_proj",
        "layers.N.attn.o_proj": "model.layers.N.self_attn.o_proj",
        "layers.N.mlp_norm": "model.layers.N.post_attention_layernorm",
        "layers.N.mlp.gate_proj": "model.layers.N.mlp.gate_proj",
        "layers.N.mlp.up_proj": "model.layers.N.mlp.up_proj",
        "layers.N.mlp.down_proj": "model.layers.N.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
)

QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    fixed={**LLAMA.fixed, "qk_norm": True, "bias": False},
    # Qwen3's heads are 128 wide unless config.json says otherwise, whatever the model's width.
    fields={**LLAMA.fields, "d_head": Field("head_dim", derived_or_int, 128)},
    features={
        **{name: values for name, values in LLAMA.features.items() if name != "sliding_window"},
        "attention_bias": (None, False),  # Qwen3 reads sliding_window only if use_sliding_window
        "mlp_bias": (None, False),
    },
    tensors={
        **LLAMA.tensors,
        "layers.N.attn.q_norm": "model.layers.N.self_attn.q_norm",
        "layers.N.attn.k_norm": "model.layers.N.self_attn.k_norm",
    },
)

WITHOUT_BIAS = {option: field for option, field in LLAMA.fields.items() if option != "bias"}

QWEN2 = replace(
    LLAMA,
    architecture="Qwen2ForCausalLM",
    fixed={**LLAMA.fixed, "bias": False, "qkv_bias": True},
    fields=WITHOUT_BIAS,
    features={name: values for name, values in QWEN3.features.items() if "bias" not in name},
    absent={"num_key_value_heads": 32, "max_position_embeddings": 32768},
)

MISTRAL = replace(  # without its sliding window a Llama, and written as one
    LLAMA,
    architecture="MistralForCausalLM",
    fixed={**LLAMA.fixed, "bias": False},
    fields=WITHOUT_BIAS,
    absent={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)

SMOLLM3 = replace(
    LLAMA,
    architecture="SmolLM3ForCausalLM",
    fixed={option: value for option, value in LLAMA.fixed.items() if option != "nope_every"},
    fields={**LLAMA.fields, "nope_every": Field("no_rope_layer_interval")},
    absent={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
)

# By config.json's model_type. Of those that fit a model, the first is written.
FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "mistral": MISTRAL,
    "smollm3": SMOLLM3,
}


# config.json


def from_huggingface(about: Json) -> ResolvedConfig:
    """Return the (resolved) ModelConfig of a parsed config.json; dropout is left at 0.

    Raises ConfigError listing every feature that the model here does not have.
    """
    name = about.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"model_type={_short(name)}: not supported; use one of {known}")
    family = FAMILIES[name]
    about = {**(family.absent or {}), **about}
    problems = _unsupported(about, family)
    values = dict(family.fixed)
    if family is GPT2:
        values["mlp"] = GELUS.get(str(about.get("activation_function")), "gelu")
    else:
        values |= _read_rope(about, problems)
    for option, field in family.fields.items():
        value = about.get(field.name, field.default)
        try:
            values[option] = field.type(value)
        except (TypeError, ValueError, OverflowError):
            given = "missing" if value is ... else f"{_short(value)} is not a number"
            problems.append(f"{field.name}: {given}")
    if family is SMOLLM3 and not problems:
        values["nope_every"] = _read_nope(about, values["n_layers"], values["nope_every"], problems)
    if not problems:
        config = ModelConfig(**values)
        problems = [_their_words(problem, family) for problem in config.problems()]
    if problems:
        raise ConfigError([f"config.json ({name}): {problem}" for problem in problems])
    return config.resolved()


def _unsupported(about: Json, family: Family) -> list[str]:
    """Return what config.json asks for and the model here does not have."""
    problems = []
    for name, allowed in family.features.items():
        value = about.get(name)
        if not any(value is a or (a is not None and value == a) for a in allowed):
            wanted = " or ".join(str(a) for a in allowed if a is not None) or "none"
            problems.append(f"{name}={_short(value)}: not supported; must be {wanted}")
    kinds = about.get("layer_types") or []
    others = {str(k) for k in (kinds if isinstance(kinds, list) else [kinds])} - {"full_attention"}
    if others:
        problems.append(f"layer_types: {_short(', '.join(sorted(others)))} is not supported")
    attention_bias, mlp_bias = about.get("attention_bias"), about.get("mlp_bias")
    if "bias" not in family.fixed and bool(attention_bias) != bool(mlp_bias):
        problems.append("attention_bias differs from mlp_bias: here all linear layers agree")
    return problems


def _their_words(problem: str, family: Family) -> str:
    """Name the fields of config.json in place of our options."""
    names = {f"model.{option}": field.name for option, field in family.fields.items()}
    return re.sub(r"model\.\w+", lambda found: names.get(found[0], found[0]), problem)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _read_nope(about: Json, n_layers: int, every: int, problems: list[str]) -> int:
    """Return nope_every of a SmolLM3. no_rope_layers, if given, comes before the interval and has a
    1 for each layer that has RoPE."""
    given = about.get("no_rope_layers")
    if given is None:
        return every
    layers = [bool(uses) for uses in given[:n_layers]] if isinstance(given, list) else []
    every = layers.index(False) + 1 if False in layers else 0
    expected = (every == 0 or (i + 1) % every != 0 for i in range(len(layers)))
    if len(layers) < n_layers or layers != list(expected):
        problems.append(
            f"no_rope_layers={_short(given)}: must list every layer, with a 0 in every Nth place"
        )
    return every


def _read_rope(about: Json, problems: list[str]) -> dict[str, Any]:
    """Return RoPE's options, from transformers 5's rope_parameters or the older rope_scaling and
    rope_theta."""
    try:
        rope = {**(about.get("rope_scaling") or {}), **(about.get("rope_parameters") or {})}
        if any(isinstance(value, Mapping) for value in rope.values()):
            problems.append("rope_parameters differ between layers: not supported")
            return {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        theta = float(rope.get("rope_theta") or about.get("rope_theta") or 10000.0)
        fixed: dict[str, tuple[int | None, ...]] = {"partial_rotary_factor": (None, 1)}
        if kind == "llama3":
            fixed |= {"low_freq_factor": (1,), "high_freq_factor": (4,)}
        elif kind != "default":
            problems.append(f"rope_type={kind}: not supported; must be default or llama3")
        for name, allowed in fixed.items():
            if rope.get(name) not in allowed:
                problems.append(f"{name}={rope.get(name)}: not supported; must be {allowed[-1]}")
        if kind != "llama3":
            return {"rope_theta": theta}
        return {
            "rope_theta": theta,
            "rope_scaling": "llama3",
            "rope_factor": float(rope["factor"]),
            "rope_original_context": int(rope["original_max_position_embeddings"]),
        }
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        problems.append(f"rope_parameters: a number is missing or wrong ({error})")
        return {}


def _write_rope(config: ResolvedConfig) -> dict[str, Any]:
    scaling = None
    if config.rope_scaling == "llama3":
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": config.rope_original_context,
        }
    theta = {"rope_theta": config.rope_theta}
    # transformers 5 reads rope_parameters; older versions and other programs read the other two.
    parameters = theta | (scaling or {"rope_type": "default"})
    return {"rope_parameters": parameters, "rope_scaling": scaling, **theta}


def to_huggingface(
    config: ResolvedConfig, *, bos: int | None, eos: int | list[int] | None
) -> dict[str, Any]:
    """Return config.json for a (resolved) model whose documents begin with `bos` and end with
    `eos`.

    Raises ConfigError if no family fits.
    """
    name = family_of(config)
    family = FAMILIES[name]
    about = {
        "architectures": [family.architecture],
        "model_type": name,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": "float32",
        "torch_dtype": "float32",  # the name before transformers 4.56
        **{field.name: getattr(config, option) for option, field in family.fields.items()},
    }
    if family is GPT2:
        return about | {
            "n_ctx": config.context_length,
            "activation_function": next(a for a, ours in GELUS.items() if ours == config.mlp),
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": attention_dropout(config),
        }
    left_out = {"sliding_window": None, "pad_token_id": None}  # some classes have other defaults
    dropout = {"attention_dropout": attention_dropout(config)}
    rest = {"hidden_act": "silu", "mlp_bias": config.bias, **dropout, **_write_rope(config)}
    return about | left_out | rest


def family_of(config: ResolvedConfig) -> str:
    """Return the family that a (resolved) model fits, by its name in FAMILIES.

    Raises ConfigError naming the options that do not fit the nearest family.
    """
    misfits = {name: _misfits(config, name) for name in FAMILIES}
    fewest = min(map(len, misfits.values()))
    nearest = [name for name in FAMILIES if len(misfits[name]) == fewest]
    if fewest:
        ways = ", or ".join(" and ".join(misfits[name]) for name in nearest)
        raise ConfigError(
            f"no Hugging Face class fits this model: {ways}; "
            "export it with --format=onnx, torchscript or torch_export"
        )
    return nearest[0]


def _misfits(config: ResolvedConfig, name: str) -> list[str]:
    def typed(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    found = []
    for option, has in FAMILIES[name].fixed.items():
        value, allowed = getattr(config, option), has if isinstance(has, tuple) else (has,)
        if value not in allowed:
            wanted = " or ".join(map(typed, allowed))
            found.append(f"model.{option}={typed(value)} where {name} has {wanted}")
    C, H, D = config.d_model, config.n_heads, config.d_head
    if name == "gpt2" and config.n_kv_heads != H:
        found.append(f"model.n_kv_heads={config.n_kv_heads} where gpt2 has n_heads={H}")
    if name == "gpt2" and D * H != C:
        found.append(f"model.d_head={D} where gpt2 has d_model / n_heads")
    if name == "smollm3" and config.nope_every == 0:
        found.append("model.nope_every=0 where smollm3 has 4")
    if name == "llama" and C % H:
        found.append(f"model.d_model={C} where llama has a multiple of n_heads={H}")
    return found


# Tensors


def parameter_names(config: ResolvedConfig) -> list[str]:
    """Return the names of the parameters of GPT(config), from the smallest model that has them."""
    narrow = replace(config, n_heads=1, n_kv_heads=1, d_model=2, d_head=2, d_mlp=1)
    model = GPT(replace(narrow, vocab_size=1, context_length=1), seed=None)
    return [name for name, _ in model.named_parameters()]


def their_names(names: Iterable[str], family: Family) -> dict[str, list[str]]:
    """Return {their tensor: the parameters of ours that lie in it, in this order}.

    Raises ConfigError for a parameter that the family does not have.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        module, _, kind = name.rpartition(".")  # layers.3.attn.q_proj, weight
        layer = re.match(r"layers\.(\d+)\.", name)
        number = layer[1] if layer else "N"
        theirs = family.tensors.get(module.replace(f".{number}.", ".N.", 1))
        if theirs is None:
            raise ConfigError(f"{name}: {family.architecture} has no such tensor")
        found.setdefault(f"{theirs.replace('.N.', f'.{number}.')}.{kind}", []).append(name)
    return found


def _turned(tensor: Tensor, name: str, family: Family) -> Tensor:
    """Transpose the matrices that the family stores the other way round; its own inverse."""
    turn = family.transposed and name.startswith("layers.") and tensor.dim() == 2
    return tensor.t() if turn else tensor


# Reading


def is_folder(path: Path) -> bool:
    """Tell whether this is a Hugging Face folder: it has a config.json."""
    return (path / "config.json").is_file()


def conversion(path: Path) -> str:
    """Return what a GGUF file or an adapter is, and the command that makes a folder of it that
    can be read; "" for anything else."""
    adapter = path / "adapter_config.json"
    gguf = [path] if path.suffix == ".gguf" and path.is_file() else sorted(path.glob("*.gguf"))
    if adapter.is_file():
        base = str(read_json(adapter).get("base_model_name_or_path"))
        here, new, base = map(json.dumps, (str(path), f"{path}-merged", base))
        what = f"an adapter for {base}, without the model's own weights; to merge them"
        code = (
            "from peft import AutoPeftModelForCausalLM; from transformers import AutoTokenizer; "
            f"AutoPeftModelForCausalLM.from_pretrained({here}).merge_and_unload()"
            f".save_pretrained({new}); AutoTokenizer.from_pretrained({base}).save_pretrained({new})"
        )
    elif gguf:
        here, name = json.dumps(str(gguf[0].parent)), json.dumps(gguf[0].name)
        new = json.dumps(str(gguf[0].with_suffix("")))
        what = (
            "weights for llama.cpp (GGUF); name the model's Hugging Face folder, or convert them "
            "(pip install transformers gguf accelerate)"
        )
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig; "
            f"AutoModelForCausalLM.from_pretrained({here}, gguf_file={name}, quantization_config="
            f"GgufConfig(dequantize=True)).save_pretrained({new}); "
            f"AutoTokenizer.from_pretrained({here}, gguf_file={name}).save_pretrained({new})"
        )
    else:
        return ""
    return f"{what}: python -c {shlex.quote(code)}, which writes {new}"


def read_config(path: Path) -> ResolvedConfig:
    """Return the ModelConfig of a folder.

    Raises ConfigError naming the features that the model here does not have, or if there are no
    weights; DamagedFolder if the weights are smaller than the model.
    """
    about = read_json(path / "config.json")
    try:
        config = from_huggingface(about)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
    # The sizes come from a file. Compare them with the weights before anything is allocated.
    heads = 2 * (config.n_heads + config.n_kv_heads) * config.d_head  # q, o, k and v
    block = config.d_model * (heads + 2 * config.d_mlp)
    at_least = 2 * (config.vocab_size * config.d_model + config.n_layers * block)
    size = sum((path / name).stat().st_size for name in _weight_files(path))
    if at_least > size:
        raise DamagedFolder(
            f"{path}: config.json describes a model of {at_least:,} bytes or more, but the weights "
            f"have {size:,}"
        )
    # If the layers are narrow, a file of this size could hold any number of them. So count tensors.
    family = FAMILIES[about["model_type"]]
    names = [n for n in parameter_names(replace(config, n_layers=1)) if n.startswith("layers.")]
    each = len(their_names(names, family))
    with _opened_weights(path, family) as found:
        if config.n_layers * each > len(found):
            raise DamagedFolder(
                f"{path}: config.json describes {config.n_layers:,} layers of {each} tensors, but "
                f"the weights have {len(found):,} tensors"
            )
    return config


def read_tensors(path: Path, config: ResolvedConfig) -> dict[str, Tensor]:
    """Return the folder's tensors by our names, in float32; `config` comes from `read_config`.

    Raises ConfigError listing the tensors that do not fit, DamagedFolder if the weights are
    truncated.
    """
    name = read_json(path / "config.json")["model_type"]
    family, tensors = FAMILIES[name], {}
    wanted = their_names(parameter_names(config), family)
    with _opened_weights(path, family) as found:
        tied_head = found.pop("lm_head.weight", None) if config.tie_embeddings else None
        problems = [f"{path} has no tensor {name}" for name in wanted.keys() - found.keys()]
        extra = found.keys() - wanted.keys()
        problems += [f"{path} has a tensor {tensor}, which {name} does not use" for tensor in extra]
        for tensor in wanted.keys() & found.keys():
            dtype = found[tensor].get_dtype()
            if dtype not in ("F32", "F16", "BF16"):
                problems.append(f"{path}: {tensor} is {dtype}; must be F32, F16 or BF16")
        if problems:
            raise ConfigError(sorted(problems))
        for theirs, ours in wanted.items():
            whole = torch.atleast_1d(found[theirs][...].float())  # exact for float16 and bfloat16
            # Not strict: if a wrong shape gives fewer parts, the model says which ones it lacks.
            for our_name, part in zip(ours, whole.chunk(len(ours), dim=-1), strict=False):
                tensors[our_name] = _turned(part, our_name, family)
        if tied_head and not torch.equal(tied_head[...].float(), tensors["embed.weight"]):
            raise ConfigError(
                f"{path}: tie_word_embeddings=true, but lm_head.weight is not the embedding; set "
                "it to false in config.json if the head has weights of its own"
            )
    return tensors


@contextmanager
def _opened_weights(path: Path, family: Family) -> Iterator[dict[str, Any]]:
    """Open the files of weights; give {name: tensor, not read yet}, buffers left out.

    Raises DamagedFolder if the files cannot be read, here or in the block.
    """
    prefix = family.tensors["embed"].partition(".")[0] + "."
    found = {}
    try:
        with ExitStack() as stack:
            for name in _weight_files(path):
                file = stack.enter_context(safetensors.safe_open(path / name, "pt"))
                for key in file.keys():  # noqa: SIM118 (not a dict: it cannot be iterated over)
                    # Files of the bare model, saved without its head, leave out the prefix.
                    full = key if key.startswith((prefix, "lm_head.")) else prefix + key
                    if not re.search(BUFFERS, full):
                        found[full] = file.get_slice(key)
            yield found
    except (safetensors.SafetensorError, OSError) as error:
        raise DamagedFolder(f"{path}: the weights cannot be read: {error}") from error


def _weight_files(path: Path) -> list[str]:
    """Return the names of the files that hold the weights; if there are several, an index."""
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise DamagedFolder(f"{path / INDEX}: weight_map does not map tensors to files")
        files = sorted(set(map(str, weight_map.values())))
        for name in files:
            # The names come from a file: never open anything outside the folder.
            if not re.fullmatch(r"[\w-][\w.-]*", name) or not (path / name).is_file():
                raise DamagedFolder(f"{path / INDEX} names {name!r}, which is not in the folder")
        return files
    if not (path / WEIGHTS).is_file():
        if other := conversion(path):
            raise ConfigError(f"{path}: {other}")
        pickled = sorted(file.name for file in path.glob("*.bin"))
        hint = f", only {pickled[0]}, which is never unpickled" if pickled else ""
        raise ConfigError(f"{path}: there is no {WEIGHTS}{hint}; save the model as safetensors")
    return [WEIGHTS]


def read_json(path: Path) -> Any:
    """Read a JSON object. Raises ConfigError if the file is not one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return found


# Writing


def write_folder(
    path: Path,
    config: ResolvedConfig,
    tensors: Mapping[str, Tensor],
    *,
    bos: int | None,
    eos: int | list[int] | None,
    never: Sequence[int],
    pad: int | None = None,
    dtype: str = "float32",
) -> None:
    """Write config.json, generation_config.json and model.safetensors into an existing folder.

    bos, eos: ids that begin and end a document; eos may be several. never: ids that belong to no
    token; their rows are kept, and `generate` is told never to draw them. pad: fills up batches.
    dtype: float32, float16 or bfloat16.

    Raises ConfigError if no family fits, before anything is written.
    """
    about = to_huggingface(config, bos=bos, eos=eos)
    about["dtype"] = about["torch_dtype"] = dtype
    family = FAMILIES[about["model_type"]]
    generation: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": eos}
    if pad is not None:
        about["pad_token_id"] = generation["pad_token_id"] = pad
    if never:
        generation["suppress_tokens"] = list(never)
    theirs = {
        name: torch.cat(
            [_turned(tensors[our_name].detach().cpu(), our_name, family) for our_name in ours], -1
        )
        .to(getattr(torch, dtype))
        .contiguous()
        for name, ours in their_names(tensors, family).items()
    }
    for name, content in (("config.json", about), ("generation_config.json", generation)):
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    # Not save_file: the files it makes are readable by their owner alone.
    (path / WEIGHTS).write_bytes(safetensors.torch.save(theirs, metadata={"format": "pt"}))
