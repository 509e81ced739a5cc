"""Shards: ids are read back as written, and damaged files are refused by name."""

from __future__ import annotations

import os
import pickle
import re
import resource
import shutil
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cli.options import ConfigError
from data import shards
from data.meta import BLOCK_BYTES, DamagedData, Meta, ShardWriter, dtype_for, read_meta, write_meta
from data.shards import IGNORE_INDEX, Windows

EOT = 0


def random_ids(count: int, vocab_size: int = 500, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, vocab_size, count)


def make(
    folder: Path,
    sources: list[dict[str, list[np.ndarray]]],
    vocab_size: int = 500,
    starts: dict[str, list[np.ndarray]] | None = None,
    weights: list[float] | None = None,
) -> Path:
    """Write a prepared folder; sources: the ids of each shard, by split, of each source."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype_for(vocab_size)
    written = []
    for source, splits in enumerate(sources):
        for split, parts in splits.items():
            for number, ids in enumerate(parts):
                writer = ShardWriter(folder, split, source, number, dtype)
                begin = starts[split][number] if starts else np.array([0] * (number == 0), int)
                writer.append(ids, begin, bytes=len(ids))
                written.append(writer.close())
    weights = weights or [1 / len(sources)] * len(sources)
    modes = ["tail"] * len(sources)
    write_meta(folder, Meta("x", "t", vocab_size, dtype, "f", modes, weights, written))
    return folder


def one(folder: Path, ids: np.ndarray, vocab_size: int = 500) -> Path:
    return make(folder, [{"train": [ids]}], vocab_size)


# Reading ids back


@pytest.mark.parametrize("vocab_size", [65536, 65537])
def test_the_dtype_is_the_smallest_that_holds_the_vocabulary(tmp_path, vocab_size):
    ids = random_ids(9000, vocab_size)
    ids[17] = vocab_size - 1
    windows = Windows(one(tmp_path, ids, vocab_size), "train", 8)
    assert read_meta(tmp_path).dtype == ("uint16" if vocab_size == 65536 else "uint32")
    assert windows.window(2).tolist() == ids[16:25].tolist()
    assert windows.window(2).dtype == np.int64


@pytest.mark.parametrize("sizes", [[1000], [7, 1, 992], [1] * 50 + [950], [2048, 2048, 1, 5000]])
def test_windows_cross_the_ends_of_shards(tmp_path, sizes):
    ids = random_ids(sum(sizes))
    parts = np.split(ids, np.cumsum(sizes)[:-1])
    windows = Windows(make(tmp_path, [{"train": parts}]), "train", 16)
    assert windows.n_tokens == len(ids)
    assert len(windows) == (len(ids) - 1) // 16
    for i in range(len(windows)):
        assert windows[i].tolist() == ids[i * 16 : i * 16 + 17].tolist()
        tokens, targets = windows.pair(i)
        assert tokens.tolist() == windows[i][:-1].tolist()
        assert targets.tolist() == windows[i][1:].tolist()


def test_shards_written_in_pieces_or_at_once_are_identical(tmp_path):
    ids, none = random_ids(10_000), np.array([], dtype=np.int64)
    cuts = np.sort(np.random.default_rng(1).integers(0, len(ids), 20))
    for number, parts in enumerate(([ids], np.split(ids, cuts))):
        writer = ShardWriter(tmp_path, "train", 0, number, "uint16")
        for part in parts:
            writer.append(part, none)
        writer.close()
    files = [tmp_path / f"train-00-{n:06d}" for n in (0, 1)]
    for suffix in (".bin", ".crc"):
        first, second = (file.with_suffix(suffix).read_bytes() for file in files)
        assert first == second
    content = files[0].with_suffix(".bin").read_bytes()
    blocks = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
    crcs = np.fromfile(files[0].with_suffix(".crc"), dtype="<u4")
    assert crcs.tolist() == [zlib.crc32(block) for block in blocks]


@pytest.mark.parametrize("shift", [0, 1, 7, 15])
def test_a_shifted_grid_wraps_around_at_the_end(tmp_path, shift):
    ids = random_ids(100)
    windows = Windows(one(tmp_path, ids), "train", 16)
    ring = np.concatenate([ids, ids])
    for i in range(len(windows)):
        start = i * 16 + shift
        assert windows.window(i, shift).tolist() == ring[start : start + 17].tolist()


@pytest.mark.parametrize("i", [-1, 6, 10**9])
def test_a_window_out_of_range_is_an_index_error(tmp_path, i):
    windows = Windows(one(tmp_path, random_ids(100)), "train", 16)
    with pytest.raises(IndexError, match=f"window {i} of 6"):
        windows[i]


@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
def test_a_split_needs_context_length_plus_one_tokens(tmp_path, extra):
    folder = one(tmp_path, random_ids(32 + extra))
    if extra >= 1:
        assert len(Windows(folder, "train", 32)) == 1
        return
    with pytest.raises(ConfigError) as refused:
        Windows(folder, "train", 32)
    for word in ("train", str(32 + extra), "context_length=32", "33"):
        assert word in str(refused.value)
    with pytest.raises(ConfigError, match="the val split has 0 tokens"):
        Windows(folder, "val", 16)


# Damage


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def read_all(folder: Path, context_length: int = 64) -> None:
    windows = Windows(folder, "train", context_length)
    for i in range(len(windows)):
        windows.pair(i)


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 8000, 12_287, 12_288, 13_999])
def test_a_flipped_bit_is_found_when_its_block_is_read(tmp_path, at):
    folder = one(tmp_path, random_ids(7000))
    flip(folder / "train-00-000000.bin", at)
    windows = Windows(folder, "train", 64)
    block = at // BLOCK_BYTES
    name = re.escape(str(folder / "train-00-000000.bin"))
    with pytest.raises(DamagedData, match=f"{name}: the block at byte {block * BLOCK_BYTES}"):
        windows[min(at // 2 // 64, len(windows) - 1)]
    intact = (block + 2) % 4 * BLOCK_BYTES // 2 // 64 + 1
    windows[intact]  # other blocks are still read


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("train-00-000000.bin", lambda raw: raw[:-1], "has 13999 bytes, 14000 were"),
        ("train-00-000000.bin", lambda raw: raw + b"\0\0", "has 14002 bytes, 14000 were"),
        ("train-00-000000.bin", None, "is missing"),
        ("train-00-000000.crc", lambda raw: raw[:-1], "has 15 bytes, 16 were"),
        ("train-00-000000.crc", lambda raw: b"\0" + raw[1:], "checksum"),
        ("train-00-000000.crc", None, "is missing"),
        ("meta.json", lambda raw: raw[:-20], "is damaged"),
    ],
)
def test_every_kind_of_damage_is_refused(tmp_path, file, damage, message):
    path = one(tmp_path, random_ids(7000)) / file
    path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()
    with pytest.raises(DamagedData, match=f"{re.escape(str(tmp_path))}.*{message}") as refused:
        read_all(tmp_path)
    assert refused.value.exit_code == 3


def test_a_shard_that_shrinks_while_in_use_is_refused(tmp_path):
    folder = one(tmp_path, random_ids(7000))
    windows = Windows(folder, "train", 64)
    windows[0]
    with (folder / "train-00-000000.bin").open("r+b") as stream:
        stream.truncate(9000)
    with pytest.raises(DamagedData, match="shorter while in use"):
        windows[100]


@pytest.mark.parametrize("where", [0, 63, 64, 6999])
@pytest.mark.parametrize("token", [500, 501, 65535])
def test_an_id_outside_the_vocabulary_is_refused_by_file_and_position(tmp_path, where, token):
    ids = random_ids(7000)
    ids[where] = token
    folder = one(tmp_path, ids, 500)
    name = re.escape(str(folder / "train-00-000000.bin"))
    with pytest.raises(DamagedData, match=f"{name}: token {where} is id {token}, .* 500 ids"):
        read_all(folder, 6999)


# Many shards, many processes


@pytest.mark.parametrize("room", [1, 20, 400])
def test_the_number_of_open_files_is_limited(tmp_path, monkeypatch, room):
    count = 300
    ids = random_ids(count * 10)
    folder = make(tmp_path, [{"train": np.split(ids, count)}])
    monkeypatch.setattr(shards, "room_for_files", lambda: room)
    windows = Windows(folder, "train", 30)
    for i in np.random.default_rng(0).permutation(len(windows)):
        assert windows[i][0] == ids[i * 30]
    opened = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    assert sum(path.startswith(str(folder)) for path in opened) == min(room, count)


def test_a_split_opens_at_most_a_quarter_of_the_process_limit():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 1 <= shards.room_for_files() <= 1024
    try:
        for soft, room in ((256, 64), (3, 1)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
            assert shards.room_for_files() == room
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("windows", ["packed", "document"])
def test_a_folder_can_be_deleted_while_in_use(tmp_path, windows):
    parts = np.split(random_ids(3000), [1000, 2000])
    folder = make(tmp_path / "x", [{"train": parts, "val": parts[:1]}, {"train": parts}])
    opened = [Windows(folder, split, 16, windows) for split in ("train", "val")]
    expected = [[w[i].tolist() for i in range(len(w))] for w in opened]
    opened = [Windows(folder, split, 16, windows) for split in ("train", "val")]
    shutil.rmtree(folder)
    assert [[w[i].tolist() for i in range(len(w))] for w in opened] == expected


def test_a_deleted_shard_that_was_not_yet_open_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "room_for_files", lambda: 1)
    folder = make(tmp_path / "x", [{"train": np.split(random_ids(2000), [1000])}])
    windows = Windows(folder, "train", 16)
    shutil.rmtree(folder)
    with pytest.raises(DamagedData, match="train-00-000001.* is missing"):
        windows[len(windows) - 1]


def test_opening_reads_no_data(tmp_path, monkeypatch):
    folder = one(tmp_path, random_ids(7000))
    monkeypatch.setattr(shards, "_pread", lambda *_: pytest.fail("read"))
    Windows(folder, "train", 64)


def test_windows_can_be_pickled(tmp_path):
    windows = Windows(one(tmp_path, random_ids(1000)), "train", 16)
    windows[0]
    assert pickle.loads(pickle.dumps(windows))[3].tolist() == windows[3].tolist()


def test_windows_work_in_a_torch_data_loader(tmp_path):
    ids = random_ids(2000)
    windows = Windows(make(tmp_path, [{"train": np.split(ids, [700])}]), "train", 16)
    windows[0]  # a file is open before the processes start
    loader = DataLoader(
        windows,
        batch_size=8,
        num_workers=2,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="fork",  # pickling, which spawn needs, is tested above
    )
    batches = list(loader)
    assert batches[0].dtype == torch.int64
    found = torch.cat(batches)
    assert found.tolist() == [ids[i * 16 : i * 16 + 17].tolist() for i in range(len(windows))]


# Documents


def documents(folder: Path, lengths: list[int], cuts: list[int]) -> tuple[Path, np.ndarray]:
    """Write documents of these lengths, each ending in EOT, in shards cut at `cuts`."""
    ids = random_ids(sum(lengths))
    ends = np.cumsum(lengths)
    ids[ends - 1] = EOT
    begins = ends - lengths
    edges = [0, *cuts, len(ids)]
    parts, starts = [], []
    for low, high in zip(edges, edges[1:], strict=False):
        parts.append(ids[low:high])
        starts.append(begins[(begins >= low) & (begins < high)] - low)
    return make(folder, [{"train": parts}], starts={"train": starts}), ids


CUTS = [[], [1], [13, 14, 40], [100]]
LENGTHS = [[5, 1, 30, 16, 17, 2, 90], [161], [1] * 161, [7] * 23, [10, 6, 11, 6, 128]]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_in_document_windows_each_token_is_a_target_once_after_its_own_document(
    tmp_path, lengths, cuts
):
    folder, ids = documents(tmp_path, lengths, cuts)
    T = 16
    windows = Windows(folder, "train", T, "document")
    targets_seen = []
    ends = np.cumsum(lengths)
    for i in range(len(windows)):
        tokens, targets = windows.pair(i)
        assert tokens.shape == targets.shape == (T,)
        assert tokens[1:].tolist() == windows.window(i)[1:-1].tolist()
        learned = targets != IGNORE_INDEX
        n = int(learned.sum())
        assert n > 0 and learned[:n].all()
        targets_seen += targets[:n].tolist()
        first = len(targets_seen) - n
        document = int(np.searchsorted(ends, first, side="right"))
        assert len(targets_seen) <= ends[document]  # one document only
        begin = int(ends[document] - lengths[document])
        assert (first - begin) % T == 0
        assert tokens[0] == ids[first - 1]  # the separator before the document, at its beginning
        assert n == T or len(targets_seen) == ends[document]
    assert targets_seen == ids.tolist()
    assert len(windows) == sum(-(-n // T) for n in lengths)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_short_documents_share_rows_and_are_numbered(tmp_path, lengths, cuts):
    folder, ids = documents(tmp_path, lengths, cuts)
    T = 16
    rows = Windows(folder, "train", T, "document", document_mask=True)
    begins = np.cumsum(lengths) - lengths
    pieces = [n for length in lengths for n in [T] * (length // T) + [length % T] if n]
    seen: list[int] = []
    for i in range(len(rows)):
        tokens, targets, numbers = rows.pair(i)
        assert tokens.shape == targets.shape == numbers.shape == (T,)
        n = int((targets != IGNORE_INDEX).sum())
        assert (targets[:n] != IGNORE_INDEX).all() and n > 0
        own = np.searchsorted(begins, np.arange(len(seen), len(seen) + n), side="right")
        assert numbers[:n].tolist() == (own - own[0]).tolist()
        assert tokens[0] == ids[len(seen) - 1]  # what stands before its first target
        assert tokens[1:n].tolist() == targets[: n - 1].tolist()
        taken = 0
        while taken < n:  # whole pieces, as many as fit
            taken += pieces.pop(0)
        assert taken == n
        assert not pieces or n + pieces[0] > T
        seen += targets[:n].tolist()
    assert seen == ids.tolist()
    assert rows.window(0).tolist() == [ids[-1], *ids[:16]]


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_windows_number_the_document_of_each_target(tmp_path, lengths, cuts, shift):
    folder, _ = documents(tmp_path, lengths, cuts)
    plain = Windows(folder, "train", 16)
    masked = Windows(folder, "train", 16, document_mask=True)
    of_token = np.repeat(np.arange(len(lengths)), lengths)
    ring = np.concatenate([of_token, of_token + len(lengths)])  # the next round is another one
    assert len(masked) == len(plain)
    for i in range(len(masked)):
        tokens, targets, numbers = masked.pair(i, shift)
        for got, want in zip((tokens, targets), plain.pair(i, shift), strict=True):
            assert got.tolist() == want.tolist()
        expected = ring[16 * i + shift + 1 :][:16]
        changes, found = np.diff(expected) != 0, np.diff(numbers)
        assert numbers[0] == 0
        assert found.min(initial=0) >= 0
        assert ((found > 0) == changes).all()


@pytest.mark.parametrize("options", [("document", False), ("document", True), ("packed", True)])
def test_damaged_document_starts_are_refused(tmp_path, options):
    folder, _ = documents(tmp_path, [50, 50, 50], [])
    flip(folder / "train-00-000000.starts", 8)
    Windows(folder, "train", 16)  # packed windows without a mask do not need them
    with pytest.raises(DamagedData, match=r"\.starts fails its checksum"):
        Windows(folder, "train", 16, *options)


# Mixtures


def test_the_windows_of_a_mixture_are_those_of_its_sources_in_order(tmp_path):
    first, second = random_ids(100, seed=1), random_ids(200, seed=2)
    folder = make(tmp_path, [{"train": [first]}, {"train": [second]}], weights=[0.25, 0.75])
    windows = Windows(folder, "train", 16)
    assert windows.weights == [0.25, 0.75]
    assert windows.n_tokens == 300
    expected = [first[i * 16 : i * 16 + 17].tolist() for i in range(6)]
    expected += [second[i * 16 : i * 16 + 17].tolist() for i in range(12)]
    assert [windows[i].tolist() for i in range(len(windows))] == expected


def test_a_source_may_lack_validation_text_but_not_training_text(tmp_path):
    both = {"train": [random_ids(100)], "val": [random_ids(40, seed=1)]}
    folder = make(tmp_path / "a", [{"train": [random_ids(50)]}, both])
    assert len(Windows(folder, "train", 16).parts) == 2
    val = Windows(folder, "val", 16)
    assert len(val.parts) == 1
    assert val.window(0).tolist() == random_ids(40, seed=1)[:17].tolist()
    folder = make(tmp_path / "b", [{"val": [random_ids(50)]}, both])
    with pytest.raises(ConfigError, match="train split of source 1 of the mixture has 0 tokens"):
        Windows(folder, "train", 16)


def test_a_too_short_source_of_a_mixture_is_named(tmp_path):
    folder = make(tmp_path, [{"train": [random_ids(100)]}, {"train": [random_ids(9)]}])
    with pytest.raises(ConfigError, match="source 2 of the mixture has 9 tokens"):
        Windows(folder, "train", 16)


# Memory


def anonymous_kilobytes() -> tuple[int, int]:
    """Return the (anonymous, total) resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return tuple(int(re.search(rf"{key}:\s+(\d+)", status)[1]) for key in ("RssAnon", "VmRSS"))


@pytest.mark.faults
def test_reading_a_gigabyte_is_fast_and_takes_no_memory(tmp_path):
    writer = ShardWriter(tmp_path, "train", 0, 0, "uint16")
    chunk = random_ids(1 << 22, 50_000)
    for _ in range(128):
        writer.append(chunk, np.array([], dtype=np.int64))
    meta = Meta("x", "t", 50_000, "uint16", "f", ["tail"], [1.0], [writer.close()])
    write_meta(tmp_path, meta)
    windows = Windows(tmp_path, "train", 1024)
    order = np.random.default_rng(0).integers(0, len(windows), 60_000)
    for i in order[:1000]:
        windows.pair(int(i))
    before = anonymous_kilobytes()
    began = time.perf_counter()
    for i in order:
        windows.pair(int(i))
    each = (time.perf_counter() - began) / len(order)
    after = anonymous_kilobytes()
    print(f"{each * 1e6:.0f} us per window, memory {before} -> {after} kB")
    assert after[0] - before[0] < 20_000
    assert after[1] - before[1] < 20_000
    assert each < 1e-3
