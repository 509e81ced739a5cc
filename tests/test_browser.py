"""The report in a real browser, headless Chromium.

Run with -m browser; needs Debian's chromium and chromium-driver, and the package selenium.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browserlib import DESKTOP, PHONE, errors, show
from runlib import PASSAGE, write_run

from tools.report.compare import comparison
from training.report.history import read_history
from training.report.page import write_page, write_report

pytestmark = pytest.mark.browser


def open_page(browser, path: Path, size: tuple[int, int], dark: bool = False) -> None:
    """Load a file and wait until its charts are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    show(browser, path.as_uri(), size, dark)
    drawn = "return [...document.querySelectorAll('.chart')].every((chart) => chart.firstChild)"
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(drawn))


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("browser") / "demo")
    return write_report(read_history(folder), folder / "report.html")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_report_opens_without_an_error_and_fits_the_screen(browser, report, size, dark):
    open_page(browser, report, size, dark)
    assert errors(browser) == []
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= size[0]
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")
    asked = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert asked == []
    text = browser.find_element("tag name", "body").text
    assert "\nEvents\nstep time event\n0 " in text and "probability" not in text
    assert "\nstep 200, loss 1.551\ndef <200>&\n" in text
    strokes = "return [...document.querySelectorAll('.loss .curve')].map((c) => c.style.stroke)"
    thin, smoothed, validation = browser.execute_script(strokes)
    assert thin == smoothed != validation


def press(browser, text: str) -> None:
    browser.find_element("xpath", f"//button[.='{text}']").click()


def ticks(browser, axis: str, chart: str = "loss") -> list[str]:
    """The labels of an axis; the last one of x is its title."""
    return browser.execute_script(
        f"return [...document.querySelectorAll('.{chart} text.{axis}')].map((t) => t.textContent)"
    )


def move(browser, share: float, chart: str = "loss") -> str:
    """Point at this share of a chart's width; the text of the box."""
    from selenium.webdriver import ActionChains

    node = browser.find_element("css selector", f".{chart} svg")
    aside = round((share - 0.5) * node.size["width"])
    ActionChains(browser).move_to_element_with_offset(node, aside, 0).perform()
    return browser.find_element("css selector", f".{chart} .pointer-box").text


def test_the_log_switch_changes_the_loss_axis_alone(browser, report):
    open_page(browser, report, DESKTOP)
    linear, others = ticks(browser, "y"), ticks(browser, "y", "grad_norm")
    press(browser, "log")
    assert linear == ["2", "3", "4", "5", "6"]
    assert ticks(browser, "y") == ["2", "3", "4", "5", "6"]  # less than a decade
    heights = "return ['2', '3', '6'].map((text) => [...document.querySelectorAll('.loss text.y')]"
    heights += ".find((tick) => tick.textContent === text).getAttribute('y'))"
    two, three, six = map(float, browser.execute_script(heights))
    assert (two - three) / (two - six) == pytest.approx(math.log(1.5) / math.log(3), abs=1e-3)
    assert ticks(browser, "y", "grad_norm") == others
    bottom = "return ['text.y', '.axis'].map((kind) => Number(document.querySelector("
    bottom += "`.grad_norm ${kind}`).getAttribute(kind === '.axis' ? 'y1' : 'y')))"
    zero, axis = browser.execute_script(bottom)
    assert (others[0], zero - 4) == ("0", axis)  # the axis of a small chart starts at zero
    assert errors(browser) == []


def test_the_axis_switch_changes_the_x_axis_of_all_charts(browser, report):
    open_page(browser, report, DESKTOP)
    assert ticks(browser, "x")[-2:] == ["200", "step"]
    press(browser, "time")
    for chart in ("loss", "lr", "bits_per_byte"):
        assert ticks(browser, "x", chart)[-1] == "minutes of training"
    assert ticks(browser, "x")[-2] == "1.6"  # 200 steps of half a second are 1.67 minutes
    press(browser, "tokens")
    assert ticks(browser, "x")[-2:] == ["0.1", "tokens (millions)"]
    assert errors(browser) == []


def test_the_values_at_the_pointer(browser, report):
    open_page(browser, report, DESKTOP)
    text = move(browser, 0.4).split("\n")
    assert [line.split()[0] for line in text] == ["step", "tokens", "time", "loss", "smoothed"]
    step = int(text[0].split()[1])
    assert text[3] == f"loss {5.5 * math.exp(-step / 80) + 1:.4f}"
    assert "tokens per second 1,024" in move(browser, 0.4, "tokens_per_second")
    end = move(browser, 0.97).split("\n")
    loss = 5.5 * math.exp(-200 / 80) + 1
    assert f"validation loss {loss + 0.1:.4f}" in end
    assert f"bits per byte {loss / 2:.4f}" in end and "step 200" in end
    mark = browser.find_element("css selector", ".loss .mark.warning")
    width = browser.find_element("css selector", ".loss").size["width"]
    text = move(browser, float(mark.get_attribute("x1")) / width)
    assert "event it <i>repeats</i> (step 60)" in text
    assert errors(browser) == []


def test_a_drag_zooms_all_charts_and_the_button_resets_them(browser, report):
    from selenium.webdriver import ActionChains

    open_page(browser, report, DESKTOP)
    before = ticks(browser, "x"), ticks(browser, "x", "lr"), ticks(browser, "y")
    reset = browser.find_element("id", "reset")
    assert not reset.is_displayed()

    def drag() -> None:
        node = browser.find_element("css selector", ".loss svg")
        actions = ActionChains(browser).move_to_element(node).click_and_hold()
        actions.move_by_offset(node.size["width"] // 4, 0).release().perform()
        assert reset.is_displayed()

    drag()
    steps = [int(text) for text in ticks(browser, "x")[:-1]]
    assert 90 < steps[0] < steps[-1] < 155
    assert ticks(browser, "x", "lr") != before[1]
    assert float(ticks(browser, "y")[-1]) < 3.5  # the y axis fits what is left
    reset.click()
    assert (ticks(browser, "x"), ticks(browser, "x", "lr"), ticks(browser, "y")) == before
    assert not reset.is_displayed()
    drag()
    press(browser, "tokens")
    assert not reset.is_displayed() and ticks(browser, "x")[0] == "0"
    assert errors(browser) == []


def test_a_chart_can_be_saved(browser, report):
    open_page(browser, report, DESKTOP, dark=True)
    browser.execute_script(
        "URL.createObjectURL = (blob) => { window.saved = blob; return '#'; };"
        "HTMLAnchorElement.prototype.click = function () { window.savedAs = this.download; };"
    )
    press(browser, "save as SVG")
    name, text = browser.execute_async_script(
        "const done = arguments[0]; saved.text().then((text) => done([savedAs, text]))"
    )
    root = ElementTree.fromstring(text)  # well-formed by itself
    assert (name, root.get("data-theme")) == ("loss.svg", "dark")
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "--curve-0" in text and "<path" in text


def test_on_paper_the_page_is_light(browser, report):
    open_page(browser, report, DESKTOP, dark=True)
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": [dark]})
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    theme = browser.execute_script("return document.documentElement.dataset.theme")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert (background, theme) == ("rgb(255, 255, 255)", "dark")


def test_a_token_shows_its_loss_and_the_top_guesses(browser, report):
    from selenium.webdriver import ActionChains

    open_page(browser, report, DESKTOP)
    spans = browser.find_elements("css selector", "#passage > span")
    assert len(spans) == len(PASSAGE)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", spans[1])
    ActionChains(browser).move_to_element(spans[1]).perform()
    box = browser.find_element("id", "token")
    assert box.is_displayed()
    # loss 2 nats: exp(-2) = 13.5%
    assert "loss 2.000 nats, probability 13.5%" in box.text
    rows = [row.text for row in box.find_elements("css selector", "tr")]
    assert rows[0].split() == ['"', 'f"', "40.0%"]
    assert len(rows) == 5
    assert box.find_element("css selector", "tr.hit").text.split() == ['"', '<b>f</b>"', "13.5%"]
    shade = spans[1].value_of_css_property("background-color")
    assert shade.startswith("rgba(232, 89, 12, 0.3")  # 0.85 x 2 / ln 256 = 0.307


def test_arrow_keys_and_the_slider_select_a_token_and_an_evaluation(browser, report):
    from selenium.webdriver.common.keys import Keys

    open_page(browser, report, DESKTOP)
    passage = browser.find_element("id", "passage")
    passage.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "99.0%" in browser.find_element("id", "token").text  # it stays at the last one
    assert browser.find_element("id", "passage-step").text == "step 200"
    browser.find_element("id", "evaluation").send_keys(Keys.ARROW_LEFT)
    assert browser.find_element("id", "passage-step").text == "step 150"


def test_the_config_shows_what_differs_and_all_on_request(browser, report):
    open_page(browser, report, DESKTOP)
    rows = (
        "return [...document.querySelectorAll('.sections tr[class]')]"
        ".filter((row) => row.offsetHeight).length"
    )
    changed = browser.execute_script(rows)
    browser.find_element("id", "all-options").click()
    assert 0 < changed < browser.execute_script(rows) / 3


def test_a_run_that_has_only_started(browser, tmp_path):
    folder = write_run(tmp_path / "new", steps=0)
    open_page(browser, write_report(read_history(folder), tmp_path / "new.html"), DESKTOP)
    assert move(browser, 0.5) == ""
    assert len(browser.find_elements("css selector", ".chart")) == 1  # none without data but this
    hidden = ["samples", "validation", "differences"]
    assert not any(browser.find_element("id", name).is_displayed() for name in hidden)
    assert errors(browser) == []


def test_the_first_logged_step_is_seen(browser, tmp_path):
    folder = write_run(tmp_path / "new", steps=2)
    open_page(browser, write_report(read_history(folder), tmp_path / "new.html"), DESKTOP)
    dots = "return [...document.querySelectorAll('.chart')].map("
    dots += "(chart) => chart.querySelectorAll('circle').length)"
    counts = browser.execute_script(dots)
    assert counts[0] == 2 and set(counts[1:]) == {1}  # as logged, and smoothed
    assert ticks(browser, "x")[0] == "0"
    assert errors(browser) == []


def test_two_runs_in_one_page(browser, tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=100, seed=7)
    log = b / "metrics.jsonl"
    log.write_text(re.sub(r'("step": 40,.*"loss": )[\d.]+', r"\1null", log.read_text()))
    both = write_page(comparison([read_history(a), read_history(b)]), tmp_path / "both.html")
    open_page(browser, both, PHONE, dark=True)
    assert errors(browser) == []
    count = "return ['.curve', 'circle', '.mark'].map((kind) => "
    count += "document.querySelectorAll(`.loss ${kind}`).length)"
    # Of each run two curves of training and one of validation, with a dot per evaluation; a
    # resume of a and a warning of each.
    assert browser.execute_script(count) == [2 * 3, 4 + 2, 1 + 2]
    paths = browser.find_elements("css selector", ".loss .curve.thin")
    assert [path.get_attribute("d").count("M") for path in paths] == [1, 2]  # b has a gap
    assert "a: loss" in (text := move(browser, 0.4)) and "b: loss" in text
    assert "b: " not in move(browser, 0.9)  # it has ended
    assert browser.find_element("id", "legend").text.split()[:2] == ["a", "b"]
    assert not browser.find_element("id", "validation").is_displayed()
