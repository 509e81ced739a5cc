"""nanoGPT (github.com/karpathy/nanoGPT) to compare with, from a folder that the user names."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn

from cli.options import ConfigError
from model.config import ModelConfig

DATASET = "data/shakespeare_char"

# Its README's command for Shakespeare on a CPU.
README_COMMAND = [
    "train.py",
    "config/train_shakespeare_char.py",
    *("--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1"),
    *("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128"),
    *("--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0"),
]


def peer_folder(name: str) -> Path:
    """Return the path of nanoGPT. Raises ConfigError if it is not there."""
    folder = Path(name).resolve()
    if not (folder / "train.py").is_file() or not (folder / "model.py").is_file():
        raise ConfigError(f"peer={name}: not a nanoGPT folder (no train.py, model.py); clone it")
    return folder


def prepared_copy(peer: Path, into: Path, train: str, val: str) -> Path:
    """Copy nanoGPT with these texts as its Shakespeare data, one id per character; return the path.

    Its own data/shakespeare_char/prepare.py would write the same, but downloads the text.
    """
    shutil.copytree(peer, into, ignore=shutil.ignore_patterns(".git", "assets", "*.ipynb", "out*"))
    data = into / DATASET
    data.mkdir(parents=True, exist_ok=True)
    characters = vocabulary(train + val)
    for name, text in (("train", train), ("val", val)):
        ids = np.array([characters[c] for c in text], dtype=np.uint16)
        ids.tofile(data / f"{name}.bin")
    # A pickle of {"vocab_size": N}, which is all that training reads of it.
    (data / "meta.pkl").write_bytes(b"(dVvocab_size\nI%d\ns." % len(characters))
    return into


def vocabulary(text: str) -> dict[str, int]:
    """Return its id of each character."""
    return {c: i for i, c in enumerate(sorted(set(text)))}


def peer_model(peer: Path, shape: ModelConfig) -> nn.Module:
    """Return its model in one of our shapes (resolved, GPT-2's architecture without biases)."""
    about = {"n_layer": shape.n_layers, "n_head": shape.n_heads, "n_embd": shape.d_model}
    about |= {"block_size": shape.context_length, "vocab_size": shape.vocab_size}
    return _built(peer, {**about, "bias": False, "dropout": 0.0})


def peer_checkpoint(folder: Path) -> nn.Module:
    """Return the model of the checkpoint that a run left, and delete the checkpoint.

    Raises ConfigError if there is none.
    """
    paths = sorted(folder.glob("out*/ckpt.pt"))
    if not paths:
        raise ConfigError(f"peer={folder}: its run has left no checkpoint")
    saved = torch.load(paths[0], map_location="cpu", weights_only=True)
    paths[0].unlink()  # the next run leaves its own
    model = _built(folder, saved["model_args"])
    model.load_state_dict(saved["model"])
    return model.eval()


def _built(peer: Path, about: dict[str, object]) -> nn.Module:
    module = _module(peer / "model.py")
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
        return module.GPT(module.GPTConfig(**about))


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


class PeerStep:
    """The training step of its train.py, for one micro-batch on a CPU."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        with contextlib.redirect_stdout(io.StringIO()):
            self.optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")

    def __call__(self, tokens: Tensor, targets: Tensor) -> float:
        """Take a step and return the loss, which its README's command logs at every step."""
        _, loss = self.model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()
