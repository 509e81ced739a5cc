"""The network that a run trains: the model, with LoRA's adapters if it has them, made fast."""

from __future__ import annotations

from model.config import ModelConfig
from model.fast import speed_up
from model.gpt import GPT
from model.lora import add_lora
from training.config import RunConfig


def new_network(config: ModelConfig, run: RunConfig, *, seed: int | None) -> GPT:
    """Return the network of a run; config and run.attention are resolved.

    seed: of the initial weights; None leaves all values undefined. With run.init_from only those of
    LoRA's adapters are drawn: the others are about to be loaded.
    """
    model = GPT(config, run.attention, seed=None if run.init_from else seed)
    if run.lora_rank:
        add_lora(model, run.lora_rank, run.lora_alpha, seed)
    speed_up(model)  # hand-written kernels for training on a CPU; see model/fast.py
    return model
