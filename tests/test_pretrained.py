"""A real pretrained model, SmolLM2-135M or another folder of its size; minutes.

    hf download HuggingFaceTB/SmolLM2-135M --local-dir smollm2
    PLAINGPT_PRETRAINED=smollm2 pytest -m pretrained tests/test_pretrained.py

Any other folder of a model that knows the capital of France serves as well.
"""

from __future__ import annotations

import json
import os
import random
import re
import sysconfig
from pathlib import Path

import pytest
import torch
from test_chat import AWKWARD, talk

import sample
import tools.evaluate
import train
from data.chat import render
from data.tokenizer import hf_from_folder, load_tokenizer, ready_tokenizer
from tools.export import __main__ as export
from training.metrics import read_metrics

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


# Its tokenizer

SCRIPTS = (
    "It's the naïve café's 1,234.50€ don't WE'LL 'ſ, ",
    "Съешь ещё этих мягких французских булок. ",
    "日本語のテキスト、汉字和標點。한국어 문장입니다. ",
    "हिन्दी में एक वाक्य। ภาษาไทยไม่มีช่องว่าง ",
    "العربية من اليمين إلى اليسار ٣٤٥٦ עברית ",
    "ᚠᛇᚻ ⠓⠑⠇⠇⠕ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀𒀁 Ⅷ½²₃ ∑∫√∞≠ ",
    "🙂🏳️‍🌈👩‍👩‍👧‍👦🇫🇷👍🏽 e\u0301\u0300\u0323 ",
)
ODD_SPACES = (
    " ", "  ", "   \n", "\t\t", "\n\n\n", "\u00a0", "\u2003", "\u3000 ", "\u2028", "\x85",
    "\x0b\x0c", "\u200b", "\u180e", "\ufeff", " " * 37, "\n" * 19, " \n \t",
)  # fmt: skip
LIKE_SPECIAL = (
    "<|endoftext|>", "<|im_start|>user\n", "<|im_end|>", "<|im_", "start|>", "< |endoftext|>",
    "<s>", "</s>", "[INST]", "<unk>", "<pad>", "<0x41>", "<file_sep>", "<repo_name>",
)  # fmt: skip
LIKE_DAMAGE = (
    "\ufffd", "\ufffd\ufffd?", "Ã©â‚¬â„¢", "ï»¿", "\\xff\\xfe", "\x00", "\x01\x1f\x7f", "\x80\x9f",
    "\xff", "\ufffe\uffff", "\ue000", "\U0010ffff", "\ud7ff", "Ġword", "▁word", "%F0%9F",
)  # fmt: skip


def mixed_text(n_bytes: int = 1_000_000) -> str:
    """Prose, code, many scripts, emoji, odd white space, text like special tokens and like damage,
    in pieces of a few characters to a few lines, so that all kinds meet."""
    rng = random.Random(1)
    names = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    code = "".join(path.read_text("utf-8") for path in names)
    kinds = (SCRIPTS, ODD_SPACES, LIKE_SPECIAL, LIKE_DAMAGE)
    parts: list[str] = []
    size = 0
    while size < n_bytes:
        kind = rng.randrange(7)
        if kind < 4:
            part = rng.choice(kinds[kind])
        elif kind < 6:
            at = rng.randrange(len(code))
            part = code[at : at + rng.randrange(1, 200)]
        else:
            part = TEXT[rng.randrange(len(TEXT)) :][: rng.randrange(1, 200)]
        parts.append(part)
        size += len(part.encode())
    return "".join(parts).encode()[:n_bytes].decode("utf-8", errors="ignore")


@pytest.fixture(scope="module")
def library(folder):
    """The `tokenizers` package, to which special tokens are plain text as well."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    return library


def test_its_tokenizer_gives_the_ids_of_tokenizers(folder, library, tmp_path, figure):
    text = mixed_text()
    expected = library.encode(text, add_special_tokens=False).ids
    tokenizer = ready_tokenizer(f"hf:{folder}")
    assert tokenizer.encode(text) == expected
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(text) == expected
    assert tokenizer.decode_bytes(expected) == text.encode()
    # The text does contain special tokens: read as such they give other ids.
    assert not set(expected) & set(tokenizer.special.values())
    library.encode_special_tokens = False
    assert set(library.encode(text).ids) & set(tokenizer.special.values())
    library.encode_special_tokens = True
    sizes = f"{len(expected):,} ids of {len(text.encode()):,} bytes"
    figure("ids of mixed text, ours and tokenizers'", f"{sizes}, all equal")


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
    code, said, err = command(export.main, folder, f"--out={out}")
    assert code == 0, err
    figure("exported again", said.splitlines()[-2])
    there = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    back = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert there.keys() == back.state_dict().keys()
    assert all(torch.equal(there[name], tensor) for name, tensor in back.state_dict().items())
    tokenizer, theirs = (AutoTokenizer.from_pretrained(path) for path in (out, folder))
    assert tokenizer(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert tokenizer.eos_token_id == theirs.eos_token_id


# Conversations


def test_its_chat_template_gives_the_ids_of_transformers(folder):
    from transformers import AutoTokenizer

    library, tokenizer = AutoTokenizer.from_pretrained(folder), hf_from_folder(folder)
    if not tokenizer.chat_template:
        pytest.skip("the folder has no chat template")
    for turns, _ in AWKWARD.values():
        messages = talk(*turns)
        if any("<|im" in message["content"] for message in messages):
            continue  # transformers reads spelled tokens as tokens
        theirs = library.apply_chat_template(messages, tokenize=True, return_dict=True)
        assert render(messages, tokenizer).ids.tolist() == theirs["input_ids"]


def test_it_learns_from_conversations(folder, tmp_path):
    """Ten steps of the shipped config, on a file that says one thing."""
    rows = [{"prompt": f"Who are you, {i}?", "completion": "A small model."} for i in range(200)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"source": tmp_path / "talks.jsonl", "val_source": "", "init_from": folder}
    options |= {"out_dir": tmp_path / "run", "prepared_dir": tmp_path / "prepared"}
    options |= {"max_steps": 10, "eval_interval": 10, "interval": 1, "context_length": 128}
    argv = [str(ROOT / "config/chat_smollm2.py"), *(f"--{k}={v}" for k, v in options.items())]
    assert train.main(argv) == 0
    losses = [
        line["loss"] for line in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in line
    ]
    assert losses[-1] < losses[0] / 2
