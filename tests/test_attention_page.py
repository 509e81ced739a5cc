"""The attention page in a real browser, as a person uses it.

Run with -m browser; needs Debian's chromium and chromium-driver, and the package selenium.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from browserlib import DESKTOP, PHONE, errors, show

from model.config import ModelConfig
from model.gpt import GPT
from tools import attention
from training.weights import find_weights

pytestmark = pytest.mark.browser
TEXT = "def f1(x):\n"
HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def sampled(trained_once):
    return find_weights(trained_once, "latest").load(torch.device("cpu"))


@pytest.fixture(scope="module")
def page(sampled, tmp_path_factory) -> Path:
    model, tokenizer = sampled
    path = tmp_path_factory.mktemp("attention") / "attention.html"
    path.write_text(attention.make_page("tiny", model, tokenizer, tokenizer.encode(TEXT)))
    return path


def token(browser, i: int):
    found = browser.find_elements("css selector", "#text > span")[i]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found


def point(browser, i: int) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser).move_to_element(token(browser, i)).perform()


def told(browser) -> str:
    return browser.find_element("id", "pair").text


def width(browser) -> int:
    return browser.execute_script("return document.documentElement.scrollWidth")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_pointing_shows_what_a_token_attends_to(browser, page, size, dark):
    show(browser, page.as_uri(), size, dark)
    point(browser, 0)
    # The first token can only look at itself.
    assert told(browser) == 'Query "d" (1) gives its weight to:'
    assert browser.find_element("id", "keys").text.split("\n") == ["100.0%", '"d" (1)']
    point(browser, 3)
    assert told(browser) == 'Query "·" (4) gives its weight to:'
    assert width(browser) <= size[0]
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")
    assert errors(browser) == []


def test_a_click_pins_the_query_and_esc_or_a_click_frees_it(browser, page):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    show(browser, page.as_uri(), DESKTOP)
    for free in (
        lambda: ActionChains(browser).send_keys(Keys.ESCAPE).perform(),
        lambda: token(browser, 4).click(),
    ):
        token(browser, 4).click()
        assert told(browser) == 'Pinned query "f" (5) gives its weight to:'
        point(browser, 2)
        assert 'Pinned query "f" (5) gives ' in told(browser) and '% to key "f" (3)' in told(
            browser
        )
        point(browser, 7)
        assert told(browser) == 'Pinned query "f" (5) gives 0.0% to key "x" (8), a later token'
        free()
        point(browser, 2)
        assert told(browser) == 'Query "f" (3) gives its weight to:'


def test_the_map_is_pointed_at_and_pinned_like_the_text(browser, page):
    from selenium.webdriver import ActionChains

    show(browser, page.as_uri(), DESKTOP)
    corner = "scrollTo(0, 0); const box = document.getElementById('large').getBoundingClientRect();"
    corner += "return [box.x + place.edge, box.y + place.edge, place.cell]"
    left, top, cell = browser.execute_script(corner)

    def at(query: int, key: int) -> ActionChains:
        actions = ActionChains(browser)
        pointer = actions.w3c_actions.pointer_action
        pointer.move_to_location(
            round(left + (key + 0.5) * cell), round(top + (query + 0.5) * cell)
        )
        return actions

    at(4, 2).perform()
    assert told(browser).startswith('Query "f" (5) gives ') and 'key "f" (3)' in told(browser)
    at(4, 2).click().perform()
    at(9, 1).perform()
    assert told(browser).startswith('Pinned query "f" (5) gives ')
    assert told(browser).endswith('to key "e" (2)')


def test_the_keyboard_chooses_query_and_key(browser, page):
    from selenium.webdriver.common.keys import Keys

    show(browser, page.as_uri(), DESKTOP)
    text, large = browser.find_element("id", "text"), browser.find_element("id", "large")
    text.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ENTER)
    assert told(browser) == 'Pinned query "f" (3) gives its weight to:'
    large.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert told(browser).endswith('to key "d" (1)')  # it stays at the first one
    large.send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    assert told(browser) == 'Query "·" (4) gives its weight to:'
    text.send_keys(Keys.END, Keys.ARROW_RIGHT)
    assert told(browser) == 'Query "↵" (11) gives its weight to:'


def test_a_tap_pins_on_a_phone(browser, page):
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        show(browser, page.as_uri(), PHONE)
        for expected in ("Pinned query", "Query"):
            spot = browser.execute_script(
                "const at = arguments[0].getBoundingClientRect();"
                "return { x: at.x + at.width / 2, y: at.y + at.height / 2 };",
                token(browser, 4),
            )
            touch = "Input.dispatchTouchEvent"
            browser.execute_cdp_cmd(touch, {"type": "touchStart", "touchPoints": [spot]})
            browser.execute_cdp_cmd(touch, {"type": "touchEnd", "touchPoints": []})
            browser.execute_async_script("setTimeout(arguments[0], 400)")
            assert told(browser) == f'{expected} "f" (5) gives its weight to:'
    finally:
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_heads_captions_and_the_theme(browser, page, sampled):
    from selenium.webdriver.support.ui import Select

    show(browser, page.as_uri(), DESKTOP)
    maps = browser.find_elements("css selector", "#maps button")
    assert [m.get_attribute("aria-label") for m in maps] == ["layer 0, head 0", "layer 0, head 1"]
    axes = [node.text for node in browser.find_elements("css selector", "#maps .axis")]
    assert axes == ["head 0", "head 1", "layer 0"]
    maps[1].click()
    assert browser.find_element("id", "name").text == "layer 0, head 1"
    point(browser, 0)
    Select(browser.find_element("id", "caption")).select_by_visible_text("strongest key")
    assert [m.text for m in maps] == ["100% d", "100% d"]
    point(browser, 3)
    assert "% " in maps[0].text and maps[0].text != "100% d"
    assert errors(browser) == []
    pixel = "const copy = document.createElement('canvas').getContext('2d', "
    pixel += "{ willReadFrequently: true }); copy.drawImage(document.querySelector('#maps canvas'),"
    pixel += " 0, 0); return [...copy.getImageData(0, 0, 1, 1).data]"
    assert browser.execute_script(pixel) == [232, 89, 12, 255]  # all of a weight
    browser.find_element("css selector", "button[data-theme='dark']").click()
    assert browser.execute_script(pixel) == [255, 140, 66, 255]
    ticks = [node.text for node in browser.find_elements("css selector", "#steps span")]
    assert ticks == ["0%", "1%", "10%", "25%", "50%", "100%"]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_64_hostile_tokens_stay_text_and_fit_the_screen(browser, tmp_path, size):
    shape = {"n_layers": 3, "n_heads": 12, "d_model": 96, "context_length": 64}

    class Hostile:
        eot = None
        special = {}

        def decode_bytes(self, ids: list[int]) -> bytes:
            return HOSTILE.encode() if ids == [1] else b"\x00 \t\n"

    model, path = GPT(ModelConfig(**shape, vocab_size=8)), tmp_path / "page.html"
    path.write_text(attention.make_page(HOSTILE, model, Hostile(), [1, 2] * 32))
    show(browser, path.as_uri(), size)
    assert browser.find_element("css selector", "h1").text == f"{HOSTILE}: attention"
    assert len(browser.find_elements("css selector", "#text > span")) == 64
    point(browser, 0)
    assert told(browser) == f'Query "{HOSTILE.replace(" ", "·")}" (1) gives its weight to:'
    assert browser.find_elements("css selector", "img") == []
    assert browser.find_element("id", "play").text.startswith("python -m tools.play '")
    assert width(browser) <= size[0]
    assert errors(browser) == []
