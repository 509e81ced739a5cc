"""What is seen while a run goes on: progress, the first screen, colours where they are wanted."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from data.config import DataConfig
from model.config import ModelConfig
from model.gpt import GPT
from training import screen
from training.config import Config, ParallelConfig, RunConfig
from training.distributed import Ranks
from training.logger import GREEN, PLAIN, UNKNOWN_STEPS, YELLOW, RunLogger, coloured
from training.memory import estimate_memory


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log of a run at step 20 of 100, of which 10 steps took 5 seconds."""
    log = RunLogger(tmp_path, max_steps=100, first_step=10)
    monkeypatch.setattr("training.logger.time.monotonic", lambda: log.started + 5.0)
    yield log
    log.close()


def test_bits_per_byte_and_the_next_evaluation(log, capsys):
    # Half a second a step: 40 s to step 100, 15 s to step 50.
    log.progress(20, 2.0, 1000.0, 0.5, bits_per_byte=1.2345, next_evaluation=50)
    assert capsys.readouterr().out == (
        "step 20/100: loss 2.0000, 1.234 bits per byte, 1k tokens/s, MFU 50%, 0:40 left, "
        "evaluation in 0:15\n"
    )


def test_an_evaluation_that_is_due_now_is_not_announced(log, capsys):
    log.progress(20, 2.0, 1000.0, None, next_evaluation=20)
    assert "evaluation" not in capsys.readouterr().out


def test_of_a_length_that_is_not_known_yet_none_is_shown(tmp_path, capsys):
    log = RunLogger(tmp_path, max_steps=UNKNOWN_STEPS, first_step=0)
    log.progress(3, 2.0, 1000.0)
    assert capsys.readouterr().out.startswith("step 3: loss 2.0000, 1k tokens/s, MFU n/a\n")
    log.set_length(40)
    log.progress(4, 2.0, 1000.0)
    assert capsys.readouterr().out.startswith("step 4/40: ")
    log.close()


def test_a_bar_takes_a_new_length(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = RunLogger(tmp_path, max_steps=UNKNOWN_STEPS, first_step=0)
    assert log.bar.total is None
    log.set_length(40)
    assert log.bar.total == 40
    log.close()
    capsys.readouterr()


def test_a_narrow_terminal_shows_what_is_read_and_leaves_out_the_drawing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda file: (90, 24))
    log = RunLogger(tmp_path, max_steps=40, first_step=0)
    log.advance(20)
    log.progress(20, 2.0, 1000.0, 0.5, bits_per_byte=2.5, next_evaluation=30)
    log.close()
    err = capsys.readouterr().err
    line = next(line for line in err.replace("\r", "\n").splitlines() if "loss" in line)
    assert line.startswith("20/40, 00:0")
    assert " left, loss 2.0000, 2.500 bits per byte, 1k tokens/s, evaluation in 0:" in line


# Progress of a real run, worked out again from its own log


def test_bits_per_byte_of_training_are_the_loss_over_ln_2_times_tokens_per_byte(
    train_tiny, tmp_path, capsys
):
    assert train_tiny(tmp_path / "run", max_steps=4) == 0
    out = capsys.readouterr().out
    # Characters of one byte each: a token is a byte.
    loss = float(out.partition("step 4/4: loss ")[2].partition(",")[0])
    bits = float(out.partition("step 4/4: loss ")[2].split()[1])
    assert bits == pytest.approx(loss / 0.693147, abs=1e-3)


# Colours


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize("text", ["warning: w", "advice: a", "note: n"])
def test_what_needs_attention_is_yellow_on_a_terminal(terminal, text):
    assert coloured(text) == f"{YELLOW}{text}{PLAIN}"


def test_the_best_so_far_is_green_and_the_rest_plain(terminal):
    assert coloured("step 5: ... (best so far)") == f"{GREEN}step 5: ... (best so far){PLAIN}"
    assert coloured("step 5: ...") == "step 5: ..."


def test_no_colours_where_they_are_not_wanted(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("warning: w") == "warning: w"


def test_no_colours_in_a_file(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured("warning: w") == "warning: w"


# The first screen


def run_of(peak: float | None, **options) -> SimpleNamespace:
    model = ModelConfig(n_layers=1, n_heads=1, d_model=8, context_length=4).resolved(10)
    config = Config(
        model=model,
        data=DataConfig(global_batch=2, micro_batch=2),
        parallel=ParallelConfig(reduction="exact"),
        run=RunConfig(dtype="float32", max_steps=110, **options),
    )
    ranks = Ranks()
    setup = SimpleNamespace(model=GPT(model), ranks=ranks)
    state = SimpleNamespace(step=10)
    return SimpleNamespace(config=config, setup=setup, peak=peak, state=state, max_steps=110)


def test_the_estimate_of_time_by_hand():
    run = run_of(None)
    flops = run.setup.model.flops_per_token(4)
    # 100 steps of 8 tokens; at half of a peak of 10 tokens a second, 160 s
    run.peak = 10.0 * flops
    assert screen.estimated_time(run) == "2:40 at 50% of the peak"
    run.setup.ranks.world = 2
    assert screen.estimated_time(run) == "1:20 at 50% of the peak"


def test_without_a_peak_no_time_is_made_up():
    assert screen.estimated_time(run_of(None)) == "time unknown before the first steps"
    assert screen.estimated_time(run_of(1e12, time_budget="10m")) == "10m of time"


def test_the_estimate_of_memory_is_the_planners():
    run = run_of(1e12)
    expected = estimate_memory(run.config, model=run.setup.model).peak / 1e9
    assert screen.estimated_memory(run) == f"{expected:.2f} GB of memory"


def test_five_lines_say_what_will_happen(train_tiny, tmp_path, capsys):
    assert train_tiny(tmp_path / "run", max_steps=4) == 0
    lines = capsys.readouterr().out.partition("step 1/4")[0].splitlines()
    heads = [line.partition(" ")[0] for line in lines if not line.startswith("prepared")]
    assert heads == ["device", "model:", "data:", "steps:", "estimate:"]
    steps = lines[-2]
    # 4 steps of 4 windows of the 133 in the text
    assert "4 of 4 x 16 = 64 tokens in 2 micro-batches, 0.12 epochs, adamw" in steps


def test_a_quiet_run_says_none_of_it(train_tiny, tmp_path, capsys):
    assert train_tiny(tmp_path / "run", max_steps=4, quiet=True) == 0
    out = capsys.readouterr().out
    assert "estimate" not in out
    assert "step 4/4" not in out
    assert "finished at step 4" in out
