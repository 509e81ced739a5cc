"""Fine-tune a pretrained model on Shakespeare: training that starts from somebody else's weights.

Two CPU cores, minutes. SmolLM2's weights (135M) come from the hub; --init_from=FOLDER takes any
GPT-2, Llama or Qwen3 folder. They bring shape and tokenizer; the text is shakespeare_char.py's.
    python train.py config/finetune_shakespeare.py
    python sample.py out/finetune_shakespeare --prompt "ROMEO:"
"""

from model.config import ModelConfig
from training.config import Config, DataConfig, LogConfig, OptimConfig, RunConfig, ScheduleConfig

config = Config(
    model=ModelConfig(context_length=256),  # of the thousands that the weights know
    data=DataConfig(
        source="data/shakespeare.txt",
        split="tail",
        val_fraction=0.1,
        global_batch=8,
        micro_batch=2,
    ),
    # A tenth of what training from scratch takes: the weights are to move a little.
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
