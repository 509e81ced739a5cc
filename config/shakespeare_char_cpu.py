"""Shakespeare, one token per character, in a size for CPUs (0.8M parameters).

Two CPU cores, a quarter of a minute. shakespeare_char.py says how to get the text.
    python train.py config/shakespeare_char_cpu.py
"""

from dataclasses import replace

from config.shakespeare_char import config as base
from model.config import ModelConfig
from training.config import Config

config = Config(
    model=ModelConfig(n_layers=4, n_heads=4, d_model=128, context_length=64),
    data=replace(base.data, global_batch=12),
    optim=replace(base.optim, lr=1e-2, muon_lr=0.04, momentum=0.9),
    schedule=replace(base.schedule, warmup_steps=5),
    run=replace(base.run, max_steps=200, eval_interval=200, checkpoint_interval=200),
    log=base.log,
)
