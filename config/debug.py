"""Smoke test: runs every stage in seconds. The samples will be gibberish.

Any machine. The tokens are bytes, so no tokenizer has to be trained.
    python train.py config/debug.py
"""

from data.config import DataConfig
from model.config import ModelConfig
from training.config import Config, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(n_layers=2, n_heads=2, d_model=64, context_length=64),
    data=DataConfig(source="stdlib", tokenizer="byte", global_batch=8, micro_batch=4),
    schedule=ScheduleConfig(warmup_steps=5),
    run=RunConfig(max_steps=20, eval_interval=10, eval_windows=16, checkpoint_interval=10),
)
