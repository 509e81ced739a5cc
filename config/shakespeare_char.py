"""Shakespeare, one token per character, in the size of nanoGPT's example (10.65M parameters).

One GPU, a few minutes; two CPU cores, an hour (use shakespeare_char_cpu.py there). Get the text
first (1.1 MB), or train on any other with --source=PATH:
    python -m data.fetch shakespeare
    python train.py config/shakespeare_char.py
"""

from data.config import DataConfig
from model.config import ModelConfig
from training.config import Config, LogConfig, OptimConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(
        n_layers=6,
        n_heads=6,
        d_model=384,
        context_length=256,
        dropout=0.2,
        attention_dropout=0.0,
    ),
    data=DataConfig(
        source="data/shakespeare.txt",
        tokenizer="char",
        split="tail",
        val_fraction=0.1,
        global_batch=32,
    ),
    optim=OptimConfig(optimizer="muon", lr=1e-2, muon_lr=0.03),
    schedule=ScheduleConfig(schedule="wsd", warmup_steps=20, decay_fraction=0.7),
    # eval_windows=0: the whole validation text, so losses are comparable between runs
    run=RunConfig(max_steps=1200, eval_interval=100, eval_windows=0, checkpoint_interval=100),
    log=LogConfig(sample_prompt="\n"),  # a character every text contains
)
