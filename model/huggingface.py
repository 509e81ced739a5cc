"""Hugging Face folders, read and written: config.json and model.safetensors, by torch alone.

    config, tensors = read_folder(path)       tensors by our names, for GPT(config)
    write_folder(path, config, tensors, ...)  for AutoModelForCausalLM

Names and layout of tensors are in places.py, config.json in families.py and fitting.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from model.config import ModelConfig
from model.families import FolderError, from_huggingface
from model.fitting import to_huggingface
from model.gpt import GPT
from model.places import Place, place_of, to_theirs

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Tables that older versions saved with the weights: masks and frequencies, made anew here.
BUFFERS = r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$"


class DamagedFolder(FolderError):
    """Weights that are cut short or are no safetensors."""

    exit_code = 3


# In


def is_folder(path: Path) -> bool:
    """Whether this is a Hugging Face folder: what it is decides config.json."""
    return (path / "config.json").is_file()


def read_folder(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and tensors, by our names and in float32.

    Raises FolderError naming what the model does not have, before any weight is read, and what does
    not fit; DamagedFolder for weights that are cut short.
    """
    config = read_config(path)
    return config, read_tensors(path, config)


def read_config(path: Path) -> ModelConfig:
    """The ModelConfig of a folder. Raises FolderError naming what the model does not have, or if
    there are no files of weights; DamagedFolder if they are too small for it.
    """
    about = _read_json(path / "config.json")
    try:
        config = from_huggingface(about)
    except FolderError as error:
        raise FolderError([f"{path}: {problem}" for problem in error.problems]) from None
    # Sizes come from a file: held against the weights before anything is allocated.
    heads = 2 * (config.n_heads + config.n_kv_heads) * config.d_head  # q, o, k and v
    block = config.d_model * (heads + 2 * config.d_mlp)
    at_least = 2 * (config.vocab_size * config.d_model + config.n_layers * block)
    size = sum((path / name).stat().st_size for name in _weight_files(path))
    if at_least > size:
        raise DamagedFolder(
            f"{path}: config.json is of a model of {at_least:,} bytes or more, the weights have "
            f"{size:,}"
        )
    _check_layers(path, config, about["model_type"])
    return config


def _check_layers(path: Path, config: ModelConfig, family: str) -> None:
    """Raise DamagedFolder for more layers than the files have tensors for: by their headers alone,
    for with narrow layers the size of the files allows any number."""
    first = {place_of(n, family).name for n in own_names(config, 1) if n.startswith("layers.0.")}
    try:
        with ExitStack() as stack:
            held = len(_find_tensors(path, family, stack))
    except (safetensors.SafetensorError, OSError) as error:
        raise DamagedFolder(f"{path}: the weights cannot be read: {error}") from error
    if config.n_layers * len(first) > held:
        raise DamagedFolder(
            f"{path}: config.json is of {config.n_layers:,} layers of {len(first)} tensors, the "
            f"weights have {held:,} tensors"
        )


def read_tensors(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The folder's tensors by our names; `config` is what `read_config` gave. Raises as above."""
    family = _read_json(path / "config.json")["model_type"]
    try:
        return _read_tensors(path, config, family)
    except (safetensors.SafetensorError, OSError) as error:
        raise DamagedFolder(f"{path}: the weights cannot be read: {error}") from error


def _read_tensors(path: Path, config: ModelConfig, family: str) -> dict[str, Tensor]:
    wanted: dict[str, dict[str, Place]] = {}  # their name -> our names
    for ours in own_names(config):
        place = place_of(ours, family)
        wanted.setdefault(place.name, {})[ours] = place
    with ExitStack() as stack:
        found = _find_tensors(path, family, stack)
        tied_head = found.pop("lm_head.weight", None) if config.tie_embeddings else None
        _check_tensors(path, family, found, wanted.keys())
        tensors = {}
        for name, places in wanted.items():
            whole = found[name].read().float()  # float16 and bfloat16 are exact in float32
            for ours, place in places.items():
                part = whole if place.part is None else whole.chunk(3, dim=-1)[place.part]
                tensors[ours] = part.t() if place.transposed else part
        if tied_head and not torch.equal(tied_head.read().float(), tensors["embed.weight"]):
            raise FolderError(
                f"{path}: tie_word_embeddings=true, but lm_head.weight is not the embedding: "
                "set it to false in config.json if the head is its own"
            )
    return tensors


def own_names(config: ModelConfig, n_layers: int | None = None) -> list[str]:
    """Names of the tensors of GPT(config), or of one with another number of layers: from the
    smallest model that has the same, a layer of which stands for all."""
    small = {"n_heads": 1, "n_kv_heads": 1, "d_model": 2, "d_head": 2, "d_mlp": 1, "n_layers": 1}
    least = replace(config, **small, vocab_size=1, context_length=1)
    names = [name for name, _ in GPT(least).named_parameters()]
    layer = [name for name in names if name.startswith("layers.0.")]
    at, n = names.index(layer[0]), config.n_layers if n_layers is None else n_layers
    layers = [name.replace("0", str(i), 1) for i in range(n) for name in layer]
    return names[:at] + layers + names[at + len(layer) :]


class Stored(NamedTuple):
    """A tensor in an open file."""

    file: Any
    name: str

    def read(self) -> Tensor:
        return self.file.get_tensor(self.name)


def _find_tensors(path: Path, family: str, stack: ExitStack) -> dict[str, Stored]:
    """{full name: tensor} of a folder, buffers left out. The files stay open until `stack` ends."""
    prefix = "transformer." if family == "gpt2" else "model."
    found = {}
    for name in _weight_files(path):
        file = stack.enter_context(safetensors.safe_open(path / name, "pt"))
        for key in file.keys():  # noqa: SIM118 (no dict: it cannot be iterated over)
            # Files of the bare model, without its head, leave the prefix out.
            full = key if key.startswith((prefix, "lm_head.")) else prefix + key
            if not re.search(BUFFERS, full):
                found[full] = Stored(file, key)
    return found


def _weight_files(path: Path) -> list[str]:
    """Names of the files that hold the weights; several have an index."""
    if (path / INDEX).is_file():
        weight_map = _read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise DamagedFolder(f"{path / INDEX}: weight_map does not map tensors to files")
        files = sorted(set(map(str, weight_map.values())))
        for name in files:
            # Names come from a file: nothing outside the folder is ever opened.
            if not re.fullmatch(r"[\w-][\w.-]*", name) or not (path / name).is_file():
                raise DamagedFolder(f"{path / INDEX} names {name!r}: there is no such file there")
        return files
    if not (path / WEIGHTS).is_file():
        pickled = sorted(file.name for file in path.glob("*.bin"))
        hint = f", only {pickled[0]}, which is never unpickled" if pickled else ""
        raise FolderError(f"{path}: there is no {WEIGHTS}{hint}: save it as safetensors")
    return [WEIGHTS]


def _check_tensors(
    path: Path, family: str, found: Mapping[str, Stored], wanted: AbstractSet[str]
) -> None:
    """Raises FolderError listing all tensors that are missing, too many or of another dtype."""
    problems = [f"has no tensor {name}" for name in wanted - found.keys()]
    problems += [f"has {name}, for which {family} has no use" for name in found.keys() - wanted]
    for name in wanted & found.keys():
        dtype = found[name].file.get_slice(found[name].name).get_dtype()
        if dtype not in ("F32", "F16", "BF16"):
            problems.append(f"has {name} in {dtype}: only F32, F16 and BF16 are read")
    if problems:
        raise FolderError([f"{path} {problem}" for problem in sorted(problems)])


def _read_json(path: Path) -> Any:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FolderError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise FolderError(f"{path} holds no JSON object")
    return found


# Out


def write_folder(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    bos: int | None,
    eos: int | list[int] | None,
    never: Sequence[int],
    pad: int | None = None,
) -> None:
    """Write config.json, generation_config.json and model.safetensors into an existing folder.

    bos, eos: ids that begin and end a document; eos may be several. never: ids that belong to
    no token; their rows are kept, and `generate` is told never to draw them. pad: fills up batches.

    Raises FolderError if no family fits, before anything is written.
    """
    about = to_huggingface(config, bos=bos, eos=eos)
    generation: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": eos}
    if pad is not None:
        about["pad_token_id"] = generation["pad_token_id"] = pad
    if never:
        generation["suppress_tokens"] = list(never)
    theirs = to_theirs(tensors, about["model_type"])
    _write_json(path / "config.json", about)
    _write_json(path / "generation_config.json", generation)
    # Not save_file: it makes files that nobody else may read.
    (path / WEIGHTS).write_bytes(safetensors.torch.save(theirs, metadata={"format": "pt"}))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
