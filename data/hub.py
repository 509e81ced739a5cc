"""Datasets of the Hugging Face hub, streamed: `hub:OWNER/NAME[/SUBSET][@SPLIT]`."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

from cli.options import ConfigError
from data.readers import How, as_text, field_of
from data.text import Piece, row_pieces

NETWORK_SECONDS = 10
INSTEAD = "download its .parquet or .jsonl files and name them as --source"


def parse_hub(spec: str) -> tuple[str, str | None, str]:
    """(name, subset, split) of a hub source. Raises ConfigError if it is spelled otherwise."""
    body, _, split = spec.removeprefix("hub:").partition("@")
    parts = body.split("/")
    if not all(parts) or len(parts) > 3:
        raise ConfigError(f"data.source={spec}: must be hub:OWNER/NAME[/SUBSET][@SPLIT]")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or "train"


def hub_pieces(spec: str, how: How) -> Iterator[Piece]:
    """Each row is one document. Raises ConfigError with the way on if the hub does not give it."""
    name, subset, split = parse_hub(spec)
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data.source={spec}: needs datasets: pip install datasets") from None
    check_network(spec)
    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=True)
        for number, row in enumerate(rows):
            place = f"{spec}, row {number}"
            yield from row_pieces(as_text(field_of(row, how.text_field, place), how, place), 0)
    except ConfigError:
        raise
    except Exception as error:  # datasets raises what its many parts raise
        raise ConfigError(_explained(spec, error)) from error


def check_network(spec: str) -> None:
    """Raise ConfigError at once if the hub cannot be reached: `datasets` would try for a minute."""
    from huggingface_hub import constants

    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=NETWORK_SECONDS).close()
    except urllib.error.HTTPError:
        return  # it answers
    except OSError as error:
        raise ConfigError(
            f"data.source={spec}: {constants.ENDPOINT} cannot be reached ({error}): {INSTEAD}"
        ) from None


def _explained(spec: str, error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    if "script" in said.lower():
        return (
            f"data.source={spec}: `datasets` no longer runs the scripts that this dataset is made "
            f"of: {INSTEAD} ({said})"
        )
    return (
        f"data.source={spec}: the hub does not give it ({type(error).__name__}: {said}): check the "
        f"name and the network, then run the same command again; or {INSTEAD}"
    )
