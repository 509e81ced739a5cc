"""Use from Python: the functions of training/inference.py, docs/python.md and the notebook."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from notebooklib import code_cells, read_notebook, run_cells, stored_output

import sample
import tools.evaluate
from cli.options import ConfigError
from data.tokenizer import byte_tokenizer, char_tokenizer
from model.config import ModelConfig
from model.gpt import GPT
from tools.export import __main__ as export
from training.inference import generate_text, load, score_text

NOTEBOOK = ROOT / "docs/first_model.ipynb"
TEXT = "def f1(x):\n    return x + 1\n" * 3


@pytest.fixture(scope="module")
def loaded(trained_once):
    return load(trained_once, device="cpu")


@pytest.fixture(scope="module")
def new_model() -> GPT:
    """A model made in Python, in training mode and with dropout."""
    return GPT(ModelConfig(n_layers=1, n_heads=2, d_model=8, vocab_size=257, dropout=0.5))


def test_a_run_a_checkpoint_and_a_folder_of_others_are_loaded(trained_once, tmp_path, command):
    assert command(export.main, trained_once, f"--out={tmp_path / 'hf'}")[0] == 0
    places = [trained_once, str(trained_once / "checkpoints/step-8"), tmp_path / "hf"]
    models = [load(place, device="cpu") for place in places]
    assert not any(model.training for model, _ in models)
    texts = {generate_text(*of, "def ", max_new_tokens=20, temperature=0) for of in models}
    assert len(texts) == 1
    first = load(trained_once, "4", device="cpu")[0]
    assert not torch.equal(first.embed.weight, models[0][0].embed.weight)


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_the_text_is_that_of_sample_py(loaded, trained_once, command):
    options = ["--max_new_tokens=30", "--top_k=5", "--seed=3", "--device=cpu"]
    printed = command(sample.main, trained_once, "--prompt=def ", *options)[1]
    text = generate_text(*loaded, "def ", max_new_tokens=30, top_k=5, seed=3)
    assert text == printed.removesuffix("\n")
    assert text.startswith("def ") and len(text) == 34
    assert text != generate_text(*loaded, "def ", max_new_tokens=30, top_k=5)


def test_text_ends_before_a_stop_text(loaded):
    options = {"temperature": 0, "max_new_tokens": 40}
    whole = generate_text(*loaded, "def ", **options)
    stop = whole[10:12]
    cut = whole[: whole.index(stop, 4)]
    assert generate_text(*loaded, "def ", stop=stop, **options) == cut  # one text, or several
    assert generate_text(*loaded, "def ", stop=["#", stop], **options) == cut


def test_dropout_is_off_in_use_and_training_goes_on(new_model):
    tokenizer = byte_tokenizer()
    for use in (generate_text, score_text):
        assert use(new_model, tokenizer, "abc") == use(new_model, tokenizer, "abc")
    assert new_model.training


def test_the_score_is_that_of_the_tool(loaded, trained_once, tmp_path, command):
    (tmp_path / "text.txt").write_text(TEXT)
    told = [f"--source={tmp_path / 'text.txt'}", "--device=cpu"]
    for stride in (None, 3):
        more = [] if stride is None else [f"--stride={stride}"]
        printed = command(tools.evaluate.main, trained_once, *told, *more)[1]
        found = score_text(*loaded, TEXT, stride=stride)
        assert f"loss {found.loss:.6f} nats" in printed
        assert f"{found.bits_per_byte:.6f} bits per byte" in printed


def test_a_score_by_hand():
    """A uniform model of 4 characters needs 2 bits for each: 6 bits for the 5 bytes of "ééb", which
    are scored; the "a" is given, not predicted."""
    tokenizer = char_tokenizer("abcé", with_eot=False)
    model = GPT(ModelConfig(n_layers=1, n_heads=2, d_model=8, vocab_size=4))
    with torch.no_grad():
        model.head.weight.zero_()
    found = score_text(model, tokenizer, "aééb")
    assert (found.tokens, found.bytes) == (3, 5)
    assert found.loss == pytest.approx(math.log(4))
    assert found.perplexity == pytest.approx(4)
    assert found.bits_per_byte == pytest.approx(6 / 5)


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda *of: generate_text(*of, "x", top_p=2.0), r"top_p=2.0: must be in \(0, 1\]"),
        (lambda *of: generate_text(*of, "x", top_k=1.5), "top_k=1.5: must be a whole number"),
        (lambda *of: generate_text(*of, "é"), "U\\+00E9"),
        (lambda *of: score_text(*of, "é"), "U\\+00E9"),
        (lambda *of: score_text(*of, "x"), "too few tokens \\(1\\)"),
        (lambda *of: score_text(*of, "xx", stride=17), "stride=17: .* at most the context, 16"),
        (lambda *of: score_text(*of, "xx", stride=0), "stride=0: must be at least 1"),
    ],
    ids=range(7),
)
def test_a_mistake_is_a_config_error(loaded, use, problem):
    with pytest.raises(ConfigError, match=problem):
        use(*loaded)


# The page and the notebook


def test_the_code_of_the_page_runs(trained, capsys):
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    page = page.replace("out/small", trained.as_posix())
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    exec(compile("\n".join(blocks), "docs/python.md", "exec"), {})
    assert "perplexity" in capsys.readouterr().out


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]


def test_the_notebook_runs_and_shows_what_it_prints():
    printed = run_cells(NOTEBOOK)
    stored = [stored_output(cell) for cell in code_cells(read_notebook(NOTEBOOK))]
    assert [bool(text) for text in printed] == [bool(text) for text in stored]
    for now, then in zip(printed, stored, strict=True):
        # Another machine rounds differently, and draws other letters from then on.
        assert losses(now) == pytest.approx(losses(then), abs=0.05)
    first, *_, last = losses("".join(printed))
    assert first == pytest.approx(math.log(10), abs=0.1)
    assert 0.78 < last < 1.0  # 3 ln 8 / 8: the letters that are free
    right, of = map(int, re.search(r"(\d+) of (\d+) lines are", "".join(printed)).groups())
    assert right >= 0.7 * of > 10
    assert int(re.search(r"back with (\d+)%", printed[-1])[1]) > 50


def test_the_notebook_can_be_opened(tmp_path):
    """Its format (nbformat 4.5), and no trace of the machine that ran it."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    identities = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identities)) == len(identities)
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            assert (output["output_type"], output["name"]) == ("stream", "stdout")
    assert not re.search(r"/(home|root|tmp|Users)\b", json.dumps(notebook))
    assert Path(NOTEBOOK).stat().st_size < 20_000
