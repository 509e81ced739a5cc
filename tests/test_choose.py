"""The config that is chosen for a text: rules, overrides, the file in the run's folder."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import train
from cli.options import ConfigError
from data.survey import Survey
from training import choose as module
from training.choose import Machine, choose, config_text, load_or_choose, name_of
from training.config import read_config, values_of

TWO_CORES = Machine("2 CPU cores", flops=1e11, layer_seconds=0.0, memory=8e9)
SOURCE = {"data.source": "my.txt", "run.out_dir": "out/my"}


def text_of(n_bytes: float) -> Survey:
    return Survey(int(n_bytes), is_whole=True, prompt="ROMEO:")


def chosen(n_bytes: float, machine: Machine = TWO_CORES, **typed):
    return choose(text_of(n_bytes), machine, {**SOURCE, **typed})


# The rules


@pytest.mark.parametrize("n_bytes", [1e3, 5e4, 1e6, 2e7, 1e9, 1e12])
@pytest.mark.parametrize("flops", [1e9, 1e11, 3e14])
def test_every_choice_is_a_valid_config(n_bytes, flops):
    config = chosen(n_bytes, replace(TWO_CORES, flops=flops))
    assert config.problems() == []
    assert config.model.d_model % config.model.n_heads == 0


def test_a_larger_text_gets_a_larger_vocabulary_and_less_dropout():
    def ids(config) -> int:
        return int(config.data.tokenizer.partition(":")[2] or 0)

    sizes = [chosen(n) for n in (2e4, 2e5, 1e6, 2e7)]
    assert sorted(map(ids, sizes)) == [ids(config) for config in sizes]
    assert ids(sizes[0]) < ids(sizes[-1])
    dropouts = [config.model.dropout for config in sizes]
    assert sorted(dropouts, reverse=True) == dropouts
    assert dropouts[0] > 0 == dropouts[-1]


def test_more_time_or_a_faster_machine_gets_a_larger_model():
    def width(config) -> int:
        return config.model.d_model * config.model.n_layers

    assert width(chosen(2e7, **{"run.time_budget": "20s"})) < width(chosen(2e7))
    assert width(chosen(2e7)) < width(chosen(2e7, replace(TWO_CORES, flops=1e13)))


def test_a_machine_with_little_memory_gets_a_small_model():
    large = chosen(1e9, replace(TWO_CORES, flops=1e14)).model
    small = chosen(1e9, replace(TWO_CORES, flops=1e14, memory=1e8)).model
    assert 12 * small.n_layers * small.d_model**2 * module.MEMORY_PER_PARAMETER < 2e8
    assert small.d_model < large.d_model


def test_a_small_text_is_not_repeated_for_the_whole_ten_minutes():
    config = chosen(5e4)
    seconds = float(config.run.time_budget.removesuffix("s"))
    assert 1 < seconds < 300
    assert "passes over the text" in "\n".join(config.reasons)
    assert chosen(2e7).run.time_budget == "10m"
    assert chosen(5e4, **{"run.time_budget": "2h"}).run.time_budget == "2h"


def test_what_is_given_stays_and_the_rest_is_chosen_around_it():
    given = {
        "data.tokenizer": "char",
        "model.n_heads": 6,
        "run.max_steps": 50,
        "model.dropout": 0.3,
    }
    config = chosen(1e6, **given)
    values = values_of(config)
    assert {name: values[name] for name in given} == given
    assert config.model.d_model % 6 == 0
    assert config.run.time_budget == ""
    assert config.run.eval_interval == 50 // module.EVALUATIONS
    assert [line for line in config.reasons if "as given" in line][0].split()[:2] == [
        "tokenizer",
        "char:",
    ]


def test_a_very_small_text_gets_advice():
    assert any(
        line.startswith("advice: 3 KB of text is very little") for line in chosen(3e3).reasons
    )
    assert not any("advice" in line for line in chosen(1e6).reasons)


def test_the_reasons_fit_80_columns():
    for config in (chosen(1e6), chosen(2e7), chosen(5e4, **{"run.time_budget": "1:30:00"})):
        assert max(map(len, config.reasons)) <= 80, config.reasons


def test_an_evaluation_scores_a_part_of_much_validation_text():
    few, many = chosen(1e6), chosen(1e9)
    assert few.run.eval_windows == 0 < many.run.eval_windows
    scored = many.run.eval_windows * many.model.context_length
    seen_by_a_million_parameters = 600 * TWO_CORES.flops / 6e6
    assert scored < 0.02 * seen_by_a_million_parameters


# The config file


def test_the_file_holds_the_choice(tmp_path):
    odd = {"data.source": 'a "b"\\c\n.txt', "log.sample_prompt": "\U0001f600 'x'", "run.seed": 7}
    config = chosen(1e6, **odd, **{"log.quiet": True})
    path = tmp_path / "config.py"
    path.write_text(config_text(config), encoding="utf-8")
    again = read_config(path)
    assert again == replace(config, log=replace(config.log, quiet=False))  # it belongs to a start
    assert again.run.out_dir == "out/my"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("texts/my_text.txt.gz", "my_text"),
        ("hub:owner/name/part@train", "part"),
        ("hub:owner/name", "name"),
        ("notes/**/*.md", "notes"),
        ("a.txt*0.7+b.txt*0.3", "a"),
        ("my text (2).txt", "my_text_2"),
        ("folder.v2", "folder_v2"),
    ],
)
def test_the_run_is_named_after_the_text(spec, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.v2").mkdir()
    assert name_of(spec) == name


# The command


@pytest.fixture
def here(tmp_path, monkeypatch) -> list[str]:
    """A folder with my_text.txt; returns options for a run of a second."""
    monkeypatch.chdir(tmp_path)
    lines = (f"NUMBER {i}:\nthe square is {i * i}\n\n" for i in range(300))
    Path("my_text.txt").write_text("".join(lines))
    monkeypatch.setattr(module, "this_machine", lambda device: replace(TWO_CORES, flops=1e9))
    tiny = {"max_steps": 3, "d_model": 32, "n_layers": 1, "context_length": 32, "threads": 1}
    tiny |= {"global_batch": 4, "report": False}
    return [f"--{name}={value}" for name, value in tiny.items()] + ["--prepared_dir=prepared"]


def test_a_text_alone_trains_and_its_config_runs_again(here, command):
    code, out, err = command(train.main, "my_text.txt", *here)
    assert (code, err) == (0, "")
    assert "chosen for my_text.txt (10 KB) on 2 CPU cores:" in out
    assert "sample (prompt: 'NUMBER')" in out
    written = Path("out/my_text/config.py").read_text()
    assert "as given" in written and "d_model=32" in written

    code, out, _ = command(train.main, "my_text.txt", *here)
    assert code == 0 and "out/my_text is finished at step 3" in out
    assert "settings: out/my_text/config.py, chosen when the run began" in out
    code, out, _ = command(train.main, "out/my_text/config.py")
    assert code == 0 and "out/my_text is finished at step 3" in out

    code, out, _ = command(train.main, "my_text.txt", "--max_steps=5")
    assert code == 0 and "finished at step 5" in out
    assert Path("out/my_text/config.py").read_text() == written


def test_another_machine_does_not_change_a_run(here, command, monkeypatch):
    assert command(train.main, "my_text.txt", *here)[0] == 0
    saved = json.loads(Path("out/my_text/run.json").read_text())
    monkeypatch.setattr(module, "this_machine", lambda device: replace(TWO_CORES, flops=1e14))
    assert load_or_choose(["my_text.txt"]).model.n_layers == saved["model"]["n_layers"]
    anew = load_or_choose(["my_text.txt", "--overwrite=true"])
    assert anew.model.n_layers > saved["model"]["n_layers"]


def test_overwrite_chooses_anew_and_moves_the_file_aside(here, command):
    assert command(train.main, "my_text.txt", *here)[0] == 0
    before = Path("out/my_text/config.py").read_text()
    assert command(train.main, "my_text.txt", *here, "--overwrite=true", "--seed=2")[0] == 0
    assert "seed=2" in Path("out/my_text/config.py").read_text()
    assert Path("out/my_text.old/config.py").read_text() == before


def test_a_run_of_another_command_is_left_alone(here):
    os.makedirs("out/my_text")
    Path("out/my_text/run.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a run that another command began"):
        load_or_choose(["my_text.txt"])


def test_a_folder_is_a_text_too(here):
    os.makedirs("notes/more")
    for name in ("notes/a.txt", "notes/more/b.md"):
        Path(name).write_text("Some words.\n\nSome words more.\n" * 300)
    config = load_or_choose(["notes"])
    assert (config.data.source, config.run.out_dir) == ("notes", "out/notes")
    assert config.log.sample_prompt == "Some words"


def test_mistakes_are_told_before_anything_is_measured(here, monkeypatch):
    monkeypatch.setattr(module, "this_machine", None)
    cases = {
        "CONFIG=my_txt.txt: no such file or config; did you mean my_text.txt?": ["my_txt.txt"],
        "optim.lr=x: must be a finite number": ["my_text.txt", "--lr=x"],
        "data.source=other.txt: the text is my_text.txt": ["my_text.txt", "--source=other.txt"],
    }
    for told, argv in cases.items():
        with pytest.raises(ConfigError) as caught:
            load_or_choose(argv)
        assert told in str(caught.value)
        assert len(caught.value.problems) == 1
