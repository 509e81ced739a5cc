"""Existing weights, found by one name: to sample, evaluate, export or start a run from.

The name is a run or checkpoint of ours, a Hugging Face folder, hub:OWNER/NAME on the Hugging Face
Hub, or a folder with a LoRA adapter of PEFT, which names its base. Adapters, PEFT's or those of a
run with LoRA, are merged into the weights of their base.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cli.options import ConfigError
from data.tokenizer import Tokenizer, load_tokenizer
from model import huggingface, peft
from model.config import ResolvedConfig
from model.gpt import GPT, with_new_ids
from model.lora import ADAPTERS, merged
from training.checkpoint import (
    MANIFEST,
    Checkpoint,
    find_checkpoint,
    load_model_tensors,
    tensor_pieces,
)
from training.config import Config
from training.device import pick_attention


@dataclass(frozen=True)
class Weights:
    """Weights on disk; nothing but their config has been read."""

    name: str  # as given
    path: Path
    origin: str  # "step 600", "Hugging Face"
    config: ResolvedConfig
    tokenizer: Path  # folder
    tensors: Callable[[], dict[str, Tensor]]
    checkpoint: Checkpoint | None  # None: not a run of ours

    def load(self, device: torch.device) -> tuple[GPT, Tokenizer]:
        """Load the model, in evaluation mode, and its tokenizer; the optimizer is not read.

        Raises DamagedCheckpoint or DamagedFolder if something is damaged.
        """
        model = GPT(self.config, pick_attention("auto", device), seed=None)
        load_model_tensors(dict(model.named_parameters()), self.tensors(), str(self.path))
        return model.to(device).eval(), load_tokenizer(self.tokenizer)

    def start(self, model: GPT, tokenizer: Tokenizer, base_hash: str = "") -> None:
        """Copy the weights into a model that is about to be trained; LoRA's adapters stay.

        Raises ConfigError if they do not fit, do not have this hash, or if they were trained with
        another tokenizer.
        """
        known_ids = self.config.vocab_size
        if self.has_tokenizer:  # else only the number of ids is known, which `resolve` has checked
            known = load_tokenizer(self.tokenizer)
            known_ids, new = known.vocab_size, list(tokenizer.table[known.vocab_size :])
            same = list(tokenizer.table[:known_ids]) == list(known.table)
            if not same or known.eot != tokenizer.eot or (new and not tokenizer.chat_template):
                asked = f"{tokenizer.name} ({tokenizer.vocab_size} ids)"
                raise self.other_tokenizer(asked, known)
        tensors = self.checked_tensors(base_hash)
        for name in {"embed.weight", "head.weight"} & tensors.keys():
            tensors[name] = with_new_ids(tensors[name], known_ids, tokenizer.vocab_size)
        if model.positions is not None:  # a shorter context takes the first positions
            tensors["positions.weight"] = tensors["positions.weight"][: model.config.context_length]
        own = {name: p for name, p in model.named_parameters() if not name.endswith(ADAPTERS)}
        load_model_tensors(own, tensors, str(self.path))

    def checked_tensors(self, base_hash: str) -> dict[str, Tensor]:
        """Return the tensors. Raises ConfigError if a hash is given and theirs is another."""
        tensors = self.tensors()
        if base_hash and (found := content_hash(tensors)) != base_hash:
            raise ConfigError(
                f"run.init_from={self.name}: the weights there have SHA-256 {found[:12]}..., but "
                f"the adapters were trained beside {base_hash[:12]}...; put those weights back (of "
                "a run that went on: name its checkpoint, RUN/checkpoints/step-N)"
            )
        return tensors

    @property
    def tokenizer_option(self) -> str:
        """The value of `data.tokenizer` that means the tokenizer of these weights."""
        return f"hf:{self.tokenizer}" if self.checkpoint is None else f"run:{self.name}"

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
        shape = huggingface.read_config(path)
        read = partial(huggingface.read_tensors, path, shape)
        return Weights(str(name), path, "Hugging Face", shape, path, read, None)
    is_run = (path / MANIFEST).is_file() or (path / "checkpoints").is_dir()
    if not is_run and peft.is_adapter(path):
        return _find_adapter(str(name), path)
    if not is_run and (other := huggingface.conversion(path)):
        raise ConfigError(f"{path}: {other}")
    found = find_checkpoint(path, which)
    config = found.config()
    tensors: Callable[[], dict[str, Tensor]] = found.model_tensors
    if config.run.lora_rank:
        tensors = partial(_merge_run, found, config)
    return Weights(
        str(name),
        found.path,
        f"step {found.state.step}",
        config.model.resolved(),
        found.path / "tokenizer",
        tensors,
        found,
    )


def content_hash(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of names, shapes and values, however the weights are stored on disk."""
    digest = hashlib.sha256()
    for piece in tensor_pieces(dict(sorted(tensors.items()))):
        digest.update(piece)
    return digest.hexdigest()


def _merge_run(found: Checkpoint, config: Config) -> dict[str, Tensor]:
    """Return the weights of a run's base with the run's adapters added in."""
    try:
        base = find_weights(config.run.init_from)
    except ConfigError as error:
        raise ConfigError(
            f"{found.path} holds LoRA adapters for the weights in {config.run.init_from}, which "
            f"cannot be read: {error}"
        ) from error
    tensors = base.checked_tensors(config.run.base_hash)
    if "positions.weight" in tensors:
        tensors["positions.weight"] = tensors["positions.weight"][: config.model.context_length]
    return merged(tensors, found.model_tensors(), config.run.lora_alpha / config.run.lora_rank)


def _find_adapter(name: str, path: Path) -> Weights:
    """Return the weights of the base that a PEFT folder names, with its adapters added in."""
    settings = peft.read_settings(path)
    here = Path(settings.base).exists()
    base = find_weights(settings.base if here else f"hub:{settings.base}")

    def tensors() -> dict[str, Tensor]:
        adapters = peft.read_adapters(path, base.config)
        return merged(base.tensors(), adapters, settings.scale)

    origin = f"LoRA adapter of {base.name}"
    name = name if base.checkpoint is None else base.name  # where its tokenizer is found
    return Weights(name, path, origin, base.config, base.tokenizer, tensors, base.checkpoint)


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
