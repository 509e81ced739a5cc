"""Fine-tune SmolLM2, which can talk already, on conversations of your own: --source=FILE.

Two CPU cores, two minutes. As it stands the file is that of chat_small.py.
    python -m tools.tasks
    python train.py config/chat_smollm2.py
"""

from data.config import DataConfig
from model.config import ModelConfig
from training.config import Config, LogConfig, OptimConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(context_length=256),  # the weights allow thousands
    data=DataConfig(
        source="data/tasks.jsonl",
        val_source="data/tasks_validation.jsonl",
        format="chat",
        global_batch=4,
        micro_batch=2,
    ),
    # A tenth of the rate for training from scratch: the weights should move only a little.
    optim=OptimConfig(optimizer="adamw", lr=1e-4, weight_decay=0.0),
    schedule=ScheduleConfig(schedule="wsd", warmup_steps=5, decay_fraction=0.5),
    run=RunConfig(
        init_from="hub:HuggingFaceTB/SmolLM2-135M-Instruct",
        max_steps=30,
        eval_interval=15,
        eval_windows=16,
        checkpoint_interval=30,
    ),
    log=LogConfig(interval=5, sample_prompt="What is 12 + 30?"),
)
