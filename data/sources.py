"""Sources: the standard library, files, folders, globs, Hugging Face Hub datasets, standard input
and mixtures of them; and which of their text trains and which validates."""

from __future__ import annotations

import glob
import hashlib
import math
import os
import re
import shlex
import sysconfig
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from cli.options import ConfigError
from cli.terminal import counted
from data.config import DataConfig
from data.fetch import command_for
from data.readers import (
    CODE_SUFFIXES,
    STRUCTURED,
    TEXT_SUFFIXES,
    Piece,
    ReadOptions,
    Row,
    field_of,
    file_pieces,
    form_of,
    kind_of,
    looks_like_lines,
    row_pieces,
    suffix_of,
)

STDIN = "-"
# Besides third-party packages and tests: tables that are near-duplicates of each other.
STDLIB_LEFT_OUT = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"]
)
# A folder with these files is a run or prepared data; it may lie inside of the source.
OURS = ({"run.json", "metrics.jsonl"}, {"meta.json", "source.json"})
SAVED_DATASET = ("dataset_info.json", "state.json", "dataset_dict.json")  # next to .arrow files
ABOUT = re.compile(r"(README|LICEN[CS]E|COPYING)\b.*", re.IGNORECASE)
SPLIT_WORDS = {
    "train": "train",
    "test": "test",
    **dict.fromkeys(["val", "valid", "validation", "dev", "eval"], "val"),
}
FORM_NAMES = {"jsonl": "JSON lines", "values": "JSON values", "text": "plain text"}
PART = re.compile(r"(.+?)\*(\d+\.?\d*|\.\d+)(?:\+|$)")


@dataclass
class ReadCounts:
    """Counts made while reading a source, for the user: see `lines`."""

    ends: tuple[str, ...] = ()  # spellings of the end-of-text
    files: Counter = field(default_factory=Counter)  # by (form, suffix), as the next two
    documents: Counter = field(default_factory=Counter)
    like_lines: Counter = field(default_factory=Counter)  # text files that begin as JSON lines do
    spelled: Counter = field(default_factory=Counter)  # ends in plain text

    def count(self, file: Path, form: str, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces of a file, counting what they hold."""
        key = form, suffix_of(file)
        self.files[key] += 1
        if form == "text":
            self.like_lines[key] += kind_of(file) == "text" and looks_like_lines(file)
        for piece in pieces:
            self.documents[key] += piece.first
            for end in self.ends if form == "text" else ():
                if end in piece.text:
                    self.spelled[end] += piece.text.count(end)
            yield piece

    def lines(self, separator: str) -> list[str]:
        """Return lines such as "60 documents from 1 .json file (JSON lines)", unless all is plain
        text, and hints about separators."""
        found = []
        for form, suffix in sorted(self.files):
            documents, files = self.documents[form, suffix], self.files[form, suffix]
            odd, name = self.like_lines[form, suffix], FORM_NAMES.get(form, form)
            if odd:
                name += f"; {odd} of them look like JSON lines: name them .jsonl to read a field"
            elif form == "text" and suffix == ".json":
                name += ": neither JSON lines nor an array of texts"
            elif form == "text" and len(self.files) == 1:
                continue
            kind = f"{suffix} file" if suffix else "file"
            found.append(f"{counted(documents, 'document')} from {counted(files, kind)} ({name})")
        for end, count in self.spelled.items():
            found.append(
                f"the text holds {end!r} {count:,} times, as plain text; if it separates "
                f"documents, add --separator={shlex.quote(end)}"
            )
        texts = [key for key in self.files if key[0] == "text"]
        if separator and sum(self.documents[k] - self.files[k] for k in texts) <= 0:
            found.append(
                f"separator={separator!r} splits no file: it does not occur between two texts"
            )
        return found


@dataclass(frozen=True)
class Source:
    """Files in the order in which they are read; none for a Hub dataset."""

    spec: str
    root: Path
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()  # files left out, and splits found by name
    val_files: frozenset[Path] = frozenset()  # the files that are named for the validation split
    validates: bool = False  # all of it is validation text

    def pieces(self, options: ReadOptions, counts: ReadCounts | None = None) -> Iterator[Piece]:
        """Yield the documents in pieces: all, or the first `max_documents`, after which no more is
        read or fetched. Raises ConfigError for damage, with file and place."""
        limit = options.max_documents or math.inf
        if self.spec.startswith("hub:"):
            yield from _first(row_pieces(hub_rows(self.spec, options), options), limit)
        left = {"train": limit, "val": limit}
        for file in self.files:
            split = "val" if file in self.val_files else "train"
            if not left[split]:
                continue
            if kind_of(file) == "ids":
                raise ConfigError(f"{file}: holds ids, not text")
            form = form_of(file, options)
            pieces = file_pieces(file, options, form)
            if split == "val":
                pieces = (piece._replace(split="val") for piece in pieces)
            pieces = pieces if counts is None else counts.count(file, form, pieces)
            for piece in _first(pieces, left[split]):
                left[split] -= piece.last
                yield piece

    @property
    def holds_ids(self) -> bool:
        """True for files of ids that another tokenizer made."""
        return bool(self.files) and kind_of(self.files[0]) == "ids"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    def name_of(self, file: Path) -> str:
        """Return a file's name within the source."""
        return file.name if file == self.root else file.relative_to(self.root).as_posix()


def _first(pieces: Iterable[Piece], documents: float) -> Iterator[Piece]:
    """Yield the pieces of so many documents, at least 1."""
    for piece in pieces:
        yield piece
        documents -= piece.last
        if not documents:
            return


def parse_mixture(text: str, option: str = "data.source") -> list[tuple[str, float]]:
    """Return (source, weight) per part of `A*0.7+B*0.3`, or a plain source with weight 1.

    Weights sum to 1. Raises ConfigError for a weight of 0.
    """
    found = list(PART.finditer(text))
    whole = "".join(match[0] for match in found) == text
    if len(found) < 2 or not whole or Path(text).exists():
        return [(text, 1.0)]
    weights = [float(match[2]) for match in found]
    if min(weights) == 0:
        raise ConfigError(f"{option}={text}: a weight is 0: leave that source out")
    return [(m[1], weight / sum(weights)) for m, weight in zip(found, weights, strict=True)]


def parts_of(config: DataConfig) -> list[tuple[str, float]]:
    """Return (source, weight) of all that is read; validation sources come last, with weight 0."""
    parts = parse_mixture(config.source)
    if not config.val_source:
        return parts
    option = "data.val_source"
    specs = [spec for spec, _ in parse_mixture(config.val_source, option)]
    if STDIN in specs and STDIN in [spec for spec, _ in parts]:
        raise ConfigError(f"{option}=-: standard input is data.source already: name a file")
    return [*parts, *((spec, 0.0) for spec in specs)]


def open_sources(config: DataConfig, stdin_file: Path | None = None) -> list[Source]:
    """Return the sources of `parts_of`. Raises ConfigError like `open_source`, and for a file that
    would be used for both training and validation."""
    found = [
        open_source(spec, stdin_file)
        if weight
        else _validating(open_source(spec, stdin_file, "data.val_source"))
        for spec, weight in parts_of(config)
    ]
    taken = {file.resolve() for source in found if source.validates for file in source.files}
    for source in found:
        trains = set() if source.validates else set(source.files) - source.val_files
        both = {file for file in trains if file.resolve() in taken} if taken else set()
        if both:
            raise ConfigError(
                f"data.val_source={config.val_source}: {_some(source, both)} would be trained on, "
                f"too, as part of data.source={source.spec}: move it elsewhere, or give it a name "
                "that says what it is for, such as val.txt"
            )
    return found


def _validating(source: Source) -> Source:
    """Return the source as validation text: if it has named splits, the validation split only."""
    files = tuple(file for file in source.files if file in source.val_files) or source.files
    notes = [note for note in source.notes if not note.startswith("validation split")]
    if len(files) < len(source.files):
        notes.append(
            f"{counted(len(source.files) - len(files), 'file')} not named for validation left out"
        )
    return replace(source, files=files, notes=tuple(notes), val_files=frozenset(), validates=True)


def open_source(spec: str, stdin_file: Path | None = None, option: str = "data.source") -> Source:
    """Return the source of this name. Raises ConfigError if there is nothing to read, or if files
    of ids are mixed with text. A new kind of source needs a branch here."""
    if spec.startswith("hub:"):
        name, subset, split = parse_hub(spec)
        plain = "/".join(filter(None, (f"hub:{name}", subset)))
        own = f"for a validation split of its own add --val_source={plain}@validation"
        return Source(spec, Path(), (), (f"reads the split {split} only; {own}",))
    if spec == STDIN:
        if stdin_file is None:
            raise ConfigError(f"{option}=-: standard input can be read only once: prepare it first")
        return Source(spec, stdin_file, (stdin_file,))
    if spec == "stdlib":
        return _stdlib()
    path = absolute(spec)
    if path.is_file():
        source = Source(spec, path, (path,))
    else:
        source = _named_splits(_folder(spec, path) if path.is_dir() else _glob(spec, path))
    if not source.files:
        raise ConfigError(f"{option}={spec}: {_why_nothing(spec, path, source.notes)}")
    kinds = {kind_of(file) for file in source.files}
    if "ids" in kinds and len(kinds) > 1:
        raise ConfigError(
            f"{option}={spec}: mixes files of ids (.bin, .npy) with text: name only one kind"
        )
    return source


def _why_nothing(spec: str, path: Path, notes: tuple[str, ...]) -> str:
    """Return the reason why there is no file to read."""
    if path.is_dir():
        return f"the folder holds nothing to read ({'; '.join(notes) or 'no files at all'})"
    why = "no file matches" if glob.has_magic(spec) else "no such file or folder"
    several = [absolute(part).exists() for part in spec.split("+")]
    if re.search(r"\*[\d.]+(\+|$)", spec) or (len(several) > 1 and all(several)):
        why += "; each part of a mixture needs a weight above 0, such as A*0.7+B*0.3"
    if command := command_for(spec):
        why += f"; to get it: {command}"
    return why


def absolute(spec: str) -> Path:
    """Return the absolute path of a file, folder or glob."""
    return Path(spec).expanduser().absolute()


# Files


def _stdlib() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = set(inside) - STDLIB_LEFT_OUT  # not walked: site-packages may be huge
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return Source("stdlib", root, _sorted(files, root))


def _glob(spec: str, path: Path) -> Source:
    """Return the files that match a pattern. A part of it that exists as it is spelled, such as a
    folder `w[1]`, is not a pattern."""
    base, *rest = path.parts
    while rest and os.path.lexists(os.path.join(base, rest[0])):
        base = os.path.join(base, rest.pop(0))
    if not rest:
        return Source(spec, Path(base), ())
    pattern = os.path.join(*rest)
    found = glob.glob(os.path.join(glob.escape(base), pattern), recursive=True)
    if not found:
        spelled = pattern.replace("[", "[[]")
        found = glob.glob(os.path.join(glob.escape(base), spelled), recursive=True)
    return Source(spec, Path(base), tuple(p for p in map(Path, sorted(found)) if p.is_file()))


def _folder(spec: str, root: Path) -> Source:
    found, notes = _walk(root)
    known = STRUCTURED.keys() | TEXT_SUFFIXES | CODE_SUFFIXES
    kept = [file for file in found if suffix_of(file) in known]
    if {kind_of(file) for file in kept} != {"ids"}:  # arrays next to other data are something else
        kept = [file for file in kept if suffix_of(file) != ".npy"]
    left_out = Counter(suffix_of(f) or "no suffix" for f in set(found) - set(kept))
    if left_out:
        kinds = ", ".join(f"{n} x {suffix}" for suffix, n in left_out.most_common(5))
        notes.append(f"{counted(left_out.total(), 'file')} of other kinds left out: {kinds}")
    about = _about_the_data(kept)
    source = Source(spec, root, _sorted([file for file in kept if file not in about], root))
    if about:
        notes.append(f"about the data, left out: {_some(source, about)}")
    return replace(source, notes=tuple(notes))


def _walk(root: Path) -> tuple[list[Path], list[str]]:
    """Return all files that are not hidden, also in linked folders, each once; and notes on what is
    left out.

    Folders are walked before links, so that a file keeps the name that it has without them.
    """
    found: list[Path] = []
    count: Counter[str] = Counter()
    seen = {_id(folder) for folder in (root.resolve(), *root.resolve().parents)}
    unreadable = "folders that cannot be read"
    links = [root]
    while links:
        top = links.pop(0)
        if top != root and _id(top) in seen:
            count["links to folders that are read anyway"] += 1
            continue
        for folder, inside, names in os.walk(top, onerror=lambda _: count.update([unreadable])):
            seen.add(_id(Path(folder)))
            if any(mark.issubset(names) for mark in OURS):
                inside[:], names = [], []
                count["folders of runs or prepared data"] += 1
            paths = sorted(Path(folder, name) for name in inside if not name.startswith("."))
            links += [path for path in paths if path.is_symlink()]
            inside[:] = [p.name for p in paths if not p.is_symlink() and _id(p) not in seen]
            found += [Path(folder, name) for name in names if not name.startswith(".")]
    files = [file for file in found if file.is_file()]
    targets = {file.resolve() for file in files if not file.is_symlink() and suffix_of(file)}
    kept: list[Path] = []
    for file in sorted(files, key=lambda file: (file.is_symlink(), file)):
        if file.is_symlink():
            if file.resolve() in targets:
                count["links to files that are read anyway"] += 1
                continue
            targets.add(file.resolve())
        kept.append(file)
    broken = [file for file in found if not file.exists()]
    count["broken links"] += len(broken)
    count["files that are neither regular nor links"] += len(found) - len(files) - len(broken)
    return kept, [f"{n} {what} left out" for what, n in count.items() if n]


def _id(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _about_the_data(files: list[Path]) -> set[Path]:
    """Return README and license files next to data or above it, and files that the `datasets`
    package writes about its data."""
    data = {f for f in files if suffix_of(f) in {*STRUCTURED, ".txt"} and not ABOUT.match(f.name)}
    data -= {file for file in files if file.name in SAVED_DATASET}
    above = {folder for file in data for folder in file.parents}
    about = {f for f in files if f.parent in above and ABOUT.match(f.name)}
    about = {f for f in about if suffix_of(f) in TEXT_SUFFIXES}
    saved = {file.parent for file in data if suffix_of(file) == ".arrow"}
    saved |= {folder.parent for folder in saved}
    about |= {file for file in files if file.name in SAVED_DATASET and file.parent in saved}
    return about | {f for f in data if suffix_of(f) == ".arrow" and f.name.startswith("cache-")}


def _sorted(files: Iterable[Path], root: Path) -> tuple[Path, ...]:
    # By the characters of the name, so that the order is the same on every platform.
    return tuple(sorted(files, key=lambda file: file.relative_to(root).as_posix()))


def _some(source: Source, files: Iterable[Path]) -> str:
    names = [source.name_of(file) for file in _sorted(files, source.root)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _named_splits(source: Source) -> Source:
    """Return the source without its test split, and with its validation split marked."""
    splits = {file: named_split(PurePath(source.name_of(file))) for file in source.files}
    files = tuple(file for file in source.files if splits[file] != "test")
    if not files:
        return source  # if every file has the word, it means something else
    notes = list(source.notes)
    if len(files) < len(source.files):
        test = set(source.files) - set(files)
        notes.append(f"test split left out, by name: {_some(source, test)}")
    val = frozenset(file for file in files if splits[file] == "val")
    if 0 < len(val) < len(files):
        notes.append(f"validation split, by name: {_some(source, val)}")
    else:
        val = frozenset()
    return replace(source, files=files, notes=tuple(notes), val_files=val)


def named_split(name: PurePath) -> str:
    """Return the split that a file within a source is named for: train, val, test, or "".

    Only whole words count. A name that is such a word comes before one that contains it, then the
    file before its folder; of several words in a name, test comes before val before train. Names of
    program files mean nothing.
    """
    names = [part.lower() for part in reversed(name.parts)]
    names = names[1:] if name.suffix.lower() in CODE_SUFFIXES else names
    for part in names:
        if part.partition(".")[0] in SPLIT_WORDS:
            return SPLIT_WORDS[part.partition(".")[0]]
    for part in names:
        found = {SPLIT_WORDS.get(word) for word in re.findall("[a-z]+", part)} - {None}
        if found:
            return next(split for split in ("test", "val", "train") if split in found)
    return ""


# Datasets of the Hugging Face Hub, streamed: `hub:OWNER/NAME[/SUBSET][@SPLIT]`

NETWORK_SECONDS = 10
INSTEAD = "download its .parquet or .jsonl files and name them as --source"


def parse_hub(spec: str) -> tuple[str, str | None, str]:
    """Return (name, subset, split) of a Hub source. Raises ConfigError if it is misspelled."""
    body, _, split = spec.removeprefix("hub:").partition("@")
    parts = body.split("/")
    if not all(parts) or len(parts) > 3:
        raise ConfigError(f"data.source={spec}: must be hub:OWNER/NAME[/SUBSET][@SPLIT]")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or "train"


def hub_rows(spec: str, options: ReadOptions) -> Iterator[Row]:
    """Yield the rows of a dataset. Raises ConfigError if the Hub does not deliver."""
    name, subset, split = parse_hub(spec)
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data.source={spec}: needs datasets: pip install datasets") from None
    offline = unreachable()
    try:
        if offline:
            rows = _cached(datasets, name, subset, split)
        else:
            rows = datasets.load_dataset(name, subset, split=split, streaming=True)
        for number, row in enumerate(rows):
            place = f"{spec}, row {number}"
            yield Row(place, field_of(row, options, place), 0)
    except ConfigError:
        raise
    except Exception as error:  # datasets passes on the exceptions of all its libraries
        said = " ".join(str(error).split())[:300]
        if offline:
            wanted = f'"{name}", "{subset}"' if subset else f'"{name}"'
            fill = f'import datasets; datasets.load_dataset({wanted}, split="{split}")'
            raise ConfigError(
                f"data.source={spec}: {offline}, and the cache of `datasets` does not have it "
                f"({said}): {INSTEAD}; or fill the cache where there is a network: python -c "
                f"{shlex.quote(fill)}"
            ) from None
        problem = (
            f"the Hub did not deliver it ({type(error).__name__}: {said}): check the name and the "
            f"network, then run the same command again; or {INSTEAD}"
        )
        if "script" in said.lower():
            problem = (
                "`datasets` no longer runs the loading scripts that this dataset consists of: "
                f"{INSTEAD} ({said})"
            )
        raise ConfigError(f"data.source={spec}: {problem}") from error


def _cached(datasets: Any, name: str, subset: str | None, split: str) -> Iterable[dict[str, Any]]:
    """Load a dataset that load_dataset has downloaded before, without asking the Hub: otherwise
    `datasets` would try to reach it for half a minute first."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, subset, split=split)
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def unreachable() -> str:
    """Return why the Hub cannot be reached, "" if it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=NETWORK_SECONDS).close()
    except urllib.error.HTTPError:
        return ""  # it answers
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    return ""


# Training and validation text

FEW_DOCUMENTS = 20


class Part(NamedTuple):
    """A piece of text that belongs to one split."""

    split: str
    text: str
    first: bool  # a document starts here, within this split
    last: bool  # the document really ends here, so an end-of-text follows
    read: int
    name: str = ""  # see Piece


@dataclass(frozen=True)
class Split:
    """The rule that splits a source into training and validation text.

    mode: tail: the last val_fraction of the characters validates. document: a hash of each document
    decides, so that adding files never moves a document between splits. files: the names of files
    and folders decide. none: everything trains. only: everything validates. rest: what is named for
    validation is left out, the rest trains.
    train_characters: characters before the tail.
    whole: the tail begins with a document, none is cut.
    """

    mode: str
    val_fraction: float
    train_characters: int = 0
    whole: bool = False

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        """Yield the same text, each part with its split."""
        if self.mode == "tail":
            yield from self._by_tail(pieces)
            return
        split = "val" if self.mode == "only" else "train"
        for piece in pieces:
            if self.mode == "document" and piece.first:
                split = split_of(piece.text, self.val_fraction)
            elif self.mode == "files":
                split = piece.split or "train"
            if self.mode != "rest" or piece.split != "val":
                yield Part(split, *piece[:4], piece.name)

    def _by_tail(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        left = self.train_characters
        val_begun = False
        for piece in pieces:
            if self.whole and left < len(piece.text):
                left = 0
            head, tail = piece.text[:left], piece.text[left:]
            left -= len(head)
            if head:
                ends = piece.last and not tail
                yield Part("train", head, piece.first, ends, 0 if tail else piece.read, piece.name)
            if tail:
                first = piece.first or not val_begun
                yield Part("val", tail, first, piece.last, piece.read, piece.name)
                val_begun = True


def split_of(text: str, val_fraction: float) -> str:
    """Return the split of a document, by a hash of its first piece."""
    return "val" if is_chosen(text, val_fraction, b"split") else "train"


def is_chosen(text: str, share: float, purpose: bytes) -> bool:
    """Return whether a text belongs to a share of all texts; the same text, the same answer."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def resolve_split(
    mode: str, val_fraction: float, pieces: Iterable[Piece], whole: bool = False
) -> Split:
    """Return the split of a source; auto is the tail for fewer than FEW_DOCUMENTS documents, or if
    the hash would leave a split empty, else document. Only the tail reads all pieces.

    whole: no document may be cut."""
    if val_fraction == 0:
        return Split("none", 0)
    if mode == "document":
        return Split(mode, val_fraction)
    characters, documents, splits = 0, 0, set()
    for piece in pieces:
        characters += len(piece.text)
        if mode == "auto" and piece.first:
            documents += 1
            splits.add(split_of(piece.text, val_fraction))
            if documents >= FEW_DOCUMENTS and len(splits) == 2:
                return Split("document", val_fraction)
    return Split("tail", val_fraction, int(characters * (1 - val_fraction)), whole)
