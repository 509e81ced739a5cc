"""The live page as a person uses it, in headless Chromium: watch, compare, sort, come back.

Run with -m browser; needs Debian's chromium and chromium-driver, and the package selenium.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browserlib import DESKTOP, PHONE, errors, show
from runlib import write_run

from training.logger import append_line
from training.report.history import read_history
from training.report.page import write_report

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[1]
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture
def out(tmp_path) -> Path:
    """A folder with two runs of different length; b has another tokenizer."""
    folder = tmp_path / "out"
    write_run(folder / "a", steps=60)
    write_run(folder / "b", steps=100, seed=7)
    change(folder / "b" / "run.json", '"bpe:4096"', '"byte"')
    return folder


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def serve(out, browser) -> Iterator[Callable[..., tuple[str, subprocess.Popen]]]:
    """serve(port): start `python -m tools.report out --serve`; its address and its process."""
    started = []

    def start(port: int = 0) -> tuple[str, subprocess.Popen]:
        argv = [sys.executable, "-m", "tools.report", str(out), "--serve", f"--port={port}"]
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process.stdout.readline().split()[-1], process

    yield start
    browser.get("about:blank")  # else the page tries to reconnect while the next test runs
    errors(browser)
    for process in started:
        process.send_signal(signal.SIGINT)
        process.wait(20)
        process.stdout.close()


def wait(browser, condition: str, seconds: float = 30) -> None:
    """Wait until a JavaScript expression is true."""
    deadline = time.monotonic() + seconds
    while not browser.execute_script(f"return Boolean({condition})"):
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


def opened(browser, address: str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
    show(browser, address, size, dark)
    wait(browser, "document.querySelector('.loss path') && document.querySelector('.runs')")


def log(run: Path, step: int, **values) -> None:
    entry = {"step": step, "attempt": 1, "time": time.time(), **values}
    append_line(run / "metrics.jsonl", entry)


def shown(browser) -> list[str]:
    """The first column of the table of runs."""
    rows = "[...document.querySelectorAll('.runs tr:not(:first-child) td:first-child')]"
    return browser.execute_script(f"return {rows}.map((cell) => cell.textContent)")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_run_grows_while_it_is_watched(browser, serve, out, size, dark):
    opened(browser, f"{serve()[0]}&run=a", size, dark)
    assert browser.execute_script("return data.runs[0].training.step.length") == 30
    browser.execute_script("setView({ zoom: [10, 50] }); window.stays = 1")
    for step in (62, 64):
        log(out / "a", step, loss=2.5, tokens_per_second=2048.0)
        wait(browser, f"data.runs[0].training.step.at(-1) === {step}")
    wait(browser, "document.getElementById('headlines').textContent.startsWith('4.0')")
    text = browser.find_element("tag name", "body").text
    assert "step 64 of 200 (32%)" in text and "2.05k" in text
    kept = browser.execute_script("return [window.stays, view.zoom, document.title]")
    assert kept[:2] == [1, [10, 50]] and kept[2].startswith("a: failed, step 64 of 200")
    log(out / "a", 64, end="stopped")
    wait(browser, "document.querySelector('.state.stopped')")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")
    assert errors(browser) == []


def test_on_a_phone_no_cell_of_the_table_is_cut_off(browser, serve):
    opened(browser, serve()[0], PHONE)
    cells = browser.execute_script(
        "return [...document.querySelectorAll('.runs td')].map((cell) => {"
        "  const box = cell.getBoundingClientRect(); return [box.left, box.right]; })"
    )
    assert len(cells) == 22 and all(0 <= left < right <= PHONE[0] for left, right in cells)
    assert errors(browser) == []


def test_runs_appear_and_are_compared_in_bits_per_byte(browser, serve, out):
    opened(browser, f"{serve()[0]}&run=a")
    assert shown(browser) == ["b", "a"]  # 1.29 bits per byte before 1.97
    heads = "return [...document.querySelectorAll('.runs th')].map((th) => th.innerText.trim())"
    assert browser.execute_script(heads)[2].startswith("bits per byte")
    boxes = browser.find_elements("css selector", ".runs input")
    boxes[0].click()
    wait(browser, "data.runs.length === 2")
    assert browser.execute_script("return data.runs.map((run) => run.name)") == ["a", "b"]
    assert browser.execute_script("return view.unit") == "bits"
    text = browser.find_element("id", "differences").text
    assert "run.seed 1 7" in text and "data.tokenizer bpe:4096 byte" in text
    assert "run.max_steps" not in text
    assert not browser.find_element("id", "config").is_displayed()
    write_run(out / "c", steps=10)
    wait(browser, "document.querySelectorAll('.runs tr').length === 4")
    browser.find_element("xpath", "//button[.='c']").click()
    wait(browser, "data.runs.length === 1 && data.runs[0].name === 'c'")
    assert browser.find_element("id", "chosen").text == "c"
    assert not browser.find_element("id", "differences").is_displayed()
    assert browser.execute_script("return new URLSearchParams(location.search).getAll('run')") == [
        "c"
    ]
    assert errors(browser) == []


def test_a_column_sorts_up_and_down(browser, serve):
    opened(browser, serve()[0])

    def press(name: str) -> list[str]:
        browser.find_element("xpath", f"//th/button[.='{name}']").click()
        return shown(browser)

    assert (press("step"), press("step")) == (["a", "b"], ["b", "a"])
    head = browser.find_element("css selector", "th[aria-sort]")
    assert head.get_attribute("aria-sort") == "descending" and head.text.startswith("step")
    assert (press("run"), press("run")) == (["a", "b"], ["b", "a"])
    assert browser.execute_script("return document.activeElement.textContent") == "run"
    assert errors(browser) == []


def test_two_tabs_show_different_runs(browser, serve, out):
    address, _ = serve()
    opened(browser, f"{address}&run=a")
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    opened(browser, f"{address}&run=b")
    log(out / "a", 62, loss=1.75)
    log(out / "b", 102, loss=1.25)
    wait(browser, "data.runs[0].training.loss.at(-1) === 1.25")
    browser.close()
    browser.switch_to.window(first)
    wait(browser, "data.runs[0].training.loss.at(-1) === 1.75")
    assert errors(browser) == []


def test_the_page_reconnects_when_its_server_is_back(browser, serve, out):
    address, process = serve()
    opened(browser, f"{address}&run=a")
    process.kill()
    process.wait()
    wait(browser, "document.getElementById('connection').textContent.includes('Trying again')")
    log(out / "a", 62, loss=1.75)
    port = int(address.split(":")[2].split("/")[0])
    assert serve(port)[0] == address  # the secret is kept
    wait(browser, "data.runs[0].training.loss.at(-1) === 1.75")
    assert browser.find_element("id", "connection").text == ""
    errors(browser)  # refused connections, which belong to this test


def test_the_end_of_the_server_is_told(browser, serve):
    address, process = serve()
    opened(browser, address)
    process.send_signal(signal.SIGINT)
    wait(browser, "document.getElementById('connection').textContent.includes('has ended')")
    assert process.wait(20) in (0, 130)
    errors(browser)


def test_a_folder_without_runs_waits_for_the_first(browser, serve, out):
    for name in ("a", "b"):
        (out / name).rename(out.parent / name)
    show(browser, serve()[0], DESKTOP)
    wait(browser, "document.getElementById('connection').textContent.includes('no run')")
    (out.parent / "a").rename(out / "a")
    wait(browser, "document.querySelector('.runs')")
    wait(browser, "document.getElementById('connection').hidden")
    assert errors(browser) == []


def test_markup_in_every_field_stays_text(browser, serve, out):
    run = out / MARKUP.replace("/", "")
    (out / "a").rename(run)
    (run / "metrics.jsonl").write_text("")
    start = {"command": MARKUP, "data": {MARKUP: MARKUP, "source": MARKUP, "tokenizer": MARKUP}}
    log(run, 0, start={**start, "environment": {MARKUP: MARKUP, "device": MARKUP}})
    log(run, 2, loss=2.0)
    log(run, 2, val_loss=2.0)
    log(run, 2, note=MARKUP, about=MARKUP)
    log(run, 2, end=f"failed: {MARKUP}")
    tokens = [[MARKUP, 1.0, [[MARKUP, 0.5]]]]
    texts = {"prompt": MARKUP, "sample": MARKUP * 2, "passage": tokens}
    (run / "snapshots.jsonl").write_text(json.dumps({"step": 2, "attempt": 1, **texts}) + "\n")
    change(run / "run.json", '"def "', json.dumps(MARKUP))
    change(run / "run.json", '"stdlib"', json.dumps(MARKUP))
    address, _ = serve()
    opened(browser, address)
    wait(browser, "data.samples.length === 1")
    for box in browser.find_elements("css selector", ".runs input:not(:checked)"):
        box.click()
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    wait(browser, "data.runs.length === 2")
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert browser.find_element("tag name", "body").text.count(MARKUP) > 4
    assert errors(browser) == []


def test_the_attention_page_is_linked_and_shut_in(browser, serve, out):
    page = '<!doctype html><meta name="generator" content="plainGPT"><body>heads<script>'
    page += "fetch('/events').catch(() => document.body.append(' alone'))</script>"
    (out / "a" / "attention.html").write_text(page)
    opened(browser, f"{serve()[0]}&run=a")
    browser.find_element("link text", "what each head attends to").click()
    wait(browser, "document.body.innerText === 'heads alone'")
    errors(browser)  # the refused request


# Parts that the file has, too


def test_terms_are_explained_by_pointer_keyboard_and_tap(browser, out):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    run = read_history(out / "a")
    show(browser, write_report(run, out / "a" / "report.html").as_uri(), DESKTOP)
    wait(browser, "document.querySelector('.hint')")
    button = browser.find_element(
        "xpath", "//div[@id='headlines']//span[contains(., 'MFU')]/button"
    )
    box = browser.find_element("id", "hint")
    ActionChains(browser).move_to_element(button).perform()
    assert box.text.startswith("Model FLOPs utilization")
    ActionChains(browser).move_by_offset(0, 200).perform()
    assert not box.is_displayed()
    browser.execute_script("arguments[0].focus()", button)
    assert box.is_displayed()
    button.send_keys(Keys.ESCAPE)
    assert not box.is_displayed()
    button.click()
    assert box.is_displayed()
    option = browser.find_element("xpath", "//button[.='lr']")
    browser.execute_script("arguments[0].focus()", option)
    assert "learning rate" in box.text
    assert errors(browser) == []


def test_a_command_is_copied(browser, out):
    run = read_history(out / "a")
    show(browser, write_report(run, out / "a" / "report.html").as_uri(), DESKTOP)
    browser.execute_script(
        "navigator.clipboard.writeText = async (text) => { window.copied = text; }"
    )
    button = browser.find_element("css selector", ".copy")
    button.click()
    wait(browser, "window.copied")
    assert browser.execute_script("return window.copied").startswith("python train.py config/small")
    assert button.text == "copied"
    browser.execute_script(
        "navigator.clipboard.writeText = () => Promise.reject(new Error('not allowed'))"
    )
    browser.find_elements("css selector", ".copy")[1].click()
    wait(browser, "getSelection().toString().startsWith('python sample.py')")


def test_samples_show_that_they_scroll(browser, out):
    write_run(out / "long")
    run = read_history(out / "long")
    show(browser, write_report(run, out / "long" / "report.html").as_uri(), PHONE)
    left, right = browser.find_elements("css selector", "button.scroll")
    assert not left.is_enabled() and right.is_enabled()
    more = "return document.querySelector('.cards').dataset.more"
    assert browser.execute_script(more) == "right"
    right.click()
    wait(browser, "document.querySelector('.cards').dataset.more === 'left right'")
    browser.execute_script("document.querySelector('.cards').scrollLeft = 1e6")
    wait(browser, "document.querySelector('.cards').dataset.more === 'left'")


def test_figures_that_the_page_computes(browser, out):
    """The smooth line, the time per step and bits per byte, by hand."""
    log_file = out / "a" / "metrics.jsonl"
    change(log_file, '"tokens to train": 123456', '"bytes per token": 2.0')
    run = read_history(out / "a")
    show(browser, write_report(run, out / "a" / "report.html").as_uri(), DESKTOP)
    wait(browser, "document.querySelector('.loss path')")
    ask = "return smoothed(arguments[0], arguments[1], arguments[2])"
    line = [9.0, 7.0, 5.0, -1.0, -3.0]  # on a line: no lag, not even at the ends
    assert browser.execute_script(ask, [1, 2, 3, 6, 7], line, 1.0) == pytest.approx(line)
    # Of three points the middle one counts most: weights (1 - 1/1.001^3)^3, 1, and the same.
    outer = (1 - 1.001**-3) ** 3
    found = browser.execute_script(ask, [1, 2, 3], [0, 1, 0], 1.0)
    assert found[1] == pytest.approx(1 / (1 + 2 * outer))
    assert browser.execute_script(ask, [1, 2, 3], [0, 1, 0], 0) == [0, 1, 0]
    assert browser.execute_script(ask, [5], [2], 0.5) == [2]
    # 512 tokens per step at 1,024 tokens per second
    times = browser.execute_script("return stepTime(data.runs[0].training)")
    assert times == pytest.approx([500] * 30)
    browser.find_element("xpath", "//button[.='bits per byte']").click()
    last = "return charts[0].curveList().map((curve) => curve.ys.at(-1))"
    loss = 5.5 * math.exp(-60 / 80) + 1  # nats per token of 2 bytes
    thin, smooth, validation, _ = browser.execute_script(last)
    assert thin == pytest.approx(loss / math.log(2) / 2, rel=1e-5)
    assert smooth == pytest.approx(thin, rel=1e-3)
    assert validation == pytest.approx((5.5 * math.exp(-50 / 80) + 1) / 2, rel=1e-5)
