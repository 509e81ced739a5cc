"""Everything that a run does, in seconds: prepare, train, evaluate, save, sample. It learns little.

Any machine. Bytes as tokens, so no tokenizer is trained.
    python train.py config/debug.py
"""

from model.config import ModelConfig
from training.config import Config, DataConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(n_layers=2, n_heads=2, d_model=64, context_length=64),
    data=DataConfig(source="stdlib", tokenizer="byte", global_batch=8, micro_batch=4),
    schedule=ScheduleConfig(warmup_steps=5),
    run=RunConfig(max_steps=20, eval_interval=10, eval_windows=16, checkpoint_interval=10),
)
