"""Weights that are there already: a checkpoint to sample from, or to start a run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from data.options import ConfigError
from data.tokenizer import Tokenizer, load_tokenizer
from model.config import ModelConfig
from model.gpt import GPT
from training.checkpoint import Checkpoint, find_checkpoint, load_model_tensors
from training.config import Config, from_json
from training.precision import pick_attention

Say = Callable[[str], None]


def load_for_sampling(path: Path, which: str, device: torch.device) -> tuple[GPT, Tokenizer]:
    """Model and tokenizer of a run or checkpoint, in evaluation mode; no optimizer is read.

    Raises ConfigError if there is none, DamagedCheckpoint if it is damaged.
    """
    checkpoint = find_checkpoint(path, which)
    model = GPT(from_json(checkpoint.run).model, pick_attention("auto", device))
    load_model_tensors(model, checkpoint.model_tensors(), str(checkpoint.path))
    return model.to(device).eval(), load_tokenizer(checkpoint.path / "tokenizer")


def inherit_model(config: Config, say: Say) -> Config:
    """With `run.init_from`, the model's options come from the weights' own config.

    Options that were left at their defaults follow, which is said; ones that were set to something
    else than the weights have are refused, but for dropout and a shorter context.
    Raises ConfigError listing them.
    """
    if not config.run.init_from:
        return config
    source = find_checkpoint(Path(config.run.init_from))
    loaded, asked, default = from_json(source.run).model, config.model, ModelConfig()
    problems, values, followed = [], asdict(loaded), []
    for field in fields(ModelConfig):
        name, want, has = field.name, getattr(asked, field.name), getattr(loaded, field.name)
        if want == has:
            continue
        if want == getattr(default, name):
            followed.append(f"{name}={has}")
        elif name == "dropout" or name == "context_length" and want < has:
            values[name] = want
        else:
            problems.append(f"model.{name}={want}: the weights in {source.path} have {has}")
    if problems:
        raise ConfigError([*problems, "leave these options out: the weights bring them"])
    say(f"weights from {source.path} (step {source.state.step}), the optimizer starts fresh")
    if followed:
        say(f"the weights bring {', '.join(followed)}")
    return replace(config, model=ModelConfig(**values))


def load_first_weights(model: GPT, path: Path, tokenizer: Tokenizer) -> None:
    """Start `model` with the weights of a run or checkpoint.

    Raises ConfigError if they do not fit, or if they were trained with another tokenizer.
    """
    source = find_checkpoint(path)
    _check_tokenizer(source, tokenizer)
    tensors = source.model_tensors()
    if model.positions is not None:  # a shorter context takes the first positions
        tensors["positions.weight"] = tensors["positions.weight"][: model.config.context_length]
    load_model_tensors(model, tensors, str(source.path))


def _check_tokenizer(source: Checkpoint, tokenizer: Tokenizer) -> None:
    folder = source.path / "tokenizer"
    trained_with = load_tokenizer(folder)
    if list(trained_with.table) == list(tokenizer.table) and trained_with.eot == tokenizer.eot:
        return
    with_json = (folder / "tokenizer.json").is_file()
    way = f"hf:{folder}" if with_json else trained_with.name
    raise ConfigError(
        f"data.tokenizer: the data's ids ({tokenizer.name}, {tokenizer.vocab_size}) are not those "
        f"that the weights in {source.path} know ({trained_with.name}, {trained_with.vocab_size}): "
        f"use --tokenizer={way}"
    )
