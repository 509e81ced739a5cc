"""Teach small.py's base model to answer: sums, words to reverse or sort, facts of a sentence.

Two CPU cores, two minutes. The last line counts right answers to questions it has never seen.
    python -m tools.tasks
    python train.py config/chat_small.py
    python -m tools.evaluate out/chat_small --task=data/tasks_validation.jsonl
"""

from data.config import DataConfig
from model.config import ModelConfig
from training.config import Config, LogConfig, OptimConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(context_length=128),
    data=DataConfig(
        source="data/tasks.jsonl",
        val_source="data/tasks_validation.jsonl",
        format="chat",
        global_batch=16,
    ),
    optim=OptimConfig(optimizer="muon", lr=1e-2, muon_lr=0.02),
    schedule=ScheduleConfig(schedule="wsd", warmup_steps=20, decay_fraction=0.7),
    run=RunConfig(
        init_from="out/small",
        max_steps=600,
        eval_interval=200,
        eval_windows=0,
        checkpoint_interval=200,
    ),
    log=LogConfig(interval=25, sample_prompt="What is 12 + 30?"),
)
