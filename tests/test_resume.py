"""Resume rules: every option in a table, then the rules one by one. Real runs: test_resume_flow."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cli.options import ConfigError
from model.config import ModelConfig
from training.config import (
    FULL_NAMES,
    Config,
    from_json,
    load_config,
    to_json,
    values_of,
    with_values,
)
from training.resume import (
    KINDS,
    compare,
    kept,
    refused_changes,
    resume_notes,
    resumed,
    ways_on,
)

# Every option with a value that is not its default.
OTHER = {
    "fixed": {
        # tensors of another shape, or other functions of them
        "model.n_layers": 2,
        "model.n_heads": 2,
        "model.n_kv_heads": 1,
        "model.d_model": 64,
        "model.d_head": 16,
        "model.d_mlp": 96,
        "model.vocab_size": 5000,
        "model.norm": "layer",
        "model.norm_eps": 1e-5,
        "model.mlp": "gelu",
        "model.position": "learned",
        "model.rope_theta": 5e5,
        "model.rope_scaling": "llama3",
        "model.rope_factor": 4.0,
        "model.rope_original_context": 4096,
        "model.nope_every": 4,
        "model.qk_norm": False,
        "model.qkv_bias": True,
        "model.bias": True,
        "model.tie_embeddings": True,
        "optim.optimizer": "muon",
        # step N would mean other windows
        "model.context_length": 512,
        "data.tokenizer": "char",
        "data.split": "tail",
        "data.val_fraction": 0.1,
        "data.text_field": "body",
        "data.errors": "replace",
        "data.max_documents": 7,
        "data.separator": "END",
        "data.ids": "u4",
        "data.format": "chat",
        "data.windows": "document",
        "data.document_mask": True,
        "data.global_batch": 64,
        "run.seed": 2,
        "run.init_from": "some/model",
        "run.lora_rank": 8,
        "run.lora_alpha": 4.0,
        "run.base_hash": "0af1",
    },
    "content": {"data.source": "other.txt", "data.val_source": "val.txt"},
    "changed": {
        # other updates from here on
        "model.dropout": 0.1,
        "model.attention_dropout": 0.1,
        "optim.lr": 0.5,
        "optim.muon_lr": 0.5,
        "optim.momentum": 0.5,
        "optim.weight_decay": 0.5,
        "optim.beta1": 0.5,
        "optim.beta2": 0.5,
        "optim.eps": 0.5,
        "optim.grad_clip": 0.5,
        "schedule.schedule": "cosine",
        "schedule.warmup_steps": 5,
        "schedule.decay_fraction": 0.1,
        "schedule.min_lr_ratio": 0.1,
        # the same ones to rounding
        "data.micro_batch": 8,
        "parallel.reduction": "fast",
        "run.device": "cpu",
        "run.dtype": "float32",
        "run.attention": "tiled",
        "run.compile": True,
        "run.threads": 7,
        "run.deterministic": True,
        # losses that cannot be compared with those before, and so another best
        "run.eval_windows": 9,
    },
    "free": {
        "run.max_steps": 2000,
        "run.eval_interval": 5,
        "run.checkpoint_interval": 5,
        "run.keep_checkpoints": 9,
        "data.workers": 1,
        "data.prepared_dir": "elsewhere",
        "log.interval": 5,
        "log.wandb": True,
        "log.project": "other",
        "log.sample_prompt": "x",
        "log.report": False,
    },
    "start": {
        "parallel.mode": "none",
        "parallel.timeout": 5.0,
        "run.out_dir": "elsewhere",
        "run.resume": "changed",
        "run.overwrite": True,
        "log.live": True,
        "log.quiet": True,
    },
    # Here from the default, which is none, to some: shorter.
    "shorter": {"run.time_budget": "10m", "run.patience": 3},
}
CASES = [(kind, name, value) for kind, rows in OTHER.items() for name, value in rows.items()]


def command(typed: dict[str, object] | None = None, file: dict[str, object] | None = None):
    """The config of a command with these options typed, and these in its config file."""
    in_file = with_values(Config(), file or {})
    config = with_values(in_file, typed or {})
    return replace(config, typed=dict(typed or {}), in_file=values_of(in_file))


def run_of(typed: dict[str, object] | None = None, file: dict[str, object] | None = None) -> Config:
    """The config of a run that such a command began, as a later start reads it."""
    return from_json(to_json(command(typed, file)))


def refused(saved: Config, asked: Config, **options) -> list[str]:
    """Names of the options that keep a run from being resumed."""
    return [diff.name for diff in refused_changes(saved, asked, **options)]


def resumes_unchanged(saved: Config, asked: Config) -> bool:
    """Whether the run is resumed as it is, without a message."""
    silent = refused_changes(saved, asked) == resume_notes(saved, asked) == []
    return silent and resumed(saved, asked) == saved


# Each option


def test_the_table_has_every_option_with_another_value_and_each_option_a_kind():
    in_table = {name: value for _, name, value in CASES}
    assert sorted(in_table) == sorted(FULL_NAMES)
    assert not [name for name, option in FULL_NAMES.items() if in_table[name] == option.default]
    assert {option.resume for option in FULL_NAMES.values()} == set(KINDS)


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
@pytest.mark.parametrize("how", ["typed", "file"])
def test_a_change_is_accepted_or_refused_by_the_kind_of_the_option(kind, name, value, how):
    saved, asked = run_of(), command(**{how: {name: value}})
    if kind == "start":
        assert refused_changes(saved, asked) == resume_notes(saved, asked) == []
    else:
        assert refused(saved, asked) == [name] * (kind in ("fixed", "changed", "shorter"))
        changed = replace(asked, run=replace(asked.run, resume="changed"))
        assert refused(saved, changed) == [name] * (kind == "fixed")
        (note,) = resume_notes(saved, asked)
        assert f"{name}=" in note
    if kind != "fixed":
        assert values_of(resumed(saved, asked)) == values_of(asked)


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
def test_an_option_that_is_not_typed_again_stays(kind, name, value):
    saved, asked = run_of({name: value}), command()
    assert refused_changes(saved, asked) == []
    assert (resumed(saved, asked) == saved) == (kind != "start")
    assert (f"--{FULL_NAMES[name].name}=" in kept(saved, asked)) == (kind != "start")


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
@pytest.mark.parametrize("how", ["typed", "file"])
def test_the_same_command_changes_nothing_and_prints_nothing(kind, name, value, how):
    saved, asked = run_of(**{how: {name: value}}), command(**{how: {name: value}})
    assert resumes_unchanged(saved, asked)


# Messages


def test_a_refusal_lists_all_changes_and_what_to_do():
    asked = command({"model.n_layers": 2, "optim.lr": 0.5}, file={"model.d_model": 64})
    changes = refused_changes(run_of(), asked)
    assert [str(diff) for diff in changes] == [
        "model.n_layers: the run has 4, the command says 2",
        "model.d_model: the run has 128, the config file now says 64 (before: 128)",
        "optim.lr: the run has 0.001, the command says 0.5",
    ]
    assert ways_on(changes) == [
        "model.n_layers, model.d_model: cannot change once a run has begun",
        "to start over (the old run is moved aside): --overwrite=true; or choose another --out_dir",
    ]
    changed = replace(asked, run=replace(asked.run, resume="changed"))
    assert refused(run_of(), changed) == ["model.n_layers", "model.d_model"]
    advice = ways_on(refused_changes(run_of(), command({"optim.lr": 0.5})))[0]
    assert advice == "to continue with the changed values: --resume=changed"


def test_kept_options_are_shown_as_they_would_be_typed():
    saved = run_of({"log.sample_prompt": "def ", "run.time_budget": ""}, {"run.time_budget": "1h"})
    asked = command(file={"run.time_budget": "1h"})
    assert kept(saved, asked) == "--time_budget= '--sample_prompt=def '"


def test_changes_that_were_never_saved_are_reported_and_dropped():
    saved = run_of()
    unsaved = run_of({"optim.lr": 0.5, "run.max_steps": 2000, "log.quiet": True})
    (note,) = resume_notes(saved, command(), unsaved)
    assert "--lr=0.5" in note and "--max_steps=2000" in note and "quiet" not in note
    notes = resume_notes(saved, command({"run.max_steps": 2000, "optim.lr": 0.1}), unsaved)
    assert not any("lr=0.5" in note for note in notes)
    (note,) = resume_notes(saved, command({"run.max_steps": 2000}), unsaved)[1:]
    assert "--lr=0.5" in note and "max_steps" not in note


# Typed, edited, or neither


def test_with_changed_only_what_is_asked_for_changes():
    """Not the config file's value of an option that was typed at the first start."""
    saved = run_of({"optim.lr": 5e-4, "optim.weight_decay": 0.0})
    asked = command({"run.resume": "changed", "optim.beta2": 0.99})
    assert refused_changes(saved, asked) == []
    now = resumed(saved, asked).optim
    assert (now.lr, now.weight_decay, now.beta2) == (5e-4, 0.0, 0.99)
    change, stays = resume_notes(saved, asked)
    assert "optim.beta2=0.99" in change and "0.95" in change
    assert "--lr=0.0005" in stays and "--weight_decay=0" in stays


def test_an_edited_config_file_is_told_from_an_option_typed_before():
    saved = run_of({"optim.lr": 5e-4}, file={"optim.lr": 1e-3})
    assert refused(saved, command(file={"optim.lr": 1e-3})) == []
    edited = command(file={"optim.lr": 2e-3})
    assert refused(saved, edited) == ["optim.lr"]
    for value in ("0.0005", "0.002", "0.001"):  # the run's, the file's now and before
        assert value in str(refused_changes(saved, edited)[0])
    changed = command({"run.resume": "changed"}, file={"optim.lr": 2e-3})
    now = from_json(to_json(resumed(saved, changed)))
    assert now.optim.lr == 2e-3
    assert resume_notes(now, edited) == []  # the change is part of the run from now on
    assert refused(now, command(file={"optim.lr": 1e-3})) == ["optim.lr"]
    # What the edited file has replaced no longer counts as typed before.
    assert refused(now, command({"optim.lr": 5e-4}, file={"optim.lr": 2e-3})) == ["optim.lr"]


def test_a_file_edited_to_what_the_run_has_is_not_a_change():
    saved = run_of({"optim.lr": 5e-4}, file={"optim.lr": 1e-3})
    assert resumes_unchanged(saved, command(file={"optim.lr": 5e-4}))


def test_a_value_of_unknown_origin_is_kept_with_a_message():
    older = replace(run_of({"model.d_mlp": 300}), typed=None, in_file=None)  # recorded neither
    edited = run_of(file={"model.d_mlp": 300})  # the line has been deleted since
    for saved in (older, edited):
        assert refused_changes(saved, command()) == []
        assert resumed(saved, command()).model.d_mlp == 300
    assert kept(edited, command()) == "--d_mlp=300"
    older = replace(run_of({"optim.lr": 5e-4}), typed=None, in_file=None)
    assert resumed(older, command()).optim.lr == 5e-4
    assert kept(older, command()) == "--lr=0.0005"


def test_a_run_that_was_saved_under_the_options_former_name_is_read():
    text = to_json(command({"run.resume": "changed"})).replace('"changed"', '"must"')
    assert '"must"' in text
    assert from_json(text).run.resume == "changed"


def test_load_config_records_what_is_typed_and_what_is_in_the_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from training.config import *\nconfig = Config(optim=OptimConfig(lr=1, beta2=0.5))\n"
    )
    config = load_config([str(path), "--lr=3", "--model.n_layers", "2", "--quiet"])
    assert config.typed == {"optim.lr": 3.0, "model.n_layers": 2, "log.quiet": True}
    assert (config.in_file["optim.lr"], config.in_file["optim.beta2"]) == (1.0, 0.5)
    again = from_json(to_json(config))
    assert again == config
    assert (again.typed, again.in_file) == (config.typed, config.in_file)


# Kinds that depend on values


@pytest.mark.parametrize(
    ("name", "old", "new", "is_longer"),
    [
        ("run.max_steps", 1000, 1001, True),
        ("run.max_steps", 1000, 999, False),
        ("run.patience", 3, 4, True),
        ("run.patience", 3, 0, True),
        ("run.patience", 3, 2, False),
        ("run.patience", 0, 3, False),
        ("run.time_budget", "10m", "601s", True),
        ("run.time_budget", "10m", "1h", True),
        ("run.time_budget", "10m", "9m", False),
        ("run.time_budget", "10m", "", False),
        ("run.time_budget", "", "10m", False),
        ("run.time_budget", "10m", "fits:out/a", False),
    ],
)
def test_a_run_may_be_made_longer_and_with_changed_shorter(name, old, new, is_longer):
    saved, asked = run_of({name: old}), command({name: new})
    assert (refused(saved, asked) == []) == is_longer
    assert refused(saved, command({name: new, "run.resume": "changed"})) == []
    assert values_of(resumed(saved, asked))[name] == new


@pytest.mark.parametrize(
    ("name", "value"), [("run.max_steps", 2000), ("data.source", "x"), ("optim.lr", 0.5)]
)
def test_without_a_checkpoint_more_is_refused_and_changed_is_not_suggested(name, value):
    changes = refused_changes(run_of(), command({name: value}), can_resume=False)
    assert [diff.name for diff in changes] == [name]
    lines = ways_on(changes, can_resume=False)
    assert not any("--resume=changed" in line for line in lines)
    assert any("cannot change" in line for line in lines) == (name == "data.source")


def test_eval_interval_is_free_unless_the_length_of_the_run_depends_on_it():
    for run in ({"run.patience": 3}, {"run.time_budget": "10m"}):
        asked = command({**run, "run.eval_interval": 5})
        assert refused(run_of(run), asked) == ["run.eval_interval"]
        assert "run.eval_interval" in refused(run_of(), asked)  # it will depend on it
        asked = command({**run, "run.eval_interval": 5, "run.resume": "changed"})
        assert refused(run_of(run), asked) == []


@pytest.mark.parametrize(("old", "new"), [("cuda", "cuda:1"), ("cuda:0", "cuda")])
@pytest.mark.parametrize("how", ["typed", "file"])
def test_a_resume_may_use_another_gpu(old, new, how):
    saved, asked = run_of({"run.device": old}), command(**{how: {"run.device": new}})
    assert resume_notes(saved, asked) == refused_changes(saved, asked) == []
    assert resumed(saved, asked).run.device == new


# Values that a start derives


def test_options_left_open_stay_as_they_were_resolved():
    asked = command()
    derived = {"run.threads": 2, "run.device": "cpu", "run.dtype": "float32"}
    derived |= {"run.attention": "sdpa", "data.micro_batch": 8}
    began = replace(with_values(asked, derived), model=asked.model.resolved(4096))
    assert resumes_unchanged(from_json(to_json(began)), asked)


def test_typing_auto_does_not_change_the_run_and_is_reported():
    saved, asked = run_of({"run.dtype": "float32"}), command({"run.dtype": "auto"})
    assert refused_changes(saved, asked) == []
    assert resumed(saved, asked).run.dtype == "float32"
    assert kept(saved, asked) == "--dtype=float32"


def test_a_model_shape_that_came_with_the_weights_stays():
    typed = {"run.init_from": "some/model"}
    asked = command(typed)
    began = replace(asked, model=ModelConfig(n_layers=9, d_model=64).resolved(300))
    saved = from_json(to_json(began))
    assert resumes_unchanged(saved, asked)
    for layers in (4, 8):  # 4 is the default
        assert refused(saved, command({**typed, "model.n_layers": layers})) == ["model.n_layers"]


def test_a_typed_value_that_the_start_replaced_is_not_a_change_when_typed_again():
    """For example, weights to start from bring their tokenizer, whatever was typed."""
    typed = {"run.device": "cuda:1", "run.dtype": "auto", "data.tokenizer": "char"}
    replaced = {"run.device": "cuda", "run.dtype": "float32", "data.tokenizer": "x"}
    saved, asked = from_json(to_json(with_values(command(typed), replaced))), command(typed)
    assert resume_notes(saved, asked) == refused_changes(saved, asked) == []
    now = resumed(saved, asked)
    assert (now.run.dtype, now.data.tokenizer) == ("float32", "x")
    assert refused(saved, command({**typed, "data.tokenizer": "byte"})) == ["data.tokenizer"]


def test_hostile_records_of_the_config_file_are_refused_or_harmless():
    saved = json.loads(to_json(command()))
    for record in ({"optim.lr": []}, {"nope": 1}, {"run.device": 3}):
        read = from_json({**saved, "config_file": record, "command_line": record})
        compare(read, command())
        resume_notes(read, command({"run.device": "cpu"}))
    for record in ([1], 3, "x", [["run.device", 3]]):
        for name in ("config_file", "command_line"):
            with pytest.raises(ConfigError):
                from_json({**saved, name: record})
