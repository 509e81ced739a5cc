"""Chat templates of models: the ids that transformers gives, and what counts in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_chat import AWKWARD, talk

from cli.options import ConfigError
from data.chat import COUNTS, render
from data.tokenizer import Tokenizer, chat_tokenizer, hf_from_folder

# The formats of five families, written for this test, with what the assistant says marked as
# transformers marks it. Without the marks they are what the models' folders hold.
CHATML = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
    {%- else %}
        {{- m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
SMOLLM2 = (
    """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a small model.<|im_end|>\\n' }}
{%- endif %}
"""
    + CHATML
)
LLAMA3 = """\
{%- for m in messages %}
    {%- if loop.first %}{{- bos_token }}{%- endif %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- m.content | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, turns = messages[0].content + '\\n\\n', messages[1:] %}
{%- else %}
    {%- set system, turns = '', messages %}
{%- endif %}
{%- for m in turns %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- elif m.role == 'user' %}
        {{- '[INST] ' + (system if loop.last or loop.index0 + 2 == turns | length else '') }}
        {{- m.content + '[/INST]' }}
    {%- else %}
        {{- ' ' }}{%- generation %}{{- m.content + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}"""
QWEN3 = """\
{%- set ns = namespace(last=messages | length - 1, seen=false) %}
{%- for m in messages[::-1] %}
    {%- if m.role == 'user' and not ns.seen %}
        {%- set ns.seen, ns.last = true, messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- set content, thought = m.content, '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
    {%- else %}
        {{- m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {
    "ChatML": CHATML,
    "SmolLM2": SMOLLM2,
    "Llama 3": LLAMA3,
    "Mistral": MISTRAL,
    "Qwen3": QWEN3,
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<s>", "</s>", "[INST]", "[/INST]"]

TALKS = {name: talk(*turns) for name, (turns, _) in AWKWARD.items()} | {
    "many turns": talk(*(f"{r}: {i}\n" for i in range(9) for r in ("user", "assistant"))),
    "system and reasoning": talk(
        "system: Be brief.",
        "user: 1+1?",
        "assistant: <think>\nOne and one.\n</think>\n\n2",
        "user: +1?",
        "assistant: <think>\nTwo and one.\n</think>\n\n3",
    ),
}


def unmarked(template: str) -> str:
    return re.sub(r"\{%- (end)?generation %\}", "", template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a small tokenizer.json."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    made = Library(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["user assistant system Hello there\n\n a small model\n"] * 9, trainer)
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    path = tmp_path_factory.mktemp("hf")
    made.save(str(path / "tokenizer.json"))
    return path


def with_template(folder: Path, template: str, in_config: bool = False) -> Tokenizer:
    """Write a template into the folder as models have it; return the folder's tokenizer."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if in_config:
        config["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return hf_from_folder(folder)


@pytest.mark.parametrize("family", TEMPLATES)
def test_ids_and_mask_are_those_of_transformers(folder, family):
    """The mask found without generation marks equals the one that transformers reads from them."""
    from transformers import PreTrainedTokenizerFast

    marked = TEMPLATES[family]
    library = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=marked,
    )
    tokenizers = {
        "without marks": with_template(folder, unmarked(marked)),
        "with marks": with_template(folder, marked, in_config=True),
        "saved": chat_tokenizer(with_template(folder, unmarked(marked))),
    }
    compared = 0
    for name, messages in TALKS.items():
        if name == "spelled tokens":  # transformers reads them as tokens
            continue
        for how, tokenizer in tokenizers.items():
            try:
                options = {
                    "tokenize": True,
                    "return_dict": True,
                    "return_assistant_tokens_mask": True,
                }
                theirs = library.apply_chat_template(messages, **options)
            except Exception:
                with pytest.raises(ConfigError, match="refuses the conversation: roles must"):
                    render(messages, tokenizer)
                continue
            ours = render(messages, tokenizer)
            assert ours.ids.tolist() == theirs["input_ids"], (name, how)
            assert (ours.mask & COUNTS).tolist() == theirs["assistant_masks"], (name, how)
            opened = render(messages[:-1], tokenizer, reply=True) if messages[1:] else None
            if opened is not None and messages[-1]["role"] == "assistant":
                options = {"tokenize": True, "add_generation_prompt": True, "return_dict": True}
                theirs = library.apply_chat_template(messages[:-1], **options)["input_ids"]
                assert opened.ids.tolist() == theirs, (name, how)
            compared += 1
    assert compared >= 21


@pytest.mark.parametrize("family", TEMPLATES)
def test_no_text_spells_a_token(folder, family):
    tokenizer = with_template(folder, unmarked(TEMPLATES[family]))
    for name in SPECIAL:
        clean, spelled = (
            render(talk(f"user: a{text}b", f"assistant: c{text}d"), tokenizer).ids.tolist()
            for text in ("", name)
        )
        special = set(tokenizer.special.values())
        assert [i for i in clean if i in special] == [i for i in spelled if i in special]
        assert tokenizer.decode(spelled) == tokenizer.decode(clean).replace(
            "ab", f"a{name}b"
        ).replace("cd", f"c{name}d")
