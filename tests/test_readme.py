"""The README and docs/ keep their word: tables, commands, code, links and names are checked."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import math
import re
import shlex
from pathlib import Path

import pytest

from cli.elsewhere import TRAINING
from tests.test_structure import LINES, PRODUCT, TREES
from tools.bench.__main__ import MODES
from training.config import (
    Config,
    ScheduleConfig,
    load_config,
    options_table,
)
from training.device import model_flops_utilization
from training.evaluate import Evaluation
from training.optimizer import lr_factor

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
LONGEST_README = 11 * 1024  # bytes
ONES_OWN = ("my_text.txt", "my_talks.jsonl", "my_folder/")  # texts that commands name


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def shell_lines() -> list[str]:
    """Every line of the sh blocks, continued lines joined, without comments; and every command
    within the text, except those with a name in capitals to be filled in."""
    lines = []
    for text in PAGES.values():
        blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        lines += "".join(blocks).replace("\\\n", " ").splitlines()
        within = re.findall(r"`((?:python|torchrun) [^`]+)`", without_code(text))
        lines += [line for line in within if not re.search(r"train\.py CONFIG", line)]
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def words_after(name: str) -> list[list[str]]:
    """What follows `name` in each command that has it, each once."""
    found = {}
    for line in shell_lines():
        for command in line.split("&&"):
            words = shlex.split(command, comments=True)
            if name in words:
                rest = words[words.index(name) + 1 :]
                found[" ".join(rest)] = rest
    return list(found.values())


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_there_is_something_to_look_at():
    assert len(PAGES) > 5
    assert len(shell_lines()) > 30


def test_the_readme_is_short():
    assert len(README.encode()) <= LONGEST_README, "move reference matter to docs/"


def test_the_table_of_options_is_the_dataclasses():
    told = PAGES[Path("docs/options.md")]
    command = 'python -c "from training.config import options_table; print(options_table())"'
    assert options_table() in told, f"replace the table by the output of: {command}"


def test_names_from_elsewhere_are_the_hints_of_the_command_line():
    page = PAGES[Path("docs/coming-from-nanogpt.md")]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (`.+) \|$", page, flags=re.MULTILINE)
    told = {}
    for theirs, ours in rows:
        theirs, ours = (re.findall(r"`(\w+)`", cell) for cell in (theirs, ours))
        told |= zip(theirs, [*ours, *ours[:1] * len(theirs)], strict=False)
    assert len(told) > 15
    assert {name: TRAINING.get(name) for name in told} == told


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

    def choose(text: str, _) -> Config:
        assert not text.startswith("config/") and (text in ONES_OWN or text.startswith("out/"))
        return Config()

    if words != ["--help"]:
        load_config([word for word in words if word != "..."], choose=choose)


class Accepted(Exception):
    """The command line was read without complaint."""


def read_only(monkeypatch, module) -> None:
    """Let the command in `module` read its command line, and then raise Accepted."""

    def stop_after(read):
        @functools.wraps(read)
        def reads(*args, **kwargs):
            read(*args, **kwargs)
            raise Accepted

        return reads

    readers = ["parse_options", "parse_sections", "load_config", "load_or_choose"]
    found = [name for name in readers if hasattr(module, name)]
    assert found, f"{module.__name__} reads its options by none of {readers}: extend this test"
    for name in found:
        monkeypatch.setattr(module, name, stop_after(getattr(module, name)))


@pytest.mark.parametrize("words", words_after("sample.py"), ids=" ".join)
def test_every_sampling_command_is_accepted(words, monkeypatch):
    sample = importlib.import_module("sample")
    read_only(monkeypatch, sample)
    with pytest.raises(Accepted):
        sample.main(words)


@pytest.mark.parametrize("words", words_after("-m"), ids=" ".join)
def test_every_module_that_is_run_accepts_its_options(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, *rest = words
    if name.split(".")[0] not in ("tools", "data"):
        assert name in ("venv", "pytest", "pip", "lm_eval", "torch.distributed.run")
        return
    is_package = importlib.util.find_spec(name).submodule_search_locations is not None
    module = importlib.import_module(f"{name}.__main__" if is_package else name)
    if name == "tools.bench":
        assert rest[0] in MODES
    read_only(monkeypatch, module)
    with pytest.raises(Accepted):
        module.main([word for word in rest if word != "..."])


def test_the_expected_output_is_what_a_run_prints(train_tiny, tmp_path, capsys):
    block = next(b for b in README.split("```") if b.startswith("\nprepared "))
    told = block.partition("\n\n")[0].split("\n")[1:]
    options = {"optimizer": "muon", "sample_prompt": "def ", "prepared_dir": tmp_path / "data"}
    options["micro_batch"] = 4  # the whole batch, as in config/small.py
    capsys.readouterr()
    assert train_tiny(tmp_path / "run", **options) == 0
    printed = capsys.readouterr().out.splitlines()
    for line in told:
        line = re.sub(r"(data/prepared|out)/[\w/-]+|stdlib", "...", line)  # names differ,
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        pattern = re.sub(r"\d[\d,]*(\\\.\d+)?", r"[\\d,.]+", pattern)  # numbers differ,
        pattern = re.sub(r"s\b", "s?", pattern)  # and so "1 thread"
        assert any(re.match(pattern, found) for found in printed), f"no run prints: {line}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page):
    text = without_code(PAGES[page])
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = (ROOT / page.parent / name).resolve() if name else ROOT / page
            assert target.exists(), f"{page}: {link}"
            if anchor:
                known = anchors(target.read_text(encoding="utf-8"))
                assert anchor in known, f"{page}: {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "comparison"], ids=str)
def test_every_file_and_name_that_is_mentioned_exists(page):
    text = PAGES[page]
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.py")]
    for folder in ("cli", "config", "data", "docs", "model", "tests", "tools", "training"):
        files += [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")]
    for name in set(re.findall(r"(?<![\w/])(?!out/)[\w/]+\.py\b", text)):
        ends = [file for file in files if f"/{file}".endswith(f"/{name}")]
        assert ends, f"{page}: {name}"
    for name, file in re.findall(r"`([A-Za-z_.]+)`(?: and `\w+`)? in\s+`([\w/]+\.py)`", text):
        code, leaf = (ROOT / file).read_text(encoding="utf-8"), name.split(".")[-1]
        assert re.search(rf"\b{leaf}\b", code), f"{page}: {name} in {file}"


def test_every_page_is_listed_in_the_readme():
    assert {f"docs/{page.name}" for page in PAGES if page.parent.name == "docs"} == set(
        re.findall(r"^\| \[[^\]]+\]\((docs/[\w-]+\.md)\) \|", README, flags=re.MULTILINE)
    )


def messages_in_the_code() -> list[str]:
    """Every string of the product; what an f-string fills in is "...", as in the docs."""
    found = []
    for file in PRODUCT:
        for node in ast.walk(TREES[file]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
                found.append("".join(parts))
    return found


def test_messages_are_quoted_as_they_are_printed():
    page = PAGES[Path("docs/troubleshooting.md")]
    quoted = "".join(
        re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    ).splitlines()
    assert len(quoted) > 20
    messages, unknown = messages_in_the_code(), []
    for line in quoted:
        parts = [re.escape(part.strip()) for part in line.split("...")]
        pattern = re.compile(".*?".join(parts), re.DOTALL)
        if not any(pattern.search(text) for text in messages):
            unknown.append(line)
    assert not unknown, "docs/troubleshooting.md quotes what is no longer printed: " + str(unknown)


def test_the_examples_of_the_glossary_are_right():
    page = " ".join(PAGES[Path("docs/glossary.md")].split())
    bits = Evaluation(loss=2.0, tokens=1000, bytes=4000).bits_per_byte
    assert f"2.0 / 0.693 / 4 = {bits:.3f} bits per byte" in page
    assert math.isclose(bits, 0.721, abs_tol=5e-4)
    mfu = model_flops_utilization(20_000, 10e6, 400e9, world=1)
    assert f"an MFU of {mfu:.0%}" in page
    wsd = ScheduleConfig(schedule="wsd", warmup_steps=20, decay_fraction=0.5, min_lr_ratio=0.0)
    assert "steps 20 to 500 run at the peak, and step 750 at half of it" in page
    factors = {step: lr_factor(step, 1000, wsd) for step in (19, 20, 500, 501, 750)}
    assert factors[19] < 1 and factors[20] == factors[500] == 1 and factors[501] < 1
    assert factors[750] == 0.5


def test_the_lines_to_read_are_the_budgets():
    """The figures of the comparison are the limits that test_structure.py holds."""
    told = f"{LINES['spine']:,} lines on the path of a batch, {LINES['product']:,} in all"
    assert told in PAGES[Path("docs/comparison.md")]
    assert f"| {LINES['spine']:,} to follow a batch, {LINES['product']:,} in all |" in README
