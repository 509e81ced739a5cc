"""The benchmark of the choice: equal cost for all, neighbors by one option, figures by hand."""

from __future__ import annotations

import pytest

from tools.bench import __main__ as bench
from tools.bench import auto
from training.config import Config, differences


@pytest.fixture
def measured(monkeypatch) -> list[Config]:
    """Steps cost 0.01 CPU seconds, wide ones 0.02; 4 x 128 reaches 2 bits, all else more."""
    trained: list[Config] = []

    def train(config: Config, folder):
        trained.append(config)
        bits = 2.0 if (config.model.d_model, config.model.n_layers) == (128, 4) else 2.5
        return bits + config.model.dropout, config

    monkeypatch.setattr(auto, "bits_per_byte", train)
    monkeypatch.setattr(
        auto, "in_fresh_process", lambda _, config: 0.02 if config.model.d_model > 128 else 0.01
    )
    return trained


def test_all_contenders_get_the_same_seconds_and_differ_in_one_thing(measured, tmp_path, command):
    text = tmp_path / "play.txt"
    text.write_text("ROMEO:\nO, she doth teach the torches to burn bright!\n\n" * 40_000)
    code, out, err = command(bench.main, "auto", f"--source={text}", "--seconds=20")
    assert code == 0, err
    chosen, *others = measured
    costs = {0.02 if c.model.d_model > 128 else 0.01: c.run.max_steps for c in measured}
    assert costs.get(0.01, 2000) == 2000 and costs.get(0.02, 1000) == 1000
    lengths = {"run.max_steps", "run.eval_interval", "run.checkpoint_interval"}
    kinds = []
    for other in others:
        changed = {name for name, _, _ in differences(chosen, other)} - lengths
        kinds.append(sorted(name.partition(".")[0] for name in changed))
        assert changed, "a contender equals the choice"
    assert {tuple(set(kind)) for kind in kinds} == {("data",), ("model",), ("optim",)}
    assert "play.txt" in out.splitlines()[0]


def test_the_table_is_sorted_and_its_ratios_are_right(capsys):
    rows = [("chosen", 2.0, Config()), ("other", 1.6, Config()), ("third", 2.5, Config())]
    auto.show_auto("texts/play.txt", rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["other", "1.600", "0.800"],
        ["chosen", "2.000", "1.000"],
        ["third", "2.500", "1.250"],
    ]
    assert lines[4].startswith("chosen / best: 1.250")


def test_the_neighbors_in_a_list():
    assert auto.beside([1, 2, 3], 2) == [1, 3]
    assert auto.beside([1, 2, 3], 1) == [2]
    assert auto.beside([1, 2, 3], 3) == [2]
