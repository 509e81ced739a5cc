"""A Hugging Face folder that AutoModelForCausalLM and AutoTokenizer load without custom code."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from cli.options import ConfigError
from data.tokenizer import CONFIG_FILE, Tokenizer
from model.families import ARCHITECTURES
from model.fitting import family_of
from model.gpt import GPT
from model.huggingface import write_folder
from tools.export_graph import ExportError, make_cases
from tools.export_tokenizer import PAD, probe_text, write_tokenizer

LIMIT = 1e-4


def export_hf(model: GPT, tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Write config, weights and tokenizer into `folder`, then load all of it with transformers.

    Returns what to say. Raises FolderError or ConfigError naming the option or the tokenizer that
    no class has, ExportError if transformers computes something else.
    """
    family = family_of(model.config)
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError(
            "format=hf: checking it needs transformers: pip install transformers"
        ) from None
    never = tokenizer.unused_ids(model.config.vocab_size)
    if tokenizer.eot is None and tokenizer.vocab_size in never:  # a row that is not needed
        table, special = [*tokenizer.table, b""], {PAD: tokenizer.vocab_size}
        tokenizer = replace(tokenizer, table=table, special=tokenizer.special | special)
    said = [write_tokenizer(tokenizer, folder, model.config.context_length)]
    tensors = dict(model.named_parameters())
    ends, pad = list(tokenizer.stop_ids), _named_id(folder, "pad_token")
    if pad is None:
        said.append(
            "no pad token: the vocabulary has no token to spare. To batch texts in transformers: "
            "tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0), with its attention_mask"
        )
    write_folder(
        folder,
        model.config,
        tensors,
        bos=_bos(tokenizer, folder),
        eos=ends if len(ends) > 1 else tokenizer.eot,
        pad=pad,
        never=never,
    )
    with quiet_transformers():
        said.append(_check_tokenizer(tokenizer, folder))
        said.append(_check_model(model, folder, ARCHITECTURES[family]))
    return said


def _bos(tokenizer: Tokenizer, folder: Path) -> int | None:
    """The id that begins a document: the tokenizer's own, one that its config names, or else the
    end-of-text."""
    if tokenizer.bos:
        return tokenizer.bos[0]
    found = _named_id(folder, "bos_token")
    return tokenizer.eot if found is None else found


def _named_id(folder: Path, role: str) -> int | None:
    """The id of a token that the folder's tokenizer_config.json names."""
    from tokenizers import Tokenizer as Loaded

    named = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get(role)
    named = named.get("content") if isinstance(named, dict) else named
    return Loaded.from_file(str(folder / "tokenizer.json")).token_to_id(named) if named else None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without its progress bars and notes."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _check_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    text = probe_text(tokenizer)
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    if ids != tokenizer.encode(text):
        raise ExportError(f"{type(loaded).__name__} gives other ids than {tokenizer.name}")
    opening = loaded(text)["input_ids"][: len(tokenizer.bos) + 1]
    if opening != [*tokenizer.bos, ids[0]]:
        raise ExportError(f"{type(loaded).__name__} begins a text with {opening}")
    if loaded.decode(ids) != tokenizer.decode(ids):
        raise ExportError(f"{type(loaded).__name__} decodes to another text than {tokenizer.name}")
    if loaded.eos_token_id != tokenizer.eot:
        raise ExportError(f"{type(loaded).__name__} ends documents with id {loaded.eos_token_id}")
    return f"AutoTokenizer: {type(loaded).__name__}, the same ids and text"


@torch.no_grad()
def _check_model(model: GPT, folder: Path, architecture: str) -> str:
    from transformers import AutoModelForCausalLM

    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    left = [name for key in ("missing_keys", "unexpected_keys") for name in report[key]]
    if left or type(loaded).__name__ != architecture:
        raise ExportError(f"{type(loaded).__name__} of transformers did not take {left}")
    worst, scale = 0.0, 1.0
    for case in make_cases(model):
        ids = torch.cat((case.past_tokens, case.tokens), dim=1)
        logits = loaded.eval()(ids).logits[:, -case.tokens.shape[1] :]
        worst = max(worst, float((logits - case.logits).abs().max()))
        scale = max(scale, float(case.logits.abs().max()))
    said = f"largest difference of a logit {worst:.1e} (the largest logit is {scale:.3g})"
    if not worst <= LIMIT * scale:
        raise ExportError(f"{architecture} of transformers: {said}, allowed {LIMIT * scale:.1e}")
    return f"AutoModelForCausalLM: {architecture}, {said}"
