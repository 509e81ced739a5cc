"""Make small questions with one right answer, to teach a model and to test it.

    python -m tools.tasks

writes data/tasks.jsonl and data/tasks_validation.jsonl, with questions that are not in the first.
They are easy for a tiny model to learn and easy to check: sums, words to reverse or to sort, and
questions about a given sentence. config/chat_small.py trains on them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from cli.command import make_folder, run_command
from cli.files import replace_file
from cli.options import parse_options

QUESTIONS = 24_000
HELD_OUT = 500
SEED = 1

WORDS = """
apple bird boat book bread bridge candle chair cloud coat corn desk dog door drum egg fish flag fork
frog gate glass goat hat horse ice jar key kite lamp leaf lemon map milk moon nail nest owl pen pig
queen rain ring road rope salt sand ship shoe snow song star stone sun table tent tiger tree wall
wind wolf zebra
"""
NAMES = "Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Kate Leo Maria Noah Olga Paul"
COLORS = "red blue green black white yellow brown gray"
PLACES = "kitchen garden garage attic cellar office school park shop barn"


@dataclass(frozen=True)
class TaskOptions:
    """Where to write the files."""

    folder: Annotated[str, "folder of both files"] = "data"


def main(argv: list[str]) -> int:
    """Write both files; they are the same every time."""
    options, _ = parse_options(argv, TaskOptions, usage="python -m tools.tasks [--folder=FOLDER]")
    folder, questions = Path(options.folder), make_questions()
    make_folder(folder, "folder")
    held_out, rest = questions[:HELD_OUT], questions[HELD_OUT:]
    files = {"tasks.jsonl": conversations(rest), "tasks_validation.jsonl": map(_row, held_out)}
    for name, rows in files.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        replace_file(folder / name, "".join(lines).encode())
        print(f"{folder / name}: {len(lines):,} conversations")
    return 0


def conversations(pairs: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield rows of one exchange or two."""
    rest, rng = iter(pairs), random.Random(SEED)
    while some := list(islice(rest, rng.choice((1, 1, 2)))):
        yield _row(*some)


def _row(*pairs: tuple[str, str]) -> dict[str, Any]:
    turns = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return {"messages": turns}


def make_questions() -> list[tuple[str, str]]:
    """Return distinct (question, answer) pairs in a fixed random order."""
    rng, makers = random.Random(SEED), (_sum, _reverse, _sort, _color, _place)
    found: dict[str, str] = {}
    while len(found) < QUESTIONS:
        question, answer = rng.choice(makers)(rng)
        found.setdefault(question, answer)
    return list(found.items())


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    return f"What is {a} + {b}?", str(a + b)


def _reverse(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(WORDS.split(), rng.randint(2, 4))
    return f"Reverse these words: {' '.join(words)}", " ".join(reversed(words))


def _sort(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(WORDS.split(), rng.randint(2, 4))
    return f"Sort these words: {' '.join(words)}", " ".join(sorted(words))


def _color(rng: random.Random) -> tuple[str, str]:
    names, colors, things = (
        rng.sample(NAMES.split(), 2),
        rng.sample(COLORS.split(), 2),
        rng.sample(WORDS.split(), 2),
    )
    has = [f"{names[i]} has a {colors[i]} {things[i]}" for i in (0, 1)]
    i, facts = rng.randrange(2), f"{has[0]} and {has[1]}."
    return rng.choice(
        [
            (f"{facts} What color is the {things[i]}?", colors[i]),
            (f"{facts} Who has the {things[i]}?", names[i]),
        ]
    )


def _place(rng: random.Random) -> tuple[str, str]:
    name, (here, there) = rng.choice(NAMES.split()), rng.sample(PLACES.split(), 2)
    thing = rng.choice(WORDS.split())
    facts = f"{name} took the {thing} from the {here} to the {there}."
    return rng.choice(
        [(f"{facts} Where is the {thing}?", f"In the {there}."), (f"{facts} Who took it?", name)]
    )


if __name__ == "__main__":
    run_command(main)
