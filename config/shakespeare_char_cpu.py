"""Shakespeare a character at a time, in the size for a CPU (0.8M parameters).

Two CPU cores, half a minute. The text is that of shakespeare_char.py, which says how to get it.
    python train.py config/shakespeare_char_cpu.py --source=data/shakespeare.txt
"""

from dataclasses import replace

from config.shakespeare_char import config as base
from model.config import ModelConfig
from training.config import Config

config = Config(
    model=ModelConfig(n_layers=4, n_heads=4, d_model=128, context_length=64),
    data=replace(base.data, global_batch=12),
    optim=replace(base.optim, lr=1e-2),
    schedule=replace(base.schedule, warmup_steps=20),
    run=replace(base.run, max_steps=400, eval_interval=200),
    log=base.log,
)
