"""Show what each head attends to: `python -m tools.attention RUN --prompt "def f(x):"`.

Writes one HTML file with a small map of every head, an enlarged one, and the weights of a token
over the text.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cli.command import run_command
from cli.files import replace_file
from cli.options import AT_LEAST_1, ConfigError, out_of_range, parse_options

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from torch import Tensor

    from data.tokenizer import Tokenizer
    from model.gpt import GPT

USAGE = 'python -m tools.attention RUN --prompt="TEXT" [--name=value ...]'
TEMPLATE = "attention.html"
STEPS = 65_535  # weights are stored in 16 bits


@dataclass(frozen=True)
class AttentionOptions:
    """Text, checkpoint and output file."""

    prompt: Annotated[str, "text to show"] = ""
    tokens: Annotated[int, "maximum number of tokens, from the start of the text"] = 128
    out: Annotated[str, "HTML file to write; default: RUN/attention.html"] = ""
    which: Annotated[str, "checkpoint: best, latest or a step; default: best if there is one"] = ""

    def problems(self) -> list[str]:
        found = [] if self.prompt else ['prompt is empty: give a text, as --prompt "def f(x):"']
        return found + out_of_range("", self, {"tokens": AT_LEAST_1})


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
        raise ConfigError(f"prompt={options.prompt!r}: has no tokens")
    path = Path(options.out) if options.out else Path(run, "attention.html")
    replace_file(path, make_page(f"{run}: attention", model, tokenizer, shown))
    cut = f" (the first of {len(ids)})" if len(shown) < len(ids) else ""
    print(f"{path}: {len(shown)} tokens{cut}; open it in a browser")
    return 0


def make_page(title: str, model: GPT, tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the HTML page for these ids, which must fit the context."""
    import torch

    from model.inspect import attention_maps
    from training.report.page import fill_template
    from training.snapshot import token_text

    maps = attention_maps(model, torch.tensor([ids]))[:, 0]  # (L, H, T, T)
    figures = {"entropy": entropies(maps), "distance": distances(maps)}  # (L, H) each
    data = {
        "tokens": [token_text(tokenizer, token) for token in ids],
        "layers": maps.shape[0],
        "heads": maps.shape[1],
        "steps": STEPS,
        "weights": packed(maps),
    }
    data |= {name: values.double().round(decimals=3).tolist() for name, values in figures.items()}
    return fill_template(Path(__file__).with_name(TEMPLATE), title, data)


def entropies(maps: Tensor) -> Tensor:
    """Return each head's entropy in nats, averaged over positions, (L, H); 0: one token only."""
    terms = maps * maps.clamp(min=1e-30).log()  # 0 ln 0 is 0
    return -terms.sum(-1).mean(-1)


def distances(maps: Tensor) -> Tensor:
    """Return how many tokens back each head attends on average, (L, H)."""
    positions = maps.new_ones(maps.shape[-1]).cumsum(0)
    back = positions[:, None] - positions  # (T, T): t - s
    return (maps * back).sum(-1).mean(-1)  # weights of later tokens, where it is negative, are 0


def packed(maps: Tensor) -> str:
    """Encode the weights on and below the diagonal, row by row, as base64 of 16-bit integers."""
    below = maps.new_ones(maps.shape[-2:]).tril().bool()
    values = (maps[..., below] * STEPS).round().int().numpy()
    return base64.b64encode(values.astype("<u2").tobytes()).decode()


if __name__ == "__main__":
    run_command(main)
