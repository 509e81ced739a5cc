"""Shared fixtures: a tiny text, a run trained on it once, and commands run in this process."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from cli.command import run_command

ROOT = Path(__file__).parents[1]

# Without a name server torch warns about every connection between ranks. It reads this on import.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# pytest-xdist runs one process per core: more threads would only compete.
if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    torch.set_num_threads(1)

# A model of some 5,000 parameters and windows of 16 characters: a run takes a tenth of a second.
TINY = {
    "n_layers": 1,
    "n_heads": 2,
    "d_model": 16,
    "context_length": 16,
    "tokenizer": "char",
    "split": "tail",
    "val_fraction": 0.2,
    "workers": 0,
    "global_batch": 4,
    "micro_batch": 2,
    "lr": 0.01,
    "warmup_steps": 2,
    "max_steps": 8,
    "eval_interval": 4,
    "eval_windows": 8,
    "checkpoint_interval": 4,
    "interval": 2,
    "report": False,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A folder with text.txt, 3,000 characters of which 20% validate, and its prepared data."""
    folder = tmp_path_factory.mktemp("tiny")
    lines = [f"def f{i}(x):\n    return x + {i * i % 97}\n" for i in range(90)]
    (folder / "text.txt").write_text("".join(lines)[:3000], encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_argv(tiny_folder) -> Callable[..., list[str]]:
    """tiny_argv(out_dir, max_steps=20, ...): the command line of a tiny run."""

    def argv(out_dir: Path, **options: object) -> list[str]:
        options = {
            **TINY,
            "source": tiny_folder / "text.txt",
            "prepared_dir": tiny_folder / "prepared",
            "out_dir": out_dir,
            **options,
        }
        if options.get("time_budget"):  # instead of max_steps
            del options["max_steps"]
        return [str(ROOT / "config/debug.py"), *(f"--{k}={v}" for k, v in options.items())]

    return argv


@pytest.fixture(scope="session")
def short_documents(tiny_folder) -> dict[str, object]:
    """Options for data of 150 documents of 3 to 40 bytes; a tiny run's windows have 16."""
    path, rng = tiny_folder / "short.jsonl", np.random.default_rng(0)
    texts = [f"def f{i}(x): return x * {i} + {i * i}"[: rng.integers(2, 40)] for i in range(150)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"source": path, "tokenizer": "byte", "split": "document"}


@pytest.fixture(scope="session")
def train_tiny(tiny_argv) -> Callable[..., int]:
    """train_tiny(out_dir, max_steps=20, ...): train in this process, with a short sample."""
    from train import main

    def run(out_dir: Path, **options: object) -> int:
        with mock.patch("training.messages.SAMPLE_TOKENS", 10):
            return main(tiny_argv(out_dir, **options))

    return run


@pytest.fixture(scope="session")
def trained_once(train_tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert train_tiny(folder, sample_prompt="def ") == 0
    return folder


@pytest.fixture
def trained(trained_once, tmp_path) -> Path:
    """A copy of a finished tiny run of 8 steps, evaluated and saved at 4 and 8."""
    return Path(shutil.copytree(trained_once, tmp_path / "tiny"))


@pytest.fixture
def command(capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """command(main, *argv) -> (exit code, out, err): run a script's main as its process would."""

    def run(main: Callable, *argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, argv)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_command(main)
        return (int(ended.value.code), *capsys.readouterr())

    return run


# For pages


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Headless Chromium. Needs Debian's chromium and chromium-driver, and the package selenium."""
    from tools.bench.pictures import open_browser

    pytest.importorskip("selenium.webdriver")
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("no chromium")
    with open_browser() as driver:
        yield driver


# A test with one of these markers runs only on request. Then it must not be skipped silently for
# lack of a browser, a GPU, a model or root.

ASKED_FOR = ("faults", "pretrained", "browser", "gpu", "peers")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    marked = [name for name in ASKED_FOR if item.get_closest_marker(name)]
    if marked and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"requested by -m {marked[0]}, but cannot run here. {reason}"
    return report


# Figures of the fault tests, printed as a table at the end of the session

FIGURES = pytest.StashKey[list[tuple[str, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []


@pytest.fixture
def figure(request) -> Callable[[str, str], None]:
    """figure("what was done", "what came out"): add a row to the table."""
    return lambda test, result: request.config.stash[FIGURES].append((test, result))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    rows = config.stash[FIGURES]
    if rows:
        terminalreporter.section("figures")
    for test, result in rows:
        terminalreporter.write_line(f"| {test} | {result} |")
