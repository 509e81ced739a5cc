"""Download a text that a config needs: `python -m data.fetch shakespeare`.

The text is checked against a known SHA-256. It is complete or absent; no other file is replaced.
"""

from __future__ import annotations

import http.client
import urllib.request
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from cli.command import make_folder, run_command
from cli.files import replace_file
from cli.options import ConfigError, parse_options

SECONDS = 20  # without an answer


@dataclass(frozen=True)
class Text:
    """A file that can be downloaded."""

    path: str  # as configs name it
    address: str
    n_bytes: int
    sha256: str


TEXTS = {
    "shakespeare": Text(
        "data/shakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        1_115_394,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
}


@dataclass(frozen=True)
class FetchOptions:
    """Options of `python -m data.fetch`."""

    source: Annotated[str, "another address (http, https), or a file, with the same text"] = ""


def command_for(path: str) -> str:
    """Return the command that downloads or makes this file, or "" for any other file."""
    if path in ("data/tasks.jsonl", "data/tasks_validation.jsonl"):
        return "python -m tools.tasks"
    names = [name for name, text in TEXTS.items() if Path(text.path) == Path(path)]
    return f"python -m data.fetch {names[0]}" if names else ""


def fetch(text: Text, source: str = "") -> bool:
    """Write the text to its path; return False if it was there already.

    Raises ConfigError if it cannot be read, is another text, or if another file is in its place.
    """
    path = Path(text.path)
    if path.exists():
        if not path.is_file() or sha256(path.read_bytes()).hexdigest() != text.sha256:
            raise ConfigError(
                f"{path}: exists and holds something else; move it away, or train on it as it is: "
                f"--source={path}"
            )
        return False
    make_folder(path.parent, "the folder of the text")
    content = _read(source or text.address, text.n_bytes)
    found = sha256(content).hexdigest()
    if found != text.sha256:
        size = f"more than {text.n_bytes:,}" if len(content) > text.n_bytes else f"{len(content):,}"
        raise ConfigError(
            f"source={source or text.address}: not the expected text ({size} bytes, SHA-256 "
            f"{found[:12]} instead of {text.sha256[:12]}, {text.n_bytes:,} bytes); "
            "nothing was written; try again, or name another --source"
        )
    replace_file(path, content)
    return True


def _read(source: str, n_bytes: int) -> bytes:
    """Return the bytes behind an address or of a file, at most one more than expected."""
    try:
        if not source.startswith(("http://", "https://")):
            with open(source, "rb") as file:
                return file.read(n_bytes + 1)
        with urllib.request.urlopen(source, timeout=SECONDS) as answer:
            return answer.read(n_bytes + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"source={source}: cannot be read ({reason}); check the network, or name a copy: "
            "--source=ADDRESS or --source=FILE"
        ) from error


def main(argv: list[str]) -> int:
    """Download the text that the first argument names."""
    usage = f"python -m data.fetch {'|'.join(TEXTS)} [--source=ADDRESS|FILE]"
    options, (name,) = parse_options(argv, FetchOptions, usage=usage, positionals=["TEXT"])
    if name not in TEXTS:
        raise ConfigError(f"TEXT={name}: must be {' or '.join(TEXTS)}")
    text = TEXTS[name]
    new = fetch(text, options.source)
    print(f"{text.path} {'is complete' if new else 'was there already'}: {text.n_bytes:,} bytes")
    print(f"to train on it: python train.py {text.path}")
    return 0


if __name__ == "__main__":
    run_command(main)
