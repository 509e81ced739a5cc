"""Run the code cells of a notebook in order, in this process: no Jupyter is needed.

    python tests/notebooklib.py docs/first_model.ipynb

runs the cells and stores what they print, which is what a reader sees on the web.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]


def read_notebook(path: Path) -> Notebook:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored_output(cell: dict[str, Any]) -> str:
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run_cells(path: Path) -> list[str]:
    """Return what each code cell prints, in the notebook's own folder, as Jupyter starts it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        for number, cell in enumerate(code_cells(read_notebook(path)), start=1):
            code = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names)
            printed.append(out.getvalue())
    finally:
        os.chdir(before)
    return printed


def store_outputs(path: Path) -> None:
    """Run the notebook and write what its cells print into it."""
    notebook = read_notebook(path)
    for number, (cell, text) in enumerate(
        zip(code_cells(notebook), run_cells(path), strict=True), start=1
    ):
        stream = {"name": "stdout", "output_type": "stream"}
        cell["execution_count"] = number
        cell["outputs"] = [stream | {"text": text.splitlines(keepends=True)}] if text else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    store_outputs(Path(sys.argv[1]).resolve())
