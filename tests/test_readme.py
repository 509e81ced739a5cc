"""The README and docs/ keep their word: the table is the dataclasses', the commands are real."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from training.config import load_config, options_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shell_lines() -> list[str]:
    """Every line of the README's sh blocks, continued lines joined, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def words_after(name: str) -> list[list[str]]:
    """What stands behind `name` in each command that has it."""
    found = []
    for line in shell_lines():
        for command in line.split("&&"):
            words = shlex.split(command, comments=True)
            if name in words:
                found.append(words[words.index(name) + 1 :])
    return found


def test_the_table_of_options_is_the_dataclasses():
    told = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    assert options_table() in told, (
        "replace the table by what training.config.options_table() returns"
    )


def test_there_are_two_commands_and_they_stand_on_their_own():
    commands = [line for line in shell_lines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    main, tests = commands
    assert main.endswith(".venv/bin/python train.py config/small.py")
    assert tests.endswith(".venv/bin/python -m pytest")
    for needed in re.findall(r"-r (\S+)", main + tests):
        assert (ROOT / needed).is_file()


@pytest.mark.parametrize("words", words_after("train.py"), ids=" ".join)
def test_every_training_command_is_accepted(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    load_config([word for word in words if word != "..."])


@pytest.mark.parametrize("words", words_after("-m"), ids=" ".join)
def test_every_module_that_is_run_exists(words):
    ours = words[0].startswith(("tools.", "data."))
    if ours:
        assert importlib.util.find_spec(words[0]) is not None, words[0]
    else:
        assert words[0] in ("venv", "pytest", "pip", "lm_eval", "torch.distributed.run")
