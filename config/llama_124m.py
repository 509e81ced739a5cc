"""A Llama-style model of GPT-2's size on the same web text, trained with Muon.

Eight GPUs of 80 GB, a few hours; data and batch size as in gpt2_124m.py, which it derives from.
    torchrun --nproc_per_node=8 train.py config/llama_124m.py
"""

from dataclasses import replace

from config.gpt2_124m import config as base
from model.config import ModelConfig
from training.config import OptimConfig, ScheduleConfig

config = replace(
    base,
    model=ModelConfig(
        n_layers=12,
        n_heads=12,
        n_kv_heads=4,
        d_model=768,
        context_length=1024,
        vocab_size=50304,
        tie_embeddings=True,
    ),
    optim=OptimConfig(optimizer="muon", lr=3e-3, muon_lr=0.02),
    schedule=ScheduleConfig(schedule="wsd", warmup_steps=250, decay_fraction=0.6),
)
