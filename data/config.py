"""The options of the data, as plain values: no torch, so that reading a config never imports it."""

from __future__ import annotations

import difflib
import re
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
SMALLEST_BPE = 257  # every byte and the end-of-text
LARGEST_BPE = 1_000_000
MOST_IDS = 1_000_000


@dataclass(frozen=True)
class DataConfig:
    """What is read, how it becomes ids, and how the ids become batches."""

    source: Annotated[
        str,
        "stdlib, a file, folder or glob (text, .json, .csv, .parquet, .bin ...), "
        "hub:OWNER/NAME[/SUBSET][@SPLIT], - (standard input), or a mixture A*0.7+B*0.3",
        "content",
    ] = "stdlib"
    tokenizer: Annotated[
        str,
        "char, byte, bpe:N, a tiktoken encoding (gpt2, cl100k_base, ...), hf:FOLDER, "
        "run:RUN, or ids:N (the source holds ids)",
        "fixed",
    ] = "bpe:4096"
    split: Annotated[
        Literal["auto", "tail", "document"],
        "validation text: files named for it (auto), the tail, or whole documents by hash",
        "fixed",
    ] = "auto"
    val_fraction: Annotated[float, "share of the text that validates; 0: none", "fixed"] = 0.05
    val_source: Annotated[
        str, "text that validates, named as source is; instead of a share of the source", "content"
    ] = ""
    text_field: Annotated[
        str, "field or column that holds the text (JSON, .csv, .parquet, .arrow, hub)", "fixed"
    ] = "text"
    separator: Annotated[
        str, "text that stands between the documents of a plain text file", "fixed"
    ] = ""
    errors: Annotated[
        Literal["strict", "replace"], "what to do with bytes that are no UTF-8", "fixed"
    ] = "strict"
    ids: Annotated[
        Literal["auto", "u1", "u2", "u4", "u8"],
        "width of the ids in a .bin file without a header",
        "fixed",
    ] = "auto"
    windows: Annotated[
        Literal["packed", "document"],
        "windows on a regular grid, or cut at document starts",
        "fixed",
    ] = "packed"
    document_mask: Annotated[
        bool, "a token sees its own document alone; document windows then share rows", "fixed"
    ] = False
    global_batch: Annotated[int, "windows a step, over all ranks", "fixed"] = 32
    micro_batch: Annotated[
        int | None | Literal["auto"],
        "windows a forward on one rank; auto: what fits; the whole share unless given",
        "must",
    ] = None
    workers: Annotated[
        int | None, "processes that prepare the data; all cores unless given", "free"
    ] = None
    prepared_dir: Annotated[
        str, "where prepared data is kept; data/prepared unless given", "free"
    ] = ""

    def problems(self) -> list[str]:
        """What is wrong, in plain words; an empty list if nothing is."""
        found = []
        if not self.source.strip():
            found.append("data.source is empty: name a file, a folder, or stdlib")
        found += tokenizer_problems(self.tokenizer)
        if not 0 <= self.val_fraction < 1:
            found.append(
                f"data.val_fraction={self.val_fraction}: must lie between 0 and 1, or be 0 for no "
                "validation"
            )
        if not self.text_field:
            found.append('data.text_field is empty: name the field, such as "text"')
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
    """What is wrong with a tokenizer's name."""
    if name in ("char", "byte", *TIKTOKEN_SIZES):
        return []
    if re.fullmatch(r"(hf|run):.+", name):
        return []
    if name.startswith("ids"):
        size = re.fullmatch(r"ids:(\d{1,9})", name)
        if size and 1 <= int(size[1]) <= MOST_IDS:
            return []
        return [f"data.tokenizer={name}: ids:N needs the number N of ids, from 1 to {MOST_IDS}"]
    if name.startswith("bpe"):
        size = re.fullmatch(r"bpe:(\d+)", name)
        if size and SMALLEST_BPE <= int(size[1]) <= LARGEST_BPE:
            return []
        return [
            f"data.tokenizer={name}: bpe:N needs a vocabulary size N from {SMALLEST_BPE} to "
            f"{LARGEST_BPE}, such as bpe:4096"
        ]
    known = ("char", "byte", "bpe:N", "ids:N", "hf:FOLDER", "run:RUN", *TIKTOKEN_SIZES)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return [f"data.tokenizer={name} is unknown{hint}: use one of {', '.join(known)}"]
