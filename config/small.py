"""The main job: a decoder that learns to write Python from the standard library's own source.

Two CPU cores, 6 minutes, no network and nothing to download: the text is the running Python's.
    python train.py config/small.py
    python sample.py out/small --prompt "def "
"""

from model.config import ModelConfig
from training.config import Config, DataConfig, LogConfig, OptimConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(n_layers=4, n_heads=4, d_model=256, context_length=256),
    data=DataConfig(source="stdlib", tokenizer="bpe:4096", global_batch=32),
    optim=OptimConfig(optimizer="muon", lr=3e-3, muon_lr=0.02),
    schedule=ScheduleConfig(schedule="wsd", warmup_steps=20, decay_fraction=0.7),
    run=RunConfig(max_steps=600, eval_interval=200, eval_windows=128, checkpoint_interval=200),
    log=LogConfig(sample_prompt="def "),
)
