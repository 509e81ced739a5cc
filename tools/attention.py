"""Show what each head attends to: `python -m tools.attention RUN "def f(x):"`.

Writes one HTML file with a small map of every head, an enlarged one, and the weights of a token
over the text. Without a prompt it shows a passage of the run's validation text.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cli.command import run_command
from cli.files import replace_file
from cli.options import AT_LEAST_1, ConfigError, out_of_range, parse_options

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from torch import Tensor

    from data.tokenizer import Tokenizer
    from model.gpt import GPT
    from training.weights import Weights

USAGE = 'python -m tools.attention RUN ["PROMPT"] [--name=value ...]'
TEMPLATE = "attention.html"
STEPS = 65_535  # weights are stored in 16 bits
PASSAGE_TOKENS = 64  # of the validation text: their labels can still be read
PASSAGES = 200  # windows of the validation text to choose from
# Where there is no validation text, as for a Hugging Face folder. Names come up again.
EXAMPLE = (
    "Alice met Robert at the station. Robert gave Alice a letter, and Alice thanked Robert. "
    "Later that day, Alice met Robert again."
)
# A head is named after a pattern if it gives its keys this much more than equal weights would.
CLEAR = 0.1
# The page opens on the first of these that a head shows clearly.
PATTERNS = ("induction", "same token", "previous token", "first token", "itself")


@dataclass(frozen=True)
class AttentionOptions:
    """Text, checkpoint and output file."""

    prompt: Annotated[str, "text to show; default: a passage of the run's validation text"] = ""
    tokens: Annotated[int, "maximum number of tokens, from the start of the text"] = 128
    out: Annotated[str, "HTML file to write; default: RUN/attention.html"] = ""
    which: Annotated[str, "checkpoint: best, latest or a step; default: best if there is one"] = ""

    def problems(self) -> list[str]:
        return out_of_range("", self, {"tokens": AT_LEAST_1})


def main(argv: list[str]) -> int:
    """Compute the maps and write the page."""
    options, (run, *given) = parse_options(
        argv, AttentionOptions, usage=USAGE, positionals=["RUN", "[PROMPT]"]
    )
    if given and options.prompt:
        raise ConfigError(f"--prompt={options.prompt!r} and {given[0]!r} are two prompts: keep one")

    import torch

    from data.tokenizer import check_ids
    from training.report.page import check_page
    from training.weights import find_weights

    if options.out:
        check_page(Path(options.out))
    weights = find_weights(run, options.which)
    model, tokenizer = weights.load(torch.device("cpu"))
    prompt, limit = given[0] if given else options.prompt, options.tokens
    if not prompt:
        prompt, limit = example(weights), min(limit, PASSAGE_TOKENS)
    ids = [*tokenizer.bos, *tokenizer.encode(prompt)]
    check_ids(ids, model.config.vocab_size, tokenizer)
    shown = ids[: min(limit, model.config.context_length)]
    if not shown:
        raise ConfigError(f"prompt={prompt!r}: has no tokens")
    path = Path(options.out) if options.out else Path(run, "attention.html")
    replace_file(path, make_page(run, model, tokenizer, shown))
    cut = f" (the first of {len(ids)})" if len(shown) < len(ids) else ""
    print(f"{path}: {len(shown)} tokens{cut}; open it in a browser")
    return 0


def example(weights: Weights) -> str:
    """Return the passage of a run's validation text in which most words come up again."""
    from data.shards import Windows
    from data.tokenizer import load_tokenizer

    if weights.checkpoint is None:
        return EXAMPLE
    config = weights.checkpoint.config()
    try:
        folder = weights.checkpoint.data_folder(config)
        windows = Windows(folder, "val", config.model.context_length)
    except ConfigError:  # the data is gone, or none of it validates
        return EXAMPLE
    tokenizer = load_tokenizer(folder / "tokenizer")
    spread = range(0, len(windows), -(-len(windows) // PASSAGES))
    texts = (tokenizer.decode(windows.window(i)[:-1].tolist()) for i in spread)
    return max(map(whole_lines, texts), key=lambda text: repeated_words(tokenizer, text))


def whole_lines(text: str) -> str:
    """Return a text without its first line, of which a window holds only the end."""
    head, _, rest = text.partition("\n")
    return rest if len(rest) > len(head) else text


def repeated_words(tokenizer: Tokenizer, text: str) -> int:
    """Count the different words of 4 letters or more that come up again in the part shown."""
    shown = tokenizer.decode(tokenizer.encode(text)[:PASSAGE_TOKENS])
    return sum(n > 1 for n in Counter(re.findall(r"[^\W\d_]{4,}", shown)).values())


def make_page(run: str, model: GPT, tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the HTML page for these ids, which must fit the context."""
    import torch

    from model.inspect import attention_maps
    from training.report.page import fill_template
    from training.snapshot import token_text

    maps = attention_maps(model, torch.tensor([ids]))[:, 0]  # (L, H, T, T)
    shares = pattern_shares(maps, torch.tensor(ids))
    figures = {"entropy": entropies(maps), "distance": distances(maps)}  # (L, H) each
    data = {
        "tokens": [token_text(tokenizer, token) for token in ids],
        "layers": maps.shape[0],
        "heads": maps.shape[1],
        "steps": STEPS,
        "weights": packed(maps),
        "patterns": clear_patterns(maps, shares),
        "start": starting_place(maps, torch.tensor(ids), shares),
        "play": f"python -m tools.play {shlex.quote(run)}",
    }
    data |= {name: values.double().round(decimals=3).tolist() for name, values in figures.items()}
    return fill_template(Path(__file__).with_name(TEMPLATE), f"{run}: attention", data)


# Figures of a head


def entropies(maps: Tensor) -> Tensor:
    """Return each head's entropy in nats, averaged over positions, (L, H); 0: one token only."""
    terms = maps * maps.clamp(min=1e-30).log()  # 0 ln 0 is 0
    return -terms.sum(-1).mean(-1)


def distances(maps: Tensor) -> Tensor:
    """Return how many tokens back each head attends on average, (L, H)."""
    positions = maps.new_ones(maps.shape[-1]).cumsum(0)
    back = positions[:, None] - positions  # (T, T): t - s
    return (maps * back).sum(-1).mean(-1)  # weights of later tokens, where it is negative, are 0


def pattern_keys(ids: Tensor) -> dict[str, Tensor]:
    """Return which keys s belong to each of PATTERNS for a query t, (T, T) booleans.

    "induction" is the token after an earlier copy of the query: having read "Alice met ... Alice",
    a head that looks at "met" can predict it (Olsson et al. 2022, "In-context learning and
    induction heads").
    """
    t, s = ids.new_ones(len(ids)).cumsum(0)[:, None] - 1, ids.new_ones(len(ids)).cumsum(0) - 1
    same = ids[:, None] == ids
    return {
        "induction": same.roll(1, 1) & (s > 0) & (s < t),
        "same token": same & (s < t),
        "previous token": s == t - 1,
        "first token": (s == 0) & (t > 1),
        "itself": (s == t) & (t > 0),
    }


def pattern_shares(maps: Tensor, ids: Tensor) -> dict[str, tuple[Tensor, float]]:
    """Return by pattern: the share of weight on its keys, (L, H), and that of equal weights.

    Averaged over the queries that have such keys. A pattern that no query has is left out.
    """
    even = maps.new_ones(maps.shape[-2:]).tril()
    even = even / even.sum(-1, keepdim=True)
    found = {}
    for name, keys in pattern_keys(ids).items():
        if (asked := keys.any(-1)).any():
            share, chance = ((m * keys).sum(-1)[..., asked].mean(-1) for m in (maps, even))
            found[name] = share, float(chance)
    return found


def clear_patterns(maps: Tensor, shares: dict[str, tuple[Tensor, float]]) -> list[list[Any]]:
    """Return for each layer a list of [name, share] per head; ["", 0] if no pattern is clear."""
    L, H = maps.shape[:2]
    table: list[list[Any]] = [[["", 0] for _ in range(H)] for _ in range(L)]
    for layer in range(L):
        for head in range(H):
            above = {n: float(s[layer, head]) - chance for n, (s, chance) in shares.items()}
            name = max(above, key=above.__getitem__, default="")
            if name and above[name] >= CLEAR:
                table[layer][head] = [name, round(float(shares[name][0][layer, head]), 3)]
    return table


def starting_place(
    maps: Tensor, ids: Tensor, shares: dict[str, tuple[Tensor, float]]
) -> dict[str, Any]:
    """Return the head that shows the most interesting clear pattern, the query that shows it best,
    and why: {"layer", "head", "query", "why"}."""
    for name in PATTERNS:
        if name not in shares:
            continue
        share, chance = shares[name]
        layer, head = divmod(int(share.argmax()), maps.shape[1])
        if (most := float(share[layer, head])) - chance >= CLEAR:
            on_keys = (maps[layer, head] * pattern_keys(ids)[name]).sum(-1)  # (T,)
            why = f"the head with the most weight on this pattern: {name}, {most:.0%}"
            why += f" ({chance:.0%} if all tokens had equal weight)"
            return {"layer": layer, "head": head, "query": int(on_keys.argmax()), "why": why}
    layer, head = divmod(int(entropies(maps).argmin()), maps.shape[1])
    why = "no head has a clear pattern here; this one has the lowest entropy"
    return {"layer": layer, "head": head, "query": len(ids) - 1, "why": why}


def packed(maps: Tensor) -> str:
    """Encode the weights on and below the diagonal, row by row, as base64 of 16-bit integers."""
    below = maps.new_ones(maps.shape[-2:]).tril().bool()
    values = (maps[..., below] * STEPS).round().int().numpy()
    return base64.b64encode(values.astype("<u2").tobytes()).decode()


if __name__ == "__main__":
    run_command(main)
