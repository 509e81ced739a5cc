"""Build what the loop needs from a config: resolved options, the process, model and optimizer."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from cli.options import ConfigError
from model.gpt import GPT
from training.config import Config, with_values
from training.console import Console
from training.device import Precision, keep_freed_memory, pick_attention, pick_dtype
from training.distributed import Ranks, default_threads, make_cublas_deterministic
from training.memory import pick_micro_batch
from training.network import new_network
from training.optimizer import Optimizers
from training.step import Setup, pick_reduction


def resolve(config: Config, ranks: Ranks, vocab_size: int, console: Console) -> Config:
    """Replace every default that depends on the machine or the data by its value, and print the
    choices that are not obvious."""
    new = vocab_size - (config.model.vocab_size or vocab_size)
    if config.run.init_from and 0 < new <= config.data.new_ids:
        if config.run.lora_rank:
            raise ConfigError(
                f"run.lora_rank={config.run.lora_rank}: the weights in {config.run.init_from} lack "
                f"{new} ids of the chat template, and the rows of new ids are learned only with "
                "--lora_rank=0; train all weights on conversations first"
            )
        console.say(f"vocabulary: {new} new ids for the chat tokens, each the mean of the others")
        config = with_values(config, {"model.vocab_size": vocab_size})
    elif config.run.init_from and new > 0:
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer}: has {vocab_size} ids, but the weights in "
            f"{config.run.init_from} have {config.model.vocab_size}; remove --tokenizer to use "
            "their own, or name it (--tokenizer=hf:FOLDER or run:RUN)"
        )
    model = config.model.resolved(vocab_size)
    dtype, why = pick_dtype(config.run.dtype, ranks.device, model.d_model)
    typed, in_file = config.typed or {}, config.in_file or {}
    if why == "as set" and {typed.get("run.dtype"), in_file.get("run.dtype")} <= {None, "auto"}:
        why = "as before"  # chosen when the run began
    attention = pick_attention(config.run.attention, ranks.device)
    config = replace(config, model=model)
    config = with_values(config, {"run.dtype": dtype, "run.attention": attention})
    if config.run.deterministic:  # cuBLAS reads this once, and trying micro-batches starts it
        make_cublas_deterministic()
    micro_batch = config.data.micro_batch or max(1, config.data.global_batch // ranks.world)
    if micro_batch == "auto":
        micro_batch = pick_micro_batch(config, ranks)
    n_micro, rest = divmod(config.data.global_batch, micro_batch)
    if rest:
        raise ConfigError(
            f"data.global_batch={config.data.global_batch}: cannot be shared evenly by "
            f"{ranks.world} ranks; use a multiple of {ranks.world}"
        )
    reduction = pick_reduction(config.parallel.reduction, n_micro, ranks)
    threads = config.run.threads or default_threads(ranks.local_world)
    console.say(
        f"device: {ranks.device.type}, {dtype} ({why}), {threads} thread{'s' * (threads > 1)}, "
        f"{attention} attention"
        + (f", {ranks.world} ranks, {reduction} reduction" if ranks.world > 1 else "")
    )
    resolved = {"run.device": ranks.device.type, "run.threads": threads}
    resolved |= {"data.micro_batch": micro_batch, "parallel.reduction": reduction}
    return with_values(config, resolved)


def prepare_process(config: Config) -> None:
    """Set threads, memory and determinism for the process, before anything is computed."""
    assert config.run.threads is not None  # see resolve
    torch.set_num_threads(config.run.threads)
    if config.run.device == "cpu":
        keep_freed_memory()
    torch.backends.cuda.matmul.allow_tf32 = False  # TF32 rounds to 10 bits: float32 means float32
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False  # it picks kernels by their time, so not always one


def build_model(config: Config, ranks: Ranks) -> GPT:
    """Return the model with initial weights drawn from the seed, on this rank's device."""
    return new_network(config.model, config.run, seed=config.run.seed).to(ranks.device)


def build_setup(config: Config, model: GPT, ranks: Ranks, console: Console) -> Setup:
    """Build optimizer, precision and reduction around the model, the same on every rank."""
    precision = Precision(getattr(torch, config.run.dtype), ranks.device.type)
    optimizers = Optimizers(model, config.optim, ranks.device, precision.dtype)
    setup = Setup(config, model, optimizers, precision.scaler(), precision, ranks)
    if ranks.world > 1 and config.parallel.reduction == "fast":
        # DDP sends gradients while the backward pass still computes others.
        with ranks.waiting("comparing the shapes of the weights"):
            setup.ddp = DistributedDataParallel(model, **_without_buffers())
    if config.run.compile:
        _compile(setup, console)
    return setup


def _without_buffers() -> dict[str, Any]:
    """Return DDP's option not to send buffers, which never change here; torch 2.13 renamed it."""
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def _compile(setup: Setup, console: Console) -> None:
    """Compile the model in place and try it on a batch of zeros.

    If that fails on one rank, all ranks continue without. The graph of a training step is the only
    one: evaluation and samples are not compiled, so nothing can fail to compile in mid-run.
    """
    model, config = setup.model, setup.config
    shape = config.data.micro_batch_size, config.model.context_length
    parts = 2 + config.data.apart
    batch = torch.zeros((parts, *shape), dtype=torch.int64, device=setup.ranks.device)
    model.compile()  # in place: the names of the tensors stay as they are
    # Called through DDP, the graph is cut where its buckets end, so that each is sent early.
    forward = setup.ddp or model
    alone = setup.ddp.no_sync() if setup.ddp else contextlib.nullcontext()
    reason = ""
    try:
        with alone, setup.precision.autocast():
            forward(*batch, reduction="sum").backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the compiler or its C++ toolchain raises
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
    setup.optimizers.zero_grad()
    # One rank may find its kernels in a cache while others compile for longer than the time-out.
    setup.ranks.meet("compiling the model")
    (failed,) = setup.ranks.sum_ints([bool(reason)], "compiling the model")
    setup.compiled = not failed
    if failed:
        model._compiled_call_impl = None
        reason = reason or f"on {failed} of {setup.ranks.world} ranks"
        console.print(f"note: torch.compile does not work here ({reason}); continuing without it")
