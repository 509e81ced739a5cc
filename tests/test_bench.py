"""The benchmarks at toy size: their arithmetic by hand, their peer played by a stand-in."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import pickle
import re
import signal
import statistics
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from peerlib import write_peer

from cli.options import ConfigError
from model.config import ModelConfig
from model.fast import FASTER
from model.gpt import GPT
from tools.bench import __main__ as bench
from tools.bench import cost as bench_cost
from tools.bench import data as bench_data
from tools.bench import gpu as bench_gpu
from tools.bench import peer as bench_peer
from tools.bench import runs as bench_runs
from tools.bench import step as bench_step
from tools.bench import train as bench_train
from tools.bench.__main__ import MODES, BenchOptions, mode_function
from tools.bench.loss import Outcome, show_loss, text_loss
from tools.bench.table import show
from training.config import load_config


@pytest.fixture
def peer(tmp_path) -> Path:
    return write_peer(tmp_path / "nanoGPT")


@pytest.fixture
def in_process(monkeypatch):
    """What would run in a process of its own runs in this one."""

    @contextlib.contextmanager
    def served(make, *arguments):
        yield make(*arguments)

    monkeypatch.setattr(bench_train, "served", served)
    monkeypatch.setattr(bench_cost, "in_fresh_process", lambda function, *args: function(*args))


def figures(line: str) -> list[float]:
    """The numbers at the end of a line of a table."""
    found = []
    for word in reversed(line.split()):
        try:
            found.insert(0, float(word))
        except ValueError:
            break
    return found


# Options


def test_every_mode_reads_options_and_every_option_has_a_reader():
    reads = {mode: set(inspect.signature(mode_function(mode)).parameters) for mode in MODES}
    names = {field.name for field in fields(BenchOptions)}
    assert set().union(*reads.values()) == names
    assert all(reads.values())
    documented = bench.__doc__
    assert all(f"\n    {mode} " in documented for mode in MODES)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nothing"], "MODE=nothing: must be one of data, compress"),
        (["compress", "--seeds=5"], "--seeds: not an option of compress; it has: --source, "),
        (["train", "--source=x", "--tries=2"], "--source, --tries: not an option of train"),
        (["loss", "--seeds=0"], "seeds=0: must be at least 1"),
        (["loss", "--peer=/nowhere"], "peer=/nowhere: not a nanoGPT folder"),
        (["train", "--peer=/nowhere"], "peer=/nowhere: not a nanoGPT folder"),
        (["data", "--tokenizer=bpe:1"], "data.tokenizer=bpe:1: bpe:N needs"),
        (["gpu", "--device=cpu"], "device=cpu: far too slow at these sizes; add --quick=true"),
    ],
)
def test_mistakes_are_told(argv, said, command):
    code, _, err = command(bench.main, *argv)
    assert code == 2
    assert err.startswith("error: " + said) or said in err
    assert len(err.splitlines()) <= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(command):
    code, out, err = command(bench.main, "gpu")
    assert (code, out) == (2, "")
    assert err.startswith("error: device=cuda: there is no CUDA GPU")
    assert len(err.splitlines()) == 1


def test_a_table_is_aligned(capsys):
    show(["what", "s"], [["a", "1.00"], ["longer", "12.00"]], "note")
    assert capsys.readouterr().out.splitlines() == [
        "what        s",
        "a        1.00",
        "longer  12.00",
        "note",
    ]


# Arithmetic


def test_flops_of_nanogpts_sizes_by_hand():
    # 6 (12 L C^2 + V C) + 12 L C T a token, times B T tokens
    token = 6 * (12 * 4 * 128**2 + 65 * 128) + 12 * 4 * 128 * 64
    assert bench_train.flops_of_step(bench_train.SIZES["1"]) == token * 12 * 64
    token = 6 * (12 * 12 * 768**2 + 50304 * 768) + 12 * 12 * 768 * 256
    assert bench_train.flops_of_step(bench_train.SIZES["3"]) == token * 4 * 256


def test_the_models_are_nanogpts():
    """Without positions: its own count, printed by its examples."""
    counts = [GPT(bench_train.SIZES[i].shape).parameter_count() for i in ("1", "2")]
    assert counts[0] - 64 * 128 == 4 * (12 * 128**2 + 2 * 128) + 128 + 65 * 128  # "0.80M"
    assert counts[1] - 256 * 384 == 6 * (12 * 384**2 + 2 * 384) + 384 + 65 * 384  # "10.65M"


def test_shares_and_ratios_by_hand():
    assert bench_step.share_of_peak(100.0, 2.0, 200.0) == 0.25
    # Twice the FLOPs in thrice the time; four times in four times.
    assert bench_cost.time_over_flops([(1.0, 5.0), (3.0, 10.0), (4.0, 20.0)]) == [1.0, 1.5, 1.0]


def test_alternating_drops_the_warm_up_and_takes_medians():
    called = []

    def work(name, values):
        values = iter(values)
        return lambda: called.append(name) or next(values)

    works = {"a": work("a", [99, 1, 5, 2]), "b": work("b", [99, 7, 7, 8])}
    assert bench_step.alternate(works, rounds=3, warmup=1) == {"a": 2, "b": 7}
    assert called == ["a", "b"] * 4


def test_text_loss_is_the_mean_over_every_target():
    """Targets 1 ... n - 1, those of the short last window too; a model whose loss is the target."""
    ids = list(range(300))
    seen = []

    def loss(tokens, targets):
        assert torch.equal(targets, tokens + 1)
        seen.append(tokens.shape)
        return targets.double().mean()

    assert text_loss(loss, ids) == pytest.approx(sum(range(1, 300)) / 299)
    assert seen == [(4, 64), (1, 43)]
    assert text_loss(loss, ids[:129]) == pytest.approx(64.5)
    assert seen[2:] == [(2, 64)]


def test_the_table_of_losses_by_hand(capsys):
    rows = [(10.0, 1.9, 60.0, 2.0), (12.0, 1.7, 50.0, 2.2), (30.0, 1.8, 48.0, 2.1)]
    show_loss("x.py", [(Outcome(a, b), Outcome(c, d)) for a, b, c, d in rows])
    lines = capsys.readouterr().out.splitlines()
    assert figures(lines[1]) == [1, 10.0, 1.9, 60.0, 2.0]
    assert lines[4].startswith("median")
    assert figures(lines[4]) == [12.0, 1.8, 50.0, 2.1]
    assert lines[-1].endswith("0.240")  # 12 / 50
    show_loss("x.py", [(Outcome(10.0, 1.9), None)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["seed", "s", "loss"]
    assert "nanoGPT" not in "".join(lines)


def test_start_and_processes_by_hand(capsys):
    bench_runs.show_start("x.py", {"torch": 1.0, "step": 2.25, "help": 0.2})
    out = capsys.readouterr().out
    assert [figures(line)[-2:] for line in out.splitlines()[1:4]] == [
        [1, 1],
        [2.25, 2.25],
        [0.2, 0.2],
    ]
    assert "1.25 s later" in out
    bench_runs.show_processes(2, {1: 1000.0, 2: 930.0})
    lines = capsys.readouterr().out.splitlines()
    assert figures(lines[1])[-2:] == [1000, 1]
    assert figures(lines[2]) == [930, 0.93]


# The modes


def test_loss_beside_a_peer(peer, tiny_folder, tmp_path, command):
    config = tmp_path / "tiny.py"
    config.write_text(
        "from dataclasses import replace\n"
        "from config.debug import config as base\n"
        "config = replace(base,\n"
        "    model=replace(base.model, n_layers=1, d_model=16),\n"
        "    data=replace(base.data, tokenizer='char', split='tail', val_fraction=0.2,\n"
        f"        workers=0, prepared_dir={str(tmp_path / 'prepared')!r}),\n"
        "    run=replace(base.run, max_steps=2, eval_windows=4, dtype='float32', device='cpu'),\n"
        "    log=replace(base.log, report=False))\n"
    )
    source = tiny_folder / "text.txt"
    before = sorted(peer.rglob("*"))
    argv = ["loss", f"--config={config}", f"--source={source}", f"--peer={peer}", "--seeds=1"]
    code, out, err = command(bench.main, *argv)
    assert code == 0, err
    assert sorted(peer.rglob("*")) == before  # a copy of it has worked
    table = out[out.index("seed") :].splitlines()
    _, _, ours, _, theirs = figures(table[1])
    text = source.read_text()
    first = int(0.8 * len(text))
    train, val = text[:first], text[first:]
    expected = -statistics.mean(math.log(train.count(c) / len(train)) for c in val[1:])
    assert theirs == pytest.approx(expected, abs=1e-4)
    assert ours == pytest.approx(math.log(len(set(text)) + 1), abs=0.5)  # 2 steps from guessing


def test_the_peers_data_is_as_its_own_script_writes_it(peer, tmp_path):
    import numpy as np

    copy = bench_peer.prepared_copy(peer, tmp_path / "copy", "banana", "ab\n")
    data = copy / "data/shakespeare_char"
    assert np.fromfile(data / "train.bin", dtype=np.uint16).tolist() == [2, 1, 3, 1, 3, 1]
    assert np.fromfile(data / "val.bin", dtype=np.uint16).tolist() == [1, 2, 0]
    assert pickle.loads((data / "meta.pkl").read_bytes()) == {"vocab_size": 4}


def test_train_beside_a_peer(peer, in_process, command):
    code, out, err = command(bench.main, "train", "--quick=true", f"--peer={peer}")
    assert code == 0, err
    before, _, _ = out.splitlines()[1].partition(" float32 ")  # too narrow for anything else
    ms, share, theirs, their_share, ratio = figures(before)[-5:]
    assert ms > 0 and theirs > 0
    assert 0 <= share <= 1 and 0 <= their_share <= 1
    # Times are printed to 0.1 ms, the ratio to 0.01.
    assert (ms - 0.05) / (theirs + 0.05) - 0.006 <= ratio
    assert ratio <= (ms + 0.05) / max(1e-9, theirs - 0.05) + 0.006
    alone = command(bench.main, "train", "--quick=true")[1]
    assert "nanoGPT" not in alone.splitlines()[0]


def test_a_training_row_by_hand():
    # 1e9 FLOPs in 10 ms are 100 GFLOP/s of 200; in 8 ms they are 125.
    times = {"ours": 0.010, "peer": 0.008, "auto": 0.006}
    row = bench_train.train_row("a", "bfloat16", times, 1e9, 200e9)
    assert row == ["a", "10.0", "0.50", "8.0", "0.62", "1.25", "bfloat16", "6.0", "0.75"]
    del times["auto"]
    row = bench_train.train_row("a", "float32", times, 1e9, 200e9)
    assert row == ["a", "10.0", "0.50", "8.0", "0.62", "1.25", "float32", "10.0", "1.25"]
    alone = bench_train.train_row("a", "float32", {"ours": 0.010}, 1e9, 200e9)
    assert alone == ["a", "10.0", "0.50", "float32", "10.0"]


@pytest.mark.parametrize("auto", ["float32", "bfloat16"])
def test_what_runs_take_by_default_is_measured_too(in_process, monkeypatch, auto):
    made = []

    def our_step(one, dtype):
        made.append(dtype)
        return lambda: 0.25

    monkeypatch.setattr(bench_train, "our_step", our_step)
    seconds, _, _ = bench_train.measure(bench_train.TOY, None, 2, 16, auto)
    assert made == list(dict.fromkeys(["float32", auto]))
    assert seconds == dict.fromkeys(["ours", "auto"][: len(made)], 0.25)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_is_that_of_the_work_alone_in_a_process_of_its_own():
    with bench_step.served(peaks, 100_000_000) as call:
        assert call() == pytest.approx(100e6, rel=0.1)
        assert call() == pytest.approx(200e6, rel=0.1)
        with pytest.raises(ValueError, match="no third"):
            call()
    with pytest.raises(OSError, match="closed"):
        call()


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (partial(os._exit, 3), "exit code 3"),
        (partial(signal.raise_signal, signal.SIGKILL), "killed by signal 9: out of memory?"),
    ],
)
def test_a_measured_process_that_ends_is_said(end, how):
    with bench_step.served(partial, end) as call:
        for _ in range(2):
            with pytest.raises(ConfigError, match=re.escape(f"has ended ({how})")):
                call()


def peaks(size: int):
    """Gives the peak of work of 1, then of 2 times `size` bytes; then it fails. Three times as much
    was used and freed before, half as much after."""
    sizes = iter([size, 2 * size])

    def peak() -> int:
        n = next(sizes, 0)
        if n == 0:
            raise ValueError("no third")
        bytearray(b"1") * (3 * n)

        def work():
            first = bytearray(b"1") * n
            del first
            return bytearray(b"1") * (n // 2)

        return bench_step.peak_memory(work)

    return peak


def test_a_fresh_process_is_one_that_is_served_once(monkeypatch):
    asked = []

    @contextlib.contextmanager
    def served(make, *arguments):
        asked.append(arguments)
        yield make(*arguments)

    monkeypatch.setattr(bench_step, "served", served)
    assert bench_step.in_fresh_process(math.hypot, 3.0, 4.0) == 5.0
    assert asked == [(math.hypot, 3.0, 4.0)]


def test_memory_ours_against_plain(in_process, command):
    code, out, err = command(bench.main, "memory", "--quick=true")
    assert code == 0, err
    ours, plain = (figures(line)[-2] for line in out.splitlines()[1:3])
    assert f"ours / plain: {ours / plain:.1f}"[:-1] in out


def test_memory_is_told_with_the_time_it_costs(monkeypatch, command):
    costs = iter([(3_000_000, 1.2), (4_000_000, 2.0)])
    monkeypatch.setattr(bench_cost, "in_fresh_process", lambda *_: next(costs))
    _, out, _ = command(bench.main, "memory", "--quick=true")
    assert [figures(line)[-2:] for line in out.splitlines()[1:3]] == [[3.0, 1.2], [4.0, 2.0]]
    assert "ours / plain: 0.75 of the memory, 0.60 of the time" in out


def test_the_plain_loss_is_the_same_number():
    shape = ModelConfig(n_layers=1, n_heads=2, d_model=16, context_length=8).resolved(40)
    models = [GPT(shape), bench_cost.PlainLossGPT(shape)]
    for model in models:
        model.init_weights(3)
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        a, b = (float(model(tokens, tokens + 1, reduction="sum")) for model in models)
    assert a == pytest.approx(b, rel=1e-5)


def test_kernels_are_left_out_one_at_a_time(command, monkeypatch):
    plain = []

    def work(setup, batches, step):
        kinds = {type(module) for module in setup.model.modules()}
        plain.append([kind for kind in FASTER if kind in kinds])

    monkeypatch.setattr(bench_cost, "train_step", work)
    code, out, err = command(bench.main, "kernels", "--quick=true")
    assert code == 0, err
    assert plain == [[], *([kind] for kind in FASTER)] * 2
    assert [line.split()[-2] for line in out.splitlines()[1:3]] == [k.__name__ for k in FASTER]


def test_growth_has_a_row_for_each_length_and_width(in_process, command):
    code, out, err = command(bench.main, "growth", "--quick=true")
    assert code == 0, err
    names = [line.split("  ")[0] for line in out.splitlines()[1:5]]
    assert names == ["T 16", "T 32", "width 16", "width 32"]
    ratios = [figures(line)[-2] for line in out.splitlines()[1:5]]
    assert ratios[0] == ratios[2] == 1


def test_start_waits_for_a_line_and_no_longer():
    code = "print('step 1/1', flush=True)\nimport time\ntime.sleep(60)"
    assert bench_runs.run_seconds(["-c", code], until="step 1/") < 30
    with pytest.raises(ValueError, match="ended with code 0: no line 'step 1/'"):
        bench_runs.run_seconds(["-c", "print('another')"], until="step 1/")
    with pytest.raises(ValueError, match="ended with code 3: last words"):
        bench_runs.run_seconds(
            ["-c", "import sys; print('x\\nlast words', file=sys.stderr); sys.exit(3)"]
        )


def test_processes_run_alike_but_for_ranks(tmp_path, monkeypatch, tiny_folder, command):
    config = tmp_path / "tiny.py"
    config.write_text(
        "from training.config import Config, DataConfig\n"
        "config = Config(data=DataConfig(source="
        f"{str(tiny_folder / 'text.txt')!r}, tokenizer='byte', workers=0,\n"
        f"    prepared_dir={str(tmp_path / 'prepared')!r}))\n"
    )
    ran = []

    def run_seconds(argv, **options):
        first = argv.index(bench_runs.TRAIN)
        run = load_config(argv[first + 1 :])
        world = next((int(a[-1]) for a in argv[:first] if a.startswith("--nproc")), 1)
        ran.append((world, run.run.threads, run.parallel.reduction, run.run.max_steps))
        rates = [1.0, 300.0 / world, 500.0 / world]  # the first is warm-up
        lines = [json.dumps({"step": i + 1, "tokens_per_second": r}) for i, r in enumerate(rates)]
        Path(run.run.out_dir, "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return 1.0

    monkeypatch.setattr(bench_runs, "run_seconds", run_seconds)
    argv = ["processes", f"--config={config}", "--cores=4", "--tries=2", "--steps=30"]
    code, out, err = command(bench.main, *argv)
    assert code == 0, err
    assert ran == [(1, 4, "auto", 30), (4, 1, "exact", 30)] * 2
    assert figures(out.splitlines()[-3])[-2:] == [400, 1]
    assert figures(out.splitlines()[-2]) == [100, 0.25]


# The GPU's, on a CPU


def test_the_gpu_table_at_toy_size(command):
    code, out, err = command(bench.main, "gpu", "--device=cpu", "--quick=true")
    assert code == 0, err
    rows = {line.split("  ")[0]: line for line in out.splitlines()[1:]}
    for backend in ("reference", "tiled", "sdpa", "sdpa MATH"):
        for dtype in ("float32", "bfloat16"):
            assert "ok 4/4" in rows[f"attention {backend}, {dtype}"]
    assert "no kernel" in rows["attention sdpa CUDNN, float32"]
    assert "TFLOP/s" in rows["matrix product, bfloat16"]
    for row in ("decoding toy, float32", "training toy, 2 x 32, bfloat16"):
        measured, limit = map(float, re.findall(r"(\S+) tokens/s", rows[row]))
        assert float(rows[row].split()[-2]) == pytest.approx(measured / limit, abs=0.01)


def wrong(q, k, v, *, causal):
    """Right forward and a wrong gradient of k."""
    out, weights = bench_gpu.ATTENTION["sdpa"](q, k, v, causal=causal)
    return out + 0.01 * (k - k.detach()).sum(), weights


def test_a_wrong_gradient_is_found(command, monkeypatch):
    monkeypatch.setitem(bench_gpu.ATTENTION, "tiled", wrong)
    code, out, _ = command(bench.main, "gpu", "--device=cpu", "--quick=true")
    assert code == 1
    assert [line.split(",")[0] for line in out.splitlines() if "WRONG" in line] == [
        "attention tiled"
    ] * 2


def test_what_is_not_a_number_is_wrong():
    def attend(q, k, v, *, causal):
        return (q + k.mean() + v.mean()) * float("nan"), None

    chosen, cpu = contextlib.nullcontext, torch.device("cpu")
    errors = list(bench_gpu.attention_errors(attend, chosen, cpu, torch.float32))
    assert errors == [float("inf")] * len(bench_gpu.CASES)


def test_verdicts_by_hand():
    assert bench_gpu.attention_row("x", [0.01, 0.02], 0.03)[1:4] == ["2.0e-02", "3e-02", "ok 2/4"]
    assert bench_gpu.attention_row("x", [0.01, 0.04], 0.03)[3] == "WRONG"
    assert bench_gpu.attention_row("x", [float("inf")], 0.03)[3] == "WRONG"
    assert bench_gpu.attention_row("x", [], 0.03)[3] == "no kernel"


def test_the_limit_of_decoding_by_hand(monkeypatch):
    # 1,000 bytes read and written in a quarter of a second at best.
    times = iter([0.5, 0.25, 0.5])
    monkeypatch.setattr(bench_gpu, "seconds_of", lambda work, device: next(times))
    assert bench_gpu.measured_bandwidth(torch.device("cpu"), 1000, tries=3) == 8000
    shape = ModelConfig(n_layers=3, n_heads=2, d_model=8, d_mlp=16, mlp="gelu").resolved(10)
    # q, k, v, o of 8 x 8, up and down of 8 x 16, the head of 8 x 10, in float32
    assert bench_gpu.bytes_of_a_token(GPT(shape)) == 4 * (3 * (4 * 64 + 2 * 128) + 80)


def test_a_batch_that_does_not_fit_is_halved(monkeypatch):
    tried = []

    def seconds(shape, batch, device):
        tried.append(batch)
        if batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.5, 1000  # 4 windows of 32 in half a second: 256 tokens/s of 1,000 FLOPs

    monkeypatch.setattr(bench_gpu, "seconds_of_training", seconds)
    shape = ModelConfig(context_length=32, vocab_size=8)
    cpu = torch.device("cpu")
    row = bench_gpu.train_row("m", shape, (16, 8, 4, 2), cpu, peak=1e6)
    assert tried == [16, 8, 4]
    assert row[:4] == ["training m, 4 x 32, bfloat16", "256 tokens/s", "1000 tokens/s", "0.26"]
    assert bench_gpu.train_row("m", shape, (16, 8), cpu, peak=1e6)[1] == "does not fit"


def test_the_speed_of_preparation_leaves_out_what_is_done_once():
    """2 copies of 10 MB in 5 s, 6 in 9 s: 40 MB more in 4 s are 10 MB/s."""
    assert bench_data.marginal_speed(10.0, (2, 5.0), (6, 9.0)) == pytest.approx(10.0)
