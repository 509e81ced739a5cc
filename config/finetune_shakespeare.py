"""Fine-tune a pretrained model on Shakespeare.

Two CPU cores, minutes. The model (135M parameters) comes from the Hugging Face Hub, or from any
GPT-2, Llama or Qwen3 folder with --init_from=FOLDER. For the text see shakespeare_char.py.
    python train.py config/finetune_shakespeare.py
    python sample.py out/finetune_shakespeare --prompt "ROMEO:"
"""

from data.config import DataConfig
from model.config import ModelConfig
from training.config import Config, LogConfig, OptimConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(context_length=256),  # the weights allow thousands
    data=DataConfig(
        source="data/shakespeare.txt",
        split="tail",
        val_fraction=0.1,
        global_batch=8,
        micro_batch=2,
    ),
    # A tenth of the rate for training from scratch: the weights should move only a little.
    optim=OptimConfig(optimizer="adamw", lr=3e-5, weight_decay=0.0),
    schedule=ScheduleConfig(schedule="wsd", warmup_steps=5, decay_fraction=0.5),
    run=RunConfig(
        init_from="hub:HuggingFaceTB/SmolLM2-135M",
        max_steps=50,
        eval_interval=25,
        eval_windows=32,
        checkpoint_interval=50,
    ),
    log=LogConfig(sample_prompt="ROMEO:"),
)
