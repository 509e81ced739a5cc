"""Weights that are there already: to sample, evaluate and export from, or to start a run with.

They come from a run or checkpoint of ours, a Hugging Face folder, or the Hugging Face hub.
"""

from __future__ import annotations

import difflib
import re
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
from model.gpt import GPT
from training.checkpoint import MANIFEST, Checkpoint, config_of, find_checkpoint, load_model_tensors
from training.config import Config
from training.device import pick_attention


@dataclass(frozen=True)
class Weights:
    """Where weights lie, what model they are of, and how to read them."""

    path: Path
    origin: str  # "step 600", "Hugging Face"
    config: ModelConfig  # resolved
    tokenizer: Path  # folder
    tensors: Callable[[], dict[str, Tensor]]

    @property
    def is_ours(self) -> bool:
        return (self.path / MANIFEST).is_file()

    def load(self, device: torch.device) -> tuple[GPT, Tokenizer]:
        """Model and tokenizer, in evaluation mode; no optimizer is read.

        Raises DamagedCheckpoint or DamagedFolder if something is damaged.
        """
        model = GPT(self.config, pick_attention("auto", device))
        load_model_tensors(model, self.tensors(), str(self.path))
        return model.to(device).eval(), load_tokenizer(self.tokenizer)


def find_weights(name: str | Path, which: str = "") -> Weights:
    """The weights of a run or checkpoint (`which` as for find_checkpoint), of a Hugging Face folder
    or, as hub:OWNER/NAME, of a repository of the Hugging Face hub, which is fetched once. None is
    read yet.

    Raises ConfigError if there are none, or naming what the model here does not have.
    """
    path = Path(name)
    if str(name).startswith("hub:"):
        path = _fetched(str(name).removeprefix("hub:"))
    elif not path.exists():
        raise _nothing_there(path)
    if huggingface.is_folder(path) and not (path / MANIFEST).is_file():
        if which:
            raise ConfigError(f"which={which}: {path} is a Hugging Face folder, it has no steps")
        config = huggingface.read_config(path)
        read = partial(huggingface.read_tensors, path, config)
        return Weights(path, "Hugging Face", config, path, read)
    found = find_checkpoint(path, which)
    config = config_of(found).model
    origin = f"step {found.state.step}"
    return Weights(found.path, origin, config, found.path / "tokenizer", found.model_tensors)


def _nothing_there(path: Path) -> ConfigError:
    """The error for a folder that is not there, with the run that is perhaps meant."""
    beside = [folder for place in (path.parent, Path("out")) for folder in place.glob("*")]
    runs = {str(folder) for folder in beside if (folder / "checkpoints").is_dir()}
    close = difflib.get_close_matches(str(path), sorted(runs), n=1)
    close = close or [run for run in sorted(runs) if Path(run).name == path.name]
    hints = [f"did you mean {run}?" for run in close[:1]]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        hints.insert(0, f"a repository of the Hugging Face hub is named hub:{path}")
    return ConfigError("; ".join([f"{path}: there is no such folder", *hints]))


def _fetched(name: str) -> Path:
    """The folder of a hub repository, from the cache if it was fetched before."""
    try:
        from huggingface_hub import snapshot_download

        files = ["*.json", "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=["*/*"]))
    except Exception as error:  # no network, no such repository, no permission, no library
        why = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"hub:{name}: the Hugging Face hub does not give it ({type(error).__name__}: {why})"
        ) from None


def load_for_sampling(path: Path, which: str, device: torch.device) -> tuple[GPT, Tokenizer]:
    """Model and tokenizer of a run, checkpoint or Hugging Face folder, in evaluation mode.

    Raises ConfigError if there is none, DamagedCheckpoint or DamagedFolder if it is damaged.
    """
    return find_weights(path, which).load(device)


def inherit_model(config: Config, say: Say) -> Config:
    """With `run.init_from`, the model's options come from the weights, and the tokenizer with them.

    Options that were left at their defaults follow, which is said. Ones that were typed, or have
    another value than the default, are refused if they contradict the weights. Dropout belongs to
    training: it is as asked. So is a context that is shorter than the weights'.
    Raises ConfigError listing what is refused.
    """
    if not config.run.init_from:
        return config
    source = find_weights(config.run.init_from)
    asked, default, typed = config.model, ModelConfig(), config.typed or {}
    problems, values, followed = [], asdict(source.config), []
    data = replace(config.data, tokenizer=_inherited_tokenizer(config, source))
    if data != config.data:
        followed.append(f"tokenizer={data.tokenizer}")
    for field in fields(ModelConfig):
        name, want, has = field.name, getattr(asked, field.name), values[field.name]
        if name in DROPOUTS or want == has:
            continue
        if name == "context_length" and want < has:
            values[name] = want
            say(f"context {want} of the {has} that the weights know (--context_length=N for more)")
        elif want in (None, "auto") or (
            want == getattr(default, name) and f"model.{name}" not in typed
        ):
            followed.append(f"{name}={has}")
        else:
            problems.append(f"model.{name}={want}: the weights in {source.path} have {has}")
    if problems:
        raise ConfigError([*problems, "leave these options out: the weights bring them"])
    say(f"weights from {source.path} ({source.origin}), the optimizer starts fresh")
    if followed:
        say(f"the weights bring {', '.join(followed)}")
    values |= {name: getattr(asked, name) for name in DROPOUTS}
    return replace(config, model=ModelConfig(**values), data=data)


def _inherited_tokenizer(config: Config, source: Weights) -> str:
    """`data.tokenizer` of a run that starts from these weights: theirs.

    Raises ConfigError for one that would be made anew from the text. Another one by name is
    compared with theirs when the weights are loaded.
    """
    asked = config.data.tokenizer
    theirs = f"run:{config.run.init_from}" if source.is_ours else f"hf:{source.path}"
    typed = "data.tokenizer" in (config.typed or {})
    if asked == DataConfig().tokenizer and not typed:
        return theirs
    made_anew = asked == "char" or asked.startswith("bpe:")
    if not made_anew or not _has_tokenizer(source):
        return asked
    known = load_tokenizer(source.tokenizer)
    if asked != known.name:
        raise _other_tokenizer(asked, source, known)
    return theirs


def with_inherited_tokenizer(config: Config, saved: Config, checkpoint: Checkpoint) -> Config:
    """Return the config of a resume with the tokenizer that `inherit_model` gave the run, if the
    config asks for it by its name (`char`, `bpe:N`)."""
    own = saved.data.tokenizer
    if not own.startswith("run:") or config.data.tokenizer == own:
        return config
    if load_tokenizer(checkpoint.path / "tokenizer").name != config.data.tokenizer:
        return config
    return replace(config, data=replace(config.data, tokenizer=own))


def _has_tokenizer(source: Weights) -> bool:
    return source.is_ours or (source.tokenizer / "tokenizer.json").is_file()


def _other_tokenizer(asked: str, source: Weights, known: Tokenizer) -> ConfigError:
    theirs = f"{'run' if source.is_ours else 'hf'}:{source.path}"
    return ConfigError(
        f"data.tokenizer={asked}: its ids are not those that the weights in {source.path} know "
        f"({known.name}, {known.vocab_size} ids): leave --tokenizer out, or use "
        f"--tokenizer={theirs}"
    )


def load_first_weights(model: GPT, name: str, tokenizer: Tokenizer) -> None:
    """Start `model` with weights that are there already.

    Raises ConfigError if they do not fit, or if they were trained with another tokenizer.
    """
    source = find_weights(name)
    _check_tokenizer(source, tokenizer)
    tensors = source.tensors()
    if model.positions is not None:  # a shorter context takes the first positions
        tensors["positions.weight"] = tensors["positions.weight"][: model.config.context_length]
    load_model_tensors(model, tensors, str(source.path))


def _check_tokenizer(source: Weights, tokenizer: Tokenizer) -> None:
    if not _has_tokenizer(source):
        return  # the folder does not tell; that the ids are few enough, `resolve` has seen
    known = load_tokenizer(source.tokenizer)
    if list(known.table) != list(tokenizer.table) or known.eot != tokenizer.eot:
        raise _other_tokenizer(f"{tokenizer.name} ({tokenizer.vocab_size} ids)", source, known)
