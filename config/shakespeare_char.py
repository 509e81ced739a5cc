"""Shakespeare a character at a time, in the size of nanoGPT's example (10.65M parameters).

One GPU, a few minutes; on 2 CPU cores hours (there: shakespeare_char_cpu.py). Get the text first
(1.1 MB), or give any other with --source=PATH:
    curl -o data/shakespeare.txt https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    python train.py config/shakespeare_char.py
"""

from model.config import ModelConfig
from training.config import Config, DataConfig, LogConfig, OptimConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(n_layers=6, n_heads=6, d_model=384, context_length=256, dropout=0.2),
    data=DataConfig(
        source="data/shakespeare.txt",
        tokenizer="char",
        split="tail",
        val_fraction=0.1,
        global_batch=64,
    ),
    optim=OptimConfig(optimizer="muon", lr=3e-3, muon_lr=0.02),
    schedule=ScheduleConfig(schedule="wsd", warmup_steps=100, decay_fraction=0.7),
    # eval_windows=0: the whole validation text, each time the same
    run=RunConfig(max_steps=3000, eval_interval=250, eval_windows=0, checkpoint_interval=250),
    log=LogConfig(sample_prompt="ROMEO:"),
)
