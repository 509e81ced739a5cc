"""List the tools: `python -m tools`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from cli.command import run_command
from cli.options import parse_options

USAGE = "python -m tools, or python -m tools.NAME for one of them"


@dataclass(frozen=True)
class ListOptions:
    """The list has no options."""


def main(argv: list[str]) -> int:
    """Print one line per tool, from its docstring."""
    parse_options(argv, ListOptions, usage=USAGE)
    for name, line in tools():
        print(f"python -m tools.{name:10}  {line}")
    print("\nEach has --help.")
    return 0


def tools() -> list[tuple[str, str]]:
    """Return (name, what it does) of each tool: a file of this package, or a package in it."""
    files = [*Path(__file__).parent.glob("*.py"), *Path(__file__).parent.glob("*/__main__.py")]
    found = []
    for file in files:
        if not file.stem.startswith("__") or file.parent != Path(__file__).parent:
            first = (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n")[0]
            name = file.parent.name if file.stem == "__main__" else file.stem
            found.append((name, first.partition(": `")[0].rstrip(".")))
    return sorted(found)


if __name__ == "__main__":
    run_command(main)
