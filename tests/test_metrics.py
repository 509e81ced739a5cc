"""Reading metrics.jsonl and snapshots.jsonl: attempts, and lines that a kill or a disk damaged."""

from __future__ import annotations

import json
import math

import pytest

from training.metrics import next_attempt, read_lines, read_metrics


@pytest.mark.parametrize(
    "content, wanted",
    [
        (None, 1),
        (b"", 1),
        (b'{"step": 1, "attempt": 1}\n', 2),
        (b'{"step": 1, "attempt": 4}\n{"step": 2, "att', 5),  # torn
        (b'{"step": 1, "attempt": 4}\n\xff\xfe\n[]\n7\n{"attempt": "x"}\n', 5),
        (b"no JSON at all", 1),
        (b'{"step": 1, "attempt": 4}\n' + b"\0" * 100_000, 5),
        (b'{"step": 1, "attempt": 4}\n' + b"\0" * 3_000_000 + b"\n", 5),
        (b'{"step": 1, "attempt": 4}\n' + b"[" * 200_000, 5),
        (b'{"step": 1, "attempt": 4}\n' + b'{"step": 2, "attempt": "x"}\n' * 9_000, 5),
        (b'{"step": 1, "attempt": 4, "note": "' + b"x" * 70_000 + b'"}\n', 5),  # over two blocks
    ],
)
def test_the_next_attempt(tmp_path, content, wanted):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    assert next_attempt(tmp_path / "metrics.jsonl") == wanted


DAMAGED = [
    b"\0" * 1000,
    b"\xff\xfe",
    b"7",
    b"null",
    b"[]",
    b'{"loss": 1.0}',
    b"[" * 100_000,
    b'{"step": ' + b"9" * 5000 + b"}",
    *(
        json.dumps({"step": 5, "attempt": 1, **wrong}).encode()
        for wrong in [
            *({"step": step} for step in ("5", None, 5.5, True, [], -1, 1 << 70)),
            *({"attempt": attempt} for attempt in ("1", None, [], 1.5)),
            *({"time": time, "note": "n"} for time in ("now", None, 1e300, math.nan)),
            *({"loss": loss} for loss in ("3.0", [], {}, True, math.nan, math.inf, 10**400)),
            *({"val_loss": loss, "perplexity": 1.0} for loss in ("3.0", [], math.nan)),
            *({"loss": 1.0, name: "x"} for name in ("lr", "grad_norm", "mfu", "tokens")),
            *({"loss": 1.0, name: {}} for name in ("data_wait", "tokens_per_second")),
            {"val_loss": 1.0, "bits_per_byte": []},
            *({"fit": fit} for fit in ("9", None, 1.5)),
            *({"note": note} for note in (7, None, [])),
            *({"start": start} for start in (7, {"command": 7}, {"data": 7}, {"environment": []})),
            *({"sample": text} for text in (7, None)),
            *({"passage": passage} for passage in (7, [7], [["a", 1.0]], [["a", "b", []]])),
            *({"passage": [["a", 1.0, pairs]]} for pairs in ([7], [["a"]], [[1, 0.5]], 7)),
        ]
    ),
]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: repr(line[:60]))
def test_a_damaged_line_is_skipped(tmp_path, line):
    good = [b'{"step": 4, "loss": 4.0}', b'{"step": 6, "loss": null, "new": "x"}']
    (tmp_path / "m").write_bytes(b"\n".join([good[0], line, good[1]]))
    assert [entry["step"] for entry in read_metrics(tmp_path / "m")] == [4, 6]
    assert [entry["step"] for entry in read_lines(tmp_path / "m")] == [4, 6]


def test_damaged_logs_cost_neither_the_run_nor_its_report(train_tiny, tmp_path, capsys):
    folder, options = tmp_path / "run", {"report": True, "eval_interval": 4}
    assert train_tiny(folder, max_steps=4, **options) == 0
    for name in ("metrics.jsonl", "snapshots.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b"\n".join(DAMAGED) + b"\n" + b"\0" * 100_000)
    capsys.readouterr()
    assert train_tiny(folder, max_steps=8, resume="changed", **options) == 0
    assert "report.html was not" not in capsys.readouterr().out
    found = read_metrics(folder / "metrics.jsonl")
    assert {entry["step"]: entry["attempt"] for entry in found} == {1: 1, 2: 1, 4: 1, 6: 2, 8: 2}
    assert [entry["step"] for entry in read_lines(folder / "snapshots.jsonl")] == [4, 8]


def test_the_highest_attempt_of_a_step_counts_and_a_torn_line_is_skipped(tmp_path):
    lines = [
        {"step": 1, "attempt": 1, "loss": 5.0},
        {"step": 2, "attempt": 1, "loss": 4.0},
        {"step": 2, "attempt": 1, "val_loss": 4.4},
        {"step": 2, "attempt": 2, "loss": 3.9},
        {"step": 3, "attempt": 2, "loss": 3.1},
        {"step": 3, "attempt": 2, "loss": 3.0},  # the later line counts
    ]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo'
    (tmp_path / "m").write_text(text)
    found = read_metrics(tmp_path / "m")
    assert [(e["step"], e.get("loss"), e.get("val_loss")) for e in found] == [
        (1, 5.0, None),
        (2, 3.9, None),
        (2, None, 4.4),
        (3, 3.0, None),
    ]
