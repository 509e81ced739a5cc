"""Run output: progress, the first and the last messages."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from data.config import DataConfig
from model.config import ModelConfig
from model.gpt import GPT
from training import messages
from training.checkpoint import TrainState
from training.config import Config, ParallelConfig, RunConfig
from training.console import UNKNOWN_STEPS, Console, bar_format, percent, short
from training.distributed import Ranks
from training.memory import estimate_memory


@pytest.fixture
def console(monkeypatch):
    """At step 20 of 100, of which this process took 10 in 5 seconds."""
    console = Console()
    console.open_progress(first_step=10, max_steps=100)
    monkeypatch.setattr("training.console.time.monotonic", lambda: console.started + 5.0)
    return console


# Messages


@pytest.mark.parametrize(
    ("first", "quiet", "out"),
    [(True, False, "progress\nresult\n"), (True, True, "result\n"), (False, False, "")],
)
def test_who_prints_what(first, quiet, out, capsys):
    console = Console(first, quiet)
    console.open_progress(0, 10)
    console.say("progress")
    console.advance(1)
    console.print("result")
    if quiet or not first:
        console.progress(1, 1.0, 1.0)
    assert capsys.readouterr() == (out, "")


# Progress


def test_plain_lines_where_there_is_no_terminal(console, capsys):
    # 10 steps in 5 s since the start at step 10: 40 s to step 100, 15 s to step 50.
    console.progress(20, 2.34567, 12_345.6, 0.456)
    console.progress(20, 2.0, 1000.0, 0.5, bits_per_byte=1.2345, next_evaluation=50)
    console.progress(20, 2.0, 1000.0, next_evaluation=20)  # now: nothing to announce
    assert capsys.readouterr().out == (
        "step 20/100: loss 2.3457, 12.3k tokens/s, MFU 46%, 0:40 left\n"
        "step 20/100: loss 2.0000, 1.234 bits per byte, 1k tokens/s, MFU 50%, 0:40 left, "
        "evaluation in 0:15\n"
        "step 20/100: loss 2.0000, 1k tokens/s, MFU n/a, 0:40 left\n"
    )
    assert console.eta(10) == math.inf  # nothing measured yet


def test_an_unknown_length_is_not_shown(capsys):
    console = Console()
    console.open_progress(0, UNKNOWN_STEPS)
    console.progress(3, 2.0, 1000.0)
    assert capsys.readouterr().out == "step 3: loss 2.0000, 1k tokens/s, MFU n/a\n"
    console.set_length(40)
    console.progress(4, 2.0, 1000.0)
    assert capsys.readouterr().out.startswith("step 4/40: ")


FIGURES = {
    "step": "step 168/400",
    "loss": "loss 2.3457",
    "bits": "1.234 bits per byte",
    "speed": "23.1k tokens/s",
    "MFU": "MFU 46%",
    "left": "0:07 left",
    "evaluation": "evaluation in 0:15",
    "percent": "42%",
    "bar": "-" * 16,
}


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (11, ""),
        (35, "step 168/400  loss 2.3457"),
        (36, "step 168/400  loss 2.3457  0:07 left"),
        (57, "step 168/400  42%  loss 2.3457  23.1k tokens/s  0:07 left"),
        # a bar of 16 columns and its gap
        (75, "step 168/400  42%  {bar}  loss 2.3457  23.1k tokens/s  0:07 left"),
        (95, "step 168/400  42%  {bar}  loss 2.3457  23.1k tokens/s  0:07 left"),
        # bits per byte take 21 columns, not from those of the bar
        (
            96,
            "step 168/400  42%  {bar}  loss 2.3457  1.234 bits per byte  23.1k tokens/s  0:07 left",
        ),
        (
            125,
            "step 168/400  42%  {bar}  loss 2.3457  1.234 bits per byte  23.1k tokens/s  MFU 46%  "
            "0:07 left  evaluation in 0:15",
        ),
    ],
)
def test_a_bar_shows_the_parts_that_fit_by_importance(columns, line):
    assert bar_format(FIGURES, columns) == line


def test_figures_are_short():
    assert [short(n) for n in (3, 999, 1000, 12_345, 1_234_567, 2e9)] == [
        "3", "999", "1k", "12.3k", "1.23M", "2G",
    ]  # fmt: skip
    assert [percent(share) for share in (None, 0.0, 0.456, 1.0)] == ["n/a", "0%", "46%", "100%"]


# First messages


def run_of(peak: float | None, **options) -> tuple:
    model = ModelConfig(n_layers=1, n_heads=1, d_model=8, context_length=4).resolved(10)
    config = Config(
        model=model,
        data=DataConfig(global_batch=2, micro_batch=1),
        parallel=ParallelConfig(reduction="exact"),
        run=RunConfig(dtype="float32", max_steps=110, **options),
    )
    ranks = Ranks()
    setup = SimpleNamespace(config=config, model=GPT(model), ranks=ranks)
    return setup, TrainState(step=10), peak


def test_the_estimates_by_hand():
    setup, state, _ = run_of(None)
    # 100 steps of 8 tokens; at half of a peak of 10 tokens per second, 160 s
    peak = 10.0 * setup.model.flops_per_token(4)
    assert messages.estimated_time(setup, state, peak) == "2:40 at 50% of peak FLOP/s"
    memory = estimate_memory(setup.config, model=setup.model).peak / 1e9
    assert messages.estimated_memory(setup) == f"{memory:.2f} GB of memory"
    setup.ranks.world = 2
    assert messages.estimated_time(setup, state, peak) == "1:20 at 50% of peak FLOP/s"
    assert messages.estimated_memory(setup).endswith(" GB of memory per rank")
    assert messages.estimated_time(*run_of(None)) == "time unknown before the first steps"
    assert messages.estimated_time(*run_of(1e12, time_budget="10m")) == "10m of time"


def test_six_lines_say_what_will_happen(train_tiny, tmp_path, capsys):
    assert train_tiny(tmp_path / "run", max_steps=4) == 0
    introduction, _, progress = capsys.readouterr().out.partition("step 1/4: loss ")
    lines = introduction.splitlines()
    heads = [line.partition(" ")[0] for line in lines if not line.startswith("prepared")]
    assert heads == ["device:", "model:", "data:", "training:", "estimate:", "folder:"]
    # 4 steps of 4 windows of the 133 in the text
    assert "4 steps of 64 tokens (4 x 16, 2 micro-batches), 0.12 epochs, adamw" in lines[-3]
    # Characters of one byte each: a token is a byte.
    loss, bits = float(progress.partition(",")[0]), float(progress.split()[1])
    assert bits == pytest.approx(loss / math.log(2), abs=1e-3)


@pytest.mark.parametrize(("loss", "warned"), [(3.4, True), (3.2, False), (None, False)])
def test_gibberish_is_announced_by_the_loss(loss, warned, monkeypatch, capsys):
    # of 257 ids a random guess costs ln 257 = 5.55; 60% of it are 3.33
    setup, state, _ = run_of(None)
    setup.model = SimpleNamespace(config=SimpleNamespace(vocab_size=257))
    state.last_val_loss = state.best_loss = loss
    monkeypatch.setattr(messages, "sample_text", lambda *_, **__: "a sample")
    checkpoints = SimpleNamespace(best_step=lambda: None, path=str)
    messages.say_result(setup, SimpleNamespace(tokenizer=None), state, checkpoints, Console())
    said = "note: gibberish is expected after 10 steps: the loss of random guessing is 5.55"
    assert (said in capsys.readouterr().out) == warned
