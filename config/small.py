"""Quick-start config: learn to write Python from the standard library's source.

Two CPU cores, five minutes. Nothing is downloaded: the text is that of the running Python.
    python train.py config/small.py
    python sample.py out/small --prompt "def "
"""

from data.config import DataConfig
from model.config import ModelConfig
from training.config import Config, LogConfig, OptimConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(n_layers=4, n_heads=4, d_model=128, context_length=128),
    data=DataConfig(source="stdlib", tokenizer="bpe:4096", global_batch=16),
    optim=OptimConfig(optimizer="muon", lr=3e-2, muon_lr=0.02),
    schedule=ScheduleConfig(schedule="wsd", warmup_steps=20, decay_fraction=0.7),
    # eval_windows=0: the whole validation text, so losses are comparable between runs
    run=RunConfig(max_steps=1400, eval_interval=350, eval_windows=0, checkpoint_interval=350),
    log=LogConfig(interval=25, sample_prompt="def "),
)
