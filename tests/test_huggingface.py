"""Reading and writing Hugging Face folders, compared with what transformers itself computes."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cli.options import ConfigError
from data.tokenizer import load_tokenizer
from model import huggingface
from model.config import ModelConfig, SamplingConfig
from model.generate import generate
from model.gpt import GPT
from model.huggingface import (
    DamagedFolder,
    family_of,
    from_huggingface,
    parameter_names,
    read_config,
    read_tensors,
    to_huggingface,
    write_folder,
)
from training.checkpoint import load_model_tensors
from training.config import Config, from_json
from training.inherit import inherit_model
from training.metrics import read_metrics
from training.weights import find_weights

V, CONTEXT = 211, 256
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}


def family_configs() -> dict[str, object]:
    """Return a tiny transformers config of each kind."""
    from transformers import (
        GPT2Config,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
        SmolLM3Config,
    )

    shape = {
        "vocab_size": V,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    gpt2 = {"vocab_size": V, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    gpt2 |= {"bos_token_id": None, "eos_token_id": None}
    biases = {"attention_bias": True, "mlp_bias": True}
    return {
        "gpt2": GPT2Config(**gpt2),
        "gpt2-untied": GPT2Config(
            **gpt2, n_inner=100, tie_word_embeddings=False, activation_function="gelu"
        ),
        "llama-gqa": LlamaConfig(**shape, num_key_value_heads=2),
        "llama3": LlamaConfig(**shape, rope_parameters=LLAMA3, tie_word_embeddings=True),
        "llama-bias": LlamaConfig(**shape, **biases, head_dim=16, rms_norm_eps=1e-5),
        "qwen3": Qwen3Config(**shape, num_key_value_heads=1, head_dim=32),
        "qwen2": Qwen2Config(**shape, num_key_value_heads=2, tie_word_embeddings=True),
        "mistral": MistralConfig(
            **{**shape, "hidden_size": 50}, num_key_value_heads=2, head_dim=16, sliding_window=None
        ),
        "smollm3": SmolLM3Config(
            **{**shape, "num_hidden_layers": 5, "pad_token_id": None},
            num_key_value_heads=2,
            no_rope_layer_interval=2,
        ),
        "smollm3-untied": SmolLM3Config(
            **{**shape, **biases, "num_hidden_layers": 4, "pad_token_id": None},
            tie_word_embeddings=False,
        ),
    }


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Return {kind: (model of transformers with large weights, its folder)}."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    found = {}
    for kind, config in family_configs().items():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                # Three times what keeps the variance: attention is sharp, every mistake shows.
                p.add_(torch.randn_like(p) * (3 / p.shape[-1] ** 0.5 if p.dim() == 2 else 0.5))
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        found[kind] = model, folder
    return found


def read_folder(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = read_config(folder)
    return config, read_tensors(folder, config)


def ours(folder: Path) -> GPT:
    config, tensors = read_folder(folder)
    model = GPT(config)
    load_model_tensors(dict(model.named_parameters()), tensors, str(folder))
    return model.eval()


KINDS = ["gpt2", "gpt2-untied", "llama-gqa", "llama3", "llama-bias", "qwen3", "qwen2", "mistral"]
KINDS += ["smollm3", "smollm3-untied"]
each_kind = pytest.mark.parametrize("kind", KINDS)


# There and back


@each_kind
@torch.no_grad()
def test_logits_are_those_of_transformers_at_every_position(theirs, kind):
    model, folder = theirs[kind]
    tokens = torch.randint(V, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    expected = model(tokens).logits
    scale = max(1.0, float(expected.abs().max()))
    assert scale > 5  # large enough to tell
    assert float((ours(folder)(tokens) - expected).abs().max()) <= 1e-4 * scale


@each_kind
def test_a_model_written_again_keeps_every_bit_and_is_the_model_to_transformers(
    theirs, kind, tmp_path
):
    from transformers import AutoModelForCausalLM

    model, folder = theirs[kind]
    config, tensors = read_folder(folder)
    write_folder(tmp_path, config, tensors, bos=3, eos=4, never=())
    before, after = (
        safetensors.torch.load_file(f / "model.safetensors") for f in (folder, tmp_path)
    )
    assert before.keys() == after.keys()  # a tied head is left out, an untied one is there
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert read_config(tmp_path) == config
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert (loaded.generation_config.bos_token_id, loaded.generation_config.eos_token_id) == (3, 4)
    differ = {"bos_token_id", "eos_token_id", "resid_pdrop", "embd_pdrop", "attn_pdrop", "n_inner"}
    differ |= {"_name_or_path", "transformers_version", "initializer_range"}
    expected, found = model.config.to_dict(), loaded.config.to_dict()
    assert {n: found[n] for n in expected.keys() - differ} == {
        n: expected[n] for n in expected.keys() - differ
    }


@each_kind
def test_greedy_continuations_are_the_same(theirs, kind):
    model, folder = theirs[kind]
    prompt = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(2))
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False
    )
    settings = SamplingConfig(temperature=0.0, max_new_tokens=64)
    found = torch.stack(list(generate(ours(folder), prompt, settings, torch.Generator())), dim=1)
    assert torch.equal(found, expected[:, 9:])


# Variants of the files


def rewritten(folder: Path, tmp_path: Path, change) -> Path:
    """Copy the folder, with change(tensors) as its tensors."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    tensors = change(safetensors.torch.load_file(copy / "model.safetensors"))
    safetensors.torch.save_file(tensors, copy / "model.safetensors")
    return copy


def same_model(a: Path, b: Path) -> bool:
    (config_a, tensors_a), (config_b, tensors_b) = read_folder(a), read_folder(b)
    same = all(torch.equal(tensors_a[name], tensors_b[name]) for name in tensors_a)
    return same and config_a == config_b and tensors_a.keys() == tensors_b.keys()


def test_buffers_of_old_files_are_ignored_and_the_prefix_may_be_missing(theirs, tmp_path):
    folder = theirs["gpt2"][1]

    def old(tensors):
        tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        for i in range(2):
            tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, CONTEXT, CONTEXT).tril()
            tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return tensors

    assert same_model(rewritten(folder, tmp_path, old), folder)


def test_a_head_that_is_stored_although_tied_must_be_the_embedding(theirs, tmp_path):
    folder = theirs["gpt2"][1]
    name = "transformer.wte.weight"
    twice = rewritten(folder, tmp_path, lambda t: {**t, "lm_head.weight": t[name].clone()})
    assert same_model(twice, folder)
    shutil.rmtree(twice)
    other = rewritten(folder, tmp_path, lambda t: {**t, "lm_head.weight": t[name] + 1})
    with pytest.raises(ConfigError, match=r"tie_word_embeddings=true, but lm_head\.weight"):
        read_folder(other)


def test_several_files_are_read_by_their_index(theirs, tmp_path):
    model, folder = theirs["llama-gqa"]
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert same_model(tmp_path, folder)


def test_half_precision_is_read_exactly(theirs, tmp_path):
    folder = theirs["qwen3"][1]
    half = rewritten(folder, tmp_path, lambda t: {n: x.bfloat16() for n, x in t.items()})
    tensors = read_folder(half)[1]
    for name, tensor in read_folder(folder)[1].items():
        assert tensors[name].dtype == torch.float32
        assert torch.equal(tensors[name], tensor.bfloat16().float())


def test_old_and_new_spellings_of_rope_mean_the_same(theirs):
    found = json.loads((theirs["llama3"][1] / "config.json").read_text())
    old = {name: value for name, value in found.items() if name != "rope_parameters"}
    old |= {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    del old["rope_scaling"]["rope_theta"], old["rope_scaling"]["rope_type"]
    assert from_huggingface(old) == from_huggingface(found)
    assert from_huggingface(found).rope_scaling == "llama3"
    assert from_huggingface(found).rope_theta == 500000.0
    written = to_huggingface(from_huggingface(found).resolved(V), bos=None, eos=None)
    for names in (["rope_parameters"], ["rope_scaling", "rope_theta"]):  # each alone is enough
        left = {name: value for name, value in written.items() if name not in names}
        assert from_huggingface(left) == from_huggingface(found)


@pytest.mark.parametrize("family", huggingface.FAMILIES)
def test_what_is_left_out_means_what_it_means_to_transformers(family):
    from transformers import AutoConfig

    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": 80, "vocab_size": V}
    if family == "gpt2":
        sizes = {"n_embd": 256, "n_head": 2, "n_layer": 1, "vocab_size": V}
    if family in ("qwen3", "qwen2"):
        sizes |= {"num_attention_heads": 32}
    if family == "qwen3":
        sizes |= {"max_position_embeddings": 2048}
    if family == "mistral":
        sizes |= {"num_attention_heads": 8, "sliding_window": None}
    if family == "smollm3":
        sizes |= {"num_attention_heads": 4, "num_hidden_layers": 4}
    meant = json.loads(AutoConfig.for_model(family, **sizes).to_json_string(use_diff=False))
    assert from_huggingface({"model_type": family, **sizes}) == from_huggingface(meant)


# Refusals, before any weights are read


REFUSED = [
    ("llama-gqa", {"model_type": "mixtral"}, "model_type=mixtral"),
    ("llama-gqa", {"model_type": "qwen2_moe"}, "model_type=qwen2_moe"),
    ("mistral", {"sliding_window": 4096}, "sliding_window=4096"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 1]}, "no_rope_layers=[1, 0, 1, 1, 1]"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers=[1, 0, 1, 0]"),
    ("smollm3", {"no_rope_layers": 4}, "no_rope_layers=4"),
    ("smollm3", {"attention_bias": True}, "attention_bias differs"),
    ("llama-gqa", {"attention_bias": True}, "attention_bias"),
    ("llama-gqa", {"mlp_bias": True}, "mlp_bias"),
    ("llama-gqa", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    ("llama-gqa", {"pretraining_tp": 2}, "pretraining_tp=2"),
    ("llama-gqa", {"sliding_window": 128}, "sliding_window=128"),
    ("llama-gqa", {"num_local_experts": 8}, "num_local_experts=8"),
    ("llama-gqa", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama-gqa", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
    ("llama-gqa", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ("llama-gqa", {"rope_parameters": {"full": {"rope_type": "default"}}}, "rope_parameters"),
    ("llama-gqa", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama3", {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor=2.0"),
    ("llama3", {"rope_parameters": {**LLAMA3, "high_freq_factor": 8.0}}, "high_freq_factor=8.0"),
    ("llama-gqa", {"hidden_size": "wide"}, "hidden_size: wide is not a number"),
    ("llama-gqa", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("gpt2", {"activation_function": "relu"}, "activation_function=relu"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("gpt2", {"n_head": 5}, "n_head=5"),
    ("gpt2", {"n_layer": None}, "n_layer: None is not a number"),
    ("llama3", {"rope_parameters": {**LLAMA3, "factor": None}}, "rope_parameters"),
]


@pytest.mark.parametrize(("kind", "change", "named"), REFUSED)
def test_a_feature_that_the_model_lacks_is_refused_by_name(theirs, tmp_path, kind, change, named):
    found = json.loads((theirs[kind][1] / "config.json").read_text())
    if "rope_scaling" in change:
        found.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(found | change))
    with pytest.raises(ConfigError) as raised:
        read_folder(tmp_path)  # there is no file of weights
    assert raised.value.exit_code == 2
    assert len(raised.value.problems) == 1
    assert named in str(raised.value) and str(tmp_path) in str(raised.value)


def test_all_refusals_come_at_once(theirs):
    found = json.loads((theirs["llama-gqa"][1] / "config.json").read_text())
    with pytest.raises(ConfigError) as raised:
        from_huggingface(found | {"hidden_act": "relu", "attention_bias": True, "head_dim": 7})
    assert len(raised.value.problems) == 2


def test_tensors_that_do_not_fit_are_named(theirs, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    changes = {
        f"no tensor {name}": lambda t: {n: x for n, x in t.items() if n != name},
        "no tensor lm_head.weight": lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"},
        "does not use": lambda t: {**t, "model.layers.0.self_attn.q_norm.weight": torch.ones(12)},
        "I8": lambda t: {**t, name: torch.zeros(80, 48, dtype=torch.int8)},
    }
    for said, change in changes.items():
        folder = rewritten(theirs["llama-gqa"][1], tmp_path, change)
        with pytest.raises(ConfigError, match=said):
            read_folder(folder)
        shutil.rmtree(folder)
    folder = rewritten(theirs["llama-gqa"][1], tmp_path, lambda t: {**t, name: t[name][:-1]})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        find_weights(folder).load(torch.device("cpu"))


def test_damaged_weights_are_told_as_damage(theirs, tmp_path):
    folder = Path(shutil.copytree(theirs["gpt2"][1], tmp_path / "copy"))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DamagedFolder, match="cannot be read") as raised:
        read_folder(folder)
    assert raised.value.exit_code == 3
    (folder / huggingface.INDEX).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(DamagedFolder, match=r"\.\./x\.safetensors"):
        read_folder(folder)


def test_sizes_that_the_weights_cannot_have_allocate_nothing(theirs, tmp_path):
    folder = Path(shutil.copytree(theirs["llama-gqa"][1], tmp_path / "copy"))
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | {"num_hidden_layers": 10**9}))
    with pytest.raises(DamagedFolder, match="the weights have"):
        find_weights(folder)


def test_pickled_weights_are_never_opened(theirs, tmp_path):
    shutil.copy(theirs["gpt2"][1] / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin, which is never unpickled"):
        read_folder(tmp_path)
    assert not Path("pwned").exists()


# Folders of other kinds


def test_an_adapter_of_another_kind_is_told_with_the_command_that_merges_it(tmp_path):
    adapter = {"base_model_name_or_path": "some/base", "peft_type": "IA3"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError) as raised:
        find_weights(tmp_path)
    said = str(raised.value)
    assert said.startswith(f'{tmp_path}/adapter_config.json: peft_type="IA3" is not supported')
    assert 'This is an adapter for "some/base"' in said
    code = said[said.index("python -c '") + len("python -c '") : said.rindex("'")]
    compile(code, "hint", "exec")
    assert f'("{tmp_path}").merge_and_unload().save_pretrained("{tmp_path}-merged")' in code
    assert said.endswith(f'which writes "{tmp_path}-merged"')


@pytest.mark.parametrize("named", ["folder", "file", "with config"])
def test_weights_for_llama_cpp_are_told_with_the_command_that_converts_them(
    named, theirs, tmp_path
):
    path = tmp_path / "m.Q8_0.gguf"
    path.write_bytes(b"GGUF")
    if named == "with config":
        shutil.copy(theirs["qwen2"][1] / "config.json", tmp_path)
    with pytest.raises(ConfigError) as raised:
        find_weights(path if named == "file" else tmp_path)
    said = str(raised.value)
    assert f'AutoTokenizer.from_pretrained("{tmp_path}", gguf_file="m.Q8_0.gguf")' in said
    code = said[said.index("python -c '") + len("python -c '") : said.rindex("'")]
    compile(code, "hint", "exec")
    assert said.endswith(f'which writes "{tmp_path}/m.Q8_0"')


def test_a_weights_folder_with_other_formats_beside_is_read(theirs, tmp_path):
    folder = Path(shutil.copytree(theirs["qwen2"][1], tmp_path / "copy"))
    (folder / "m.gguf").write_bytes(b"GGUF")
    (folder / "adapter_config.json").write_text("{}")
    assert same_model(folder, theirs["qwen2"][1])
    assert find_weights(folder).config.qkv_bias


# Which models fit which class


FITTING = {
    "qwen3": ModelConfig(),
    "llama": ModelConfig(qk_norm=False, bias=True),
    "qwen2": ModelConfig(qk_norm=False, qkv_bias=True),
    "mistral": ModelConfig(qk_norm=False, d_model=126, d_head=32),
    "smollm3": ModelConfig(qk_norm=False, nope_every=4, bias=True),
    "gpt2": ModelConfig(
        norm="layer", mlp="gelu", position="learned", qk_norm=False, bias=True, tie_embeddings=True
    ),
}


@pytest.mark.parametrize("family", FITTING)
def test_the_family_and_the_names_follow_from_the_model(family):
    config = FITTING[family].resolved(V)
    assert family_of(config) == family
    assert parameter_names(config) == [name for name, _ in GPT(config).named_parameters()]


def test_a_mistral_is_refused_if_its_file_leaves_the_sliding_window_out(theirs):
    found = json.loads((theirs["mistral"][1] / "config.json").read_text())
    del found["sliding_window"]
    with pytest.raises(ConfigError, match="sliding_window=4096: not supported"):
        from_huggingface(found)


def test_a_mistral_whose_heads_share_the_width_is_written_as_a_llama(theirs):
    found = json.loads((theirs["mistral"][1] / "config.json").read_text())
    assert family_of(from_huggingface(found | {"hidden_size": 48})) == "llama"


@pytest.mark.parametrize(
    ("listed", "every"), [([1, 1, 0, 1, 1], 3), ([0, 0, 0, 0, 0, 1], 1), ([1] * 5, 0)]
)
def test_the_list_of_layers_without_rope_comes_before_the_interval(theirs, listed, every):
    found = json.loads((theirs["smollm3"][1] / "config.json").read_text())
    assert from_huggingface(found | {"no_rope_layers": listed}).nope_every == every


def test_a_module_that_no_family_has_is_refused_by_name(tmp_path):
    config = FITTING["qwen3"].resolved(V)
    tensors = {"layers.0.mlp.experts.1.weight": torch.ones(2, 2)}
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts\.1\.weight: Qwen3ForCausalLM"):
        write_folder(tmp_path, config, tensors, bos=None, eos=None, never=())
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "change", "blamed"),
    [
        ("qwen3", {"mlp": "relu2"}, "model.mlp=relu2"),
        ("qwen3", {"bias": True}, "model.bias=true"),
        ("qwen3", {"norm": "layer"}, "model.norm=layer"),
        ("qwen3", {"position": "learned"}, "model.position=learned"),
        ("qwen3", {"nope_every": 4}, "model.nope_every=4"),
        ("qwen3", {"qkv_bias": True}, "model.qkv_bias=true"),
        ("qwen2", {"nope_every": 4}, "model.nope_every=4"),
        ("llama", {"d_model": 126, "d_head": 32}, "model.d_model=126"),
        ("gpt2", {"n_kv_heads": 2}, "model.n_kv_heads=2"),
        ("gpt2", {"d_head": 16}, "model.d_head=16"),
        ("gpt2", {"bias": False}, "model.bias=false"),
    ],
)
def test_what_fits_no_class_is_refused_with_the_option_to_blame(family, change, blamed):
    config = replace(FITTING[family], **change).resolved(V)
    with pytest.raises(ConfigError) as raised:
        to_huggingface(config, bos=None, eos=None)
    assert f"{blamed} where {family} has" in str(raised.value)


def test_written_files_can_be_read_by_others(tmp_path):
    config = FITTING["qwen3"].resolved(V)
    before = os.umask(0o022)
    try:
        write_folder(
            tmp_path, config, dict(GPT(config).named_parameters()), bos=None, eos=0, never=()
        )
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


# A run that starts from a folder


def asked(folder: Path, **model) -> Config:
    config = Config(model=ModelConfig(**model))
    return replace(config, run=replace(config.run, init_from=str(folder)))


def test_a_run_takes_the_shape_the_tokenizer_and_a_context_as_asked(theirs):
    folder = theirs["gpt2"][1]
    said = []
    config = inherit_model(asked(folder, context_length=32, dropout=0.1), said.append)
    assert config.model == replace(read_folder(folder)[0], context_length=32, dropout=0.1)
    assert config.data.tokenizer == f"hf:{folder}"
    assert "context_length=32" in said[0] and "256" in said[0] and "d_model=48" in said[-1]
    explicit = replace(asked(folder), data=replace(Config().data, tokenizer="byte"))
    assert inherit_model(explicit, said.append).data.tokenizer == "byte"


def test_options_that_contradict_the_weights_are_refused(theirs):
    folder = theirs["llama-gqa"][1]
    with pytest.raises(ConfigError) as raised:
        inherit_model(asked(folder, n_layers=3, context_length=512, bias=True), print)
    text = str(raised.value)
    for said in ("model.n_layers=3", "have 2", "model.context_length=512", "model.bias=True"):
        assert said in text
    assert "qk_norm" not in text  # it was left at its default


@pytest.mark.parametrize(("name", "has"), [("n_layers", 2), ("d_model", 48), ("qk_norm", False)])
def test_a_typed_default_that_contradicts_the_weights_is_refused(name, has, theirs):
    config, value = asked(theirs["llama-gqa"][1]), getattr(ModelConfig(), name)
    with pytest.raises(ConfigError) as raised:
        inherit_model(replace(config, typed={f"model.{name}": value}), print)
    assert f"{name}={value}: " in str(raised.value) and str(has) in str(raised.value)
    inherit_model(replace(config, typed={"optim.lr": 0.1}), print)


def test_an_option_that_is_typed_as_automatic_follows_the_weights(theirs):
    config = replace(asked(theirs["llama-gqa"][1]), typed={"model.n_kv_heads": None})
    assert inherit_model(config, print).model.n_kv_heads == 2


def test_a_hugging_face_folder_has_no_steps(theirs):
    with pytest.raises(ConfigError, match="which=7"):
        find_weights(theirs["gpt2"][1], "7")


def test_a_hub_name_without_a_network_is_one_line(monkeypatch):
    import huggingface_hub

    def no_network(name, **_):
        raise ConnectionError(f"no route to {name}\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ConfigError, match="hub:some/model: ") as raised:
        find_weights("hub:some/model")
    assert len(str(raised.value).splitlines()) == 1


def test_a_hub_name_is_fetched_once_and_then_a_folder(theirs, monkeypatch):
    import huggingface_hub

    folder, calls = theirs["qwen3"][1], []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: calls.append(name) or str(folder)
    )
    assert find_weights("hub:some/model").config == read_folder(folder)[0]
    assert calls == ["some/model"]


# Fine-tuning is training


@pytest.fixture
def pretrained(trained, tmp_path, command) -> Path:
    """The tiny run as a Hugging Face folder: from there on anybody's."""
    from tools.export import __main__ as export

    assert command(export.main, trained, f"--out={tmp_path / 'pretrained'}")[0] == 0
    return tmp_path / "pretrained"


def fine_tune(pretrained: Path, tiny_folder: Path, **options) -> list[str]:
    config = pretrained.parent / "tune.py"
    config.write_text("from training.config import Config\nconfig = Config()\n")
    options = {
        "init_from": pretrained,
        "out_dir": pretrained.parent / "tuned",
        "source": tiny_folder / "text.txt",
        "prepared_dir": pretrained.parent / "prepared",
        "split": "tail",
        "val_fraction": 0.2,
        "global_batch": 4,
        "max_steps": 3,
        "eval_interval": 3,
        "eval_windows": 8,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "workers": 0,
        **options,
    }
    return [str(config), *(f"--{name}={value}" for name, value in options.items())]


def test_fine_tuning_goes_on_from_the_weights_and_resumes(
    trained, pretrained, tiny_folder, command
):
    import train

    argv = fine_tune(pretrained, tiny_folder, lr=1e-12, max_steps=1)  # as good as no step
    code, said, _ = command(train.main, *argv)
    assert code == 0
    assert "Hugging Face" in said
    tuned = pretrained.parent / "tuned"
    before = read_metrics(trained / "metrics.jsonl")
    after = read_metrics(tuned / "metrics.jsonl")
    # What it knows at its beginning is what the run knew at its end.
    known = [line["val_loss"] for line in before if "val_loss" in line][-1]
    first = [line for line in after if "val_loss" in line][0]
    assert first["val_loss"] == pytest.approx(known, abs=1e-6)
    saved = from_json((tuned / "run.json").read_text())
    assert saved.data.tokenizer == f"hf:{pretrained}"
    assert saved.model == find_weights(tuned).config
    assert command(train.main, *argv)[0] == 0  # finished: the same command finds nothing to do
    code, _, _ = command(
        train.main, *fine_tune(pretrained, tiny_folder, max_steps=5, resume="changed")
    )
    assert code == 0
    assert find_weights(tuned, "5").origin == "step 5"


def test_ids_that_the_weights_do_not_know_are_refused(pretrained, tiny_folder, command):
    import train

    for tokenizer, said in (("byte", "257"), ("bpe:300", "its ids")):
        argv = fine_tune(pretrained, tiny_folder, tokenizer=tokenizer)
        code, _, err = command(train.main, *argv)
        assert code == 2
        assert "data.tokenizer" in err and said in err and "hf:" in err


def test_other_ids_of_the_same_number_are_refused(pretrained, tiny_folder, tmp_path):
    tokenizer = load_tokenizer(pretrained)
    swapped = replace(tokenizer, table=[*tokenizer.table[1:], tokenizer.table[0]])
    model = GPT(find_weights(pretrained).config)
    find_weights(str(pretrained)).start(model, tokenizer)
    with pytest.raises(ConfigError, match=f"use --tokenizer=hf:{pretrained}"):
        find_weights(str(pretrained)).start(model, swapped)
