"""GPT-2's smallest model, with the published architecture, on 10 billion tokens of web text.

Eight GPUs of 80 GB, a few hours; first the text (28 GB) is downloaded and prepared.
480 windows per step = 8 ranks x 5 micro-batches x 12 windows of 1,024 tokens.
    python -m data.prepare --source=hub:HuggingFaceFW/fineweb-edu/sample-10BT@train --tokenizer=gpt2
    torchrun --nproc_per_node=8 train.py config/gpt2_124m.py
"""

from data.config import DataConfig
from model.config import ModelConfig
from training.config import Config, OptimConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(
        n_layers=12,
        n_heads=12,
        d_model=768,
        context_length=1024,
        vocab_size=50304,  # 50,257 padded to a multiple of 128, which matrix units handle faster
        norm="layer",
        norm_eps=1e-5,
        mlp="gelu",
        position="learned",
        qk_norm=False,
        bias=True,
        tie_embeddings=True,
    ),
    data=DataConfig(
        source="hub:HuggingFaceFW/fineweb-edu/sample-10BT@train",
        tokenizer="gpt2",
        val_fraction=0.001,
        global_batch=480,
        micro_batch=12,
    ),
    optim=OptimConfig(optimizer="adamw", lr=6e-4, weight_decay=0.1),
    schedule=ScheduleConfig(schedule="cosine", warmup_steps=700, min_lr_ratio=0.1),
    run=RunConfig(
        max_steps=19_000,  # 9.3 billion tokens: about one epoch
        compile=True,
        eval_interval=250,
        eval_windows=2048,
        checkpoint_interval=1000,
    ),
)
