"""What a resume takes, keeps and refuses: every option in a table, then the rules one by one.

The same rules with real runs are in test_resume_flow.py.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from cli.options import ConfigError
from model.config import ModelConfig
from training.config import OPTIONS, Config, from_json, load_config, to_json, values_of
from training.resume import kept, resume_notes, resume_problems, resumed

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
        "model.qk_norm": False,
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
        "data.separator": "END",
        "data.ids": "u4",
        "data.windows": "document",
        "data.document_mask": True,
        "data.global_batch": 64,
        "run.seed": 2,
        "run.init_from": "some/model",
    },
    "content": {"data.source": "other.txt", "data.val_source": "val.txt"},
    "must": {
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
        "run.resume": "must",
        "run.overwrite": True,
        "log.quiet": True,
    },
    # Here from the default, which is none, to some: shorter.
    "shorter": {"run.time_budget": "10m", "run.patience": 3},
}
CASES = [(kind, name, value) for kind, rows in OTHER.items() for name, value in rows.items()]


def changed(config: Config, values: dict[str, object]) -> Config:
    for name, value in values.items():
        section, _, leaf = name.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{leaf: value})})
    return config


def command(typed: dict[str, object] | None = None, file: dict[str, object] | None = None):
    """The config of a command with these options typed, and these in its config file."""
    in_file = changed(Config(), file or {})
    config = changed(in_file, typed or {})
    return replace(config, typed=dict(typed or {}), in_file=values_of(in_file))


def run_of(typed: dict[str, object] | None = None, file: dict[str, object] | None = None) -> Config:
    """The config of a run that such a command began, as a later start reads it."""
    return from_json(to_json(command(typed, file)))


def refused(saved: Config, asked: Config) -> list[str]:
    return [line.partition(":")[0] for line in resume_problems(saved, asked)[:-2]]


# Each option changed


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
@pytest.mark.parametrize("how", ["typed", "file"])
def test_an_option_that_is_changed_is_taken_or_refused_by_its_kind(kind, name, value, how):
    saved, asked = run_of(), command(**{how: {name: value}})
    if kind == "start":
        assert resume_problems(saved, asked) == []
        assert resume_notes(saved, asked) == []
    else:
        must = replace(asked, run=replace(asked.run, resume="must"))
        is_refused, must_is_refused = bool(resume_problems(saved, asked)), kind == "fixed"
        assert is_refused == (kind in ("fixed", "must", "shorter"))
        assert bool(resume_problems(saved, must)) == must_is_refused
        if is_refused:
            assert refused(saved, asked) == [name]
            assert "--overwrite=true" in resume_problems(saved, asked)[-1]
            told = "fixed once" if must_is_refused else "--resume=must"
            assert told in resume_problems(saved, asked)[-2]
        (note,) = resume_notes(saved, asked)
        assert f"{name}=" in note
    if kind != "fixed":
        assert values_of(resumed(saved, asked)) == values_of(asked)


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
def test_an_option_that_is_not_typed_again_stays(kind, name, value):
    saved, asked = run_of({name: value}), command()
    assert resume_problems(saved, asked) == []
    if kind == "start":
        assert values_of(resumed(saved, asked))[name] == values_of(Config())[name]
        assert kept(saved, asked) == []
    else:
        assert resumed(saved, asked) == saved
        typed = f"--{OPTIONS[name.partition('.')[2]].name}"
        assert [shlex.split(text)[0].partition("=")[0] for text in kept(saved, asked)] == [typed]


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
@pytest.mark.parametrize("how", ["typed", "file"])
def test_the_same_command_again_changes_nothing_and_says_nothing(kind, name, value, how):
    saved, asked = run_of(**{how: {name: value}}), command(**{how: {name: value}})
    assert resume_problems(saved, asked) == []
    assert resume_notes(saved, asked) == []
    assert resumed(saved, asked) == asked


# Typed, edited, or neither


def test_with_must_only_what_is_asked_for_is_taken():
    """Not the config file's value of an option that was typed at the first start."""
    saved = run_of({"optim.lr": 5e-4, "optim.weight_decay": 0.0})
    asked = command({"run.resume": "must", "optim.beta2": 0.99})
    assert resume_problems(saved, asked) == []
    going_on = resumed(saved, asked).optim
    assert (going_on.lr, going_on.weight_decay, going_on.beta2) == (5e-4, 0.0, 0.99)
    taken, stays = resume_notes(saved, asked)
    assert "optim.beta2=0.99" in taken and "0.95" in taken
    assert "--lr=0.0005" in stays and "--weight_decay=0" in stays


def test_an_edited_config_file_is_told_from_an_option_typed_before():
    saved = run_of({"optim.lr": 5e-4}, file={"optim.lr": 1e-3})
    assert resume_problems(saved, command(file={"optim.lr": 1e-3})) == []
    edited = command(file={"optim.lr": 2e-3})
    assert refused(saved, edited) == ["optim.lr"]
    for value in ("0.0005", "0.002", "0.001"):  # the run's, the file's now and before
        assert value in resume_problems(saved, edited)[0]
    must = command({"run.resume": "must"}, file={"optim.lr": 2e-3})
    going_on = from_json(to_json(resumed(saved, must)))
    assert going_on.optim.lr == 2e-3
    assert resume_notes(going_on, edited) == []  # taken once and for all
    back = command(file={"optim.lr": 1e-3})
    assert refused(going_on, back) == ["optim.lr"]


def test_an_edited_file_that_now_says_what_the_run_has_is_no_change():
    saved = run_of({"optim.lr": 5e-4}, file={"optim.lr": 1e-3})
    assert resume_notes(saved, command(file={"optim.lr": 5e-4})) == []


def test_a_run_that_did_not_note_its_config_file_keeps_its_values_and_says_so():
    older = json.loads(to_json(command({"optim.lr": 5e-4})))
    del older["config_file"], older["command_line"]
    saved, asked = from_json(older), command()
    assert resume_problems(saved, asked) == []
    assert resumed(saved, asked).optim.lr == 5e-4
    assert kept(saved, asked) == ["--lr=0.0005"]


def test_a_line_taken_out_of_the_config_file_leaves_the_value_as_it_was_and_says_so():
    saved = run_of(file={"model.d_mlp": 300})
    assert resume_problems(saved, command()) == []
    assert resumed(saved, command()).model.d_mlp == 300
    assert kept(saved, command()) == ["--d_mlp=300"]


def test_load_config_tells_what_is_typed_from_what_is_in_the_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from training.config import *\nconfig = Config(optim=OptimConfig(lr=1, beta2=0.5))\n"
    )
    config = load_config([str(path), "--lr=3", "--model.n_layers", "2", "--quiet"])
    assert config.typed == {"optim.lr": 3.0, "model.n_layers": 2, "log.quiet": True}
    assert config.in_file["optim.lr"] == 1.0
    assert config.in_file["optim.beta2"] == 0.5
    again = from_json(to_json(config))
    assert again == config
    assert (again.typed, again.in_file) == (config.typed, config.in_file)


def test_what_a_start_changed_without_saving_is_told_and_not_taken():
    saved = run_of()
    unsaved = run_of({"optim.lr": 0.5, "run.max_steps": 2000, "log.quiet": True})
    (note,) = resume_notes(saved, command(), unsaved)
    assert "--lr=0.5" in note and "--max_steps=2000" in note and "quiet" not in note
    again = {"run.max_steps": 2000, "optim.lr": 0.1}
    assert not any("optim.lr=0.5" in note for note in resume_notes(saved, command(again), unsaved))
    (note,) = resume_notes(saved, command({"run.max_steps": 2000}), unsaved)[1:]
    assert "--lr=0.5" in note and "max_steps" not in note


# Longer and shorter


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
def test_a_longer_run_just_goes_on_and_a_shorter_one_when_told(name, old, new, is_longer):
    saved, asked = run_of({name: old}), command({name: new})
    assert (resume_problems(saved, asked) == []) == is_longer
    assert resume_problems(saved, command({name: new, "run.resume": "must"})) == []
    assert values_of(resumed(saved, asked))[name] == new


def test_a_run_without_checkpoints_is_not_made_longer_nor_given_another_source():
    for name, value in (("run.max_steps", 2000), ("data.source", "other.txt")):
        lines = resume_problems(run_of(), command({name: value}), can_resume=False)
        assert lines[0].startswith(f"{name}: ")
        assert not any("--resume=must" in line for line in lines)
        assert any("fixed once" in line for line in lines) == (name == "data.source")


def test_all_changes_are_told_at_once():
    asked = command({"model.n_layers": 2, "optim.lr": 0.5}, file={"model.d_model": 64})
    lines = resume_problems(run_of(), asked)
    names = ["model.n_layers", "model.d_model", "optim.lr"]
    assert [line.partition(":")[0] for line in lines[:3]] == names
    assert lines[3].startswith("model.n_layers, model.d_model: fixed")
    must = replace(asked, run=replace(asked.run, resume="must"))
    assert len(resume_problems(run_of(), must)) == 4


# What depends on more than the option


def test_when_to_evaluate_is_free_unless_the_length_of_the_run_depends_on_it():
    for run in ({"run.patience": 3}, {"run.time_budget": "10m"}):
        saved, asked = run_of(run), command({**run, "run.eval_interval": 5})
        assert refused(saved, asked) == ["run.eval_interval"]
        both = command({**run, "run.eval_interval": 5})  # from this start on
        assert "run.eval_interval" in refused(run_of(), both)
        asked = command({**run, "run.eval_interval": 5, "run.resume": "must"})
        assert resume_problems(saved, asked) == []


def test_what_is_left_to_be_derived_stays_as_it_was():
    asked = command()
    model = asked.model.resolved(4096)
    run = replace(asked.run, threads=2, device="cpu", dtype="float32", attention="sdpa")
    data = replace(asked.data, micro_batch=8)
    saved = from_json(to_json(replace(asked, model=model, run=run, data=data)))
    assert resume_notes(saved, asked) == resume_problems(saved, asked) == []
    assert resumed(saved, asked) == saved


def test_what_is_kept_is_shown_as_it_would_be_typed():
    saved = run_of({"log.sample_prompt": "def ", "run.time_budget": ""}, {"run.time_budget": "1h"})
    assert kept(saved, command(file={"run.time_budget": "1h"})) == [
        "--time_budget=",
        "'--sample_prompt=def '",
    ]


def test_auto_that_is_typed_does_not_change_the_run_and_says_so():
    saved, asked = run_of({"run.dtype": "float32"}), command({"run.dtype": "auto"})
    assert resume_problems(saved, asked) == []
    assert resumed(saved, asked).run.dtype == "float32"
    assert kept(saved, asked) == ["--dtype=float32"]


@pytest.mark.parametrize(("old", "new"), [("cuda", "cuda:1"), ("cuda:0", "cuda")])
@pytest.mark.parametrize("how", ["typed", "file"])
def test_a_resume_may_take_another_gpu(old, new, how):
    saved, asked = run_of({"run.device": old}), command(**{how: {"run.device": new}})
    assert resume_notes(saved, asked) == resume_problems(saved, asked) == []
    assert resumed(saved, asked).run.device == new


def test_a_model_that_came_with_its_weights_stays_as_it_came():
    typed = {"run.init_from": "some/model"}
    asked = command(typed)
    brought = replace(asked, model=ModelConfig(n_layers=9, d_model=64).resolved(300))
    saved = from_json(to_json(brought))
    assert resume_notes(saved, asked) == resume_problems(saved, asked) == []
    assert resumed(saved, asked) == saved
    for layers in (4, 8):  # 4 is the default
        assert refused(saved, command({**typed, "model.n_layers": layers})) == ["model.n_layers"]


def test_what_the_start_makes_of_a_typed_value_is_no_change_when_it_is_typed_again():
    """As weights to start from bring their tokenizer, whatever was typed."""
    typed = {"run.device": "cuda:1", "run.dtype": "auto", "data.tokenizer": "char"}
    asked = command(typed)
    began = changed(asked, {"run.device": "cuda", "run.dtype": "float32", "data.tokenizer": "x"})
    saved = from_json(to_json(began))
    assert resume_notes(saved, asked) == resume_problems(saved, asked) == []
    again = resumed(saved, asked)
    assert (again.run.dtype, again.data.tokenizer) == ("float32", "x")
    assert refused(saved, command({**typed, "data.tokenizer": "byte"})) == ["data.tokenizer"]


def test_what_an_edited_file_has_replaced_counts_as_typed_no_more():
    saved = run_of({"optim.lr": 0.5})
    going_on = resumed(saved, command({"run.resume": "must"}, file={"optim.lr": 0.1}))
    going_on = from_json(to_json(going_on))
    assert going_on.optim.lr == 0.1
    assert refused(going_on, command({"optim.lr": 0.5}, file={"optim.lr": 0.1})) == ["optim.lr"]


def test_a_hostile_note_of_the_config_file_is_a_mistake_or_harmless():
    saved = json.loads(to_json(command()))
    for note in ({"optim.lr": []}, {"nope": 1}, {"run.device": 3}):
        read = from_json({**saved, "config_file": note, "command_line": note})
        resume_problems(read, command())
        resume_notes(read, command({"run.device": "cpu"}))
    for note in ([1], 3, "x", [["run.device", 3]]):
        for name in ("config_file", "command_line"):
            with pytest.raises(ConfigError):
                from_json({**saved, name: note})
