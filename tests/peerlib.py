"""A stand-in for nanoGPT: its files as the benchmarks use them; names, options, what is called and
what is written. Its model knows how frequent each character is."""

from __future__ import annotations

from pathlib import Path

from tools.bench.peer import README_COMMAND

MODEL = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 50304
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 4
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.logits = nn.Parameter(torch.zeros(config.vocab_size))
        print("number of parameters: 0.00M")

    def forward(self, idx, targets=None):
        logits = self.logits.expand(*idx.shape, -1)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def generate(self, idx, max_new_tokens):
        assert not self.training
        print("peer", tuple(idx.shape), max_new_tokens, self.config.n_layer, self.config.bias)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        assert (weight_decay, betas, device_type) == (0.1, (0.9, 0.95), "cpu")
        print("using fused AdamW: False")
        return torch.optim.SGD(self.parameters(), learning_rate)
"""
TRAIN = """
import pickle, sys
import numpy as np
import torch
from model import GPT, GPTConfig

assert sys.argv[1:] == COMMAND, sys.argv
data = "data/shakespeare_char/"
size = pickle.load(open(data + "meta.pkl", "rb"))["vocab_size"]
ids = np.fromfile(data + "train.bin", dtype=np.uint16)
about = dict(n_layer=4, n_head=4, n_embd=128, block_size=64, bias=False, dropout=0.0)
about["vocab_size"] = size
model = GPT(GPTConfig(**about))
counts = np.bincount(ids, minlength=size)
model.logits.data = torch.tensor(counts / counts.sum()).log().float()
import os
os.makedirs("out-shakespeare-char", exist_ok=True)
torch.save({"model": model.state_dict(), "model_args": about}, "out-shakespeare-char/ckpt.pt")
"""


def write_peer(folder: Path) -> Path:
    """The folder, made, with the stand-in in it."""
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(TRAIN.replace("COMMAND", str(README_COMMAND[1:])))
    return folder
