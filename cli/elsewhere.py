"""Names that other projects use for the options: for suggestions only, none is accepted.

From nanoGPT's train.py, nanochat's base_train.py, Hugging Face's TrainingArguments, model configs
and example scripts, and plain guesses. The names after "" mean no option here, and would otherwise
be taken for misspellings of another one.
"""

from __future__ import annotations

OURS = {  # our option: their names
    "n_layers": "n_layer layers depth num_hidden_layers",
    "n_heads": "n_head heads num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_model": "n_embd hidden_size",
    "d_head": "head_dim",
    "d_mlp": "intermediate_size",
    "context_length": "block_size seq_len sequence_length max_seq_len max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "mlp": "hidden_act",
    "rope_theta": "rope_base",
    "tie_embeddings": "weight_tying tie_weights tie_word_embeddings",
    "source": "dataset dataset_name train_file",
    "val_source": "validation_file",
    "global_batch": "batch_size total_batch_size",
    "micro_batch": "gradient_accumulation_steps per_device_train_batch_size device_batch_size",
    "workers": "num_workers dataloader_num_workers",
    "optimizer": "optim",
    "lr": "learning_rate embedding_lr unembedding_lr",
    "muon_lr": "matrix_lr",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "grad_clip": "max_grad_norm",
    "schedule": "decay_lr lr_scheduler_type",
    "warmup_steps": "warmup_iters warmup_ratio",
    "decay_fraction": "warmdown_ratio",
    "min_lr_ratio": "min_lr final_lr_frac",
    "out_dir": "output output_dir model_tag",
    "max_steps": "max_iters steps iterations num_iterations",
    "seed": "data_seed",
    "device": "device_type use_cpu",
    "dtype": "bf16 fp16",
    "compile": "torch_compile",
    "deterministic": "full_determinism",
    "init_from": "model_name_or_path",
    "resume": "resume_from_checkpoint",
    "overwrite": "overwrite_output_dir",
    "eval_interval": "eval_steps eval_every",
    "eval_windows": "eval_iters eval_tokens",
    "checkpoint_interval": "save_interval save_steps save_every",
    "keep_checkpoints": "save_total_limit",
    "patience": "early_stopping_patience",
    "timeout": "ddp_timeout",
    "interval": "log_interval logging_steps",
    "wandb": "wandb_log report_to",
    "project": "wandb_project",
    "quiet": "disable_tqdm",
    "": "per_device_eval_batch_size sample_every decay",
}
TRAINING = {name: ours for ours, names in OURS.items() for name in names.split()}
SAMPLING = {  # sample.py's
    "start": "prompt",
    "length": "max_new_tokens",
    "max_length": "max_new_tokens",
    "num_return_sequences": "num_samples",
    "step": "which",
}
