"""See what each head looks at: `python -m tools.attention RUN --prompt "def f(x):"`.

Writes one HTML file: a small map for every head, one enlarged, a token's row over the text.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cli.command import run_command
from cli.files import replace_file
from cli.options import ConfigError, parse_options

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from torch import Tensor

    from data.tokenizer import Tokenizer
    from model.gpt import GPT

USAGE = 'python -m tools.attention RUN --prompt="TEXT", as: ... out/small --prompt "def f(x):"'
TEMPLATE = "attention.html"
STEPS = 65_535  # a weight is kept in 16 bits


@dataclass(frozen=True)
class AttentionOptions:
    """Which text, which checkpoint, where to."""

    prompt: Annotated[str, "text to look at"] = ""
    tokens: Annotated[int, "most tokens shown, from the start of the text"] = 128
    out: Annotated[str, "the file; RUN/attention.html unless given"] = ""
    which: Annotated[str, "checkpoint: best, latest or a step; best if there is one"] = ""

    def problems(self) -> list[str]:
        found = []
        if not self.prompt:
            found.append('prompt is empty: give a text, as --prompt "def f(x):"')
        if self.tokens < 1:
            found.append(f"tokens={self.tokens}: must be at least 1")
        return found


def main(argv: list[str]) -> int:
    """Compute the maps and write the page."""
    options, (run,) = parse_options(argv, AttentionOptions, usage=USAGE, positionals=["RUN"])

    import torch

    from data.tokenizer import check_ids
    from training.report.page import check_page
    from training.weights import find_weights

    if options.out:
        check_page(Path(options.out))
    model, tokenizer = find_weights(run, options.which).load(torch.device("cpu"))
    ids = [*tokenizer.bos, *tokenizer.encode(options.prompt)]
    check_ids(ids, model.config.vocab_size, tokenizer)
    shown = ids[: min(options.tokens, model.config.context_length)]
    if not shown:
        raise ConfigError(f"prompt={options.prompt!r}: no token in it")
    path = Path(options.out) if options.out else Path(run, "attention.html")
    replace_file(path, make_page(f"{run}: attention", model, tokenizer, shown))
    cut = f" (the first of {len(ids)})" if len(shown) < len(ids) else ""
    print(f"{path}: {len(shown)} tokens{cut}, open it in a browser")
    return 0


def make_page(title: str, model: GPT, tokenizer: Tokenizer, ids: list[int]) -> str:
    """The page for one text. An invariant: ids fit the context."""
    import torch

    from model.inspect import attention_maps
    from training.observer import token_text
    from training.report.page import fill_template

    maps = attention_maps(model, torch.tensor([ids]))[:, 0]  # (L, H, T, T)
    data = {
        "tokens": [token_text(tokenizer, token) for token in ids],
        "layers": maps.shape[0],
        "heads": maps.shape[1],
        "steps": STEPS,
        "weights": packed(maps),
        "entropy": rounded(entropies(maps)),
        "distance": rounded(distances(maps)),
    }
    return fill_template(Path(__file__).with_name(TEMPLATE), title, data)


def entropies(maps: Tensor) -> Tensor:
    """(L, H): how spread a head looks, in nats, the mean over positions; 0: at one alone."""
    terms = maps * maps.clamp(min=1e-30).log()  # 0 ln 0 is 0
    return -terms.sum(-1).mean(-1)


def distances(maps: Tensor) -> Tensor:
    """(L, H): how many tokens back a head looks, the mean over its weights and over positions."""
    import torch

    T = maps.shape[-1]
    place = torch.arange(T, dtype=maps.dtype)
    back = place[:, None] - place  # (T, T): t - s
    return (maps * back.clamp(min=0)).sum(-1).mean(-1)


def packed(maps: Tensor) -> str:
    """Weights (L, H, T, T) on and below the diagonal, row by row, as base64 of 16-bit integers."""
    import torch

    T = maps.shape[-1]
    rows, columns = torch.tril_indices(T, T)
    values = (maps[..., rows, columns] * STEPS).round().to(torch.int32).numpy()
    return base64.b64encode(values.astype("<u2").tobytes()).decode()


def rounded(values: Tensor) -> list[list[Any]]:
    return [[round(value, 3) for value in row] for row in values.tolist()]


if __name__ == "__main__":
    run_command(main)
