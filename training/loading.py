"""A checkpoint read back: verified first, then its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cli.options import ConfigError
from data.prepare import prepared_root
from data.record import find_fingerprint
from training.config import Config, from_json
from training.manifest import (
    MODEL,
    OPTIM,
    RUN,
    STATE,
    DamagedCheckpoint,
    read_json,
    read_manifest,
    read_tensors,
)
from training.state import TrainState, state_from_json


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, its small files parsed."""

    path: Path
    run: dict[str, Any]
    state: TrainState
    about: dict[str, Any]  # where it was made: data, ranks, threads, versions

    def model_tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.path / MODEL)

    def optim_tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.path / OPTIM)


def load_checkpoint(path: Path, *, weights_only: bool = False) -> Checkpoint:
    """Verify every byte of a checkpoint, then read its small files.

    weights_only: leave out the optimizer's state, which may be missing then.
    Raises DamagedCheckpoint naming the file that is missing, of another size or hash, or strange.
    """
    manifest = read_manifest(path, skip=(OPTIM,) if weights_only else ())
    run, saved = read_json(path / RUN), read_json(path / STATE)
    try:
        state = state_from_json(saved)
    except ValueError as error:
        raise DamagedCheckpoint(f"{path / STATE} is damaged: {error}") from error
    if state.step != manifest["step"]:
        raise DamagedCheckpoint(f"{path / STATE}: step {state.step}, not {manifest['step']}")
    return Checkpoint(path, run, state, manifest["about"])


def config_of(checkpoint: Checkpoint) -> Config:
    """The config that a checkpoint was made with.

    Raises DamagedCheckpoint if it is none, or is of a larger model than the weights are: sizes that
    come from a file are checked before anything is allocated.
    """
    path = checkpoint.path / RUN
    try:
        config = from_json(checkpoint.run)
        problems = config.problems()
        if config.model.vocab_size is None:
            problems.append("model.vocab_size is missing")
        if problems:
            raise ConfigError(problems)
        shape = config.model.resolved(config.model.vocab_size)
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error
    heads = 2 * (shape.n_heads + shape.n_kv_heads) * shape.d_head  # q, o, k and v
    block = shape.d_model * (heads + 2 * shape.d_mlp)  # at least: an MLP may have a gate
    at_least = 4 * (shape.vocab_size * shape.d_model + shape.n_layers * block)
    size = (checkpoint.path / MODEL).stat().st_size
    if at_least > size:
        raise DamagedCheckpoint(
            f"{path} is of a model of {at_least:,} bytes or more, {MODEL} has {size:,}"
        )
    return config


def data_folder(about: Mapping[str, Any], config: Config) -> Path:
    """Find the prepared data of the run that a checkpoint with this manifest is of.

    Raises ConfigError if it is gone.
    """
    wanted, hint = str(about["data_fingerprint"]), str(about.get("data_folder", ""))
    root = prepared_root(config.data)
    folder = find_fingerprint(root, wanted, hint)
    if folder is None:
        raise ConfigError(
            f"{root} holds no data with fingerprint {wanted[:12]}, which the run was trained on: "
            f"prepare data.source={config.data.source} again"
        )
    return folder
