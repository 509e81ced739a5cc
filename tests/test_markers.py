"""A test selected by its marker runs or fails: it is never skipped silently."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[1]
WAYS = """
import pytest

@pytest.fixture
def browser():
    pytest.skip("no chromium")

@pytest.mark.MARKER
def test_fixture(browser): ...

@pytest.mark.MARKER
@pytest.mark.skipif(True, reason="no chromium")
def test_skipif(): ...

@pytest.mark.MARKER
def test_import():
    pytest.importorskip("chromium")

@pytest.mark.MARKER
def test_runs(): ...

def test_plain(browser): ...
"""


@pytest.mark.parametrize("marker", ["faults", "pretrained", "browser", "gpu"])
def test_a_selected_test_that_cannot_run_fails_with_the_reason(pytester, marker):
    pytester.makeini((ROOT / ".pytest.ini").read_text().replace("= .", f"= {ROOT}"))
    pytester.makeconftest((ROOT / "tests/conftest.py").read_text())
    pytester.makepyfile(WAYS.replace("MARKER", marker))
    for asked, wanted in [
        ([], {"skipped": 1, "deselected": 4}),
        (["-m", marker], {"errors": 2, "failed": 1, "passed": 1, "deselected": 1}),
    ]:
        result = pytester.runpytest_inprocess("-n0", "-p", "no:cacheprovider", "-rs", *asked)
        found = result.parseoutcomes()
        assert {name: n for name, n in found.items() if "warning" not in name} == wanted
    result.stdout.fnmatch_lines([f"*requested by -m {marker}, but cannot run here*no chromium*"])
