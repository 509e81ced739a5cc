"""Config of a run: file, overrides, problems and JSON. Resume: test_resume.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli import elsewhere
from cli.options import ConfigError, parse_arguments
from model.config import ModelConfig
from training.config import (
    OPTIONS,
    SECTIONS,
    Config,
    OptimConfig,
    RunConfig,
    differences,
    from_json,
    load_config,
    options_table,
    to_json,
)

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(ROOT.glob("config/*.py"))
PLAIN = "from training.config import *\nconfig = Config()\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load(*overrides, text=...) -> the config of a file with that text."""
    monkeypatch.chdir(tmp_path)

    def load_text(*overrides: str, text: str = PLAIN) -> Config:
        Path("mine.py").write_text(text)
        return load_config(["mine.py", *overrides])

    return load_text


@pytest.fixture
def refusal(load):
    """refusal(*overrides, text=...) -> the text of the ConfigError."""

    def refuse(*overrides: str, text: str = PLAIN) -> str:
        with pytest.raises(ConfigError) as caught:
            load(*overrides, text=text)
        return str(caught.value)

    return refuse


# Command line

# By type: {text: value} that is read, and a text that is refused with what is allowed.
TYPED = {
    float: ({"1": 1.0, "3e-4": 0.0003}, "x", "a finite number"),
    float | None: ({"1": 1.0, "none": None}, "x", "a finite number"),
    int: ({"1e3": 1000, "1_000": 1000}, "1.5", "a whole number"),
    int | None: ({"7": 7, "none": None, "auto": None}, "1.5", "a whole number"),
    bool: (
        {**dict.fromkeys(["false", "False", "0", "no"], False), "true": True, "1": True},
        "maybe",
        "true or false",
    ),
    str: ({t: t for t in ["2024", "1e3", "None", "true", "lr=3e-4", "a=b=", "-1", ""]}, "", ""),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_read_as_its_type(name, refusal):
    option = OPTIONS[name]
    if "Literal" in str(option.annotation):
        text, choices = refusal(f"--{name}=fp8"), re.findall(r"'(\w+)'", str(option.annotation))
        assert f"{option.full_name}=fp8: must be " in text
        assert choices and all(choice in text for choice in choices)
        return
    good, bad, allowed = TYPED[option.annotation]
    for text, value in good.items():
        arguments = parse_arguments([f"--{name}={text}"], SECTIONS)
        found = arguments.values[option.section][name]
        assert (found, type(found), arguments.problems) == (value, type(value), [])
    if bad:
        assert f"{option.full_name}={bad}: must be {allowed}" in refusal(f"--{name}={bad}")


def test_a_value_may_stand_apart(load):
    assert load("--global_batch", "8", "--out_dir", "2024").data.global_batch == 8


@pytest.mark.parametrize("name", [name for name in OPTIONS if len(name) > 3])
def test_a_misspelt_option_is_refused_with_the_nearest(name, refusal):
    misspelt = name[:2] + name[3:]
    assert f"--{misspelt} is not an option: did you mean --" in refusal(f"--{misspelt}=8")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("fused", None),
        ("ema_decay", None),
        ("world_size", None),
        ("epochs", None),
        ("amp", None),
        ("verbose", None),
        ("theta", "model.rope_theta"),
        ("clip", "optim.grad_clip"),
        ("init", "run.init_from"),
        ("decay", None),  # weight_decay, or decay_fraction?
        ("Lr", "optim.lr"),
    ],
)
def test_only_a_close_name_is_suggested(typed, meant, refusal):
    advice = f"did you mean --{meant}?" if meant else "--help lists them all"
    assert f"--{typed} is not an option: {advice}" in refusal(f"--{typed}=1")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *((name, "optim.lr") for name in ("--data.lr", "--optim.lrr", "--optimizer.lr")),
    ],
)
def test_a_wrong_section_leads_to_the_option(typed, meant, refusal):
    assert f"{typed} is not an option: did you mean --{meant}?" in refusal(f"{typed}=1")


# Written out, not read from the table under test. nanoGPT, Hugging Face, nanochat, plain guesses.
NAMES_ELSEWHERE = """
batch_size global_batch, gradient_accumulation_steps micro_batch, block_size context_length,
n_layer n_layers, n_head n_heads, n_embd d_model, learning_rate lr, max_iters max_steps,
warmup_iters warmup_steps, decay_lr schedule, lr_decay_iters -, min_lr min_lr_ratio,
eval_iters eval_windows, eval_only -, log_interval interval, dataset source, backend -,
wandb_log wandb, wandb_project project, wandb_run_name -, always_save_checkpoint -,
output_dir out_dir, overwrite_output_dir overwrite, num_train_epochs -,
per_device_train_batch_size micro_batch, per_device_eval_batch_size -, lr_scheduler_type schedule,
warmup_ratio warmup_steps, optim optimizer, adam_beta1 beta1, adam_beta2 beta2, adam_epsilon eps,
max_grad_norm grad_clip, bf16 dtype, fp16 dtype, tf32 -, torch_compile compile,
logging_steps interval, logging_dir -, report_to wandb, run_name -, disable_tqdm quiet,
eval_strategy -, eval_steps eval_interval, save_steps checkpoint_interval,
save_total_limit keep_checkpoints,
load_best_model_at_end -, dataloader_num_workers workers, ddp_timeout timeout, deepspeed -, fsdp -,
gradient_checkpointing -, model_name_or_path init_from, num_hidden_layers n_layers,
num_attention_heads n_heads, num_key_value_heads n_kv_heads, hidden_size d_model,
intermediate_size d_mlp, max_position_embeddings context_length, tie_word_embeddings tie_embeddings,
depth n_layers, head-dim d_head, aspect-ratio -, max-seq-len context_length, window_pattern -,
num-iterations max_steps, target-flops -, device-batch-size micro_batch,
total-batch-size global_batch, embedding-lr lr, matrix-lr muon_lr, scalar-lr -,
warmdown-ratio decay_fraction, final-lr-frac min_lr_ratio, eval-every eval_interval,
eval-tokens eval_windows, sample_every -, save-every checkpoint_interval, model-tag out_dir,
device_type device, core-metric-every -,
epochs -, steps max_steps, heads n_heads, layers n_layers, weight_tying tie_embeddings,
output out_dir, seq_len context_length, rope_base rope_theta, save_interval checkpoint_interval
"""
PAIRS = [pair.split() for pair in NAMES_ELSEWHERE.replace("\n", " ").split(",")]


def test_names_of_other_projects_lead_to_the_right_option_or_to_none(refusal):
    assert len(PAIRS) >= 60
    told = refusal(*(f"--{theirs}=1" for theirs, _ in PAIRS)).splitlines()
    for (theirs, ours), line in zip(PAIRS, told, strict=False):
        meant = (
            "--help lists them all" if ours == "-" else f"did you mean --{OPTIONS[ours].full_name}?"
        )
        assert line == f"--{theirs} is not an option: {meant}"


def test_every_name_from_elsewhere_is_another_one_and_means_an_option():
    assert elsewhere.TRAINING.keys().isdisjoint(OPTIONS)
    assert set(elsewhere.TRAINING.values()) - {""} <= OPTIONS.keys()


def test_nanogpts_word_for_resuming_is_explained(refusal):
    told = refusal("--init_from=resume")
    assert "run.init_from=resume: remove it; the same command again resumes" in told


def test_the_command_line_beats_the_file_and_the_file_the_default(load, capsys):
    text = PLAIN.replace("Config()", "Config(run=RunConfig(compile=True, max_steps=7))")
    assert load(text=text).run == RunConfig(out_dir="out/mine", compile=True, max_steps=7)
    config = load("--compile=False", text=text)
    assert (config.run.compile, config.run.max_steps) == (False, 7)
    assert json.loads(to_json(config))["run"]["compile"] is False
    with pytest.raises(SystemExit) as stop:
        load("--compile=False", "--print_config", text=text)
    assert stop.value.code == 0
    assert from_json(capsys.readouterr().out) == config


# Ranges


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--n_heads=3", "--d_model=64"], "model.n_heads=3"),
        (["--n_heads=4", "--d_model=20"], "must be even"),
        (["--nope_every=-1"], "model.nope_every=-1"),
        (["--nope_every=2", "--position=learned"], "model.nope_every=2 needs model.position=rope"),
        (["--bias=true", "--qkv_bias=true"], "model.qkv_bias=true: model.bias=true has"),
        (["--dropout=1.5"], "model.dropout=1.5"),
        (["--dropout=-0.1"], "model.dropout=-0.1"),
        (["--attention_dropout=1"], "model.attention_dropout=1"),
        (["--n_layers=0"], "model.n_layers=0"),
        (["--context_length=0"], "model.context_length=0"),
        (["--vocab_size=0"], "model.vocab_size=0"),
        (["--global_batch=0"], "data.global_batch=0"),
        (["--max_documents=0"], "data.max_documents=0: must be 1 or more, or none"),
        (["--micro_batch=0"], "data.micro_batch=0"),
        (["--micro_batch=-4"], "data.micro_batch=-4"),
        (["--val_fraction=1.5"], "data.val_fraction=1.5"),
        (["--lr=0"], "optim.lr=0.0: must be above 0"),
        (["--muon_lr=-1"], "optim.muon_lr=-1.0: must be above 0"),
        (["--eps=0"], "optim.eps=0.0: must be above 0"),
        (["--beta1=1"], "optim.beta1=1.0: must be in [0, 1)"),
        (["--beta2=-0.1"], "optim.beta2=-0.1: must be in [0, 1)"),
        (["--momentum=1"], "optim.momentum=1.0: must be in [0, 1)"),
        (["--weight_decay=-1"], "optim.weight_decay=-1.0: must be at least 0"),
        (["--grad_clip=-1"], "optim.grad_clip=-1.0: must be at least 0"),
        (["--warmup_steps=-5"], "schedule.warmup_steps=-5: must be at least 0"),
        (["--decay_fraction=1.1"], "schedule.decay_fraction=1.1: must be in [0, 1]"),
        (["--min_lr_ratio=-0.1"], "schedule.min_lr_ratio=-0.1: must be in [0, 1]"),
        (["--timeout=0"], "parallel.timeout=0.0: must be above 0"),
        (["--max_steps=0"], "run.max_steps=0: must be at least 1"),
        (["--eval_interval=0"], "run.eval_interval=0: must be at least 1"),
        (["--checkpoint_interval=0"], "run.checkpoint_interval=0: must be at least 1"),
        (["--keep_checkpoints=1"], "run.keep_checkpoints=1: must be at least 2"),
        (["--eval_windows=-1"], "run.eval_windows=-1: must be at least 0"),
        (["--patience=-1"], "run.patience=-1: must be at least 0"),
        (["--threads=0"], "run.threads=0: must be at least 1"),
        (["--seed=-1"], "run.seed=-1: must be in [0, 2**63)"),
        (["--seed=9223372036854775808"], "run.seed=9223372036854775808: must be in"),
        (["--device=gpu"], "run.device=gpu: must be auto, cpu, cuda, cuda:N or mps"),
        (["--device=cuda:"], "run.device=cuda:: must be"),
        (["--resume=changed", "--overwrite"], "run.overwrite=true starts over, run.resume=changed"),
        (["--interval=0"], "log.interval=0: must be at least 1"),
        (["--wandb", "--project="], "log.project is empty"),
    ],
)
def test_a_value_out_of_range_is_refused(overrides, said, refusal):
    assert said in refusal(*overrides)


@pytest.mark.parametrize(("whole", "part"), [(32, 5), (8, 16), (7, 2)])
def test_a_micro_batch_that_does_not_divide_is_refused_with_both_numbers(whole, part, refusal):
    said = refusal(f"--global_batch={whole}", f"--micro_batch={part}")
    assert f"data.micro_batch={part}" in said
    assert f"data.global_batch={whole}" in said


def test_the_ends_of_the_ranges_are_allowed(load):
    low = {"grad_clip": 0, "warmup_steps": 0, "decay_fraction": 0, "eval_windows": 0, "threads": 1}
    low |= {"seed": 0, "device": "cuda:1", "micro_batch": 1, "beta1": 0, "dropout": 0}
    high = {"seed": 2**63 - 1, "device": "mps", "micro_batch": 32, "decay_fraction": 1}
    for options in (low, {**high, "max_steps": 1}, {"warmup_steps": 5000}):
        load(*[f"--{name}={value}" for name, value in options.items()])


def test_a_number_of_steps_is_refused_beside_a_time_budget(refusal):
    text = refusal("--max_steps=50", "--time_budget=10m")
    assert "run.max_steps=50" in text and "run.time_budget=10m" in text and "--time_budget=" in text


def test_all_problems_are_reported_together(refusal):
    text = refusal("--dropout=2", "--global_batch=0", "--lr=x", "--eval_interval=0", "--seeed=1")
    for part in ("dropout=2", "global_batch=0", "lr=x", "eval_interval=0", "--seeed is not"):
        assert part in text
    assert len(text.splitlines()) == 5


# The file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config = 3\n", "mine.py: must bind config = Config(...)"),
        ("x = 3\n", "mine.py: must bind config = Config(...)"),
        ("config = (\n", "mine.py: line 1: '(' was never closed"),
        ("a\0b", "mine.py: "),
        ("import nothing_of_that_name\n", "mine.py: line 1: ModuleNotFoundError: No module named"),
        ("x = 1\nconfig = Config()\n", "mine.py: line 2: NameError: name 'Config' is not defined"),
        (PLAIN + "bach_size = 8\n", "mine.py: line 3: bach_size is set but never used: did you"),
        (PLAIN + "bach_size = 8\n", "DataConfig(global_batch=...)?"),
        (PLAIN + "learning_rate: float = 3e-4\n", "OptimConfig(lr=...)?"),
        (PLAIN + "max_steps, T = 5, 64\n", "RunConfig(max_steps=...)?"),
        (PLAIN + "model = ModelConfig(n_layers=2)\n", "did you mean Config(model=model)?"),
        *(
            (PLAIN.replace("()", f"({options})"), said)
            for options, said in [
                ("max_steps=3", "line 2: TypeError: "),
                ("max_steps=3", "did you mean RunConfig(max_steps=...)?"),
                ("data=DataConfig(bach_size=8)", "mean DataConfig(global_batch=...)?"),
                ("run=OptimConfig()", "must be RunConfig(...)"),
                ("run=RunConfig(max_steps='3')", "run.max_steps='3': must be a whole number"),
                ("run=RunConfig(compile='False')", "run.compile='False': must be true or false"),
                ("optim=OptimConfig(lr=float('nan'))", "optim.lr=nan: must be a finite number"),
            ]
        ),
    ],
)
def test_a_wrong_file_gets_one_clear_line(text, said, refusal):
    text = refusal(text=text)
    assert said in text
    assert len(text.splitlines()) == 1


def test_a_name_that_the_file_uses_is_not_a_mistake(load):
    text = PLAIN + "lr = 1\nT = 64\nconfig = Config(optim=OptimConfig(lr=lr))\n"
    config = load(text=text)
    assert config.optim.lr == 1.0
    assert type(config.optim.lr) is float


@pytest.mark.parametrize("path", ["nope.py", ".", "nope/nope.py", "x" * 5000, "a\0b"])
def test_a_missing_file_is_named_with_the_shipped_ones(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        load_config([path, "--lr=x"])
    assert "no such file or config (configs: chat_small, chat_smollm2, " in str(caught.value)
    assert "optim.lr=x" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("smal", "small"),
        ("smal.py", "small"),
        ("shakespear_char", "shakespeare_char or shakespeare_char_cpu"),
        ("my_txt.txt", "my_text.txt"),
        ("notes/to_do.txt", "notes/todo.txt"),
        ("zebra", None),
    ],
)
def test_a_missing_file_gets_the_nearest_name(name, meant, tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    for text in ("my_text.txt", "notes/todo.txt"):
        (tmp_path / text).write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config([name])
    hint = f"; did you mean {meant}? (configs: " if meant else " (configs: "
    assert f"CONFIG={name}: no such file or config{hint}" in str(caught.value)


def test_a_shipped_config_is_found_by_name_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(["small"]).run.out_dir == "out/small"
    assert load_config(["small"]) == load_config([str(ROOT / "config/small.py")])
    monkeypatch.chdir(ROOT)
    assert load_config(["config/small"]) == load_config(["small"])


def test_a_config_of_ones_own_comes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/small.py").write_text(PLAIN + "config = Config(run=RunConfig(seed=7))\n")
    assert load_config(["small"]).run.seed == 7


def test_no_file_gives_the_usage():
    with pytest.raises(ConfigError) as caught:
        load_config(["--lr=x"])
    for part in ("CONFIG is missing", "optim.lr=x", "usage: python train.py CONFIG"):
        assert part in str(caught.value)


def test_help_needs_no_file(capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name, option in OPTIONS.items():
        assert f"--{name}=" in text
        assert option.help and option.help in text
    assert "--print_config" in text


@pytest.mark.parametrize("asked", ["--help", "--print_config"])
def test_one_rank_per_machine_prints(asked, load, monkeypatch, capsys):
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as stop:
            load(asked)
        assert stop.value.code == 0
        assert bool(capsys.readouterr().out) == (rank == "0")


def test_the_folder_is_named_after_the_file_unless_given(load):
    assert load().run.out_dir == "out/mine"
    assert load("--out_dir=2024").run.out_dir == "2024"
    text = PLAIN.replace("()", "(run=RunConfig(out_dir='there'))")
    assert load(text=text).run.out_dir == "there"


def test_a_config_may_derive_from_another(load):
    text = (
        "from dataclasses import replace\nfrom config.debug import config as base\n"
        "config = replace(base, run=replace(base.run, max_steps=3))\n"
    )
    config = load(text=text)
    assert config.run.max_steps == 3
    assert config.run.out_dir == "out/mine"
    assert config.model.n_layers == 2


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_loads_and_its_docstring_shows_the_command(path):
    config = load_config([str(path)])
    assert config.run.out_dir == f"out/{path.stem}"
    assert from_json(to_json(config)) == config
    head = path.read_text().split('"""')[1]
    assert f"train.py config/{path.name}" in head
    assert 3 <= len(head.strip().splitlines()) <= 6


@pytest.mark.parametrize("name", ["gpt2_124m", "llama_124m"])
def test_a_config_for_many_ranks_can_be_summed_exactly(name):
    data = load_config([str(ROOT / f"config/{name}.py")]).data
    micro_batches = data.global_batch // data.micro_batch
    assert micro_batches % 8 == 0


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPTIONS)) | st.text(max_size=8), st.text(max_size=8)).map(
            lambda pair: f"--{pair[0]}={pair[1]}"
        )
        | st.tuples(
            st.sampled_from(sorted(OPTIONS)),
            st.integers().map(str) | st.floats().map(str) | st.just("true"),
        ).map(lambda pair: f"--{pair[0]}={pair[1]}")
        | st.text(max_size=8),
        max_size=4,
    )
)
def test_any_overrides_give_a_config_or_one_clear_error(overrides):
    try:
        config = load_config([str(ROOT / "config/debug.py"), *overrides])
    except ConfigError as error:
        assert error.problems
    except SystemExit as stop:
        assert stop.code == 0
    else:
        assert config.problems() == []
        assert from_json(to_json(config)) == config


def test_mistakes_end_the_command_before_anything_is_made(tmp_path):
    """More such commands: test_ranks_cli.py."""
    argv = [str(ROOT / "config/debug.py"), "--bach_size", "8", "--lr=1.x", "--dropout=1.5"]
    command = [sys.executable, str(ROOT / "train.py"), *argv]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    names = ["--bach_size is not", "optim.lr=1.x", "model.dropout=1.5"]
    for line, name in zip(ended.stderr.splitlines(), names, strict=True):
        assert line.startswith(f"error: {name}")
    assert list(tmp_path.iterdir()) == []


# JSON


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "run.json is not JSON"),
        ("[]", "must be an object of sections"),
        ('{"run": 3}', "must be an object of sections"),
        ('{"run": {"max_step": 3}}', "unknown option run.max_step"),
        ('{"runs": {}}', "unknown section runs"),
        ('{"run": {"max_steps": "3"}}', "run.max_steps='3': must be a whole number"),
        ('{"optim": {"lr": NaN}}', "optim.lr=nan: must be a finite number"),
        ('{"run": {"dtype": "fp8"}}', "run.dtype='fp8': must be auto or"),
        ('{"run": {"compile": 0}}', "run.compile=0: must be true or false"),
    ],
)
def test_a_wrong_run_json_is_refused_by_name(text, said):
    with pytest.raises(ConfigError, match=said):
        from_json(text)


def test_run_json_may_be_older_than_an_option():
    assert from_json({"run": {"max_steps": 3}}) == Config(run=RunConfig(max_steps=3))


def test_whole_numbers_in_run_json_become_floats():
    assert type(from_json({"optim": {"lr": 1}}).optim.lr) is float


def test_differences_name_the_option_and_both_values():
    a = Config()
    b = replace(a, optim=OptimConfig(lr=0.5), run=RunConfig(seed=7))
    assert differences(a, b) == [("optim.lr", 1e-3, 0.5), ("run.seed", 1, 7)]
    assert differences(a, a) == []


def test_the_table_has_every_option_in_a_row_of_its_own():
    rows = options_table().splitlines()[2:]
    assert len(rows) == len(OPTIONS)
    for row, option in zip(rows, OPTIONS.values(), strict=True):
        cells = row.replace(r"\|", "/").split("|")
        assert len(cells) == 5
        assert option.full_name in cells[1]
        assert option.help in cells[3]


def test_a_width_that_heads_do_not_divide_is_one_mistake_not_two():
    """108 / 7 is not a head width, so that 15 is odd is beside the point."""
    (problem,) = ModelConfig(d_model=108, n_heads=7).problems()
    assert "model.d_model=108 is not a multiple of model.n_heads=7" in problem
