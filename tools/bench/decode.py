"""Decoding: tokens per second, compared with reading the weights once per token, and with peers."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import KVCache
from model.config import ModelConfig, SamplingConfig
from model.generate import generate
from model.gpt import GPT
from tools.bench.peer import peer_folder, peer_model
from tools.bench.step import GPT2_SHAPED, alternate, seconds_of
from tools.bench.table import show

Timed = Callable[[], float]  # does something and returns its seconds


@dataclass(frozen=True)
class Work:
    """A model and the lengths, in tokens, to measure."""

    shape: ModelConfig
    prompt_tokens: int = 16
    new_tokens: int = 128
    batch: int = 16
    positions: tuple[int, ...] = (128, 256, 512, 1000)
    rounds: int = 3  # of whole calls
    steps: int = 25  # at each position


def bench_decode(*, peer: str, quick: bool) -> None:
    """Measure one sequence, ours and the others alternating; a batch; and by position."""
    folder = peer_folder(peer) if peer else None
    work = toy_work() if quick else Work(gpt2_shaped(12, 12, 768, 1024, 50304))
    model = GPT(work.shape)
    model.init_weights(1)
    model.eval()
    notes = [] if folder else ["to compare with nanoGPT: --peer=DIR"]
    notes += (
        [] if has_transformers() else ["to compare with Hugging Face: pip install transformers"]
    )
    rows = speed_rows(seconds_a_token(model, work, folder), work.batch)
    show(
        ["float32", "ms per token", "tokens/s", "of the bound", "speedup", "attention", "other"],
        rows + position_rows(along_the_context(model, work)),
        f"{work.prompt_tokens} + {work.new_tokens} tokens, including the prompt; "
        f"{torch.get_num_threads()} threads",
        "the bound: F.linear of each weight matrix with a vector, timed after each of our tokens; "
        "speedup: of ours over this row",
        "attention: ms of attention in all layers, for the next token at this position",
        *notes,
    )


def toy_work() -> Work:
    """Return a toy version that takes a second."""
    return Work(gpt2_shaped(2, 2, 32, 32, 64), 4, 8, batch=2, positions=(4, 30), steps=3)


def gpt2_shaped(layers: int, heads: int, width: int, context: int, vocab: int) -> ModelConfig:
    sizes = {"n_layers": layers, "n_heads": heads, "d_model": width, "context_length": context}
    return ModelConfig(**sizes, **GPT2_SHAPED).resolved(vocab)


def speed_rows(seconds: dict[str, float], batch: int) -> list[list[str]]:
    """seconds: per token, of "the bound", "ours", the peers, and "batch" sequences at once."""
    bound, ours = seconds["the bound"], seconds["ours"]
    rows = []
    for name, each in seconds.items():
        ratio = f"{each / ours:.2f}" if name != "batch" else f"1/{ours / each:.2f}"
        label = name if name != "batch" else f"ours, {batch} at once"
        rows.append([label, f"{1e3 * each:.2f}", f"{1 / each:.1f}", f"{bound / each:.2f}", ratio])
        rows[-1] += ["", ""]
    return rows


def position_rows(seconds: dict[int, tuple[float, float]]) -> list[list[str]]:
    """seconds: at each position, per token and for its attention alone."""
    return [
        [f"ours at position {position}", f"{1e3 * whole:.2f}", f"{1 / whole:.1f}", "", ""]
        + [f"{1e3 * mixing:.2f}", f"{1e3 * (whole - mixing):.2f}"]
        for position, (whole, mixing) in seconds.items()
    ]


# One sequence, and several at once


def decode_speed(
    model: GPT, *, prompt_tokens: int, new_tokens: int, batch: int, rounds: int = 3
) -> float:
    """Return tokens per second of whole calls of `generate`, prompt included: the median."""
    call = decoding(model, prompt_tokens, new_tokens, batch)
    call()  # the first is slower
    return batch * new_tokens / statistics.median(call() for _ in range(rounds))


def seconds_a_token(model: GPT, work: Work, folder: Path | None) -> dict[str, float]:
    """Return seconds per token of each contender: medians of alternating rounds."""
    bounds, products = [], weight_products(model)

    def ours_and_the_bound() -> float:
        stream = decoded(model, prompt_of(model, 1, work.prompt_tokens), work.new_tokens)
        ours, bound = beside(stream, work.new_tokens, products)
        bounds.append(bound)
        return ours

    works = {"ours": ours_and_the_bound, **peers(work, folder)}
    works["batch"] = decoding(model, work.prompt_tokens, work.new_tokens, work.batch)
    calls = alternate(works, work.rounds, warmup=0)
    calls = {"the bound": statistics.median(bounds), **calls}
    tokens = {"batch": work.batch * work.new_tokens}
    return {name: call / tokens.get(name, work.new_tokens) for name, call in calls.items()}


def beside(stream: Iterator[Tensor], count: int, products: Timed) -> tuple[float, float]:
    """Return the seconds of `count` items of a stream, and of as many calls of `products`.

    They alternate, so that both see the same load of the machine.
    """
    pairs = [(seconds_of(lambda: next(stream)), products()) for _ in range(count)]
    ours, bound = zip(*pairs, strict=True)
    return sum(ours), sum(bound)


def weight_products(model: GPT) -> Timed:
    """Return a timed product of every matrix, blocks and head, with a vector."""
    weights = weights_of_a_token(model)
    pairs = [(weight.new_ones(1, weight.shape[1]), weight) for weight in weights]

    @torch.inference_mode()
    def multiply() -> None:
        for x, weight in pairs:
            F.linear(x, weight)

    return lambda: seconds_of(multiply, weights[0].device)


def weights_of_a_token(model: GPT) -> list[Tensor]:
    """Return the weights that each token reads: all matrices of the blocks, and the head."""
    weights = [module.weight for module in model.layers.modules() if isinstance(module, nn.Linear)]
    return [*weights, model.head_weight]


def decoding(model: GPT, prompt_tokens: int, new_tokens: int, batch: int) -> Timed:
    """Return a timed call of `generate`."""
    prompt = prompt_of(model, batch, prompt_tokens)
    return lambda: seconds_of(lambda: list(decoded(model, prompt, new_tokens)), prompt.device)


def decoded(model: GPT, prompt: Tensor, new_tokens: int) -> Iterator[Tensor]:
    """Decode greedily."""
    settings = SamplingConfig(temperature=0.0, max_new_tokens=new_tokens)
    return generate(model, prompt, settings, torch.Generator())


def prompt_of(model: GPT, batch: int, tokens: int) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    prompt = torch.randint(model.config.vocab_size, (batch, tokens), generator=rng)
    return prompt.to(model.embed.weight.device)


def peers(work: Work, folder: Path | None) -> dict[str, Timed]:
    """Return timed calls of the peers' `generate`, for the peers that are installed."""
    prompt = torch.ones(1, work.prompt_tokens, dtype=torch.int64)
    found = {}
    if folder is not None:
        theirs = peer_model(folder, work.shape).eval()
        found["nanoGPT"] = lambda: seconds_of(lambda: theirs.generate(prompt, work.new_tokens))
    if has_transformers():
        other = hugging_face_model(work.shape)
        lengths = {"max_new_tokens": work.new_tokens, "min_new_tokens": work.new_tokens}
        options = {**lengths, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        options["attention_mask"] = torch.ones_like(prompt)
        found["Hugging Face"] = lambda: seconds_of(lambda: other.generate(prompt, **options))
    return found


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def hugging_face_model(shape: ModelConfig) -> nn.Module:
    """Return its GPT-2 in this shape, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": shape.n_layers, "n_head": shape.n_heads, "n_embd": shape.d_model}
    sizes |= {"n_positions": shape.context_length, "vocab_size": shape.vocab_size}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()


# Along the context


def along_the_context(model: GPT, work: Work) -> dict[int, tuple[float, float]]:
    """Return seconds per token at each position, and of its attention in all layers: medians."""
    works: dict[tuple[int, str], Timed] = {}
    for position in work.positions:
        token, attention = at_position(model, position)
        works[position, "token"], works[position, "attention"] = token, attention
    found = alternate(works, work.steps, warmup=2)
    return {p: (found[p, "token"], found[p, "attention"]) for p in work.positions}


@torch.inference_mode()
def at_position(model: GPT, position: int) -> tuple[Timed, Timed]:
    """Return a timed token after `position` others, repeatable, and its attention alone."""
    tokens, cache = prompt_of(model, 1, position + 1), KVCache(model.config.n_layers, position + 1)
    model(tokens[:, :position], cache=cache, last_only=True)
    shape = model.config
    q = torch.zeros(1, shape.n_heads, 1, shape.d_head)
    k = torch.zeros(1, shape.n_kv_heads, 1, shape.d_head)
    seen = [cache.append(layer, k, k) for layer in range(shape.n_layers)]

    @torch.inference_mode()
    def token() -> None:
        model.forward(tokens[:, position:], cache=cache, last_only=True)
        cache.length = position

    @torch.inference_mode()
    def attention() -> None:
        for layer, (keys, values) in zip(model.layers, seen, strict=True):
            layer.attn.attend(q, keys, values)

    return lambda: seconds_of(token), lambda: seconds_of(attention)
