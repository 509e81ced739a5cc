"""A real pretrained model, SmolLM2-135M or another folder of its size; minutes.

    hf download HuggingFaceTB/SmolLM2-135M --local-dir smollm2
    PLAINGPT_PRETRAINED=smollm2 pytest -m pretrained tests/test_pretrained.py

Any other folder of a model that knows the capital of France serves as well.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import sample
import tools.evaluate
import tools.export
import train
from training.folder import read_metrics

pytestmark = pytest.mark.pretrained
ROOT = Path(__file__).parents[1]
TEXT = (
    "ROMEO:\nBut, soft! what light through yonder window breaks?\n"
    "It is the east, and Juliet is the sun.\n\nJULIET:\nO Romeo, Romeo! wherefore art thou Romeo?\n"
    "Deny thy father and refuse thy name; or, if thou wilt not, be but sworn my love.\n"
) * 3


@pytest.fixture(scope="module")
def folder() -> Path:
    named = os.environ.get("PLAINGPT_PRETRAINED")
    if not named:
        pytest.skip("PLAINGPT_PRETRAINED names no folder")
    return Path(named)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def test_it_knows_the_capital_of_france(folder, command, figure):
    prompt = "--prompt=The capital of France is"
    code, out, _ = command(sample.main, folder, prompt, "--temperature=0", "--max_new_tokens=5")
    assert code == 0
    assert out.startswith("The capital of France is Paris")
    figure("The capital of France is", out.strip())


@torch.no_grad()
def test_the_loss_is_that_of_transformers(folder, text, command, figure):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, out, _ = command(tools.evaluate.main, folder, f"--source={text}", "--device=cpu")
    assert code == 0
    found = float(re.search(r"loss ([\d.]+) nats", out)[1])
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = float(model(tokens, labels=tokens).loss)
    figure("loss of a text, ours and transformers'", f"{found:.6f}, {expected:.6f}")
    assert found == pytest.approx(expected, abs=1e-4)


def test_fifty_steps_on_shakespeare_lower_the_loss(folder, command, tmp_path, figure):
    source = os.environ.get("PLAINGPT_SHAKESPEARE", str(ROOT / "data/shakespeare.txt"))
    if not Path(source).is_file():
        pytest.skip(f"{source} is not there: config/shakespeare_char.py says how to get it")
    run = tmp_path / "tuned"
    options = [f"--init_from={folder}", f"--source={source}", f"--out_dir={run}"]
    options += [f"--prepared_dir={tmp_path / 'prepared'}", "--eval_windows=8", "--workers=0"]
    options += ["--context_length=128", "--global_batch=4", "--micro_batch=4"]  # a minute or two
    code, _, err = command(
        train.main, ROOT / "config/finetune_shakespeare.py", *options, "--eval_interval=50"
    )
    assert code == 0, err
    lines = read_metrics(run / "metrics.jsonl")
    after = next(line["val_loss"] for line in lines if line["step"] == 50 and "val_loss" in line)
    untrained = tmp_path / "untrained"
    options[2] = f"--out_dir={untrained}"
    options += ["--max_steps=1", "--eval_interval=1", "--lr=1e-12"]  # as good as no step
    assert command(train.main, ROOT / "config/finetune_shakespeare.py", *options)[0] == 0
    lines = read_metrics(untrained / "metrics.jsonl")
    before = next(line["val_loss"] for line in lines if "val_loss" in line)
    figure("Shakespeare's loss before and after 50 steps", f"{before:.4f}, {after:.4f}")
    assert after < before - 0.1


@torch.no_grad()
def test_it_goes_back_to_transformers_unchanged(folder, command, tmp_path, figure):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "back"
    code, said, err = command(tools.export.main, folder, f"--out={out}")
    assert code == 0, err
    figure("exported again", said.splitlines()[-2])
    there = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    back = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert there.keys() == back.state_dict().keys()
    assert all(torch.equal(there[name], tensor) for name, tensor in back.state_dict().items())
    tokenizer, theirs = (AutoTokenizer.from_pretrained(path) for path in (out, folder))
    assert tokenizer(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert tokenizer.eos_token_id == theirs.eos_token_id
