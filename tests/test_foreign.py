"""Models and tokenizers of others: documents start and end as they do in transformers."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import sample
import tools.attention
import tools.evaluate
from cli.options import ConfigError
from cli.terminal import shown
from data import prepare
from data.config import DataConfig
from data.meta import read_meta
from data.shards import Windows
from data.tokenizer import (
    END_OF_TEXT,
    JSON_FILE,
    Tokenizer,
    byte_tokenizer,
    char_tokenizer,
    load_tokenizer,
    lost_bytes,
    prompt_ids,
    ready_tokenizer,
    start_ids,
    train_bpe,
)
from model.config import ModelConfig, SamplingConfig
from model.generate import generate
from model.gpt import GPT
from model.huggingface import DamagedFolder
from tools.evaluate import EvaluateOptions, read_ids
from tools.export import __main__ as export
from tools.export.huggingface import export_huggingface
from training.metrics import read_metrics
from training.score import score
from training.snapshot import token_text
from training.weights import find_weights

TEXT = "def main(argv):\n    return argv\n\nclass Name:\n    pass\n" * 30
PROMPT = "def main(argv):"
START = "<s>"
EOT_ID, START_ID = 288, 289  # the text holds too little to merge for 300


def byte_level() -> Library:
    return Library.from_str(train_bpe("bpe:300", 300, [TEXT]).files[JSON_FILE])


def tokenizer_folder(folder: Path, processor=None, **config) -> Path:
    """A byte-level tokenizer.json with <s>, and its tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    library = byte_level()
    library.add_special_tokens([START])
    if processor is not None:
        library.post_processor = processor(library.token_to_id)
    library.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    about |= {"bos_token": START, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def template(single: str):
    """A TemplateProcessing around a text, such as "<s> $A"."""

    def make(id_of):
        special = [(token, id_of(token)) for token in (START, END_OF_TEXT)]
        return processors.TemplateProcessing(single=single, special_tokens=special)

    return make


STARTED = template(f"{START} $A")


def model_folder(folder: Path, ends: list[int] | int | None, **tokenizer) -> Path:
    """A random Llama of transformers with large weights, and a tokenizer as above."""
    import transformers

    transformers.logging.set_verbosity_error()
    tokenizer_folder(folder, **tokenizer)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=load_tokenizer(folder).vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=ends,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (3 / p.shape[-1] ** 0.5 if p.dim() == 2 else 0.5))
    model.save_pretrained(folder)
    return folder


def their_ids(folder: Path, prompt: str, **options) -> list[int]:
    """The prompt's ids and the continuation that transformers generates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    given.pop("token_type_ids", None)
    found = model.generate(**given, do_sample=False, max_new_tokens=40, pad_token_id=0, **options)
    return found[0].tolist()


def our_ids(folder: Path, prompt: str) -> list[int]:
    model, tokenizer = find_weights(folder).load(torch.device("cpu"))
    ids, first, _ = prompt_ids(tokenizer, prompt, 999)
    settings = SamplingConfig(temperature=0.0, max_new_tokens=40)
    new = generate(
        model,
        torch.tensor([ids]),
        settings,
        torch.Generator(),
        stop_ids=tokenizer.stop_ids,
        never=tokenizer.unused_ids(model.config.vocab_size),
        first_ids=first,
    )
    return ids + [int(token) for token in new]


@pytest.mark.parametrize("processor", [None, STARTED], ids=["no BOS", "BOS"])
def test_greedy_ids_are_those_of_transformers(processor, tmp_path):
    folder = model_folder(tmp_path / "model", None, processor=processor)
    expected = their_ids(folder, PROMPT)
    assert our_ids(folder, PROMPT) == expected
    assert len(expected) >= 40 + len(load_tokenizer(folder).encode(PROMPT))


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_any_of_several_ends_ends_a_sample_as_in_transformers(file, tmp_path, command):
    folder = model_folder(tmp_path / "model", None, processor=STARTED)
    eot = load_tokenizer(folder).eot
    free = their_ids(folder, PROMPT)
    new = free[-40:]
    at = next(i for i in range(5, 40) if new[i] not in new[:i])  # an id not drawn before
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    about = json.loads((folder / file).read_text()) | {"eos_token_id": [eot, new[at]]}
    (folder / file).write_text(json.dumps(about))
    expected = their_ids(folder, PROMPT)
    assert expected == free[: len(free) - 39 + at]
    assert our_ids(folder, PROMPT) == expected
    # sample.py ends there too, and ends nothing with --ignore_eot.
    text = load_tokenizer(folder).decode(new[:at])
    argv = [folder, f"--prompt={PROMPT}", "--temperature=0", "--max_new_tokens=40", "--device=cpu"]
    assert command(sample.main, *argv)[1] == f"{PROMPT}{text}\n"
    assert len(command(sample.main, *argv, "--ignore_eot")[1]) > len(PROMPT + text) + 1


def test_an_export_keeps_the_starts_and_every_end(tmp_path, command):
    folder = model_folder(tmp_path / "model", [EOT_ID, 12], processor=STARTED)
    code, _, err = command(export.main, folder, f"--out={tmp_path / 'again'}")
    assert code == 0, err
    for name in ("config.json", "generation_config.json"):
        about = json.loads((tmp_path / "again" / name).read_text())
        assert sorted(about["eos_token_id"]) == sorted(load_tokenizer(folder).stop_ids)
        assert about["bos_token_id"] == load_tokenizer(folder).bos[0]
    assert their_ids(tmp_path / "again", PROMPT) == their_ids(folder, PROMPT)
    assert load_tokenizer(tmp_path / "again").bos == load_tokenizer(folder).bos


def test_a_saved_tokenizer_keeps_its_starts_and_ends(tmp_path):
    folder = tokenizer_folder(tmp_path / "theirs", STARTED)
    (folder / "config.json").write_text('{"eos_token_id": [288, 7]}')
    tokenizer = ready_tokenizer(f"hf:{folder}")
    tokenizer.save(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert (tokenizer.bos, tokenizer.stop_ids) == ((START_ID,), (EOT_ID, 7))
    assert (saved.bos, saved.stop_ids) == ((START_ID,), (EOT_ID, 7))


@pytest.mark.parametrize("value", [[1, "2"], "</s>", -1, [True], {"a": 1}])
def test_an_end_that_is_not_an_id_is_refused(value, tmp_path):
    folder = tokenizer_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id="):
        load_tokenizer(folder)


# Document starts, for every kind of post-processor

LEVEL = processors.ByteLevel()
OTHER = template(f"{END_OF_TEXT} $A")


def around(processor):
    """A processor of BERT's kind, which takes the tokens after and before a text."""
    return lambda id_of: processor(*((token, id_of(token)) for token in (END_OF_TEXT, START)))


OPENINGS = {
    "none": (None, {}),
    "byte level": (lambda id_of: LEVEL, {}),
    "template": (STARTED, {}),
    "both sides": (template(f"{START} $A {END_OF_TEXT}"), {}),
    "end only": (template(f"$A {END_OF_TEXT}"), {}),
    "two": (template(f"{END_OF_TEXT} {START} $A"), {}),
    "sequence": (lambda id_of: processors.Sequence([LEVEL, STARTED(id_of)]), {}),
    "nested": (lambda id_of: processors.Sequence([STARTED(id_of), OTHER(id_of)]), {}),
    "bert": (around(processors.BertProcessing), {}),
    "roberta": (around(processors.RobertaProcessing), {}),
    "only the config would add it": (None, {"add_bos_token": True}),
    "only the config would not": (STARTED, {"add_bos_token": False}),
}


@pytest.mark.parametrize("kind", OPENINGS)
def test_a_document_starts_with_what_transformers_puts_before_a_text(kind, tmp_path):
    from transformers import AutoTokenizer

    processor, config = OPENINGS[kind]
    folder = tokenizer_folder(tmp_path, processor, **config)
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    plain = theirs(PROMPT, add_special_tokens=False)["input_ids"]
    given = theirs(PROMPT)["input_ids"]
    before = given[: next(i for i in range(9) if given[i : i + len(plain)] == plain)]
    assert list(tokenizer.bos) == before
    assert prompt_ids(tokenizer, PROMPT, 999)[0] == [*before, *plain]
    assert prompt_ids(tokenizer, PROMPT + " ", 999)[0][: len(before)] == before
    assert start_ids(tokenizer) == (before or [tokenizer.eot])


DOCUMENTS = [f"def f{i}(x):\n    return {i}\n" for i in range(60)]


def prepared(tmp_path: Path, folder: Path, texts: list[str], say=lambda _: None) -> Path:
    """The prepared folder of texts and the tokenizer of a Hugging Face folder."""
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"prepared_dir": str(tmp_path / "prepared"), "val_fraction": 0.3, "workers": 0}
    config = DataConfig(source=str(source), tokenizer=f"hf:{folder}", **options)
    return prepare.prepare(config, say=say, progress=False)


def ids_and_starts(folder: Path, split: str) -> tuple[list[int], list[int]]:
    meta = read_meta(folder)
    (shard,) = meta.of(split)
    ids = np.fromfile(folder / shard.file, meta.id_dtype).tolist()
    return ids, np.fromfile((folder / shard.file).with_suffix(".starts"), "<i8").tolist()


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_prepared_document_begins_with_the_start(split, tmp_path):
    plain = prepared(tmp_path, tokenizer_folder(tmp_path / "plain"), DOCUMENTS)
    folder = tokenizer_folder(tmp_path / "started", STARTED)
    started = prepared(tmp_path, folder, DOCUMENTS)
    assert started.name != plain.name
    tokenizer = load_tokenizer(started / "tokenizer")
    ids, starts = ids_and_starts(started, split)
    assert len(starts) > 10
    # A start is the first target of a document: the token before it is the one that predicts it.
    assert [at + 1 for at, token in enumerate(ids) if token == tokenizer.bos[0]] == starts
    assert all(ids[at - 2] == tokenizer.eot for at in starts[1:])
    windows = Windows(started, split, 8, "document")
    tokens, targets = windows.pair(len(windows) - 1)
    first = next(i for i in range(len(windows)) if windows.pair(i)[0][0] == tokenizer.bos[0])
    assert first == 0 and targets[0] != tokenizer.bos[0]
    without = [token for token in ids if token != tokenizer.bos[0]]
    assert without == ids_and_starts(plain, split)[0]  # the rest is the same
    texts = tokenizer.decode_bytes(ids).decode()
    assert read_meta(started).bytes[split] == len(texts.encode())


def test_a_start_that_is_the_end_of_text_is_not_doubled(tmp_path):
    folder = tokenizer_folder(tmp_path / "opt", template(f"{END_OF_TEXT} $A"))
    assert load_tokenizer(folder).bos == (EOT_ID,)
    ids, starts = ids_and_starts(prepared(tmp_path, folder, DOCUMENTS), "train")
    assert all(ids[at - 1] == EOT_ID != ids[at] for at in starts[1:])
    plain = prepared(tmp_path, tokenizer_folder(tmp_path / "plain"), DOCUMENTS)
    assert ids == ids_and_starts(plain, "train")[0]


def test_evaluation_begins_each_document_with_the_start(tmp_path):
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS[:3]))
    for single, opening in ((f"{START} $A", START_ID), (f"{END_OF_TEXT} $A", EOT_ID)):
        folder = tokenizer_folder(tmp_path / str(opening), template(single))
        tokenizer = load_tokenizer(folder)
        ids, starts = read_ids(EvaluateOptions(source=str(source)), tokenizer)
        a, b, c = (tokenizer.encode(text) for text in DOCUMENTS[:3])
        between = [tokenizer.eot, *([START_ID] if opening == START_ID else [])]
        assert ids == [opening, *a, *between, *b, *between, *c]
        assert [ids[at] for at in starts] == [a[0], b[0], c[0]]


@torch.no_grad()
def test_a_start_between_documents_is_context_and_not_scored(tmp_path):
    folder = model_folder(tmp_path / "model", None, processor=STARTED)
    model, tokenizer = find_weights(folder).load(torch.device("cpu"))
    ids = [START_ID, *tokenizer.encode("def"), EOT_ID, START_ID, *tokenizer.encode("class")]
    at = ids.index(START_ID, 1)
    losses = model(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]), reduction="none")[0]
    found = score(model, ids, tokenizer, 128, 64)
    assert found.tokens == len(ids) - 2
    assert found.loss == pytest.approx(float(losses.sum() - losses[at - 1]) / (len(ids) - 2))


@torch.no_grad()
def test_the_loss_of_a_text_is_that_of_transformers(tmp_path, command):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(tmp_path / "model", None, processor=STARTED)
    (tmp_path / "text.txt").write_text(TEXT[:150])
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT[:150], return_tensors="pt")["input_ids"]
    expected = float(AutoModelForCausalLM.from_pretrained(folder)(tokens, labels=tokens).loss)
    argv = [folder, f"--source={tmp_path / 'text.txt'}", "--device=cpu"]
    said = command(tools.evaluate.main, *argv)[1]
    assert f"scored: {tokens.shape[1] - 1:,} tokens" in said
    assert float(said.partition("loss ")[2].split()[0]) == pytest.approx(expected, abs=1e-5)


def test_attention_is_shown_with_the_start(tmp_path, command):
    folder = model_folder(tmp_path / "model", None, processor=STARTED)
    out = tmp_path / "page.html"
    assert command(tools.attention.main, folder, f"--prompt={PROMPT}", f"--out={out}")[0] == 0
    assert '"tokens":["\\u003cs>","def"' in out.read_text()
    tokenizer = load_tokenizer(folder)
    assert token_text(tokenizer, START_ID) == START


# The text of a special token is plain text, for every kind of tokenizer


SPECIAL = ["<unk>", "<s>", "</s>"]
CHARACTERS = sorted(set("abcdefghijklmnopqrstuvwxyz</>_ \u2581."))
PIECES = [*SPECIAL, *CHARACTERS, "cat", "\u2581cat"]


def word_ids() -> dict[str, int]:
    return {piece: i for i, piece in enumerate(PIECES)}


def unigram() -> Library:
    library = Library(models.Unigram([(piece, -float(i > 2)) for i, piece in enumerate(PIECES)], 0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    return library


def word_level() -> Library:
    library = Library(models.WordLevel(word_ids(), unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return library


def word_piece() -> Library:
    vocabulary = word_ids() | {f"##{c}": len(PIECES) + i for i, c in enumerate(CHARACTERS)}
    library = Library(models.WordPiece(vocabulary, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.WordPiece()
    return library


def whole_words() -> Library:
    library = Library(models.BPE(word_ids(), [], unk_token="<unk>", ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return library


def merging() -> Library:
    """A BPE whose merges spell </s>, from parts that are no special tokens."""
    vocabulary = word_ids() | {"</": len(PIECES), "s>": len(PIECES) + 1}
    return Library(models.BPE(vocabulary, [("<", "/"), ("s", ">"), ("</", "s>")]))


KINDS = {
    kind.__name__: kind
    for kind in (unigram, word_level, word_piece, whole_words, merging, byte_level)
}


def kind_folder(folder: Path, kind: str, marked: bool = True) -> tuple[Path, Library]:
    """A folder with a tokenizer of one kind; its special tokens are marked as such, or not."""
    library = KINDS[kind]()
    if marked:
        library.add_special_tokens(SPECIAL)
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "unk_token": "<unk>"}')
    return folder, library


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_special_tokens_is_plain_text_to_every_kind(kind, tmp_path):
    folder, library = kind_folder(tmp_path / kind, kind)
    tokenizer = ready_tokenizer(f"hf:{folder}")
    tokenizer.save(tmp_path / "saved")
    for found in (tokenizer, load_tokenizer(tmp_path / "saved")):
        for text in ("a </s> b", "</s>", "cat</s>cat", "<s> <unk> </s>", "\n</s>\n"):
            ids = found.encode(text)
            assert not set(ids) & {found.special["<s>"], found.special["</s>"]}, text
        # Other text has the ids that it always had.
        library.encode_special_tokens = True
        text = "a cat sat on a < mat / and s >."
        assert found.encode(text) == library.encode(text, add_special_tokens=False).ids
        # A prompt may ask for them: then they are those of the library.
        library.encode_special_tokens = False
        expected = library.encode("a cat </s> cat", add_special_tokens=False).ids
        assert found.encode("a cat </s> cat", special=True) == expected
        assert expected.count(found.special["</s>"]) == 1
        assert prompt_ids(found, "a cat </s> cat", 999, special=True)[0] == expected
        assert prompt_ids(found, "a cat </s> cat", 999)[0] != expected


@pytest.mark.parametrize("kind", ["word_level", "whole_words", "unigram"])
def test_an_end_of_text_needs_no_mark_to_be_special(kind, tmp_path):
    tokenizer = load_tokenizer(kind_folder(tmp_path / kind, kind, marked=False)[0])
    assert tokenizer.eot == 2
    assert 2 not in tokenizer.encode("a </s> b")
    assert tokenizer.bytes_of(2) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_ends_once_whatever_its_text_says(kind, tmp_path):
    folder, _ = kind_folder(tmp_path / kind, kind)
    made = prepared(tmp_path, folder, [f"cat {'a' * i} </s> b" for i in range(1, 40)])
    ids = [token for split in ("train", "val") for token in ids_and_starts(made, split)[0]]
    assert ids.count(load_tokenizer(folder).eot) == 39


def test_special_tokens_in_a_prompt_are_an_option_of_sampling(tmp_path, command):
    folder = model_folder(tmp_path / "model", None, processor=STARTED)
    argv = [folder, "--temperature=0", "--max_new_tokens=9", "--device=cpu"]
    plain = command(sample.main, *argv, f"--prompt={START}{PROMPT}")[1]
    typed = command(sample.main, *argv, f"--prompt={START}{PROMPT}", "--special")[1]
    given = command(sample.main, *argv, f"--prompt={PROMPT}")[1]
    assert typed == START + given  # the start that was typed is not doubled
    assert plain != typed


# Ids that belong to no token


def test_ids_without_a_token_are_never_sampled(tmp_path):
    library = word_level()
    sparse = {piece: 3 * i for piece, i in word_ids().items()}
    library.model = models.WordLevel(sparse, unk_token="<unk>")
    library.add_special_tokens(SPECIAL)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    V = tokenizer.vocab_size + 5
    unused = tokenizer.unused_ids(V)
    assert set(unused) == set(range(V)) - set(sparse.values())
    model = GPT(ModelConfig(n_layers=1, d_model=8, n_heads=2, context_length=8).resolved(V))
    settings = SamplingConfig(temperature=5.0, max_new_tokens=5)
    prompt, rng = torch.zeros(64, 1, dtype=torch.int64), torch.Generator().manual_seed(1)
    drawn = torch.stack(list(generate(model, prompt, settings, rng, never=unused)))
    assert set(drawn.flatten().tolist()) <= set(sparse.values())
    assert len(set(drawn.flatten().tolist())) > 20
    named = replace(byte_tokenizer(), table=[*byte_tokenizer().table, b"", b""])
    assert named.unused_ids(260) == [257, 258, 259]  # the end-of-text is a token


# A model and a tokenizer that do not belong together


def test_an_id_beyond_the_embedding_is_refused_with_both_numbers(tmp_path, command):
    folder = model_folder(tmp_path / "model", None)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 270}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:270].clone()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    largest = max(load_tokenizer(folder).encode(PROMPT))
    assert largest >= 270
    (tmp_path / "text.txt").write_text(PROMPT)
    for main, argv in (
        (sample.main, [f"--prompt={PROMPT}"]),
        (sample.main, ["--prompt="]),  # starts from the end-of-text, 288
        (tools.evaluate.main, [f"--source={tmp_path / 'text.txt'}"]),
        (tools.attention.main, [f"--prompt={PROMPT}", f"--out={tmp_path / 'page.html'}"]),
    ):
        code, out, err = command(main, folder, *argv)
        assert (code, out) == (2, "")
        assert str(largest if argv != ["--prompt="] else EOT_ID) in err and "270" in err
    # What it does know is continued, and no id is looked for that it does not know.
    assert command(sample.main, folder, "--prompt=x ", "--max_new_tokens=3")[0] == 0


# Starting from one's own run


@pytest.fixture(scope="module", params=["char", "bpe:270", "byte"])
def own_run(request, train_tiny, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("own") / "first"
    assert train_tiny(folder, tokenizer=request.param, max_steps=2) == 0
    return folder, request.param


def new_text(tmp_path: Path, text: str) -> Path:
    (tmp_path / "new.txt").write_text(text, encoding="utf-8")
    return tmp_path / "new.txt"


@pytest.mark.parametrize("typed", [False, True])
def test_a_run_started_from_another_takes_its_tokenizer_and_resumes(
    own_run, typed, tiny_argv, tmp_path, capsys, monkeypatch
):
    import train

    monkeypatch.setattr("training.messages.SAMPLE_TOKENS", 10)
    run, name = own_run
    plain, out = tmp_path / "plain.py", tmp_path / "tuned"
    plain.write_text("from training.config import Config\nconfig = Config()\n")
    options = {"init_from": run, "source": new_text(tmp_path, "def f1(x):\n    return x\n" * 60)}
    options |= {"prepared_dir": tmp_path / "prepared", "max_steps": 2, "tokenizer": name}
    argv = [str(plain), *tiny_argv(out, **options)[1:]]
    argv = [text for text in argv if typed or not text.startswith("--tokenizer")]
    assert train.main(argv) == 0
    assert (
        load_tokenizer(out / "checkpoints/step-2/tokenizer").table
        == load_tokenizer(next(run.glob("checkpoints/step-*")) / "tokenizer").table
    )
    capsys.readouterr()
    assert train.main(argv) == 0
    assert "finished at step 2" in capsys.readouterr().out
    assert train.main([*(text for text in argv if "max_steps" not in text), "--max_steps=4"]) == 0


def test_another_tokenizer_than_the_runs_is_refused(own_run, tiny_argv, tmp_path, command):
    import train

    run, name = own_run
    for other in {"char", "bpe:300", "bpe:4096", "byte"} - {name}:
        argv = tiny_argv(tmp_path / "x", init_from=run, tokenizer=other)
        code, _, err = command(train.main, *argv)
        assert code == 2
        assert f"data.tokenizer={other}" in err and "--tokenizer" in err
        if other != "byte":  # nothing was made from the text to find out
            assert name in err and f"run:{run}" in err


def test_characters_that_the_run_does_not_know_are_named_and_counted(
    train_tiny, trained_once, tiny_argv, tmp_path, command
):
    import train

    text = new_text(tmp_path, "def é(ï):\n    return ï\n" * 50)
    argv = tiny_argv(tmp_path / "x", init_from=trained_once, source=text, tokenizer="char")
    code, _, err = command(train.main, *argv)
    assert code == 2
    assert "'é' (U+00E9) 50 times" in err and "'ï' (U+00EF) 100 times" in err


def test_a_run_names_a_tokenizer_of_the_data(own_run, tmp_path):
    run, _ = own_run
    tokenizer = ready_tokenizer(f"run:{run}")
    assert ready_tokenizer(f"run:{run}/checkpoints/step-2").table == tokenizer.table
    assert load_tokenizer(run / "checkpoints/step-2/tokenizer").table == tokenizer.table
    with pytest.raises(ConfigError, match=f"data.tokenizer=run:{tmp_path}"):
        ready_tokenizer(f"run:{tmp_path}")


# Mistyped names


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("out/smal", "did you mean out/small?"),
        ("out/small2", "did you mean out/small?"),
        ("small", "did you mean out/small?"),
        ("some/model", "hub:some/model; runs here: out/books, out/small\n"),
        ("out/debug", "no such run yet; make it with: python train.py debug\n"),
        ("xyzzy", "xyzzy: there is no such folder; runs here: out/books, out/small\n"),
    ],
)
def test_a_mistyped_run_is_never_looked_for_on_the_network(
    typed, hint, tmp_path, monkeypatch, command
):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/small/checkpoints").mkdir(parents=True)
    (tmp_path / "out/books/checkpoints").mkdir(parents=True)
    (tmp_path / "out/smalt").mkdir()  # no run
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    code, out, err = command(sample.main, typed)
    assert (code, out) == (2, "")
    assert hint in err
    assert ("hub:" in err) == (typed == "some/model")
    if "small" in typed:
        assert "smalt" not in err


# Exports in transformers


def exported_tokenizer(tokenizer: Tokenizer, folder: Path, vocab_size: int | None = None) -> Path:
    """The Hugging Face folder of a random model with this tokenizer."""
    n_ids = vocab_size or tokenizer.vocab_size
    shape = {"n_layers": 1, "d_model": 8, "n_heads": 2, "context_length": 64, "qk_norm": False}
    model = GPT(ModelConfig(**shape).resolved(n_ids)).eval()
    model.init_weights(1)
    folder.mkdir()
    folder.with_suffix(".said").write_text("\n".join(export_huggingface(model, tokenizer, folder)))
    return folder


def test_an_exported_char_tokenizer_raises_for_an_unknown_character(tmp_path):
    from transformers import AutoTokenizer

    folder = exported_tokenizer(char_tokenizer("\n abc", True), tmp_path / "char")
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert theirs("a b\nc", add_special_tokens=False)["input_ids"] == [2, 1, 3, 0, 4]
    with pytest.raises(Exception, match="UNK"):
        theirs("a z")
    with pytest.raises(ConfigError, match=r"'z' \(U\+007A\) 2 times"):
        ours.encode("a zz")
    assert ours.encode("a b\nc") == [2, 1, 3, 0, 4]


@pytest.mark.parametrize("kind", ["byte", "char", "char, padded", "bpe", "theirs"])
@torch.no_grad()
def test_a_batch_of_an_export_gives_what_its_texts_give_alone(kind, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    vocab_size = None
    if kind == "theirs":
        folder = model_folder(tmp_path / "model", EOT_ID, processor=STARTED)
        tokenizer = load_tokenizer(folder)
    elif kind == "char, padded":
        tokenizer, vocab_size = char_tokenizer("\n abc", False), 8
    else:
        make = {"byte": byte_tokenizer, "char": lambda: char_tokenizer("\n abc", True)}
        make["bpe"] = lambda: train_bpe("bpe:300", 300, [TEXT])
        tokenizer = make[kind]()
    folder = exported_tokenizer(tokenizer, tmp_path / "out", vocab_size)
    theirs = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = ["a", "abc abc"]
    batch = theirs(texts, padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    assert model.generation_config.pad_token_id == theirs.pad_token_id is not None
    assert int(batch["input_ids"].max()) < model.config.vocab_size
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    together = model.generate(**batch, **options)[:, -8:].tolist()
    for text, found in zip(texts, together, strict=True):
        one = theirs(text, return_tensors="pt")["input_ids"]
        alone = model.generate(one, attention_mask=torch.ones_like(one), **options)
        assert found == alone[0, -8:].tolist()
        assert theirs.pad_token_id not in found or kind != "char, padded"


def test_an_export_without_an_id_for_padding_says_so(tmp_path):
    folder = exported_tokenizer(char_tokenizer("\n abc", False), tmp_path / "char")
    assert "no pad token" in folder.with_suffix(".said").read_text()


# Files that are not what they should be


DEEP = "[" * 200_000 + "]" * 200_000
BROKEN = {
    "a config nested deep": ("config.json", DEEP),
    "a config that is a list": ("config.json", "[]"),
    "a model_type that is a list": ("config.json", {"model_type": ["llama"]}),
    "layer types that are a number": ("config.json", {"layer_types": 5}),
    "layer types of objects": ("config.json", {"layer_types": [{"a": 1}]}),
    "an infinite number of layers": ("config.json", {"num_hidden_layers": float("inf")}),
    "three million layers": ("config.json", {"num_hidden_layers": 3_000_000}),
    "layers by the billion": ("config.json", {"num_hidden_layers": 10**12}),
    "rope as a list": ("config.json", {"rope_parameters": [1], "rope_scaling": [1]}),
    "rope in words": (
        "config.json",
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
    ),
    "an index that maps a list": ("model.safetensors.index.json", '{"weight_map": ["a"]}'),
    "an index without a map": ("model.safetensors.index.json", "{}"),
    "an index nested deep": ("model.safetensors.index.json", DEEP),
    "an index of numbers": ("model.safetensors.index.json", '{"weight_map": {"a": 5}}'),
    "a generation config nested deep": ("generation_config.json", DEEP),
    "a tokenizer nested deep": ("tokenizer.json", DEEP),
    "a tokenizer config nested deep": ("tokenizer_config.json", DEEP),
    "a tokenizer config that is a list": ("tokenizer_config.json", "[]"),
    "weights that are text": ("model.safetensors", "weights"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_by_name_in_reasonable_time(what, tmp_path, command):
    name, content = BROKEN[what]
    folder = model_folder(tmp_path / "model", EOT_ID)
    if what == "three million layers":  # narrow ones, in a file that is large enough for them
        with (folder / "model.safetensors").open("r+b") as stream:
            stream.truncate(3_000_000 * 2 * 40_000)
        name, content = "config.json", {"num_hidden_layers": 3_000_000}
    if isinstance(content, dict):
        content = json.dumps(json.loads((folder / name).read_text()) | content)
    (folder / name).write_text(content)
    began = time.perf_counter()
    code, out, err = command(sample.main, folder)
    assert time.perf_counter() - began < 10
    assert code in (2, 3) and out == ""
    assert name.split(".")[0] in err or str(folder) in err
    assert len(err) < 1000


def test_more_layers_than_the_headers_have_tensors_for_are_refused(tmp_path):
    folder = model_folder(tmp_path / "model", EOT_ID)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.rotary_emb.inv_freq"] = torch.zeros(30_000_000)  # so that the size allows it
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    about = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3_000}
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(DamagedFolder, match="3,000 layers"):
        find_weights(folder)


def test_a_vocabulary_whose_ids_would_fill_the_memory_is_refused(tmp_path):
    library = word_level()
    library.model = models.WordLevel({"<unk>": 0, "</s>": 4}, unk_token="<unk>")
    about = json.loads(library.to_str())  # the library itself would count to the largest id
    about["model"]["vocab"]["</s>"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="ids up to 4,000,000,000"):
        load_tokenizer(tmp_path)


# Text on a terminal


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x9b2J", "\\x1b[2J\\x9b2J"),
        ("a\rb\x08\x00\x7f", "a\\rb\\x08\\x00\\x7f"),
        ("a\tb\nü日🙂", "a\tb\nü日🙂"),
    ],
)
def test_generated_text_cannot_control_a_terminal(text, escaped):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert shown(text, Terminal()) == escaped
    assert shown(text, io.StringIO()) == text  # a file gets the bytes


@pytest.mark.parametrize("options", [{}, {"stream": False}, {"num_samples": 2}], ids=str)
def test_sampling_escapes_what_a_terminal_would_obey(options, monkeypatch, capsys):
    def rigged(network, prompt, *args, **kwargs):
        yield from (torch.tensor([byte] * len(prompt)) for byte in b"\x1b[2J")

    monkeypatch.setattr("training.inference.generate", rigged)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    network = GPT(ModelConfig(n_layers=1, d_model=8, n_heads=2).resolved(257))
    chosen = sample.SampleOptions(**options)
    sample.write_samples(network, byte_tokenizer(), "\x1b]0;", chosen, SamplingConfig())
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b]0;\\x1b[2J" in out


# A tokenizer that cannot spell the text

MIXED = "The Cat sat ÜBER a Mat.\n" * 200


def lower_casing(folder: Path) -> Path:
    library = byte_level()
    library.normalizer = normalizers.Lowercase()
    library.save(str(folder / "tokenizer.json"))
    return folder


def knows_few_words(folder: Path) -> Path:
    library = word_level()
    library.add_special_tokens(SPECIAL)
    library.save(str(folder / "tokenizer.json"))
    return folder


LOSSY = {
    # Per line: T, C, B, E, R and M become small, Ü becomes ü: 8 of 25 bytes.
    "lower case": (lower_casing, 8 / 25, 1),
    # "a" alone is a word it knows; the rest of the text, white space included, is not there.
    "few words": (knows_few_words, 24 / 25, 25),
}


@pytest.mark.parametrize("kind", LOSSY)
def test_the_share_of_lost_text_is_measured_and_reported(kind, tmp_path):
    make, share, scale = LOSSY[kind]
    said = []
    meta = read_meta(prepared(tmp_path, make(tmp_path), [MIXED], said.append))
    assert sum(meta.bytes.values()) == len(MIXED.encode()) == 200 * 25
    assert sum(shard.lost for shard in meta.shards) == round(share * 200 * 25)
    assert meta.byte_scale("val") == pytest.approx(scale)
    assert f"loses {share:.2%} of the text" in said[-1]


@pytest.mark.parametrize("kind", ["byte_level", "merging"])
def test_a_text_that_comes_back_is_not_called_lost(kind, tmp_path):
    folder, _ = kind_folder(tmp_path / kind, kind)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.lossy == (kind != "byte_level")  # where it cannot be, it is not measured
    said = []
    meta = read_meta(prepared(tmp_path, folder, ["a cat and a mat." * 99], said.append))
    assert meta.byte_scale("val") == 1 and "loses" not in said[-1]


@pytest.mark.parametrize(
    ("text", "spelled", "lost"),
    [
        ("", "", 0),
        ("abc", "cba", 0),
        ("aab", "ab", 1),
        ("é日🙂", "", 9),
        ("A", "a", 1),
        ("a", " a", 0),
    ],
)
def test_lost_bytes_count_missing_characters(text, spelled, lost):
    assert lost_bytes(text, spelled) == lost


@pytest.mark.parametrize("kind", LOSSY)
def test_bits_per_byte_are_over_the_bytes_of_the_text(kind, train_tiny, tmp_path, command):
    (tmp_path / "text.txt").write_text(MIXED, encoding="utf-8")
    options = {"source": tmp_path / "text.txt", "tokenizer": f"hf:{LOSSY[kind][0](tmp_path)}"}
    options |= {"prepared_dir": tmp_path / "prepared", "max_steps": 2, "eval_windows": 0}
    assert train_tiny(tmp_path / "run", **options) == 0
    scored = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "val_loss" in line]
    meta = read_meta(next((tmp_path / "prepared").glob("*/meta.json")).parent)
    bytes_per_token = meta.bytes["val"] / meta.tokens["val"]
    expected = scored[-1]["val_loss"] / math.log(2) / bytes_per_token
    assert scored[-1]["bits_per_byte"] == pytest.approx(expected, rel=0.03)  # windows leave a rest
    said = command(tools.evaluate.main, tmp_path / "run", f"--source={tmp_path / 'text.txt'}")[1]
    n_bytes = int(said.partition(" tokens (")[2].split()[0].replace(",", ""))
    assert n_bytes == pytest.approx(len(MIXED.encode()), abs=30)  # the first token is not scored
    assert f"loses {LOSSY[kind][1]:.2%} of the text" in said
