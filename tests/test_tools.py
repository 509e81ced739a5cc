"""The list of the tools."""

from __future__ import annotations

import tools.__main__ as tools_main
from tests.test_structure import FILES


def test_every_tool_is_listed_with_what_it_does(command):
    code, out, _ = command(tools_main.main)
    names = {
        file.parts[1].removesuffix(".py")
        for file in FILES
        if file.parts[0] == "tools" and not file.stem.startswith("__")
    }
    listed = dict(
        line.removeprefix("python -m tools.").split(maxsplit=1)
        for line in out.splitlines()
        if line.startswith("python -m tools.")
    )
    assert code == 0 and listed.keys() == names
    assert listed["batch"] == "Show the text that an update was computed from"
    assert all(text[0].isupper() and "`" not in text for text in listed.values())


def test_a_tool_is_not_named_apart(command):
    code, _, err = command(tools_main.main, "report")
    assert code == 2 and "python -m tools.NAME" in err
