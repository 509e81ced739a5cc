"""The pages in a real browser, headless Chromium: no error, and what is pointed at answers.

Run with -m browser; needs Debian's chromium and chromium-driver, and the package selenium.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runlib import PASSAGE, write_run

from tools import attention
from training.history import read_history
from training.report import write_report
from training.weights import load_for_sampling

pytestmark = pytest.mark.browser

FLAGS = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync disable-dev-shm-usage"
)
DESKTOP, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("no chromium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for flag in [*FLAGS.split(), f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=chromedriver)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def open_page(browser, path: Path, size: tuple[int, int], dark: bool = False) -> None:
    """Load a file at a size and colour scheme, and wait until its curves are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    shape = {"width": size[0], "height": size[1], "deviceScaleFactor": 1}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**shape, "mobile": False})
    browser.get(path.as_uri())
    drawn = (
        "return !window.Bokeh || (Bokeh.documents.length > 0 && "
        "Bokeh.documents.every((d) => d.is_idle))"
    )
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(drawn))


def errors(browser) -> list[str]:
    found = browser.get_log("browser")
    return [entry["message"] for entry in found if entry["level"] in ("WARNING", "SEVERE")]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("browser") / "demo")
    return write_report([read_history(folder)], folder / "report.html")


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


def press(browser, value: str) -> None:
    browser.find_element("css selector", f'button[data-value="{value}"]').click()


def test_the_log_switch_swaps_the_plots(browser, report):
    open_page(browser, report, DESKTOP)
    sizes = (
        "return ['linear', 'log'].map((n) => "
        "document.getElementById(`loss-${n}`).getBoundingClientRect().height > 100)"
    )
    assert browser.execute_script(sizes) == [True, False]
    press(browser, "log")
    assert browser.execute_script(sizes) == [False, True]
    width = "return document.querySelector('#loss-log > div > *').getBoundingClientRect().width"
    assert browser.execute_script(width) > 800
    assert errors(browser) == []


def test_the_axis_switch_moves_the_curves(browser, report):
    open_page(browser, report, DESKTOP)
    press(browser, "minutes")
    state = browser.execute_script(
        "const plot = plots().find((p) => p.name === 'loss-linear');"
        "return [plot.below[0].axis_label, plot.renderers[0].glyph.x.field, plot.x_range.end]"
    )
    assert state[:2] == ["minutes of training", "minutes"]
    # 200 steps of half a second are 1.67 minutes; the range is a little wider
    assert 1.67 <= state[2] < 2
    assert errors(browser) == []


def test_a_curve_says_its_values_where_it_is_pointed_at(browser, report):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    open_page(browser, report, DESKTOP)
    place = browser.find_element("css selector", "#loss-linear > div > *")
    ActionChains(browser).move_to_element(place).perform()
    # The tooltip lives in a shadow root.
    read = """
        const texts = [];
        const walk = (node) => {
            if (node.matches?.('.bk-Tooltip') && node.shadowRoot) {
                texts.push(node.shadowRoot.textContent);
            }
            for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) {
                walk(child);
            }
        };
        walk(document.body);
        return texts.join(' ');
    """
    text = WebDriverWait(browser, 30).until(lambda b: b.execute_script(read))
    assert "loss" in text
    assert "smoothed" in text


def test_the_box_of_a_curve_is_dark_where_the_page_is(browser, report):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    open_page(browser, report, DESKTOP, dark=True)
    place = browser.find_element("css selector", "#loss-linear > div > *")
    ActionChains(browser).move_to_element(place).perform()
    read = """
        const found = [];
        const walk = (node) => {
            if (node.matches?.('.bk-Tooltip') && node.shadowRoot?.querySelector('td')) {
                found.push(getComputedStyle(node).backgroundColor);
            }
            for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) {
                walk(child);
            }
        };
        walk(document.body);
        return found;
    """
    colours = WebDriverWait(browser, 30).until(lambda b: b.execute_script(read))
    assert set(colours) == {"rgb(20, 24, 31)"}


def test_on_paper_the_curves_fit_and_are_light(browser, report):
    open_page(browser, report, DESKTOP, dark=True)
    drawn = browser.execute_script("return document.getElementById('loss-linear').clientWidth")
    assert drawn > 1000
    zoom = "return document.getElementById('loss-linear').style.zoom"
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "light"
    assert float(browser.execute_script(zoom)) == pytest.approx(700 / drawn, abs=1e-3)
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(zoom) == ""
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert errors(browser) == []


def test_a_token_says_its_loss_and_the_likeliest(browser, report):
    from selenium.webdriver import ActionChains

    open_page(browser, report, DESKTOP)
    spans = browser.find_elements("css selector", "#passage > span")
    assert len(spans) == len(PASSAGE)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", spans[1])
    ActionChains(browser).move_to_element(spans[1]).perform()
    box = browser.find_element("id", "token")
    assert box.is_displayed()
    # loss 2 nats: exp(-2) = 13.5%
    assert "loss 2.000 nats, 13.5% given to it" in box.text
    rows = [row.text for row in box.find_elements("css selector", "tr")]
    assert rows[0].split() == ['"', 'f"', "40.0%"]
    assert len(rows) == 5
    shade = spans[1].value_of_css_property("background-color")
    assert shade.startswith("rgba(232, 89, 12, 0.3")  # 0.85 x 2 / ln 256 = 0.307


def test_arrow_keys_and_the_slider_go_through_the_passage(browser, report):
    from selenium.webdriver.common.keys import Keys

    open_page(browser, report, DESKTOP)
    passage = browser.find_element("id", "passage")
    passage.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "99.0%" in browser.find_element("id", "token").text  # it stays at the last one
    assert browser.find_element("id", "passage-step").text == "step 200"
    browser.find_element("id", "evaluation").send_keys(Keys.ARROW_LEFT)
    assert browser.find_element("id", "passage-step").text == "step 150"


def test_the_config_can_be_cut_to_what_differs(browser, report):
    open_page(browser, report, DESKTOP)
    rows = (
        "return [...document.querySelectorAll('.sections tr[class]')]"
        ".filter((row) => row.offsetHeight).length"
    )
    everything = browser.execute_script(rows)
    browser.find_element("id", "changes-only").click()
    assert 0 < browser.execute_script(rows) < everything / 3


def test_two_runs_in_one_page(browser, tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=100, seed=7)
    both = write_report([read_history(a), read_history(b)], tmp_path / "both.html")
    open_page(browser, both, PHONE, dark=True)
    assert errors(browser) == []
    lines = browser.execute_script(
        "return plots().find((p) => p.name === 'loss-linear').renderers.length"
    )
    # Of each two curves of training, line and dots of validation; a restart of a; two warnings.
    assert lines == 2 * (2 + 2) + 1 + 2


# The attention page


@pytest.fixture(scope="module")
def attention_page(trained_once, tmp_path_factory) -> Path:
    model, tokenizer = load_for_sampling(trained_once, "latest", torch.device("cpu"))
    path = tmp_path_factory.mktemp("attention") / "attention.html"
    ids = tokenizer.encode("def f1(x):\n")
    path.write_text(attention.make_page("tiny", model, tokenizer, ids), encoding="utf-8")
    return path


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_attention_page_shows_whom_a_token_looks_at(browser, attention_page, size):
    from selenium.webdriver import ActionChains

    open_page(browser, attention_page, size, dark=True)
    assert errors(browser) == []
    maps = browser.find_elements("css selector", "#maps button")
    assert len(maps) == 2  # one layer of two heads
    maps[1].click()
    assert browser.find_element("id", "name").text == "layer 0, head 1"
    first = browser.find_element("css selector", "#text > span")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", first)
    ActionChains(browser).move_to_element(first).perform()
    # The first token can only look at itself.
    assert browser.find_element("id", "figures").text.startswith('"d" looks at "d" 100.0%')
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
