"""The README and docs/ keep their word: tables, commands, code, links and names are checked."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from tools.bench.__main__ import MODES
from training.config import ELSEWHERE, OPTIONS, load_config, options_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
LONGEST_README = 12 * 1024  # bytes


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
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (`.+) \|$", README, flags=re.MULTILINE)
    told = {}
    for theirs, ours in rows:
        theirs, ours = (re.findall(r"`(\w+)`", cell) for cell in (theirs, ours))
        told |= zip(theirs, [*ours, *ours[:1] * len(theirs)], strict=False)
    known = {name: option for name, option in told.items() if name in ELSEWHERE}
    assert known == ELSEWHERE
    assert set(known.values()) <= OPTIONS.keys()


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
    if words != ["--help"]:
        load_config([word for word in words if word != "..."])


@pytest.mark.parametrize("words", words_after("-m"), ids=" ".join)
def test_every_module_that_is_run_exists(words):
    ours = words[0].startswith(("tools.", "data."))
    if ours:
        assert importlib.util.find_spec(words[0]) is not None, words[0]
    else:
        assert words[0] in ("venv", "pytest", "pip", "lm_eval", "torch.distributed.run")
    if words[0] == "tools.bench":
        assert words[1] in MODES


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


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_file_and_name_that_is_mentioned_exists(page):
    text = PAGES[page]
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.py")]
    for folder in ("cli", "config", "data", "docs", "model", "tests", "tools", "training"):
        files += [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")]
    for name in set(re.findall(r"[\w/]+\.py\b", text)):
        ends = [file for file in files if f"/{file}".endswith(f"/{name}")]
        assert ends, f"{page}: {name}"
    for name, file in re.findall(r"`([A-Za-z_.]+)`(?: and `\w+`)? in\s+`([\w/]+\.py)`", text):
        code, leaf = (ROOT / file).read_text(encoding="utf-8"), name.split(".")[-1]
        assert re.search(rf"\b{leaf}\b", code), f"{page}: {name} in {file}"


def test_the_code_for_notebooks_runs(trained, capsys):
    page = PAGES[Path("docs/notebook.md")].replace("out/small", trained.as_posix())
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    exec(compile("\n".join(blocks), "docs/notebook.md", "exec"), {})
    assert "perplexity" in capsys.readouterr().out
