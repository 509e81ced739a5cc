"""The playground as a person uses it, in headless Chromium: type, watch, branch, drag a slider.

Run with -m browser; needs Debian's chromium and chromium-driver, and the package selenium.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browserlib import DESKTOP, PHONE, errors, show

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[1]
MARKUP = "<img src=x onerror=alert(1)>\n"


@pytest.fixture(scope="module")
def run(train_tiny, tmp_path_factory) -> Path:
    """A run over bytes, so that any prompt can be typed; named like an attack."""
    folder = tmp_path_factory.mktemp("play") / "<b>run"
    assert train_tiny(folder, tokenizer="byte", max_steps=4) == 0
    return folder


@pytest.fixture
def served(run) -> Iterator[tuple[str, subprocess.Popen]]:
    """The printed address of `python -m tools.play run run`, and its process."""
    argv = [sys.executable, "-m", "tools.play", str(run), str(run)]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("playground: http://127.0.0.1:")
    yield line.split()[1], process
    process.send_signal(signal.SIGINT)
    process.wait(20)


def wait(browser, condition: str, seconds: float = 30) -> None:
    """Wait until a JavaScript expression is true."""
    deadline = time.monotonic() + seconds
    while not browser.execute_script(f"return Boolean({condition})"):
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


def text_of(browser, pane: int = 0) -> str:
    script = "return document.querySelectorAll('.pane .text')[arguments[0]].textContent"
    return browser.execute_script(script, pane)


def type_prompt(browser, text: str, new_tokens: int = 12) -> None:
    box = browser.find_element("id", "prompt")
    box.clear()
    box.send_keys(text)
    count = browser.find_element("id", "max_new_tokens")
    count.clear()
    count.send_keys(str(new_tokens))


def generate(browser, text: str, new_tokens: int = 12) -> None:
    """Type a prompt, click Generate and wait for the end."""
    wait(browser, "panes.length === 2")
    type_prompt(browser, text, new_tokens)
    browser.find_element("id", "go").click()
    wait(browser, "panes.every((pane) => /\\((done|failed)\\)/.test(pane.status.textContent))")


def choose(browser, at: int, pane: int = 0) -> None:
    """Click a token and wait until all that is inside is shown."""
    script = "panes[arguments[0]].text.children[arguments[1]].click()"
    browser.execute_script(script, pane, at)
    for name in ("distribution", "lens", "attended"):
        wait(browser, f"document.getElementById('{name}').children.length")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_type_watch_and_look_inside(browser, served, size, dark):
    show(browser, served[0], size, dark)
    generate(browser, "def f(x):")
    assert text_of(browser).startswith("def f(x):")
    assert browser.execute_script("return panes.map((pane) => pane.tokens.length)") == [21, 21]
    choose(browser, 12)
    rows = "return document.getElementById('{}').children.length"
    assert browser.execute_script(rows.format("likeliest")) == 10
    assert browser.execute_script(rows.format("lens")) == 2  # the embedding and one layer
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    assert errors(browser) == []


def test_the_theme_follows_the_system_until_a_button_is_pressed(browser, served):
    background = "return getComputedStyle(document.body).backgroundColor"
    for dark, color in ((False, "rgb(255, 255, 255)"), (True, "rgb(20, 24, 31)")):
        show(browser, served[0], DESKTOP, dark)
        assert browser.execute_script(background) == color
    browser.find_element("css selector", "button[data-theme='light']").click()
    assert browser.execute_script(background) == "rgb(255, 255, 255)"
    assert errors(browser) == []


def test_a_click_on_another_token_branches_and_back_undoes_it(browser, served):
    show(browser, served[0], DESKTOP)
    generate(browser, "def f(x):")
    before = text_of(browser)
    choose(browser, 12)
    ids = browser.execute_script("return panes[0].tokens.map((token) => token.id)")
    other = browser.execute_script("return panes[0].tokens[12].top.map((row) => row[0])")
    wanted = next(i for i, token in enumerate(other) if token != ids[12])
    browser.execute_script(
        "document.getElementById('likeliest').children[arguments[0]].click()", wanted
    )
    wait(browser, "/\\(done\\)/.test(panes[0].status.textContent) && !panes[0].running")
    branched = browser.execute_script("return panes[0].tokens.map((token) => token.id)")
    assert branched[:12] == ids[:12]
    assert branched[12] == other[wanted]
    assert len(branched) == 13 + 12
    browser.find_element("id", "back").click()
    assert text_of(browser) == before
    assert errors(browser) == []


def test_the_distribution_follows_the_slider(browser, served):
    show(browser, served[0], DESKTOP)
    generate(browser, "def f(x):")
    choose(browser, 12)
    move = (
        "const input = document.getElementById('top_k'); input.value = arguments[0];"
        "input.dispatchEvent(new Event('input'));"
    )
    for k in (3, 7):
        browser.execute_script(move, k)
        wait(browser, f"document.getElementById('kept').textContent.startsWith('{k} tokens')")
        assert (
            browser.execute_script("return document.getElementById('distribution').children.length")
            == k
        )
    assert errors(browser) == []


def test_colors_follow_the_attention_of_a_head(browser, served):
    show(browser, served[0], DESKTOP)
    generate(browser, "def f(x):")
    choose(browser, 8)
    browser.execute_script(
        "const c = document.getElementById('color'); c.value = 'attention';"
        "c.dispatchEvent(new Event('change'));"
    )
    shades = browser.execute_script(
        "return [...panes[0].text.children].map((s) => getComputedStyle(s).backgroundColor)"
    )
    strong = [not shade.endswith(", 0)") for shade in shades]
    assert any(strong[:8])
    assert not any(strong[8:])  # a token is predicted from those before it


def test_what_is_typed_and_generated_stays_text(browser, served):
    show(browser, served[0], DESKTOP)
    generate(browser, MARKUP)
    choose(browser, 5)
    assert MARKUP.strip() in text_of(browser)
    assert browser.execute_script("return document.querySelectorAll('img, b').length") == 0
    assert "<b>run" in browser.execute_script(
        "return document.querySelector('.pane h2').textContent"
    )
    assert errors(browser) == []


def test_stop_ends_an_answer_and_keeps_what_came(browser, served):
    show(browser, served[0], DESKTOP)
    wait(browser, "panes.length === 2")
    type_prompt(browser, "def f(x):", 2000)
    browser.find_element("id", "go").click()
    wait(browser, "panes[0].tokens.length > 15")
    browser.find_element("id", "stop").click()
    wait(browser, "/stopped/.test(panes[0].status.textContent)")
    assert 15 < browser.execute_script("return panes[0].tokens.length") < 2000
    assert errors(browser) == []


def test_two_tabs_at_once(browser, served):
    show(browser, served[0], DESKTOP)
    wait(browser, "panes.length === 2")
    first = browser.current_window_handle
    type_prompt(browser, "def f(x):", 300)
    browser.find_element("id", "go").click()
    browser.switch_to.new_window("tab")
    show(browser, served[0], DESKTOP)
    generate(browser, "x + 1", 5)
    browser.close()
    browser.switch_to.window(first)
    wait(browser, "panes.every((pane) => /\\(done\\)/.test(pane.status.textContent))", 60)
    assert browser.execute_script("return panes[0].tokens.length") == 309


def test_a_server_that_has_ended_is_told(browser, served):
    show(browser, served[0], DESKTOP)
    wait(browser, "panes.length === 2")
    os.kill(served[1].pid, signal.SIGKILL)
    served[1].wait()
    browser.find_element("id", "go").click()
    wait(browser, "document.getElementById('error').textContent.includes('does not answer')")
    errors(browser)  # the refused connection, which belongs to this test
