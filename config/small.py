"""The main job: a decoder that learns to write Python from the standard library's own source.

Two CPU cores, five minutes, no network and nothing to download: the text is the running Python's.
    python train.py config/small.py
    python sample.py out/small --prompt "def "
"""

from model.config import ModelConfig
from training.config import Config, DataConfig, LogConfig, OptimConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(n_layers=4, n_heads=4, d_model=128, context_length=128),
    data=DataConfig(source="stdlib", tokenizer="bpe:4096", global_batch=16),
    optim=OptimConfig(optimizer="muon", lr=3e-2, muon_lr=0.02),
    schedule=ScheduleConfig(schedule="wsd", warmup_steps=20, decay_fraction=0.7),
    # eval_windows=0: the whole validation text, each time the same
    run=RunConfig(max_steps=1400, eval_interval=350, eval_windows=0, checkpoint_interval=350),
    log=LogConfig(interval=25, sample_prompt="def "),
)
