"""Where documents come from: the standard library, files, folders, globs, a hub, or a mixture."""

from __future__ import annotations

import glob
import hashlib
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
from typing import NamedTuple

from cli.options import ConfigError
from data.config import DataConfig
from data.readers import (
    CODE_SUFFIXES,
    STRUCTURED,
    TEXT_SUFFIXES,
    How,
    Piece,
    as_text,
    field_of,
    file_pieces,
    form_of,
    kind_of,
    looks_like_lines,
    row_pieces,
    suffix_of,
)

# Datasets of the Hugging Face hub, streamed: `hub:OWNER/NAME[/SUBSET][@SPLIT]`.

NETWORK_SECONDS = 10
INSTEAD = "download its .parquet or .jsonl files and name them as --source"


def parse_hub(spec: str) -> tuple[str, str | None, str]:
    """(name, subset, split) of a hub source. Raises ConfigError if it is spelled otherwise."""
    body, _, split = spec.removeprefix("hub:").partition("@")
    parts = body.split("/")
    if not all(parts) or len(parts) > 3:
        raise ConfigError(f"data.source={spec}: must be hub:OWNER/NAME[/SUBSET][@SPLIT]")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or "train"


def hub_pieces(spec: str, how: How) -> Iterator[Piece]:
    """Each row is one document. Raises ConfigError with the way on if the hub does not give it."""
    name, subset, split = parse_hub(spec)
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data.source={spec}: needs datasets: pip install datasets") from None
    check_network(spec)
    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=True)
        for number, row in enumerate(rows):
            place = f"{spec}, row {number}"
            yield from row_pieces(as_text(field_of(row, how.text_field, place), how, place), 0)
    except ConfigError:
        raise
    except Exception as error:  # datasets raises what its many parts raise
        raise ConfigError(_explained(spec, error)) from error


def check_network(spec: str) -> None:
    """Raise ConfigError at once if the hub cannot be reached: `datasets` would try for a minute."""
    from huggingface_hub import constants

    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=NETWORK_SECONDS).close()
    except urllib.error.HTTPError:
        return  # it answers
    except OSError as error:
        raise ConfigError(
            f"data.source={spec}: {constants.ENDPOINT} cannot be reached ({error}): {INSTEAD}"
        ) from None


def _explained(spec: str, error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    if "script" in said.lower():
        return (
            f"data.source={spec}: `datasets` no longer runs the scripts that this dataset is made "
            f"of: {INSTEAD} ({said})"
        )
    return (
        f"data.source={spec}: the hub does not give it ({type(error).__name__}: {said}): check the "
        f"name and the network, then run the same command again; or {INSTEAD}"
    )


# Which text trains and which validates.
#
# `tail`: the last val_fraction of the characters. `document`: whole documents by a hash of their
# text, so that adding files never moves a document between splits. `auto`: the tail for fewer than
# 20 documents, or where the hash would leave a split empty; else by document. `files`: as the names
# of files and folders say. `none`: everything trains. `only`: everything validates. `rest`: what is
# named for validation is left out, the rest trains.

FEW_DOCUMENTS = 20


class Part(NamedTuple):
    """A piece of text that belongs to one split."""

    split: str
    text: str
    first: bool  # a document starts here, as far as this split is concerned
    last: bool  # the document really ends here, so an end-of-text follows
    read: int


@dataclass(frozen=True)
class Split:
    """How one source is split; `train_characters` counts for the tail only."""

    mode: str
    val_fraction: float
    train_characters: int = 0

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        """The same text, each part with its split."""
        if self.mode == "tail":
            return self._by_tail(pieces)
        return self._by_document(pieces) if self.mode == "document" else self._as_named(pieces)

    def _as_named(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        every = {"none": "train", "only": "val"}.get(self.mode)
        for piece in pieces:
            if self.mode != "rest" or piece.split != "val":
                yield Part(every or piece.split or "train", *piece[:4])

    def _by_document(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        split = "train"
        for piece in pieces:
            if piece.first:
                split = split_of(piece.text, self.val_fraction)
            yield Part(split, *piece[:4])

    def _by_tail(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        left = self.train_characters
        val_begun = False
        for piece in pieces:
            head, tail = piece.text[:left], piece.text[left:]
            left -= len(head)
            if head:
                ends = piece.last and not tail
                yield Part("train", head, piece.first, ends, 0 if tail else piece.read)
            if tail:
                first = piece.first or not val_begun
                yield Part("val", tail, first, piece.last, piece.read)
                val_begun = True


def split_of(text: str, val_fraction: float) -> str:
    """The split of a document, by the hash of its first piece."""
    return "val" if is_chosen(text, val_fraction, b"split") else "train"


def is_chosen(text: str, share: float, purpose: bytes) -> bool:
    """Whether a text belongs to a share of all texts, by its hash: always the same answer."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def resolve_split(mode: str, val_fraction: float, pieces: Iterable[Piece]) -> Split:
    """The split of one source, from its pieces; only the tail needs to see them all."""
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
    return Split("tail", val_fraction, int(characters * (1 - val_fraction)))


STDIN = "-"
# Apart from third-party packages and tests: tables that are near-duplicates of each other.
STDLIB_LEFT_OUT = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"]
)
# A folder with these files is a run, or prepared data, and no text: it may lie in the source.
OURS = ({"run.json", "metrics.jsonl"}, {"meta.json", "source.json"})
SAVED_DATASET = ("dataset_info.json", "state.json", "dataset_dict.json")  # beside .arrow files
ABOUT = re.compile(r"(README|LICEN[CS]E|COPYING)\b.*", re.IGNORECASE)
SPLIT_WORDS = {
    "train": "train",
    "test": "test",
    **dict.fromkeys(["val", "valid", "validation", "dev", "eval"], "val"),
}
FORM_NAMES = {"jsonl": "JSON lines", "values": "JSON values", "text": "plain text"}
PART = re.compile(r"(.+?)\*(\d+\.?\d*|\.\d+)(?:\+|$)")


@dataclass
class Read:
    """What reading a source to its end found; `lines` tells it."""

    ends: tuple[str, ...] = ()  # how an end-of-text is spelled
    files: Counter = field(default_factory=Counter)  # by (form, suffix)
    documents: Counter = field(default_factory=Counter)
    like_lines: Counter = field(default_factory=Counter)  # texts that begin as JSON lines do
    spelled: Counter = field(default_factory=Counter)  # ends in plain text

    def lines(self, separator: str) -> list[str]:
        """Lines such as "60 documents from 1 .json file (JSON lines)", but none for what is plainly
        plain text, and what there is to say of separators."""
        found = []
        for form, suffix in sorted(self.files):
            documents, files = self.documents[form, suffix], self.files[form, suffix]
            odd, name = self.like_lines[form, suffix], FORM_NAMES.get(form, form)
            if odd:
                name += f"; {odd} of them begin as JSON lines do: name them .jsonl to read a field"
            elif form == "text" and suffix == ".json":
                name += ": neither JSON lines nor an array of texts"
            elif form == "text" and len(self.files) == 1:
                continue
            kind = f"{suffix} file" if suffix else "file"
            many = "s" * (documents != 1)
            found.append(
                f"{documents:,} document{many} from {files:,} {kind}{'s' * (files != 1)} ({name})"
            )
        for end, count in self.spelled.items():
            found.append(
                f"the text holds {end!r} {count:,} times, as plain text; if it stands between "
                f"documents: --separator={shlex.quote(end)}"
            )
        texts = [key for key in self.files if key[0] == "text"]
        if separator and sum(self.documents[k] - self.files[k] for k in texts) <= 0:
            found.append(f"separator={separator!r} splits no file: it is nowhere between two texts")
        return found


@dataclass(frozen=True)
class Source:
    """Files in the order in which they are read; none for a hub dataset."""

    spec: str
    root: Path
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()  # what was left out, and what names decided
    val_files: frozenset[Path] = frozenset()  # of these files: named for the validation split
    validates: bool = False  # all of it

    def pieces(self, how: How, read: Read | None = None) -> Iterator[Piece]:
        """Every document, in pieces. Raises ConfigError for damage, by file and byte offset.

        read: notes what is found.
        """
        if self.spec.startswith("hub:"):
            yield from hub_pieces(self.spec, how)
        for file in self.files:
            if kind_of(file) == "ids":
                raise ConfigError(f"{file}: holds ids, not text")
            form = form_of(file, how)
            pieces = file_pieces(file, how, form)
            if file in self.val_files:
                pieces = (piece._replace(split="val") for piece in pieces)
            yield from pieces if read is None else self._noted(file, form, pieces, read)

    def _noted(self, file: Path, form: str, pieces: Iterator[Piece], read: Read) -> Iterator[Piece]:
        key = form, suffix_of(file)
        read.files[key] += 1
        if form == "text":
            read.like_lines[key] += kind_of(file) == "text" and looks_like_lines(file)
        for piece in pieces:
            read.documents[key] += piece.first
            for end in read.ends if form == "text" else ():
                if end in piece.text:
                    read.spelled[end] += piece.text.count(end)
            yield piece

    @property
    def holds_ids(self) -> bool:
        """Whether these are files of ids that somebody else's tokenizer made."""
        return bool(self.files) and kind_of(self.files[0]) == "ids"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    def name_of(self, file: Path) -> str:
        """A file's name within the source."""
        return file.name if file == self.root else file.relative_to(self.root).as_posix()


def parse_mixture(text: str, option: str = "data.source") -> list[tuple[str, float]]:
    """(source, weight) of each part of `A*0.7+B*0.3`; one part with weight 1 for a plain source.

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
    """(source, weight) of all that is read; what only validates comes last and has no weight."""
    parts = parse_mixture(config.source)
    if not config.val_source:
        return parts
    option = "data.val_source"
    specs = [spec for spec, _ in parse_mixture(config.val_source, option)]
    if STDIN in specs and STDIN in [spec for spec, _ in parts]:
        raise ConfigError(f"{option}=-: standard input is data.source already: name a file")
    return [*parts, *((spec, 0.0) for spec in specs)]


def open_sources(config: DataConfig, stdin_file: Path | None = None) -> list[Source]:
    """The sources of `parts_of`, in order. Raises ConfigError as `open_source` does, and for a file
    that would train and validate."""
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
                f"data.val_source={config.val_source}: {_some(source, both)} would train too, as "
                f"part of data.source={source.spec}: move it out of there, or give it a name that "
                "says what it is, such as val.txt"
            )
    return found


def _validating(source: Source) -> Source:
    """The same source as validation text: of named splits, the validation split alone."""
    files = tuple(file for file in source.files if file in source.val_files) or source.files
    notes = [note for note in source.notes if not note.startswith("validation split")]
    if len(files) < len(source.files):
        notes.append(f"{len(source.files) - len(files)} files that are not for validation left out")
    return replace(source, files=files, notes=tuple(notes), val_files=frozenset(), validates=True)


def open_source(spec: str, stdin_file: Path | None = None, option: str = "data.source") -> Source:
    """The source of a name. Raises ConfigError if there is nothing to read, or it is a mix-up."""
    if spec.startswith("hub:"):
        name, subset, split = parse_hub(spec)
        plain = "/".join(filter(None, (f"hub:{name}", subset)))
        own = f"its own validation split, if it has one: --val_source={plain}@validation"
        return Source(spec, Path(), (), (f"reads the split {split} alone; {own}",))
    if spec == STDIN:
        if stdin_file is None:
            raise ConfigError(f"{option}=-: standard input can be read only once: prepare it")
        return Source(spec, stdin_file, (stdin_file,))
    if spec == "stdlib":
        return _stdlib()
    path = absolute(spec)
    if path.is_file():
        source = Source(spec, path, (path,))
    elif path.is_dir():
        source = _named_splits(_folder(spec, path))
    else:
        source = _named_splits(_glob(spec, path))
    if not source.files:
        raise ConfigError(f"{option}={spec}: {_why_nothing(spec, path, source.notes)}")
    kinds = {kind_of(file) for file in source.files}
    if "ids" in kinds and len(kinds) > 1:
        raise ConfigError(
            f"{option}={spec}: mixes files of ids (.bin, .npy) with text: name one kind"
        )
    return source


def _why_nothing(spec: str, path: Path, notes: tuple[str, ...]) -> str:
    """Why there is no file to read."""
    if path.is_dir():
        return f"the folder holds nothing to read ({'; '.join(notes) or 'no file at all'})"
    why = "no file matches" if glob.has_magic(spec) else "no such file or folder"
    several = [absolute(part).exists() for part in re.split(r"\+", spec)]
    if re.search(r"\*[\d.]+(\+|$)", spec) or (len(several) > 1 and all(several)):
        why += "; each part of a mixture needs a weight above 0, such as A*0.7+B*0.3"
    return why


def absolute(spec: str) -> Path:
    """The path that a file, folder or glob means, from wherever it is looked at."""
    return Path(spec).expanduser().absolute()


def _stdlib() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = set(inside) - STDLIB_LEFT_OUT  # not walked: site-packages may be huge
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return Source("stdlib", root, _sorted(files, root))


def _glob(spec: str, path: Path) -> Source:
    """What a pattern matches. A part of it that is there as it is spelled is no pattern: `w[1]`."""
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


# Folders


def _folder(spec: str, root: Path) -> Source:
    found, notes = _walk(root)
    known = STRUCTURED.keys() | TEXT_SUFFIXES | CODE_SUFFIXES
    kept = [file for file in found if suffix_of(file) in known]
    if {kind_of(file) for file in kept} != {"ids"}:  # arrays beside other data are something else
        kept = [file for file in kept if suffix_of(file) != ".npy"]
    left_out = Counter(suffix_of(f) or "no suffix" for f in set(found) - set(kept))
    if left_out:
        kinds = ", ".join(f"{n} x {suffix}" for suffix, n in left_out.most_common(5))
        notes.append(f"{left_out.total()} files of other kinds left out: {kinds}")
    about = _about_the_data(kept)
    source = Source(spec, root, _sorted([file for file in kept if file not in about], root))
    if about:
        notes.append(f"about the data, left out: {_some(source, about)}")
    return replace(source, notes=tuple(notes))


def _walk(root: Path) -> tuple[list[Path], list[str]]:
    """All files that are not hidden, in linked folders too, each once; notes on what is not read.

    Folders come before links, so that a file has the name that it has without them.
    """
    found: list[Path] = []
    count: Counter[str] = Counter()
    ids = {_id(folder) for folder in (root.resolve(), *root.resolve().parents)}
    links = [root]
    while links:
        top = links.pop(0)
        if top != root and _id(top) in ids:
            count["links to folders that are read anyway"] += 1
            continue
        for folder, inside, names in os.walk(top, onerror=lambda _: count.update([UNREADABLE])):
            ids.add(_id(Path(folder)))
            if any(mark.issubset(names) for mark in OURS):
                inside[:], names = [], []
                count["folders of runs or prepared data"] += 1
            paths = sorted(Path(folder, name) for name in inside if not name.startswith("."))
            links += [path for path in paths if path.is_symlink()]
            inside[:] = [p.name for p in paths if not p.is_symlink() and _id(p) not in ids]
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
    count["links that lead nowhere"] += len(broken)
    count["files that are neither regular nor links"] += len(found) - len(files) - len(broken)
    return kept, [f"{n} {what} left out" for what, n in count.items() if n]


UNREADABLE = "folders that cannot be read"


def _id(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _about_the_data(files: list[Path]) -> set[Path]:
    """Cards and licences that have data beside or below them, and what `datasets` notes."""
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
    # By the name's characters, so that the order is the same on every platform.
    return tuple(sorted(files, key=lambda file: file.relative_to(root).as_posix()))


def _some(source: Source, files: Iterable[Path]) -> str:
    names = [source.name_of(file) for file in _sorted(files, source.root)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# Splits by name


def named_split(name: PurePath) -> str:
    """The split that a file within a source is named for: train, val or test; "" for none.

    Whole words count alone. A name that is such a word goes before one that holds it, then the file
    before its folder; of several words in a name test goes before val before train. What a program
    is called says nothing.
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


def _named_splits(source: Source) -> Source:
    """The source without its test split, and with its validation split marked."""
    splits = {file: named_split(PurePath(source.name_of(file))) for file in source.files}
    test = {file for file, split in splits.items() if split == "test"}
    if len(test) == len(source.files):
        return source  # nothing but that: the word says something else
    files = tuple(file for file in source.files if file not in test)
    notes = list(source.notes)
    if test:
        notes.append(f"test split left out, by name: {_some(source, test)}")
    val = frozenset(file for file, split in splits.items() if split == "val")
    if val and len(val) < len(files):
        notes.append(f"validation split, by name: {_some(source, val)}")
    else:
        val = frozenset()
    return replace(source, files=files, notes=tuple(notes), val_files=val)
