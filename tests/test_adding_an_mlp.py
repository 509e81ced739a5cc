"""A reader adds an MLP by the two edits that docs/contributing.md names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

CLASS = '''
class GEGLU(SwiGLU):
    """down(gelu(gate(x)) * up(x)) (Shazeer 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


NORMS = {'''
FORMULA = '"geglu": lambda gate, up: gate / 2 * (1 + torch.erf(gate / math.sqrt(2))) * up,'


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def test_two_edits_add_an_mlp_and_the_tests_ask_for_its_formula(tmp_path):
    """It is added twice, and one of the two gets no formula."""
    for folder in ("cli", "data", "model", "tests", "tools", "training"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc"))
    (tmp_path / ".pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = -q -rfp\n")
    edit(
        tmp_path / "model/layers.py",
        ("\nNORMS = {", CLASS),
        ('"swiglu": SwiGLU,', '"swiglu": SwiGLU, "geglu": GEGLU, "unproved": GEGLU,'),
    )
    edit(tmp_path / "model/config.py", ('["swiglu",', '["swiglu", "geglu", "unproved",'))
    edit(tmp_path / "tests/test_layers.py", ("HIDDEN = {\n", f"HIDDEN = {{\n    {FORMULA}\n"))

    files = [f"tests/test_{name}.py" for name in ("layers", "gpt", "one_forward")]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *files]
    chosen = "geglu or every_choice or (unproved and formula)"
    ended = subprocess.run(
        [*command, "-k", chosen],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    passed, failed = (
        re.findall(rf"^{outcome} \S+::(\S+)", ended.stdout, flags=re.MULTILINE)
        for outcome in ("PASSED", "FAILED")
    )
    formula = "test_an_mlp_equals_its_formula"
    assert failed == [f"{formula}[unproved-{bias}]" for bias in (False, True)], ended.stdout
    assert "HIDDEN has no formula for unproved" in ended.stdout
    assert len(passed) >= 16 and f"{formula}[geglu-True]" in passed
