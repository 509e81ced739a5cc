"""Shared by the browser tests: sizes, opening an address, errors that the browser logged."""

from __future__ import annotations

DESKTOP, PHONE = (1280, 900), (390, 844)


def show(browser, address: str, size: tuple[int, int], dark: bool = False) -> None:
    """Load an address at a size and color scheme."""
    feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    shape = {"width": size[0], "height": size[1], "deviceScaleFactor": 1}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**shape, "mobile": False})
    browser.get(address)


def errors(browser) -> list[str]:
    found = browser.get_log("browser")
    return [entry["message"] for entry in found if entry["level"] in ("WARNING", "SEVERE")]
