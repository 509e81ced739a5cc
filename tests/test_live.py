"""The live page: only what is new is sent, its doors are closed, training does not notice it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from runlib import write_run

from cli.web import HOST, open_listener
from tools.report.__main__ import main
from tools.report.address import kept_secret, open_near
from tools.report.compare import run_table
from tools.report.follow import Folder, changes, tail
from training.logger import append_line
from training.report.history import read_history
from training.report.page import page_data

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[1]
SECRET = "s3cret"


@pytest.fixture
def out(tmp_path) -> Path:
    """A folder with two runs, and things that are not runs."""
    folder = tmp_path / "out"
    write_run(folder / "a", steps=60)
    write_run(folder / "b", steps=100, seed=7)
    (folder / "notes").mkdir()
    (folder / "notes.txt").write_text("not a run")
    return folder


@pytest.fixture
def follow(monkeypatch, out) -> Folder:
    """The folder, looked at whenever it is asked."""
    monkeypatch.setattr("tools.report.follow.OFTEN", -1.0)
    return Folder(out)


def log(run: Path, step: int, **values) -> None:
    append_line(run / "metrics.jsonl", {"step": step, "attempt": 9, "time": 2e9, **values})


# What is sent


def test_of_the_curves_only_new_rows_are_sent(follow, out):
    sent = follow.page(["a"])
    assert changes(sent, follow.page(["a"])) == {}
    log(out / "a", 62, loss=2.5, tokens_per_second=1024.0)
    found = changes(sent, follow.page(["a"]))
    assert set(found) == {"runs", "table", "status", "headlines"}
    training, validation = found["runs"][0]["training"], found["runs"][0]["validation"]
    assert (training["keep"], training["step"], training["loss"]) == (30, [62], [2.5])
    assert (validation["keep"], validation["step"]) == (1, [])
    assert len(json.dumps(found)) < 3000


def test_rows_that_changed_are_sent_again():
    old = {"step": [1, 2, 3], "loss": [3.0, 2.0, 1.0]}
    assert tail(old, {"step": [1, 2, 3], "loss": [3.0, 9.0, 1.0]}) == {
        "keep": 1, "step": [2, 3], "loss": [9.0, 1.0]
    }  # fmt: skip
    assert tail(old, {"step": [1], "loss": [3.0]}) == {"keep": 1, "step": [], "loss": []}
    assert tail({"step": [], "loss": []}, old) == {"keep": 0, **old}


def test_other_runs_come_whole(follow):
    a, both = follow.page(["a"]), follow.page(["a", "b"])
    assert changes({}, a) == {**a, "reset": True}
    assert changes(a, both) == {**both, "reset": True}
    assert [run["name"] for run in both["runs"]] == ["a", "b"] and both["differences"]


def test_the_newest_run_is_shown_if_none_is_chosen(follow, out):
    assert follow.page([])["chosen"] == ["b"]
    assert follow.page(["gone"])["chosen"] == ["b"]
    log(out / "a", 62, loss=2.5)
    assert follow.page([])["chosen"] == ["a"]


def test_a_new_run_appears_and_one_that_is_moved_away_disappears(follow, out):
    def names() -> list[str]:
        return sorted(row["name"] for row in follow.page([])["table"]["rows"])

    assert names() == ["a", "b"]
    write_run(out / "c", steps=2)
    assert names() == ["a", "b", "c"]
    (out / "b").rename(out.parent / "b")
    assert names() == ["a", "c"]
    (out / "a" / "run.json").write_text("{")
    assert names() == ["c"]
    assert Folder(out / "c").page([])["chosen"] == ["c"]  # the folder of one run


def test_a_run_that_is_started_over_or_cut_is_read_anew(follow, out):
    def last() -> tuple[int, int]:
        page = follow.page(["a"])
        return page["runs"][0]["training"]["step"][-1], len(page["runs"][0]["training"]["step"])

    assert last() == (60, 30)
    (out / "a").rename(out.parent / "a.old")  # as --overwrite does
    write_run(out / "a", steps=80)
    assert last() == (80, 40)
    path = out / "a" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:11]))
    assert last() == (20, 10)
    path.rename(out / "old.jsonl")  # another log in its place, longer than what was read
    path.write_bytes(b"".join([lines[0], *lines[5:17]]))
    assert last() == (32, 12)
    log(out / "a", 10, start={})  # a resume from an earlier step
    log(out / "a", 12, loss=1.0)
    assert last() == (12, 2)


def test_a_line_that_is_still_being_written_is_read_when_it_is_complete(follow, out):
    line = json.dumps({"step": 62, "attempt": 1, "time": 2e9, "loss": 2.25})
    follow.page(["a"])
    with (out / "a" / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        assert follow.page(["a"])["runs"][0]["training"]["step"][-1] == 60
        file.write(line[20:] + "\n")
    assert follow.page(["a"])["runs"][0]["training"]["loss"][-1] == 2.25


# The table of runs


def test_the_state_of_a_run(tmp_path):
    def state(lock: str, *entries: dict, steps: int = 100) -> str:
        run = write_run(tmp_path / f"run-{time.monotonic_ns()}", steps=steps)
        (run / ".lock").write_text(lock)
        for entry in entries:
            append_line(run / "metrics.jsonl", {"step": 100, "attempt": 3, **entry})
        return read_history(run).state

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = os.uname().nodename
    dead, alive = (f"process {pid} on {host}\n" for pid in (ended.pid, os.getpid()))
    assert state(alive) == "running"
    assert state(dead) == "failed"  # killed
    assert state(dead, steps=200) == "finished"  # from before runs logged their end
    assert state(dead, {"end": "stopped"}) == "stopped"
    assert state(dead, {"end": "failed: no memory"}) == "failed"
    assert state(alive, {"end": "stopped"}, {"start": {}}) == "running"  # resumed
    elsewhere = "process 1 on elsewhere\n"
    assert state(elsewhere, {"loss": 1.0, "time": time.time()}) == "running"
    assert state(elsewhere, {"loss": 1.0, "time": time.time() - 3600}) == "failed"


def test_bits_per_byte_come_first_if_the_tokenizers_differ(tmp_path):
    """a: loss 2.6758, 1.2879 bits per byte after 100 steps. b: after 50, with smaller tokens."""
    a, b = write_run(tmp_path / "a", steps=100), write_run(tmp_path / "b", steps=0)
    log(b, 50, val_loss=1.5, bits_per_byte=2.25)
    runs = [read_history(b), read_history(a)]
    table = run_table(runs)
    assert table["columns"][:2] == ["validation loss", "bits per byte"]
    assert [(row["name"], row["cells"][0]) for row in table["rows"]] == [
        ("b", ["1.5000", 1.5]), ("a", ["2.6758", pytest.approx(2.6758, abs=1e-4)])
    ]  # fmt: skip
    recipe = (b / "run.json").read_text().replace('"bpe:4096"', '"char"')
    (b / "run.json").write_text(recipe)
    table = run_table([read_history(b), read_history(a)])
    assert table["columns"][:2] == ["bits per byte", "validation loss"]
    assert [(row["name"], row["cells"][0][0]) for row in table["rows"]] == [
        ("a", "1.2879"), ("b", "2.2500")
    ]  # fmt: skip


# Doors


@pytest.fixture
def served(follow):
    """The address of a server in a thread, without its token, and the server."""
    from cli.web import make_server
    from tools.report.server import make_app

    app = make_app(follow, SECRET)
    server = app.state.server = make_server(app)
    listener = open_listener(0)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield f"http://{HOST}:{listener.getsockname()[1]}", server
    server.should_exit = True
    thread.join(10)
    listener.close()


def test_nothing_is_answered_without_the_token_or_under_another_name(served):
    address, _ = served
    for path in ("/", "/events", "/attention?run=a"):
        mark = "&" if "?" in path else "?"
        for token in ("", f"{mark}token=wrong", f"{mark}token=s%C3%A9cret"):
            assert httpx.get(f"{address}{path}{token}").status_code == 403
        evil = {"Host": "evil.example"}
        found = httpx.get(f"{address}{path}{mark}token={SECRET}", headers=evil)
        assert found.status_code == 403
    assert httpx.get(f"{address}/?token={SECRET}").status_code == 200


def test_no_file_is_served(served, follow, out):
    address, _ = served
    assert follow.page([])["chosen"] == ["b"]  # the runs are known
    (out / "a" / "attention.html").write_text("not ours")
    write_run(out.parent / "outside")
    for path in (
        "/a/run.json", "/a/metrics.jsonl", "/notes.txt", "/../outside/run.json",
        "/%2e%2e/outside/run.json", "/.live", "/attention?run=a", "/attention?run=../outside",
        "/attention?run=notes.txt", "/attention",
    ):  # fmt: skip
        mark = "&" if "?" in path else "?"
        assert httpx.get(f"{address}{path}{mark}token={SECRET}").status_code == 404, path


def test_links_out_of_the_folder_are_not_followed(follow, out):
    outside = write_run(out.parent / "outside", steps=200)
    (outside / "attention.html").write_text('<meta name="generator" content="plainGPT">')
    (out / "linked").symlink_to(outside)
    for name in ("metrics.jsonl", "snapshots.jsonl", "run.json"):
        run = write_run(out / f"linked-{name}", steps=2)
        (run / name).unlink()
        (run / name).symlink_to(outside / name)
    (out / "a" / "attention.html").symlink_to(outside / "attention.html")
    page = follow.page(["linked", "linked-metrics.jsonl", "../outside"])
    assert sorted(row["name"] for row in page["table"]["rows"]) == ["a", "b"]
    assert page["chosen"] == ["b"]
    assert follow.attention("a") is None and follow.attention("../outside") is None


def test_the_attention_page_cannot_ask_the_server(served, out):
    address, _ = served
    page = '<meta name="generator" content="plainGPT"><script>1</script>'
    (out / "a" / "attention.html").write_text(page)
    httpx.get(f"{address}/?token={SECRET}")
    with httpx.stream("GET", f"{address}/events?token={SECRET}&run=a") as stream:
        assert next(messages(stream))["attention"] == "a"
    found = httpx.get(f"{address}/attention?token={SECRET}&run=a")
    assert (found.status_code, found.text) == (200, page)
    policy = found.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none'")
    assert "connect-src" not in policy and "allow-same-origin" not in policy


def test_the_page_loads_nothing_and_runs_only_its_own_scripts(served):
    address, _ = served
    page = httpx.get(f"{address}/?token={SECRET}")
    policy = page.headers["content-security-policy"]
    nonce = policy.split("'nonce-")[1].split("'")[0]
    assert page.text.count(f'<script nonce="{nonce}">') == 2
    assert "default-src 'none'" in policy and "@" not in page.text.split("<style>")[0]
    assert SECRET not in page.text


def messages(stream):
    for line in stream.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_stream_follows_the_run_and_says_when_the_server_ends(served, out, monkeypatch):
    monkeypatch.setattr("tools.report.server.LOOK_SECONDS", 0.02)
    address, server = served
    with httpx.stream("GET", f"{address}/events?token={SECRET}&run=a", timeout=20) as stream:
        found = messages(stream)
        first = next(found)
        assert first["reset"] and first["chosen"] == ["a"] and len(first["table"]["rows"]) == 2
        log(out / "a", 62, loss=2.5, tokens_per_second=1.0)
        assert next(found)["runs"][0]["training"]["step"] == [62]
        log(out / "b", 102, loss=2.5, tokens_per_second=1.0)
        assert next(found).keys() == {"table"}  # of a run that is not shown
        server.should_exit = True
        assert next(found) == {}  # the event "end"


def test_a_secret_is_kept_where_only_we_can_read_it(tmp_path):
    path = tmp_path / ".live"
    first = kept_secret(path)
    assert len(first) > 15 and kept_secret(path) == first
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert kept_secret(path) != first  # others could have read it
    path.chmod(0o600)
    (link := tmp_path / "link").symlink_to(path)
    assert kept_secret(link) != first
    path.write_text("short")
    assert kept_secret(path) != "short"
    assert len(kept_secret(tmp_path / "missing" / "file")) > 15


# The commands


def test_the_next_port_is_taken_if_one_is_in_use():
    with open_listener(0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with open_near(port) as other:
            assert other.getsockname()[1] != port


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["a", "b", "--serve"], "2 folders given"),
        (["missing", "--serve"], "missing: no such folder"),
        ([".", "--serve", "--port=70000"], "port=70000"),
    ],
)
def test_mistakes_end_with_2(command, argv, named):
    code, _, err = command(main, *argv)
    assert code == 2 and named in err


def test_without_the_packages_there_is_one_line_before_anything_starts(
    command, tiny_argv, tmp_path, monkeypatch
):
    import train

    monkeypatch.setitem(sys.modules, "starlette", None)
    line = "needs the package starlette: pip install starlette uvicorn\n"
    assert command(main, tmp_path, "--serve") == (2, "", f"error: the live page {line}")
    argv = tiny_argv(tmp_path / "run", live=True)
    assert command(train.main, *argv) == (2, "", f"error: log.live=true {line}")
    assert not (tmp_path / "run").exists()


def address_in(text: str) -> str:
    return next(word for word in text.split() if word.startswith("http://"))


def is_closed(address: str, seconds: float = 30.0) -> bool:
    """Wait until no server answers at this address."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            httpx.get(address, timeout=5)
        except httpx.ConnectError:
            return True
        except httpx.TransportError:  # it is ending
            pass
        time.sleep(0.05)
    return False


def test_live_serves_the_run_until_it_ends_and_changes_no_bit(
    train_tiny, trained, tmp_path, capsys
):
    """The end of the page is the end of the run: its port is closed soon after."""
    assert train_tiny(tmp_path / "out" / "run", live=True, sample_prompt="def ") == 0
    address = address_in(capsys.readouterr().out)
    assert address.endswith("&run=run")
    model = "checkpoints/step-8/model.safetensors"
    assert (tmp_path / "out" / "run" / model).read_bytes() == (trained / model).read_bytes()
    assert is_closed(address)


def test_a_live_page_that_does_not_start_or_dies_stops_nothing(
    train_tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert train_tiny(tmp_path / "run", live=True) == 0
    assert "note: the live page did not start (); training continues" in capsys.readouterr().out
    monkeypatch.setattr("sys.executable", "/not/there")
    assert train_tiny(tmp_path / "other", live=True) == 0
    assert "/not/there" in capsys.readouterr().out


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_when_training_is_killed(tmp_path, out, how):
    """A process that holds the pipe stands for the training."""
    code = (
        "import time\nfrom pathlib import Path\nfrom training.live import LivePage\n"
        f"page = LivePage(Path({str(out / 'a')!r}), lambda text: print(text, flush=True))\n"
        "time.sleep(60)\n"
    )
    training = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    address = address_in(training.stdout.readline().decode())
    assert httpx.get(address).status_code == 200
    training.send_signal(how)
    training.wait()
    training.stdout.close()
    assert is_closed(address)


# All runs of a folder in one file


def test_all_runs_in_a_folder_are_compared(command, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, _ = command(main, "out")
    assert code == 0 and text.startswith("report.html: 2 runs, ")
    code, text, _ = command(
        main, *sorted(str(path.relative_to(tmp_path)) for path in out.iterdir())
    )
    lines = text.splitlines()
    assert code == 0 and lines[-1].startswith("report.html: 2 runs, ")
    assert lines[0].startswith("skipped: out/notes is not the folder of a run")
    assert len(lines) == 3
    code, _, err = command(main, "out/notes", "out/notes.txt")
    assert code == 2 and len(err.splitlines()) == 2


def test_the_end_of_a_run_is_logged_with_its_reason(train_tiny, tmp_path, monkeypatch):
    assert train_tiny(tmp_path / "run") == 0
    history = read_history(tmp_path / "run")
    assert (history.state, history.ended) == ("finished", "finished")

    def fail(*args, **options):
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr("training.run.train_step", fail)
    with pytest.raises(RuntimeError):
        train_tiny(tmp_path / "broken", report=True)
    history = read_history(tmp_path / "broken")
    assert (history.state, history.ended) == ("failed", "failed: no memory")
    assert page_data(history)["status"].startswith("failed: no memory, step 0 of 8 (0%), ")
    assert (tmp_path / "broken" / "report.html").exists()
