"""Start a run from existing weights: the options that come with them, and the weights."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

from cli.command import Say
from cli.options import ConfigError
from data.config import DataConfig
from data.tokenizer import Tokenizer, load_tokenizer
from model.config import DROPOUTS, ModelConfig
from model.gpt import GPT
from training.checkpoint import Checkpoint
from training.config import Config, with_values
from training.weights import Weights, content_hash, find_weights


def inherit_model(config: Config, say: Say) -> Config:
    """With `run.init_from`, take the options of the model and the tokenizer from the weights.

    Options left at their defaults follow the weights, with a message. Options that were typed, or
    differ from the default, are refused if they contradict the weights. Dropout is free, since it
    belongs to training, and so is a context shorter than the weights'.
    Raises ConfigError listing what is refused.
    """
    if not config.run.init_from:
        return config
    source = find_weights(config.run.init_from)
    default, typed = ModelConfig(), config.typed or {}
    problems, values, followed = [], asdict(source.config), []
    data = replace(config.data, tokenizer=_inherited_tokenizer(config, source))
    if data != config.data:
        followed.append(f"tokenizer={data.tokenizer}")
    for field in fields(ModelConfig):
        name, asked, has = field.name, getattr(config.model, field.name), values[field.name]
        untouched = asked == getattr(default, name) and f"model.{name}" not in typed
        if name in DROPOUTS:
            values[name] = asked
        elif asked == has:
            continue
        elif name == "context_length" and asked < has:
            values[name] = asked
            say(f"context_length={asked}; the weights know {has} (--context_length=N for more)")
        elif asked in (None, "auto") or untouched:
            followed.append(f"{name}={has}")
        else:
            problems.append(f"model.{name}={asked}: the weights in {source.path} have {has}")
    if problems:
        raise ConfigError(problems, ["remove these options; they come from the weights"])
    say(f"weights from {source.path} ({source.origin}), the optimizer starts fresh")
    if config.run.lora_rank and config.optim.optimizer == "muon":
        say("note: optimizer=muon: LoRA's adapters are trained by AdamW, with --lr")
    if followed:
        say(f"from the weights: {', '.join(followed)}")
    return replace(config, model=ModelConfig(**values), data=data)


def _inherited_tokenizer(config: Config, source: Weights) -> str:
    """Return `data.tokenizer` of a run that starts from these weights: theirs by default.

    Raises ConfigError for a tokenizer that would be trained on the text. Another one by name is
    compared with theirs in `Weights.start`.
    """
    asked = config.data.tokenizer
    if asked == DataConfig().tokenizer and "data.tokenizer" not in (config.typed or {}):
        return source.tokenizer_option
    from_text = asked == "char" or asked.startswith("bpe:")
    if not from_text or not source.has_tokenizer:
        return asked
    known = load_tokenizer(source.tokenizer)
    if asked != known.name:
        raise source.other_tokenizer(asked, known)
    return source.tokenizer_option


def with_inherited_tokenizer(config: Config, saved: Config, checkpoint: Checkpoint) -> Config:
    """Return the config of a resume with the tokenizer that `inherit_model` gave the run, if the
    config asks for it by its name (`char`, `bpe:N`)."""
    own = saved.data.tokenizer
    if not own.startswith("run:") or config.data.tokenizer == own:
        return config
    if load_tokenizer(checkpoint.path / "tokenizer").name != config.data.tokenizer:
        return config
    return replace(config, data=replace(config.data, tokenizer=own))


def with_base_hash(config: Config) -> Config:
    """Record in the options of a run with LoRA which weights its adapters belong to."""
    if not config.run.lora_rank or config.run.base_hash:
        return config
    found = content_hash(find_weights(config.run.init_from).tensors())
    return with_values(config, {"run.base_hash": found})


def start_from_weights(config: Config, model: GPT, tokenizer: Tokenizer) -> None:
    """Copy the weights of run.init_from into the model of a run that begins or resumes.

    Raises ConfigError if they do not fit, are not those of run.base_hash, or were trained with
    another tokenizer.
    """
    find_weights(config.run.init_from).start(model, tokenizer, config.run.base_hash)
