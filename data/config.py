"""Options of the data. No torch and no numpy here, so that reading a config is fast."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Annotated, Literal

# tiktoken's encodings and their numbers of ids; a table, since asking tiktoken may need a network.
TIKTOKEN_SIZES = {
    "gpt2": 50257,
    "r50k_base": 50257,
    "p50k_base": 50281,
    "p50k_edit": 50284,
    "cl100k_base": 100277,
    "o200k_base": 200019,
    "o200k_harmony": 201088,
}
# N in bpe:N and ids:N; the smallest BPE has every byte and the end-of-text.
SIZES = {"bpe": range(257, 1_000_001), "ids": range(1, 1_000_001)}


@dataclass(frozen=True)
class DataConfig:
    """Options for reading text, for turning it into ids, and for batches of ids."""

    source: Annotated[
        str,
        "stdlib, a file, folder or glob (text, .json, .csv, .parquet, .bin ...), "
        "hub:OWNER/NAME[/SUBSET][@SPLIT], - (standard input), or a mixture A*0.7+B*0.3",
        "content",
    ] = "stdlib"
    tokenizer: Annotated[
        str,
        "char, byte, bpe:N, bpe:N:llama, a tiktoken encoding (gpt2, cl100k_base, ...), hf:FOLDER, "
        "run:RUN, or ids:N (the source holds ids)",
        "fixed",
    ] = "bpe:4096"
    split: Annotated[
        Literal["auto", "tail", "document"],
        "validation text: the tail, or whole documents by hash; "
        "auto: files named for a split, else tail or document",
        "fixed",
    ] = "auto"
    val_fraction: Annotated[
        float, "fraction of the text held out for validation; 0: none", "fixed"
    ] = 0.05
    val_source: Annotated[
        str, "validation text, named like source; replaces val_fraction", "content"
    ] = ""
    text_field: Annotated[
        str, "field or column that holds the text (JSON, .csv, .parquet, .arrow, hub)", "fixed"
    ] = "text"
    format: Annotated[
        Literal["text", "chat"],
        "chat: rows are conversations; the loss is on what the assistant says",
        "fixed",
    ] = "text"
    max_documents: Annotated[
        int | None, "read only the first N documents of each source; default: all", "fixed"
    ] = None
    separator: Annotated[str, "text between the documents of a plain text file", "fixed"] = ""
    errors: Annotated[
        Literal["strict", "replace"], "invalid UTF-8: fail, or replace it with U+FFFD", "fixed"
    ] = "strict"
    ids: Annotated[
        Literal["auto", "u1", "u2", "u4", "u8"],
        "integer type of the ids in a .bin file without a header",
        "fixed",
    ] = "auto"
    windows: Annotated[
        Literal["packed", "document"],
        "cut training sequences on a regular grid, or at document starts",
        "fixed",
    ] = "packed"
    document_mask: Annotated[
        bool, "attend only within a document; document windows then share rows", "fixed"
    ] = False
    global_batch: Annotated[
        int, "batch size: sequences per optimizer step, over all ranks", "fixed"
    ] = 32
    micro_batch: Annotated[
        int | None | Literal["auto"],
        "sequences per forward pass on one rank; auto: largest that fits; default: the rank's "
        "whole share",
        "changed",
    ] = None
    workers: Annotated[
        int | None, "processes that prepare the data; default: one per core", "free"
    ] = None
    prepared_dir: Annotated[str, "folder for prepared data; default: data/prepared", "free"] = ""

    @property
    def micro_batch_size(self) -> int:
        """The micro-batch of a run that has begun: its default and `auto` have become a number."""
        assert isinstance(self.micro_batch, int)
        return self.micro_batch

    @property
    def apart(self) -> bool:
        """Whether rows hold several documents that do not see each other."""
        return self.document_mask or self.format == "chat"

    @property
    def new_ids(self) -> int:
        """Ids that the data may add to a tokenizer: a beginning and an end of a turn."""
        return 2 if self.format == "chat" else 0

    def _chat_problems(self) -> list[str]:
        found = []
        if self.tokenizer.startswith("ids:"):
            found.append(f"data.tokenizer={self.tokenizer}: has no text; data.format=chat needs it")
        default = DataConfig()
        for name in ("text_field", "separator", "windows", "document_mask"):
            if getattr(self, name) != getattr(default, name):
                found.append(
                    f"data.{name}={getattr(self, name)}: has no effect with data.format=chat; "
                    "remove it"
                )
        return found

    def problems(self) -> list[str]:
        """Return all mistakes, in plain words."""
        found = []
        if self.format == "chat":
            found += self._chat_problems()
        if not self.source.strip():
            found.append("data.source is empty: name a file, a folder, or stdlib")
        found += tokenizer_problems(self.tokenizer)
        if not 0 <= self.val_fraction < 1:
            found.append(
                f"data.val_fraction={self.val_fraction}: must be at least 0 (no validation) and "
                "less than 1"
            )
        if not self.text_field:
            found.append('data.text_field is empty: name the field, such as "text"')
        if self.max_documents is not None and self.max_documents < 1:
            found.append(f"data.max_documents={self.max_documents}: must be 1 or more, or none")
        if self.global_batch < 1:
            found.append(f"data.global_batch={self.global_batch}: must be 1 or more")
        if isinstance(self.micro_batch, int):
            if self.micro_batch < 1:
                found.append(f"data.micro_batch={self.micro_batch}: must be 1 or more")
            elif self.global_batch >= 1 and self.global_batch % self.micro_batch:
                found.append(
                    f"data.micro_batch={self.micro_batch} does not divide "
                    f"data.global_batch={self.global_batch}"
                )
        if self.workers is not None and self.workers < 0:
            found.append(f"data.workers={self.workers}: must be 0 or more")
        return found


def tokenizer_problems(name: str) -> list[str]:
    """Return the mistake in a tokenizer's name, if there is one."""
    kind, _, rest = name.partition(":")
    if name in ("char", "byte", *TIKTOKEN_SIZES) or (kind in ("hf", "run") and rest):
        return []
    if kind in SIZES:
        sizes = SIZES[kind]
        rest = rest.removesuffix(":llama") if kind == "bpe" else rest
        if rest.isascii() and rest.isdigit() and len(rest) < 10 and int(rest) in sizes:
            return []
        return [
            f"data.tokenizer={name}: {kind}:N needs a vocabulary size N from {sizes[0]} to "
            f"{sizes[-1]}, such as {kind}:4096"
        ]
    known = (
        "char",
        "byte",
        "bpe:N",
        "bpe:N:llama",
        "ids:N",
        "hf:FOLDER",
        "run:RUN",
        *TIKTOKEN_SIZES,
    )
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return [f"data.tokenizer={name} is unknown{hint}: use one of {', '.join(known)}"]
