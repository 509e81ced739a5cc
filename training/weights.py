"""Existing weights, found by one name: to sample, evaluate, export or start a run from.

The name is a run or checkpoint of ours, a Hugging Face folder, or hub:OWNER/NAME on the Hugging
Face Hub.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cli.command import Say
from cli.options import ConfigError
from data.config import DataConfig
from data.tokenizer import Tokenizer, load_tokenizer
from model import huggingface
from model.config import DROPOUTS, ModelConfig
from model.gpt import GPT, with_new_ids
from training.checkpoint import MANIFEST, Checkpoint, find_checkpoint, load_model_tensors
from training.config import Config
from training.device import pick_attention


@dataclass(frozen=True)
class Weights:
    """Weights on disk; nothing but their config has been read."""

    name: str  # as given
    path: Path
    origin: str  # "step 600", "Hugging Face"
    config: ModelConfig  # resolved
    tokenizer: Path  # folder
    tensors: Callable[[], dict[str, Tensor]]
    checkpoint: Checkpoint | None  # None: not a run of ours

    def load(self, device: torch.device) -> tuple[GPT, Tokenizer]:
        """Load the model, in evaluation mode, and its tokenizer; the optimizer is not read.

        Raises DamagedCheckpoint or DamagedFolder if something is damaged.
        """
        model = GPT(self.config, pick_attention("auto", device), seed=None)
        load_model_tensors(model, self.tensors(), str(self.path))
        return model.to(device).eval(), load_tokenizer(self.tokenizer)

    def start(self, model: GPT, tokenizer: Tokenizer) -> None:
        """Copy the weights into a model that is about to be trained.

        Raises ConfigError if they do not fit, or if they were trained with another tokenizer.
        """
        known_ids = self.config.vocab_size
        if self.has_tokenizer:  # else only the number of ids is known, which `resolve` has checked
            known = load_tokenizer(self.tokenizer)
            known_ids, new = known.vocab_size, list(tokenizer.table[known.vocab_size :])
            same = list(tokenizer.table[:known_ids]) == list(known.table)
            if not same or known.eot != tokenizer.eot or (new and not tokenizer.chat_template):
                asked = f"{tokenizer.name} ({tokenizer.vocab_size} ids)"
                raise self.other_tokenizer(asked, known)
        tensors = self.tensors()
        for name in {"embed.weight", "head.weight"} & tensors.keys():
            tensors[name] = with_new_ids(tensors[name], known_ids, tokenizer.vocab_size)
        if model.positions is not None:  # a shorter context takes the first positions
            tensors["positions.weight"] = tensors["positions.weight"][: model.config.context_length]
        load_model_tensors(model, tensors, str(self.path))

    @property
    def tokenizer_option(self) -> str:
        """The value of `data.tokenizer` that means the tokenizer of these weights."""
        return f"hf:{self.path}" if self.checkpoint is None else f"run:{self.name}"

    @property
    def has_tokenizer(self) -> bool:
        return self.checkpoint is not None or (self.tokenizer / "tokenizer.json").is_file()

    def other_tokenizer(self, asked: str, known: Tokenizer) -> ConfigError:
        return ConfigError(
            f"data.tokenizer={asked}: its ids are not those of the weights in {self.path} "
            f"({known.name}, {known.vocab_size} ids); remove --tokenizer, or use "
            f"--tokenizer={self.tokenizer_option}"
        )


def find_weights(name: str | Path, which: str = "") -> Weights:
    """Find weights by name; a repository of the Hub is downloaded once.

    which: of a run: best, latest or a step (see find_checkpoint).
    Raises ConfigError if there are none or the model here cannot have their architecture,
    DamagedCheckpoint if a checkpoint is damaged.
    """
    path = Path(name)
    if str(name).startswith("hub:"):
        path = _download(str(name).removeprefix("hub:"))
    if huggingface.is_folder(path) and not (path / MANIFEST).is_file():
        if which:
            raise ConfigError(f"which={which}: {path} is a Hugging Face folder, it has no steps")
        config = huggingface.read_config(path)
        tensors = partial(huggingface.read_tensors, path, config)
        return Weights(str(name), path, "Hugging Face", config, path, tensors, None)
    is_run = (path / MANIFEST).is_file() or (path / "checkpoints").is_dir()
    if not is_run and (other := huggingface.conversion(path)):
        raise ConfigError(f"{path}: {other}")
    found = find_checkpoint(path, which)
    return Weights(
        str(name),
        found.path,
        f"step {found.state.step}",
        found.config().model,
        found.path / "tokenizer",
        found.model_tensors,
        found,
    )


def _download(name: str) -> Path:
    """Return the local folder of a Hub repository, from the cache if it was downloaded before."""
    try:
        from huggingface_hub import snapshot_download

        files = ["*.json", "*.jinja", "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=["*/*"]))
    except Exception as error:  # no network, no such repository, no permission, no library
        why = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"hub:{name}: could not be downloaded from the Hugging Face Hub "
            f"({type(error).__name__}: {why})"
        ) from None


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
