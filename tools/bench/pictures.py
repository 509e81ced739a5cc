"""Make the pictures in docs/ from a fresh run: the terminal, the report, attention, playground.

Needs Debian's packages chromium and chromium-driver, and requirements-dev.txt. Training the default
config takes about five minutes on two idle cores.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.options import ConfigError
from cli.terminal import clock_text
from tools.bench.recording import film_of, record, screens_of, write_svg

ROOT = Path(__file__).parents[2]
SIZE = (1200, 940)
PROMPT = 'def read(self, path):\n    """'
NEW_TOKENS = 40
FLAGS = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync disable-dev-shm-usage hide-scrollbars"
)


def bench_pictures(config: str | None, out: str) -> None:
    """Train `config` into out/ while recording it, then write the pictures to the folder `out`.

    A run that is there already is neither trained nor recorded again; its pages are photographed.
    """
    config, pictures = config or "small", Path(out)
    if not pictures.is_dir():
        raise ConfigError(f"out={out}: there is no such folder")
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        raise ConfigError("pictures needs chromium: apt install chromium chromium-driver")
    run = Path("out", Path(config).stem)
    if run.exists():
        print(f"{run} is there: not recorded again; move it away to make {pictures}/terminal.svg")
    else:
        record_training(config, pictures / "terminal.svg")
    for tool in ("attention", "report"):
        argv = [sys.executable, "-m", f"tools.{tool}", str(run)]
        subprocess.run(argv, env=environment(), check=True)
    with open_browser() as browser:
        for page in ("attention", "report"):
            address = (run / f"{page}.html").resolve().as_uri()
            shoot(browser, address, pictures / f"{page}.png")
        with served(run) as address:
            shoot(browser, address, pictures / "play.png", play)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def record_training(config: str, path: Path) -> None:
    """Train, and write the recording. Raises ConfigError if training fails."""
    command = [sys.executable, str(ROOT / "train.py"), config]
    events, code = record(command, Path.cwd(), environment())
    if code:
        raise ConfigError(f"config={config}: training ended with exit code {code}")
    typed = f"python train.py {config}"
    film = film_of(screens_of(events, typed))
    shown = clock_text(sum(seconds for _, seconds in film))
    write_svg(path, film, f"{typed}: {clock_text(events[-1][0])}, shortened to {shown}")


@contextmanager
def open_browser() -> Iterator:
    """Headless Chromium with an empty profile."""
    from selenium import webdriver

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in [*FLAGS.split(), f"user-data-dir={profile}"]:
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        browser = webdriver.Chrome(options=options, service=service)
        browser.set_script_timeout(60)
        try:
            yield browser
        finally:
            browser.quit()


def shoot(browser, address: str, path: Path, act: Callable | None = None) -> None:
    """Load a page, do something with it, and save what is seen."""
    shape = {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
    browser.get(address)
    if act:
        act(browser)
    time.sleep(0.5)  # for what is drawn after loading
    browser.save_screenshot(str(path))
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Start the playground; yield its address."""
    argv = [sys.executable, "-m", "tools.play", str(run)]
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGINT)


def play(browser) -> None:
    """Generate, and look inside the most surprising new token."""
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser, 60)
    wait.until(lambda b: b.execute_script("return panes.length === 1"))
    for name, text in (("prompt", PROMPT), ("max_new_tokens", str(NEW_TOKENS))):
        browser.find_element("id", name).clear()
        browser.find_element("id", name).send_keys(text)
    browser.find_element("id", "go").click()
    done = "return /\\((done|failed)\\)/.test(panes[0].status.textContent)"
    wait.until(lambda b: b.execute_script(done))
    browser.execute_script(
        "const p = panes[0].tokens.map((token, i) => (i < panes[0].prompt ? 1 : token.p));"
        "panes[0].text.children[p.indexOf(Math.min(...p))].click()"
    )
    drawn = "return document.getElementById('attended').children.length > 0"
    wait.until(lambda b: b.execute_script(drawn))
