"""A Hugging Face folder that AutoModelForCausalLM and AutoTokenizer load without custom code."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cli.options import ConfigError
from data.tokenizer import Tokenizer
from model.gpt import GPT
from model.huggingface import FAMILIES, family_of, write_folder
from tools.export.graph import Case, ExportError, compare, make_cases
from tools.export.tokenizer import PAD, probe_text, write_tokenizer

LIMIT = 1e-4


def export_huggingface(
    model: GPT, tokenizer: Tokenizer, folder: Path, dtype: str = "float32"
) -> list[str]:
    """Write config, weights and tokenizer into `folder`, then load all of it with transformers.

    Returns lines on what was verified. Raises ConfigError naming the option or
    tokenizer that no class supports, ExportError if transformers computes something else.
    """
    if dtype != "float32":  # what is compared has the rounded weights
        model = deepcopy(model).to(getattr(torch, dtype)).float()
    config = model.config
    architecture = FAMILIES[family_of(config)].architecture
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError(
            "format=hf: checking the export needs transformers: pip install transformers"
        ) from None
    unused = tokenizer.unused_ids(config.vocab_size)
    if tokenizer.eot is None and tokenizer.vocab_size in unused:  # a spare row can be the padding
        special = tokenizer.special | {PAD: tokenizer.vocab_size}
        tokenizer = replace(tokenizer, table=[*tokenizer.table, b""], special=special)
    line, named = write_tokenizer(tokenizer, folder, config.context_length)
    lines = [line]
    if "pad_token" not in named:
        lines.append(
            "no pad token: the vocabulary has no spare token. To batch texts in transformers, set "
            "tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0) and pass its attention_mask"
        )
    ends = list(tokenizer.stop_ids)
    write_folder(
        folder,
        config,
        dict(model.named_parameters()),
        bos=tokenizer.bos[0] if tokenizer.bos else named.get("bos_token", tokenizer.eot),
        eos=ends if len(ends) > 1 else tokenizer.eot,
        pad=named.get("pad_token"),
        never=unused,
        dtype=dtype,
    )
    with quiet_transformers():
        return [
            *lines,
            _check_tokenizer(tokenizer, folder),
            _check_model(model, folder, architecture),
        ]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and notes of transformers."""
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
    kind, text = type(loaded).__name__, probe_text(tokenizer)
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    if ids != tokenizer.encode(text):
        raise ExportError(f"{kind} gives other ids than {tokenizer.name}")
    opening = loaded(text)["input_ids"][: len(tokenizer.bos) + 1]
    if opening != [*tokenizer.bos, ids[0]]:
        raise ExportError(f"{kind} begins a text with {opening}, not {tokenizer.bos}")
    if loaded.decode(ids) != tokenizer.decode(ids):
        raise ExportError(f"{kind} decodes to another text than {tokenizer.name}")
    if loaded.eos_token_id != tokenizer.eot:
        raise ExportError(
            f"{kind} ends documents with id {loaded.eos_token_id}, not {tokenizer.eot}"
        )
    return f"AutoTokenizer: {kind}, same ids and text"


def _check_model(model: GPT, folder: Path, architecture: str) -> str:
    from transformers import AutoModelForCausalLM

    loaded: Any  # the types of from_pretrained leave output_loading_info out
    report: dict[str, list[str]]
    loaded, report = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
        folder, dtype=torch.float32, output_loading_info=True
    )
    loaded.eval()
    ignored = [name for key in ("missing_keys", "unexpected_keys") for name in report[key]]
    if ignored or type(loaded).__name__ != architecture:
        raise ExportError(f"{type(loaded).__name__} of transformers did not take {ignored}")

    def logits_of(case: Case) -> Tensor:
        return loaded(case.ids).logits[:, case.P :]

    line = compare(logits_of, make_cases(model), LIMIT)
    return f"AutoModelForCausalLM: {architecture}, {line}"
