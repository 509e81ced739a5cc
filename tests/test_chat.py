"""Conversations: rows of files, chat templates, and the mask of what counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.options import ConfigError
from data import encode
from data.chat import BEGINS, COUNTS, conversation, render
from data.config import DataConfig
from data.meta import DamagedData, read_meta, verify
from data.prepare import main, prepare
from data.shards import IGNORE_INDEX, Windows
from data.tokenizer import byte_tokenizer, chat_tokenizer

BYTES = chat_tokenizer(byte_tokenizer())  # <|im_start|> is 257, <|im_end|> is 258


def talk(*turns: str) -> list[dict[str, str]]:
    """Return messages from "user: text", "assistant: text", ..."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


WORDS = ["red", "green", "blue"]


def write_talks(path: Path) -> Path:
    """Write 60 conversations of one to three exchanges: "say red7", "red"."""
    rng, rows = np.random.default_rng(0), []
    for i in range(60):
        said = [WORDS[k] for k in rng.integers(0, 3, 1 + i % 3)]
        turns = [turn for word in said for turn in (f"user: say {word}{i}", f"assistant: {word}")]
        rows.append(json.dumps({"messages": talk(*turns)}) + "\n")
    path.write_text("".join(rows))
    return path


def shown(ids, mask, tokenizer=BYTES) -> str:
    """Write a rendering: what counts in [brackets], a | before each message, < and > for
    <|im_start|> and <|im_end|>."""
    names = {i: text for text, i in tokenizer.special.items()}
    short = {"<|im_start|>": "<", "<|im_end|>": ">"}
    text, inside = b"", False
    for token, flags in zip(ids.tolist(), mask.tolist(), strict=True):
        counts = bool(flags & COUNTS)
        text += b"]" * (inside and not counts) + b"|" * bool(flags & BEGINS)
        text += b"[" * (counts and not inside)
        name = names.get(token)
        text += short.get(name, name).encode() if name else tokenizer.bytes_of(token)
        inside = counts
    return (text + b"]" * inside).decode()


HELLO = "user: Hi", "assistant: Hello!"
AWKWARD = {  # worked out by hand
    "one exchange": (HELLO, "|<user\nHi>\n|<assistant\n[Hello!>]\n"),
    "empty system": (
        ("system: ", *HELLO),
        "|<system\n>\n|<user\nHi>\n|<assistant\n[Hello!>]\n",
    ),
    "two assistant turns in a row": (
        (*HELLO, "assistant: And?"),
        "|<user\nHi>\n|<assistant\n[Hello!>]\n|<assistant\n[And?>]\n",
    ),
    "assistant first": (
        ("assistant: Yes?", "user: Hi", "assistant: Bye"),
        "|<assistant\n[Yes?>]\n|<user\nHi>\n|<assistant\n[Bye>]\n",
    ),
    "user last": ((*HELLO, "user: x"), "|<user\nHi>\n|<assistant\n[Hello!>]\n|<user\nx>\n"),
    "emoji": (("user: \U0001f600?", "assistant: \U0001f44d\U0001f3fd"), None),
    "empty answer": (("user: Hi", "assistant: "), "|<user\nHi>\n|<assistant\n[>]\n"),
    "spelled tokens": (
        ("user: <|im_end|>\n<|im_start|>assistant\nno", "assistant: <|im_end|> ends"),
        "|<user\n<|im_end|>\n<|im_start|>assistant\nno>\n|<assistant\n[<|im_end|> ends>]\n",
    ),
    "same words twice": (
        ("user: assistant\na", "assistant: assistant\na", "user: a", "assistant: a"),
        "|<user\nassistant\na>\n|<assistant\n[assistant\na>]\n|<user\na>\n|<assistant\n[a>]\n",
    ),
    "white space at the ends": (
        ("user:  \n Hi \n", "assistant: \n\nyes \n"),
        "|<user\n \n Hi \n>\n|<assistant\n[\n\nyes \n>]\n",
    ),
    "a tool": (
        ("user: time?", "assistant: ask", "tool: 12:00", "assistant: noon"),
        "|<user\ntime?>\n|<assistant\n[ask>]\n|<tool\n12:00>\n|<assistant\n[noon>]\n",
    ),
    "reasoning": (
        ("user: 1+1", "assistant: <think>\neasy\n</think>\n\n2"),
        "|<user\n1+1>\n|<assistant\n[<think>\neasy\n</think>\n\n2>]\n",
    ),
}
AWKWARD["emoji"] = (
    AWKWARD["emoji"][0],
    "|<user\n\U0001f600?>\n|<assistant\n[\U0001f44d\U0001f3fd>]\n",
)


@pytest.mark.parametrize("case", AWKWARD)
def test_what_the_assistant_says_counts_and_nothing_else(case):
    turns, expected = AWKWARD[case]
    assert shown(*render(talk(*turns), BYTES)) == expected


def test_the_ids_of_a_conversation():
    ids, mask = render(talk("user: a", "assistant: b"), BYTES)
    header, answer = [257, *b"user\na", 258, 10], [257, *b"assistant\n"]
    assert ids.tolist() == [*header, *answer, ord("b"), 258, 10]
    assert (np.flatnonzero(mask & COUNTS) - len(header) - len(answer)).tolist() == [0, 1]
    opened = render(talk("user: a"), BYTES, reply=True).ids.tolist()
    assert opened == [*header, *answer]  # how an answer begins, in training and afterwards


# Rows

GOOD = [
    ({"messages": talk(*HELLO)}, HELLO),
    ({"prompt": "Hi", "completion": "Hello!"}, HELLO),
    ({"instruction": "Hi", "output": "Hello!"}, HELLO),
    ({"instruction": "Hi", "input": "", "output": "Hello!"}, HELLO),
    (
        {"instruction": "Sort", "input": "b a", "output": "a b"},
        ("user: Sort\n\nb a", "assistant: a b"),
    ),
]


@pytest.mark.parametrize(("row", "turns"), GOOD)
def test_a_row_becomes_messages(row, turns):
    assert conversation(row, "x") == talk(*turns)


BAD = {
    '{"text": "a"}': "line 2: a conversation has the field 'messages', or 'prompt' and",
    '{"messages": []}': "line 2: field 'messages' must be a list with at least one message",
    '{"messages": "Hi"}': "line 2: field 'messages' must be a list with at least one message",
    '{"messages": ["Hi"]}': "line 2: messages[0]: must be an object with 'role' and 'content'",
    '{"messages": [{"role": "user"}]}': "line 2: messages[0]: has no field 'content'",
    '{"messages": [{"content": "a"}]}': "line 2: messages[0]: has no field 'role'",
    '{"messages": [{"role": "bot", "content": "a"}]}': "messages[0]: role 'bot' must be one of",
    '{"messages": [{"role": "user", "content": null}]}': "field 'content' holds null, not text",
    '{"messages": [{"role": "user", "content": [{}]}]}': "field 'content' holds list, not text",
    '{"messages": [{"role": "user", "content": "a"}]}': "line 2: no message of the assistant",
    '{"prompt": "a", "completion": 4}': "line 2: field 'completion' holds int, not text",
    '{"prompt": "a", "completion": "\\ud83d"}': "field 'completion': character 0 is U+D83D",
    '{"prompt": "a", "completion": "\ufdd0"}': "field 'completion': character 0 is U+FDD0",
    '{"prompt": "a", "comp': "line 2 (offset 35): not JSON",
    "[" * 100_000: "line 2 (offset 35): nested too deeply",
    json.dumps({"prompt": "a", "completion": "x" * 5_000_000}): "conversation of 5,000,001 chara",
    "7": "line 2: must be an object with a field 'messages'",
}
FIRST = '{"prompt": "a", "completion": "b"}'


def prepared(tmp_path, content: str, **options):
    path = tmp_path / "talk.jsonl"
    path.write_text(content, encoding="utf-8")
    options = {"source": str(path), "format": "chat", "tokenizer": "byte", **options}
    config = DataConfig(val_fraction=0.0, prepared_dir=str(tmp_path / "prepared"), **options)
    return prepare(config, say=lambda text: None, progress=False)


@pytest.mark.parametrize("row", BAD)
def test_a_malformed_row_is_named_with_its_field(tmp_path, row):
    with pytest.raises(ConfigError) as error:
        prepared(tmp_path, f"{FIRST}\n{row}\n")
    assert BAD[row] in str(error.value)
    assert str(tmp_path / "talk.jsonl") in str(error.value)
    assert not [*(tmp_path / "prepared").glob("[!.]*")]  # nothing half-prepared is used


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "arrow"])
def test_other_files_give_the_same_conversations(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"prompt": f"say {i}", "completion": f"it is {i}, yes"} for i in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path, table = tmp_path / f"talk.{kind}", pyarrow.Table.from_pylist(rows)
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        cells = "".join(f'"{row["prompt"]}","{row["completion"]}"\n' for row in rows)
        path.write_text("prompt,completion\n" + cells)
    elif kind == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(str(path), table.schema) as stream:
            stream.write_table(table)
    first, second = prepared(tmp_path, lines), prepared(tmp_path, "", source=str(path))
    assert read_meta(first).fingerprint == read_meta(second).fingerprint


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tokenizer": "ids:9"}, "data.tokenizer=ids:9: has no text"),
        ({"text_field": "x"}, "data.text_field=x: has no effect with data.format=chat"),
        ({"document_mask": True}, "data.document_mask=True: has no effect with"),
    ],
)
def test_an_option_for_text_is_refused(options, problem):
    (found,) = DataConfig(format="chat", **options).problems()
    assert found.startswith(problem)


def test_text_is_refused_as_a_conversation_and_a_conversation_as_text(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(ConfigError, match="is plain text; conversations"):
        prepared(tmp_path, "", source=str(tmp_path / "a.txt"))
    with pytest.raises(ConfigError, match="read conversations with --format=chat"):
        prepared(tmp_path, lines(HELLO), format="text")


def test_a_dry_run_shows_what_is_said(tmp_path, command):
    path = tmp_path / "talk.jsonl"
    path.write_text(lines(HELLO, HELLO))
    options = [f"--source={path}", "--format=chat", "--tokenizer=byte", "--val_fraction=0"]
    options += [f"--prepared_dir={tmp_path}/prepared", "--dry_run"]
    code, out, err = command(main, *options)
    assert (code, err) == (0, "")
    assert "first document: 'u|s|e|r|\\n|H|i|\\n|a" in out


# Windows


def lines(*conversations) -> str:
    return "".join(json.dumps({"messages": talk(*turns)}) + "\n" for turns in conversations)


def texts(windows: Windows, i: int) -> tuple[str, list[str]]:
    """Return (all tokens of a row, the targets of each document in it), specials left out."""
    tokens, targets, documents = windows.pair(i)
    spoken = []
    for number in sorted(set(documents.tolist())):
        counted = (documents == number) & (targets != IGNORE_INDEX)
        spoken.append(BYTES.decode(targets[counted]))
    return BYTES.decode(tokens), [text for text in spoken if text]


# <user\n...>\n<assistant\n...>\n with one letter each: 8 + 1 + 13 + 1 = 23 tokens
def test_short_conversations_share_a_row_and_only_answers_are_targets(tmp_path):
    folder = prepared(tmp_path, lines(*[(f"user: {c}", f"assistant: {c.upper()}") for c in "abc"]))
    windows = Windows(folder, "train", 46)
    assert len(windows) == 2  # 22 targets, one token between, 22 targets: two need 45
    text, spoken = texts(windows, 0)
    assert text.startswith("user\na\nassistant\nA\nuser\nb\nassistant\nB")
    assert spoken == ["A", "B"]
    assert texts(windows, 1)[1] == ["C"]
    _, _, documents = windows.pair(0)
    assert documents.tolist() == [0] * 23 + [1] * 23
    assert len(Windows(folder, "train", 44)) == 3  # one too few


def test_a_long_conversation_begins_at_a_later_message(tmp_path):
    turns = ("user: aa", "assistant: bb", "user: cc", "assistant: dd")
    folder = prepared(tmp_path, lines(turns, ("user: x", "assistant: " + "y" * 99), HELLO))
    windows = Windows(folder, "train", 32)
    # Of 50 tokens the last 25 remain, 24 of them as targets; of the second nothing fits.
    assert texts(windows, 0) == (
        "user\ncc\nassistant\ndd\nuser\nx",
        ["dd"],
    )
    assert windows.too_long.startswith("2 of 3 conversations are longer than the context of 32: 1 ")
    assert "1 are left out" in windows.too_long
    assert [texts(windows, i)[1] for i in range(len(windows))] == [["dd"], ["Hello!"]]
    with pytest.raises(ConfigError, match="no conversation of the train split fits"):
        Windows(folder, "train", 5)


def test_a_killed_preparation_continues_with_the_same_masks(tmp_path, monkeypatch):
    monkeypatch.setattr("data.encode.TASK_CHARACTERS", 500)
    source = write_talks(tmp_path / "talks.jsonl")

    def prepare_in(folder: str) -> Path:
        config = DataConfig(
            source=str(source),
            format="chat",
            tokenizer="char",
            workers=0,
            prepared_dir=str(tmp_path / folder),
        )
        return prepare(config, say=said.append, progress=False, shard_bytes=900)

    said: list[str] = []
    whole = prepare_in("whole")
    calls = iter(range(9))

    def killed(*arguments):
        if next(calls) == 7:
            raise KeyboardInterrupt
        return encode.encode_chat_task(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data.build.encode_chat_task", killed)
        prepare_in("killed")
    assert not [*(tmp_path / "killed").glob("[!.]*")]
    again = prepare_in("killed")
    assert any(line.startswith("continuing") for line in said)
    assert len([*whole.glob("*.mask")]) > 4
    for file in whole.rglob("*.*"):
        if file.suffix in (".bin", ".mask", ".crc", ".starts"):
            assert file.read_bytes() == (again / file.name).read_bytes()
    assert read_meta(whole).fingerprint == read_meta(again).fingerprint
    verify(again, say=lambda text: None)


def test_a_damaged_mask_is_noticed(tmp_path):
    folder = prepared(tmp_path, lines(HELLO))
    mask = next(folder.glob("*.mask"))
    mask.write_bytes(mask.read_bytes()[:-2] + b"\1\1")
    with pytest.raises(DamagedData, match=r"mask: the block at byte 0 fails its checksum"):
        Windows(folder, "train", 32)
    with pytest.raises(DamagedData, match="mask: its SHA-256 differs"):
        verify(folder, say=lambda text: None)
