"""From a config to what the loop needs: the run's folder, the data, the model, what was saved."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import platform
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from cli.options import ConfigError
from data.loader import BatchLoader
from data.meta import Meta, check_tokenizer, read_meta, read_tokenizer
from data.prepare import difference_from, prepare, prepared_root, source_options
from data.prepared import find_fingerprint, hold, note_use, read_made_from
from data.shards import Windows
from data.tokenizer import Tokenizer, load_tokenizer
from model.fast import speed_up
from model.gpt import GPT
from training.budget import lengthened, next_factor, open_budget
from training.checkpoint import (
    MANIFEST,
    RUN,
    Checkpoint,
    Checkpoints,
    TrainState,
    config_of,
    load_checkpoint,
    load_model_tensors,
    read_json,
)
from training.config import OPTIONS, Config, differences, from_json, to_json
from training.console import Console
from training.device import Precision, hardware_name, keep_freed_memory, pick_attention, pick_dtype
from training.distributed import Ranks, default_threads, make_cublas_deterministic
from training.folder import (
    WRITTEN,
    check_own,
    has_stepped,
    lock_folder,
    mark_cleared,
    move_aside,
    was_cleared,
)
from training.memory import pick_micro_batch
from training.optimizer import Optimizers
from training.resume import is_other_recipe, resume_notes, resume_problems, resumed
from training.step import Setup, pick_reduction
from training.weights import inherit_model, load_first_weights

# What the learning rate of the next step depends on.
RATE_OPTIONS = {option.full_name for option in OPTIONS.values() if option.section == "schedule"}
RATE_OPTIONS |= {"optim.lr", "optim.muon_lr", "run.max_steps", "run.time_budget"}


def open_run(
    config: Config, ranks: Ranks, stack: contextlib.ExitStack, console: Console
) -> tuple[Config, Path | None]:
    """Lock the run's folder and see whether to begin or to go on.

    Returns the config to go on with and the checkpoint to go on from, if there is one. The lock is
    held until `stack` closes.

    Raises ConfigError if it holds another's files or recipe, FolderHeld if a process has it.
    """

    def begin(config: Config) -> dict[str, str]:
        open_budget(config.run, TrainState())  # a run to repeat that is not there is told now
        return {"config": to_json(inherit_model(config, console.print)), "checkpoint": ""}

    def look() -> dict[str, str]:
        folder = Path(config.run.out_dir)
        stack.enter_context(lock_folder(folder))
        cleared = config.run.overwrite and was_cleared(folder, ranks.launch.proof)
        if cleared:
            console.print(
                f"started again: --overwrite=true was done by this launch; continuing in {folder}"
            )
        if config.run.overwrite and not cleared:  # see clear_folder
            return begin(config)
        check_own(folder)
        checkpoints = Checkpoints(folder / "checkpoints", console.print)
        checkpoints.clean()
        newest = checkpoints.newest()
        if newest is not None:
            checkpoints.mend_best(newest.state)
        if newest is None and config.run.resume == "must":
            raise ConfigError(f"run.resume=must: {folder} holds no checkpoint to go on from")
        saved = _saved_config(folder, newest)
        if saved is None:
            return begin(config)
        state = newest.state if newest is not None else None
        asked = _with_own_tokenizer(config, saved, newest)
        stepped = has_stepped(folder) if state is None else state.step > 0
        if not stepped and is_other_recipe(saved, asked):
            console.print(
                f"{folder}: no step was taken in it; beginning with the recipe of this start"
            )
            aside = newest is not None  # a checkpoint of the first weights
            return begin(replace(config, run=replace(config.run, overwrite=aside)))
        problems = resume_problems(saved, asked, can_resume=newest is not None)
        if problems:
            raise ConfigError([f"{folder} holds a run with different settings:", *problems])
        going_on = resumed(saved, asked)
        open_budget(going_on.run, TrainState())
        unsaved = _unsaved_config(folder) if newest is not None else None
        told = resume_notes(saved, asked, unsaved) + _rate_notes(saved, going_on, state)
        for line in told:
            console.print(line)
        return {"config": to_json(going_on), "checkpoint": str(newest.path) if newest else ""}

    found = ranks.share(look, "opening the run's folder")
    checkpoint = Path(found["checkpoint"]) if found["checkpoint"] else None
    return from_json(found["config"]), checkpoint


def _with_own_tokenizer(config: Config, saved: Config, newest: Checkpoint | None) -> Config:
    """The config asked for, its `char` or `bpe:N` read as what `inherit_model` made of it: the
    tokenizer of the run that this one started from."""
    own = saved.data.tokenizer
    if newest is None or not own.startswith("run:") or config.data.tokenizer == own:
        return config
    if load_tokenizer(newest.path / "tokenizer").name != config.data.tokenizer:
        return config
    return replace(config, data=replace(config.data, tokenizer=own))


def clear_folder(
    config: Config, ranks: Ranks, stack: contextlib.ExitStack, console: Console
) -> None:
    """With `run.overwrite`, move an old run aside, once per launch: last, when no mistake is left
    to be found."""
    folder = Path(config.run.out_dir)
    if not ranks.first or not config.run.overwrite or was_cleared(folder, ranks.launch.proof):
        return
    if any((folder / name).exists() for name in WRITTEN):
        console.print(f"moved the old run to {move_aside(folder)}")
        if not (folder / ".lock").exists():  # it has gone with the folder
            stack.enter_context(lock_folder(folder))
    mark_cleared(folder, ranks.launch.names)


def _rate_notes(saved: Config, config: Config, state: TrainState | None) -> list[str]:
    """From what to what another length or schedule takes the learning rate, in a line."""
    changed = {name for name, _, _ in differences(saved, config)} & RATE_OPTIONS
    if state is None or state.step == 0 or not changed:
        return []
    now = replace(state, fits=lengthened(saved.run, config.run, state))
    last = next_factor(saved, replace(state, step=state.step - 1))
    first = next_factor(config, now)
    old, new = saved.optim, config.optim
    rates = f"{old.lr * last:.3g} in step {state.step}, {new.lr * first:.3g} in the next"
    if new.optimizer == "muon":
        rates += f" (Muon's: {old.muon_lr * last:.3g}, {new.muon_lr * first:.3g})"
    return [f"learning rate: {rates}"]


def _saved_config(folder: Path, newest: Checkpoint | None) -> Config | None:
    if newest is not None:
        return config_of(newest)
    path = folder / "run.json"
    try:
        return from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ConfigError as error:
        lines = [f"{folder}: {line}" for line in error.problems]
        raise ConfigError([*lines, "to move the folder aside: --overwrite=true"]) from error


def _unsaved_config(folder: Path) -> Config | None:
    """The recipe of the last start, which is newer than the checkpoint if nothing was saved since;
    None if run.json is missing or damaged: it is about to be written anew."""
    try:
        return from_json((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Data:
    """The prepared data of a run, with all of it that the run will need."""

    folder: Path
    meta: Meta
    tokenizer: Tokenizer
    tokenizer_files: dict[str, bytes]  # as they are saved with each checkpoint
    train: Windows
    val: Windows | None  # None: nothing validates
    byte_lengths: np.ndarray  # (V,)

    @property
    def fingerprint(self) -> str:
        return self.meta.fingerprint

    def checked_tokenizer(self) -> dict[str, bytes]:
        """The tokenizer's files. Raises DamagedData if they no longer are those of the ids."""
        check_tokenizer(self.folder, self.meta, self.tokenizer_files)
        return self.tokenizer_files


def open_data(
    config: Config,
    checkpoint: Path | None,
    ranks: Ranks,
    stack: contextlib.ExitStack,
    console: Console,
) -> Data:
    """Prepare the data if it is not there (rank 0; the others wait), and open it. Its folder is
    held until `stack` closes.

    A run that goes on from a checkpoint goes on with its own data. Raises ConfigError if the config
    names other data.
    """

    def find() -> str:
        own = _data_of(checkpoint, config, console) if checkpoint is not None else None
        progress = not config.log.quiet
        return str(own or prepare(config.data, say=console.say, progress=progress))

    folder = Path(ranks.share(find, "preparing the data"))
    stack.enter_context(hold(folder))
    T = config.model.context_length
    meta, files = read_meta(folder), read_tokenizer(folder)
    if checkpoint is not None:  # before its vocabulary is compared: that is a consequence
        _check_trained_on(checkpoint, meta.fingerprint)
    check_tokenizer(folder, meta, files)
    tokenizer = load_tokenizer(folder / "tokenizer")
    kind = config.data.windows, config.data.document_mask
    train = Windows(folder, "train", T, *kind)
    validates = meta.of("val") or config.data.val_fraction > 0  # asked for, it must be there
    val = Windows(folder, "val", T, *kind) if validates else None
    if val is None and config.run.patience:
        raise ConfigError(
            f"run.patience={config.run.patience}: counts evaluations, and nothing validates; give "
            "--val_source=TEXT or a --val_fraction above 0, or leave --patience out"
        )
    scale = meta.byte_scale("val")  # bits per byte are over the text, also where some is lost
    lengths = tokenizer.byte_lengths() * (scale if scale != 1 else 1)
    return Data(folder, meta, tokenizer, files, train, val, lengths)


def _check_trained_on(path: Path, fingerprint: str) -> None:
    trained_on = str(read_json(path / MANIFEST)["about"].get("data_fingerprint"))
    if trained_on != fingerprint:
        raise ConfigError(
            f"{path}: the run was trained on other data (fingerprint {trained_on[:12]}, now "
            f"{fingerprint[:12]}). Bring the old source back, or start over with --overwrite=true "
            "(it moves the old run aside)"
        )


def _data_of(path: Path, config: Config, console: Console) -> Path | None:
    """The folder of the data that a checkpoint was trained on; None if it is gone.

    Raises ConfigError if that is not the data of the config.
    """
    about = read_json(path / MANIFEST)["about"]  # verified when the run was opened
    trained_on, hint = str(about.get("data_fingerprint")), str(about.get("data_folder", ""))
    folder = find_fingerprint(prepared_root(config.data), trained_on, hint)
    if folder is None or not read_made_from(folder):
        return None
    began_with = from_json(read_json(path / RUN)).data
    difference = difference_from(folder, config.data, began_with, console.say)
    same_source = source_options(config.data) == source_options(began_with)
    if difference and config.run.resume == "must" and same_source:
        console.say(f"note: {difference}; going on with the run's own data, {folder}")
    elif difference:
        raise ConfigError(
            [
                difference,
                f"the run's own data is still there, {folder}: to go on with it, --resume=must "
                f"with --{source_options(began_with)}",
                "to start anew and move the old run aside: --overwrite=true; elsewhere: --out_dir",
            ]
        )
    note_use(folder)
    return folder


def resolve(config: Config, ranks: Ranks, vocab_size: int, console: Console) -> Config:
    """Fill in everything that was left open, and say what was chosen where that is not plain."""
    if config.run.init_from and config.model.vocab_size < vocab_size:
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer}: has {vocab_size} ids, the weights in "
            f"{config.run.init_from} know {config.model.vocab_size}: leave --tokenizer out, they "
            "bring their own (--tokenizer=hf:FOLDER or run:RUN)"
        )
    try:
        model = config.model.resolved(vocab_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    dtype, why = pick_dtype(config.run.dtype, ranks.device, model.d_model)
    attention = pick_attention(config.run.attention, ranks.device)
    run = replace(config.run, dtype=dtype, attention=attention)
    if run.deterministic:  # before a micro-batch is tried
        make_cublas_deterministic()
    micro_batch = config.data.micro_batch or max(1, config.data.global_batch // ranks.world)
    if micro_batch == "auto":
        micro_batch = pick_micro_batch(replace(config, model=model, run=run), ranks)
    n_micro = config.data.global_batch // micro_batch
    if config.data.global_batch % micro_batch:
        raise ConfigError(
            f"data.global_batch={config.data.global_batch} windows do not spread evenly over "
            f"{ranks.world} ranks: choose a multiple of {ranks.world}"
        )
    reduction = pick_reduction(config.parallel.reduction, n_micro, ranks)
    threads = config.run.threads or default_threads(ranks.local_world)
    run = replace(run, device=ranks.device.type, threads=threads)
    console.say(
        f"device {ranks.device.type}, {dtype} ({why}), {threads} thread{'s' * (threads > 1)}, "
        f"attention {attention}"
        + (f", {ranks.world} ranks, {reduction} reduction" if ranks.world > 1 else "")
    )
    return replace(
        config,
        model=model,
        data=replace(config.data, micro_batch=micro_batch),
        parallel=replace(config.parallel, reduction=reduction),
        run=run,
    )


def prepare_process(config: Config) -> None:
    """Threads, memory and determinism, before anything is computed."""
    torch.set_num_threads(config.run.threads)
    if config.run.device == "cpu":
        keep_freed_memory()
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def build_model(config: Config, ranks: Ranks, tokenizer: Tokenizer, resuming: bool) -> GPT:
    """The model with its first weights: drawn from the seed, or those of `run.init_from`."""
    model = GPT(config.model, config.run.attention)
    speed_up(model)
    model.init_weights(config.run.seed)
    if config.run.init_from and not resuming:
        load_first_weights(model, config.run.init_from, tokenizer)
    return model.to(ranks.device)


def build_setup(config: Config, model: GPT, ranks: Ranks, console: Console) -> Setup:
    """Optimizer, precision and reduction around the model, the same on every rank."""
    _check_same_weights(model, ranks)
    precision = Precision(getattr(torch, config.run.dtype), ranks.device.type)
    setup = Setup(
        model=model,
        optimizers=Optimizers(model, config.optim, ranks.device, precision.dtype),
        scaler=precision.scaler(),
        precision=precision,
        ranks=ranks,
        reduction=config.parallel.reduction,
        n_micro=config.data.global_batch // config.data.micro_batch,
        seed=config.run.seed,
        grad_clip=config.optim.grad_clip,
    )
    if ranks.world > 1 and setup.reduction == "fast":
        with ranks.waiting("comparing the shapes of the weights"):
            setup.ddp = DistributedDataParallel(model, **_without_buffers())
    if config.run.compile:
        _compile(setup, config, console)
    return setup


def _without_buffers() -> dict[str, bool]:
    """DDP's option not to send buffers, which never change. torch 2.13 warns of its older name."""
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def _compile(setup: Setup, config: Config, console: Console) -> None:
    """torch.compile in place, tried on a batch of zeros; all ranks go on without it if it fails on
    one. This graph is the only one: evaluation and samples are not compiled."""
    model, shape = setup.model, (config.data.micro_batch, config.model.context_length)
    parts = 2 + config.data.document_mask
    batch = torch.zeros((parts, *shape), dtype=torch.int64, device=setup.ranks.device)
    model.compile()  # in place: tensor names stay as they are
    # Within DDP it is compiled in as many parts as there are buckets, each sent once it is there.
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
    # One rank may find its kernels in a cache while others compile, for longer than a time-out.
    setup.ranks.meet("compiling the model")
    (failed,) = setup.ranks.sum_ints([bool(reason)], "compiling the model")
    setup.compiled = not failed
    if failed:
        model._compiled_call_impl = None
        reason = reason or f"on {failed} of {setup.ranks.world} ranks"
        console.print(f"note: torch.compile does not work here ({reason}); going on without it")


def _check_same_weights(model: GPT, ranks: Ranks) -> None:
    if ranks.world == 1:
        return
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64).clone()
    for rank, other in enumerate(ranks.gather(own, "comparing the first weights")):
        if not torch.equal(other, own):
            raise RuntimeError(f"rank {rank} starts with other weights than rank {ranks.rank}")


def restore(
    config: Config, path: Path | None, setup: Setup, data: Data, console: Console
) -> TrainState:
    """Load a checkpoint into model and optimizer; a fresh TrainState if there is none."""
    if path is None:
        return TrainState()
    checkpoint = load_checkpoint(path)
    load_model_tensors(setup.model, checkpoint.model_tensors(), str(path))
    setup.optimizers.load_state_tensors(checkpoint.optim_tensors())
    if checkpoint.state.scaler and setup.scaler.is_enabled():
        setup.scaler.load_state_dict(checkpoint.state.scaler)
    here = environment(setup.ranks, data)
    for name in ("world", "torch", "hardware"):
        if checkpoint.about.get(name) != here[name]:
            console.say(f"note: {name} was {checkpoint.about.get(name)!r}, now {here[name]!r}")
    console.say(f"going on from {path}")
    state, began = checkpoint.state, from_json(checkpoint.run)
    return replace(state, fits=lengthened(began.run, config.run, state))


def environment(ranks: Ranks, data: Data) -> dict[str, object]:
    """What a checkpoint's manifest tells about where it came from."""
    return {
        "data_fingerprint": data.fingerprint,
        "data_folder": str(data.folder),
        "world": ranks.world,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "hardware": hardware_name(ranks.device),
        "python": platform.python_version(),
    }


def make_loader(config: Config, data: Data) -> BatchLoader:
    return BatchLoader(
        data.train,
        seed=config.run.seed,
        global_batch=config.data.global_batch,
        micro_batch=config.data.micro_batch,
    )
