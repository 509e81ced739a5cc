"""Print a plain-text table."""

from __future__ import annotations

from collections.abc import Sequence


def show(header: Sequence[str], rows: Sequence[Sequence[str]], *notes: str) -> None:
    """Print a table, its first column left-aligned and the others right-aligned, then the notes."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for first, *rest in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        print("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    for note in notes:
        print(note)
