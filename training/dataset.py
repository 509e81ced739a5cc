"""The prepared data of a run: find or prepare it, and open it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cli.options import ConfigError
from data.meta import Meta, check_tokenizer, read_meta, read_tokenizer
from data.prepare import difference_from, prepare, prepared_root, source_options
from data.prepared import find_fingerprint, hold, note_use, read_made_from
from data.shards import Windows
from data.tokenizer import Tokenizer, load_tokenizer
from training.checkpoint import MANIFEST, RUN, read_json
from training.config import Config, from_json
from training.console import Console
from training.distributed import Ranks


@dataclass(frozen=True)
class Data:
    """Prepared data, opened, with everything the run needs of it."""

    folder: Path
    meta: Meta
    tokenizer: Tokenizer
    tokenizer_files: dict[str, bytes]  # copied into every checkpoint
    train: Windows
    val: Windows | None  # None: no validation set
    byte_lengths: np.ndarray  # (V,)

    @property
    def fingerprint(self) -> str:
        return self.meta.fingerprint

    @property
    def about(self) -> dict[str, object]:
        """What a checkpoint's manifest says of the data."""
        return {"data_fingerprint": self.fingerprint, "data_folder": str(self.folder)}

    def checked_tokenizer(self) -> dict[str, bytes]:
        """Return the tokenizer's files. Raises DamagedData if they have changed in memory."""
        check_tokenizer(self.folder, self.meta, self.tokenizer_files)
        return self.tokenizer_files


def open_data(
    config: Config,
    checkpoint: Path | None,
    ranks: Ranks,
    stack: contextlib.ExitStack,
    console: Console,
) -> Data:
    """Open the run's data; rank 0 prepares it first if necessary, while the others wait.

    A run that is resumed from a checkpoint uses the data it was trained on. The folder cannot be
    removed until `stack` closes. Raises ConfigError if the config asks for other data.
    """

    def find() -> str:
        own = _own_data(checkpoint, config, console) if checkpoint is not None else None
        progress = not config.log.quiet
        return str(own or prepare(config.data, say=console.say, progress=progress))

    folder = Path(ranks.share(find, "preparing the data"))
    stack.enter_context(hold(folder))
    meta, files = read_meta(folder), read_tokenizer(folder)
    if checkpoint is not None:  # first: another vocabulary would only follow from other data
        _check_trained_on(checkpoint, meta.fingerprint)
    check_tokenizer(folder, meta, files)
    tokenizer = load_tokenizer(folder / "tokenizer")
    kind = config.model.context_length, config.data.windows, config.data.document_mask
    has_val = meta.of("val") or config.data.val_fraction > 0  # if asked for, it must be there
    if not has_val and config.run.patience:
        raise ConfigError(
            f"run.patience={config.run.patience}: counts evaluations, but there is no validation "
            "set; add one with --val_source=TEXT or --val_fraction above 0, or remove --patience"
        )
    train, val = Windows(folder, "train", *kind), Windows(folder, "val", *kind) if has_val else None
    for windows, split in ((train, "training"), (val, "validation")):
        if windows is not None and windows.too_long:
            console.say(f"{split}: {windows.too_long}")
    # Bits per byte count the bytes of the text, also those that the ids cannot give back.
    scale = meta.byte_scale("val")
    lengths = tokenizer.byte_lengths() * (scale if scale != 1 else 1)
    return Data(folder, meta, tokenizer, files, train, val, lengths)


def _check_trained_on(checkpoint: Path, fingerprint: str) -> None:
    trained_on = str(read_json(checkpoint / MANIFEST)["about"].get("data_fingerprint"))
    if trained_on != fingerprint:
        raise ConfigError(
            f"{checkpoint}: the run was trained on other data (fingerprint {trained_on[:12]}, now "
            f"{fingerprint[:12]}); bring the old source back, or start over with --overwrite=true "
            "(the old run is moved aside)"
        )


def _own_data(checkpoint: Path, config: Config, console: Console) -> Path | None:
    """Find the data that a checkpoint was trained on; None if it is gone.

    Raises ConfigError if the config asks for other data.
    """
    about = read_json(checkpoint / MANIFEST)["about"]  # verified when the run was opened
    trained_on, hint = str(about.get("data_fingerprint")), str(about.get("data_folder", ""))
    folder = find_fingerprint(prepared_root(config.data), trained_on, hint)
    if folder is None or not read_made_from(folder):
        return None
    began_with = from_json(read_json(checkpoint / RUN)).data
    difference = difference_from(folder, config.data, began_with, console.say)
    same_source = source_options(config.data) == source_options(began_with)
    if difference and config.run.resume == "changed" and same_source:
        console.say(f"note: {difference}; resuming with the run's own data, {folder}")
    elif difference:
        raise ConfigError(
            difference,
            [
                f"the run's own data is still in {folder}: to resume with it, --resume=changed "
                f"with --{source_options(began_with)}",
                "to start over (the old run is moved aside): --overwrite=true; or choose another "
                "--out_dir",
            ],
        )
    note_use(folder)
    return folder
