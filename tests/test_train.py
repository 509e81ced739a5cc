"""Training from the command line, end to end in this process, on a tiny text."""

from __future__ import annotations

import json
import math
import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sample
from cli.options import ConfigError
from data.prepare import prepared_folder
from data.shards import IGNORE_INDEX, Windows
from training import run as run_module
from training.checkpoint import TrainState, state_from_json
from training.config import from_json
from training.evaluate import Evaluation
from training.metrics import read_metrics
from training.step import NonFinite
from training.weights import find_weights


def metrics(folder: Path, name: str) -> dict[int, float]:
    """{step: value} of one value of metrics.jsonl."""
    return {e["step"]: e[name] for e in read_metrics(folder / "metrics.jsonl") if name in e}


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/step-{step}/model.safetensors")


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def losses(monkeypatch):
    """losses(2.0, 3.0, ...): let the evaluations find these; returns the batches they are asked."""

    def rig(*values: float) -> list[int]:
        found, asked = iter(values), []

        def evaluate(*args, batch: int, **options) -> Evaluation:
            asked.append(batch)
            return Evaluation(next(found), 100, 100)

        monkeypatch.setattr(run_module, "evaluate", evaluate)
        return asked

    return rig


# What a run leaves behind


def test_exactly_max_steps_are_taken_and_logged(trained_once):
    loss = metrics(trained_once, "loss")
    assert list(loss) == [1, 2, 4, 6, 8]
    assert loss[1] == pytest.approx(math.log(24), abs=0.1)  # the text has 24 characters
    assert loss[8] < loss[1] - 0.3
    saved = json.loads((trained_once / "checkpoints/step-8/state.json").read_text())
    assert saved["step"] == 8
    line = next(e for e in read_metrics(trained_once / "metrics.jsonl") if "loss" in e)
    assert line.keys() >= {"step", "attempt", "time", "lr", "grad_norm", "tokens_per_second", "mfu"}
    assert line["attempt"] == 1 and line["mfu"] <= 1


def test_tokens_and_skipped_steps_are_counted_across_a_resume(train_tiny, tmp_path, monkeypatch):
    """Documents of 6 characters in windows of 16: the padding is not training."""
    (tmp_path / "docs.jsonl").write_text("".join(f'{{"text": "f{i:04}."}}\n' for i in range(200)))
    counted, step = [], run_module.train_step

    def counting(setup, batches, number, n_targets):
        found = step(setup, batches, number, n_targets)
        counted.append(replace(found, skipped=number in (2, 4)))
        return counted[-1]

    monkeypatch.setattr(run_module, "train_step", counting)
    options = {
        "source": tmp_path / "docs.jsonl",
        "prepared_dir": tmp_path / "prepared",
        "windows": "document",
        "checkpoint_interval": 3,
        "interval": 2,
    }
    assert train_tiny(tmp_path / "run", max_steps=3, **options) == 0
    assert train_tiny(tmp_path / "run", max_steps=8, resume="changed", **options) == 0
    totals = metrics(tmp_path / "run", "tokens")
    assert totals == {
        step: sum(found.tokens for found in counted[:step]) for step in (1, 2, 3, 4, 6, 8)
    }
    assert 0 < totals[8] < 8 * 4 * 16
    assert metrics(tmp_path / "run", "skipped") == {3: 1, 4: 1, 6: 2, 8: 2}


def test_a_run_older_than_the_count_of_tokens_resumes_without_it(train_tiny, trained, monkeypatch):
    """Its checkpoint does not say how many there were: a wrong total would be worse than none."""
    state = json.loads((trained / "checkpoints/step-8/state.json").read_text())
    assert state["tokens"] == 8 * 4 * 16
    with pytest.raises(ValueError, match="out of range"):
        state_from_json({**state, "tokens": -1})

    def older(saved: dict) -> TrainState:
        return state_from_json({name: saved[name] for name in saved if name != "tokens"})

    monkeypatch.setattr("training.checkpoint.state_from_json", older)
    assert train_tiny(trained, max_steps=10, resume="changed") == 0
    assert list(metrics(trained, "tokens")) == [1, 2, 4, 6, 8]
    assert max(metrics(trained, "loss")) == 10


def test_every_evaluation_is_logged_in_three_units(trained_once):
    losses = metrics(trained_once, "val_loss")
    assert list(losses) == [4, 8]
    for step, loss in losses.items():
        # Every character of the text is one byte.
        assert metrics(trained_once, "bits_per_byte")[step] == pytest.approx(loss / math.log(2))
        assert metrics(trained_once, "perplexity")[step] == pytest.approx(math.exp(loss))


def test_the_folder_holds_what_is_needed_and_no_more(trained_once):
    assert {p.name for p in trained_once.iterdir()} == {
        "run.json", "metrics.jsonl", "checkpoints", ".lock",
    }  # fmt: skip
    assert {p.name for p in (trained_once / "checkpoints").iterdir()} == {
        "step-4", "step-8", "best",
    }  # fmt: skip
    assert (trained_once / "checkpoints/best").read_text() == "step-8\n"
    resolved = json.loads((trained_once / "run.json").read_text())
    assert resolved["model"]["vocab_size"] == 24
    assert resolved["run"]["attention"] == "sdpa"
    assert resolved == json.loads((trained_once / "checkpoints/step-8/run.json").read_text())


def test_steps_are_updates_and_not_micro_batches(train_tiny, tmp_path):
    train_tiny(
        tmp_path, max_steps=20, global_batch=8, micro_batch=1, interval=1, warmup_steps=5, lr=0.5
    )
    rates = metrics(tmp_path, "lr")
    assert list(rates) == list(range(1, 21))
    assert all(0 < rate <= 0.5 for rate in rates.values())
    # wsd: 5 steps of warm-up, 0.5 until step 11, then down by 0.05 a step.
    by_hand = {1: 0.5 / 6, 5: 2.5 / 6, 6: 0.5, 11: 0.5, 12: 0.45, 16: 0.25, 20: 0.05}
    assert {step: rates[step] for step in by_hand} == pytest.approx(by_hand)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_shorter_than_its_intervals_ends_evaluated_and_saved(train_tiny, tmp_path, steps):
    options = {"eval_interval": 2000, "checkpoint_interval": 2000, "interval": 2000}
    assert train_tiny(tmp_path / "run", max_steps=steps, **options) == 0
    assert list(metrics(tmp_path / "run", "val_loss")) == [steps]
    assert list(metrics(tmp_path / "run", "loss")) == sorted({1, steps})
    assert sample.main([str(tmp_path / "run"), "--max_new_tokens=3"]) == 0


# Messages


def test_the_first_messages_and_the_last_with_the_next_command(train_tiny, tmp_path, capsys):
    folder = tmp_path / "a run"
    train_tiny(folder, max_steps=4, sample_prompt="def f")
    out = capsys.readouterr().out
    assert "device: cpu, float32 (as set), 1 thread, sdpa attention" in out
    assert "parameters, 1 layer of width 16, vocabulary 24" in out
    assert "training: 4 steps of 64 tokens (4 x 16, 2 micro-batches), 0.12 epochs, adamw" in out
    assert "step 4/4: loss" in out
    assert f"saved {folder}/checkpoints/step-4" in out
    ending = out.partition("finished at step 4: all steps done; validation loss ")[2]
    assert f"checkpoint: {folder}/checkpoints/step-4" in ending
    assert "sample (prompt: 'def f'):\n\ndef f" in ending
    typed = shlex.split(ending.partition("to generate more: python ")[2])
    assert typed == ["sample.py", str(folder), "--prompt", "def f"]
    sample.main([*typed[1:], "--max_new_tokens=4"])
    assert capsys.readouterr().out.startswith("def f")


def test_quiet_leaves_warnings_and_the_result(train_tiny, tmp_path, capsys):
    train_tiny(tmp_path, max_steps=4, quiet=True)
    out, err = capsys.readouterr()
    before, _, _ = out.partition("finished at step 4: all steps done")
    # A busy machine may be advised of.
    assert all(line.startswith("advice") for line in before.splitlines()) and err == ""
    assert "checkpoint: " in out and "sample (prompt: " in out
    assert out.endswith(f"to generate more: python sample.py {tmp_path}\n")  # from no prompt


def test_tokens_per_second_leave_evaluation_and_saving_out(train_tiny, tmp_path, monkeypatch):
    now = [0.0]

    def takes(seconds: float, name: str) -> None:
        inner = getattr(run_module, name)

        def slow(*args, **options):
            now[0] += seconds
            return inner(*args, **options)

        monkeypatch.setattr(run_module, name, slow)

    takes(2.0, "train_step")
    takes(100.0, "evaluate")
    takes(1000.0, "save")
    monkeypatch.setattr(run_module, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("training.observer.peak_flops", lambda *args: None)
    train_tiny(tmp_path, max_steps=8)
    rates = metrics(tmp_path, "tokens_per_second")
    assert rates == dict.fromkeys([1, 2, 4, 6, 8], pytest.approx(4 * 16 / 2.0))
    assert metrics(tmp_path, "mfu") == {}


# What must not matter


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_evaluating_saving_and_logging_change_no_step(train_tiny, tmp_path, optimizer):
    """Evaluations, checkpoints and log lines in between leave every bit as it was."""
    options = {"max_steps": 6, "dropout": 0.2, "optimizer": optimizer}
    often = {"eval_interval": 1, "checkpoint_interval": 1, "interval": 1, "eval_windows": 3}
    train_tiny(tmp_path / "a", **options, eval_interval=100, checkpoint_interval=100, interval=1)
    train_tiny(tmp_path / "b", **options, **often)
    assert metrics(tmp_path / "a", "loss") == metrics(tmp_path / "b", "loss")
    assert same_weights(weights(tmp_path / "a", 6), weights(tmp_path / "b", 6))


@pytest.mark.parametrize("windows", ["packed", "document"])
def test_validation_hides_documents_from_each_other_too(
    train_tiny, short_documents, tmp_path, monkeypatch, windows
):
    """The loss that is logged is that of each document alone, as far as a packed row holds it; so
    are the losses of the report's passage, which is the first row."""
    monkeypatch.setattr("training.observer.try_report", lambda *_: True)
    options = {"windows": windows, "document_mask": True, "eval_windows": 0, "lr": 0.1}
    train_tiny(tmp_path, **short_documents, **options, report=True, context_length=64)
    config = from_json((tmp_path / "run.json").read_text())
    model = find_weights(tmp_path, "latest").load(torch.device("cpu"))[0]
    total, count, first_row = 0.0, 0, []
    rows = Windows(prepared_folder(config.data), "val", 64, windows, document_mask=True)
    for i in range(len(rows)):
        tokens, targets, documents = map(torch.from_numpy, rows.pair(i))
        for number in documents.unique():
            mine = (documents == number) & (targets != IGNORE_INDEX)
            if mine.any():
                losses = model(tokens[mine][None], targets[mine][None], reduction="none")[0]
                total += losses.sum().item()
                count += int(mine.sum())
                first_row += losses.tolist() if i == 0 else []
    assert metrics(tmp_path, "val_loss")[8] == pytest.approx(total / count, abs=1e-5)
    assert (rows.pair(0)[2] > 0).any()
    last = json.loads((tmp_path / "snapshots.jsonl").read_text().splitlines()[-1])
    assert [loss for _, loss, _ in last["passage"]] == pytest.approx(first_row, abs=6e-4)


@pytest.mark.parametrize(
    ("options", "wasted"),
    [
        ({"windows": "document"}, True),
        ({"windows": "document", "document_mask": True}, False),
        ({"windows": "packed"}, False),
    ],
)
def test_advice_on_windows_that_are_mostly_padding(
    train_tiny, short_documents, tmp_path, capsys, options, wasted
):
    train_tiny(tmp_path, **short_documents, **options, context_length=64, max_steps=1)
    assert ("advice: short documents fill" in capsys.readouterr().out) == wasted
    tokens = metrics(tmp_path, "tokens")[1]
    assert (tokens < 0.5 * 4 * 64) == wasted  # targets that count, of 4 windows


def test_losses_do_not_depend_on_micro_batches_with_a_mask_or_without(
    train_tiny, short_documents, tmp_path
):
    options = {**short_documents, "global_batch": 8, "interval": 1, "max_steps": 4}
    found = {}
    unmasked = {"document_mask": False}
    for name, more in {
        "8": {},
        "2": {"micro_batch": 2},
        "8 off": unmasked,
        "1 off": {"micro_batch": 1, **unmasked},
    }.items():
        more = {"document_mask": True, "micro_batch": 8, "windows": "document", **more}
        train_tiny(tmp_path / name, **options, **more)
        found[name] = metrics(tmp_path / name, "loss")
    assert found["2"] == pytest.approx(found["8"], rel=1e-5)
    assert found["1 off"] == pytest.approx(found["8 off"], rel=1e-5)
    assert found["8 off"] != pytest.approx(found["8"], rel=1e-3)


def test_the_seed_decides(train_tiny, trained_once, tmp_path):
    train_tiny(tmp_path / "same", max_steps=8)
    train_tiny(tmp_path / "other", max_steps=8, seed=2)
    assert metrics(tmp_path / "same", "loss") == metrics(trained_once, "loss")
    assert metrics(tmp_path / "other", "loss") != metrics(trained_once, "loss")


# The best checkpoint, patience


def test_a_worse_loss_never_replaces_the_best_also_after_a_resume(
    train_tiny, tmp_path, losses, capsys
):
    best = tmp_path / "checkpoints/best"
    losses(2.0, 3.0, 2.5)
    train_tiny(tmp_path, max_steps=6, eval_interval=2, checkpoint_interval=2)
    assert best.read_text() == "step-2\n"
    assert f"best: {tmp_path}/checkpoints/step-2" in capsys.readouterr().out
    kept = weights(tmp_path, 2)
    losses(2.4, 2.1)
    more = {"max_steps": 10, "resume": "changed", "eval_interval": 2, "checkpoint_interval": 2}
    train_tiny(tmp_path, **more)
    assert best.read_text() == "step-2\n"
    assert same_weights(weights(tmp_path, 2), kept)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {
        "best", "step-2", "step-8", "step-10",
    }  # fmt: skip
    losses(1.9)
    train_tiny(tmp_path, **{**more, "max_steps": 12})
    assert best.read_text() == "step-12\n"


def test_a_run_without_a_better_loss_stops_early_and_stays_finished(
    train_tiny, tmp_path, losses, capsys
):
    losses(2.0, 2.1, 2.2, 0.1)
    options = {"max_steps": 100, "eval_interval": 3, "patience": 2, "interval": 2}
    assert train_tiny(tmp_path, **options) == 0
    assert list(metrics(tmp_path, "val_loss")) == [3, 6, 9]
    assert max(metrics(tmp_path, "loss")) == 9  # next to the last evaluation, off the interval
    out = capsys.readouterr().out
    assert "finished at step 9: no better loss in 2 evaluations; validation loss 2.2000" in out
    assert (tmp_path / "checkpoints/step-9").exists()
    assert train_tiny(tmp_path, **options) == 0
    assert "is finished at step 9: no better loss in 2 evaluations" in capsys.readouterr().out


# Without validation


def test_a_run_may_go_without_validation(train_tiny, tmp_path, monkeypatch, capsys):
    reports = []
    monkeypatch.setattr("training.observer.try_report", lambda *_: reports.append(1) or True)
    options = {"val_fraction": 0, "max_steps": 6, "report": True}
    assert train_tiny(tmp_path, **options) == 0
    assert list(metrics(tmp_path, "loss")) == [1, 2, 4, 6]
    assert metrics(tmp_path, "val_loss") == {}
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step-4", "step-6"}
    out = capsys.readouterr().out
    assert "tokens for training, no validation" in out
    assert "finished at step 6: all steps done\n" in out
    assert "evaluation" not in out
    snapshots = [json.loads(line) for line in (tmp_path / "snapshots.jsonl").open()]
    assert [(s["step"], s["passage"]) for s in snapshots] == [(4, []), (6, [])]
    assert len(reports) == 4  # the first line, two evaluations, the end
    assert train_tiny(tmp_path, **options) == 0
    assert "is finished at step 6" in capsys.readouterr().out
    assert train_tiny(tmp_path / "timed", val_fraction=0, time_budget="0.5s", eval_interval=3) == 0


def test_validation_alone_changes_no_step(train_tiny, tmp_path):
    """The same training text, with a validation text and without."""
    text = tmp_path / "text.txt"
    text.write_text("def f(x): return x + 1\n" * 60)
    options = {"source": text, "interval": 1, "max_steps": 3}
    train_tiny(tmp_path / "with", **options, val_fraction=0.25)
    text.write_text(text.read_text()[: int(60 * 23 * 0.75)])
    train_tiny(tmp_path / "without", **options, val_fraction=0)
    assert metrics(tmp_path / "with", "loss") == metrics(tmp_path / "without", "loss")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"val_fraction": 0, "patience": 2}, "run.patience=2.*val_fraction"),
        ({"sample_prompt": "Ω"}, r"log.sample_prompt='Ω': the char tokenizer .*U\+03A9"),
    ],
)
def test_mistakes_are_found_before_training(train_tiny, tmp_path, options, told):
    with pytest.raises(ConfigError, match=told):
        train_tiny(tmp_path, **options)
    assert not (tmp_path / "metrics.jsonl").exists()


# What goes wrong


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_windows(
    train_tiny, tmp_path, monkeypatch
):
    told = []  # to the other ranks: whether something has failed
    monkeypatch.setattr(
        "training.distributed.Ranks.close", lambda self, failed: told.append(failed)
    )
    train_tiny(tmp_path / "good", max_steps=2)
    with pytest.raises(NonFinite, match=r"step 2: .*norm nan.*Its windows: \d+ \(epoch 0\), "):
        train_tiny(tmp_path / "bad", lr=1e38, grad_clip=0)
    assert NonFinite.exit_code == 4
    assert metrics(tmp_path / "bad", "loss")
    assert told == [False, True]


def test_a_validation_loss_that_is_not_finite_ends_the_run(train_tiny, tmp_path, losses):
    losses(2.0, math.nan)
    with pytest.raises(NonFinite, match="step 4: validation loss nan"):
        train_tiny(tmp_path, eval_interval=2)
    assert (tmp_path / "checkpoints/best").read_text() == "step-2\n"


def test_validation_scores_many_windows_per_forward_on_a_cpu(train_tiny, tmp_path, losses):
    asked = losses(2.0, 2.0)
    train_tiny(tmp_path, context_length=32, eval_interval=4)
    assert asked == [4096 // 32] * 2  # not the micro-batch of a few windows


def test_a_resume_continues_the_run_at_wandb(train_tiny, tmp_path, monkeypatch):
    asked, logged = [], []
    run = types.SimpleNamespace(
        id="abc", log=lambda values, step: logged.append((step, *values)), finish=lambda: None
    )
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: asked.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train_tiny(tmp_path, max_steps=4, wandb=True, project="mine")
    assert (asked[0]["id"], asked[0]["project"]) == (None, "mine")
    assert [step for step, *names in logged if "loss" in names] == [1, 2, 4]
    state = json.loads((tmp_path / "checkpoints/step-4/state.json").read_text())
    assert state["wandb_id"] == "abc"
    train_tiny(tmp_path, max_steps=6, wandb=True, project="mine", resume="changed")
    assert asked[1]["id"] == "abc"
