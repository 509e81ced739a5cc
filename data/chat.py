"""Conversations as ids: a chat template renders them, and a mask says which ids count.

A conversation is a list of messages, {"role": ..., "content": ...}. The template is that of the
tokenizer: a model's own, in Jinja as in its Hugging Face folder, or ChatML for our tokenizers. Loss
is only on what the assistant says, including the token that ends its turn.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
                                                          ^^^^^^^^^^^^^^^^ counts
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cli.options import ConfigError
from data.tokenizer import CONFIG_FILE, Tokenizer

COUNTS, BEGINS = 1, 2  # flags of the mask: a target of the loss; the first id of a message
ROLES = ("system", "user", "assistant", "tool")
MOST_CHARACTERS = 4 << 20  # of a conversation: no context is as long, and a template is slow
# Characters that never occur in text (Unicode's noncharacters), put into a rendering to find places
# in it: around what a template marks as generated, and in place of a message's content.
GENERATED, PLACE = "\ufdd0", "\ufdd1"
END_OF_REASONING = "</think>"
FIELDS = ("messages", "prompt", "completion", "instruction", "input", "output")  # of a row

Messages = list[dict[str, str]]


class Rendered(NamedTuple):
    """A conversation as ids (n,) int64, and their mask (n,) uint8: COUNTS, BEGINS or both."""

    ids: np.ndarray
    mask: np.ndarray


def render(messages: Messages, tokenizer: Tokenizer, reply: bool = False) -> Rendered:
    """Render a conversation by the tokenizer's chat template.

    reply: end with what opens an answer of the assistant, for a model to continue.

    Text in a message that looks like a special token is plain text. Raises ConfigError if the
    template refuses the conversation, or if the messages cannot be found again in what it made.
    """
    found = _layout(messages, tokenizer, reply)
    said = "\n".join(message["content"] for message in messages)
    spelled = next((name for name in tokenizer.special if name in said), None)
    if spelled is not None and not found.contents:
        raise ConfigError(f"a message holds {spelled!r}, which is a token of the chat template")
    if tokenizer.encode_special is not None and spelled is None:
        encoding = tokenizer.encode_special(found.text)
        ids, offsets = encoding.ids, np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    else:
        ids, offsets = _encode_apart(found, tokenizer)
    starts, ends = offsets.T
    mask = np.zeros(len(ids), dtype=np.uint8)
    for first, end in found.said:
        mask[(starts < end) & (ends > first)] |= COUNTS
    begins = [at for at in np.searchsorted(starts, found.begins) if at < len(ids)]
    mask[begins] |= BEGINS
    mask[:1] &= BEGINS  # nothing comes before the first id, so it cannot be predicted
    return Rendered(np.array(ids, dtype=np.int64), mask)


def chat_prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    """Return the ids of a question, and of what opens the answer."""
    return render([{"role": "user", "content": question}], tokenizer, reply=True).ids.tolist()


def plain_text(messages: Messages) -> str:
    """Return the text that a tokenizer for conversations has to know: roles and contents."""
    return "".join(f"{message['role']}\n{message['content']}\n" for message in messages)


# Rows of a file


def conversation(row: Any, name: str) -> Messages:
    """Return the messages of a row: `messages`, or prompt and completion, or instruction, input and
    output. Raises ConfigError naming the row and its field if it is malformed."""
    if not isinstance(row, dict):
        raise ConfigError(f"{name}: must be an object with a field 'messages'")
    if "messages" in row:
        found = row["messages"]
        if not isinstance(found, list) or not found:
            raise ConfigError(f"{name}: field 'messages' must be a list with at least one message")
        messages = [_message(m, f"{name}: messages[{i}]") for i, m in enumerate(found)]
    elif "prompt" in row and "completion" in row:
        messages = _exchange(_text(row, "prompt", name), _text(row, "completion", name))
    elif "instruction" in row and "output" in row:
        given = _text(row, "input", name) if row.get("input") is not None else ""
        question = "\n\n".join(filter(None, [_text(row, "instruction", name), given]))
        messages = _exchange(question, _text(row, "output", name))
    else:
        there = ", ".join(map(repr, row)) or "none"
        raise ConfigError(
            f"{name}: a conversation has the field 'messages', or 'prompt' and 'completion', or "
            f"'instruction' and 'output'; this row has {there}"
        )
    if all(message["role"] != "assistant" for message in messages):
        raise ConfigError(f"{name}: no message of the assistant, so nothing to learn: leave it out")
    size = sum(len(message["content"]) for message in messages)
    if size > MOST_CHARACTERS:
        raise ConfigError(
            f"{name}: a conversation of {size:,} characters; at most {MOST_CHARACTERS:,} are "
            "allowed: split it, or leave it out"
        )
    return messages


def _exchange(question: str, answer: str) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _message(found: Any, name: str) -> dict[str, str]:
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: must be an object with 'role' and 'content'")
    role = _text(found, "role", name)
    if role not in ROLES:
        raise ConfigError(f"{name}: role {role[:40]!r} must be one of {', '.join(ROLES)}")
    return {"role": role, "content": _text(found, "content", name)}


def _text(row: dict[str, Any], name: str, place: str) -> str:
    if name not in row:
        raise ConfigError(f"{place}: has no field {name!r}")
    text = row[name]
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise ConfigError(f"{place}: field {name!r} holds {kind}, not text")
    bad = re.search(f"[\ud800-\udfff{GENERATED}{PLACE}]", text)
    if bad:
        code = ord(bad[0])
        raise ConfigError(
            f"{place}: field {name!r}: character {bad.start()} is U+{code:04X}, which is not a "
            "character of any text: repair it"
        )
    return text


# The template


@dataclass
class _Layout:
    """A rendering and the places in it, as character offsets."""

    text: str
    contents: list[tuple[int, int]]  # of each message; no special token is in there
    said: list[tuple[int, int]]  # what the assistant says, with the token that ends its turn
    begins: list[int] = field(default_factory=list)  # where messages begin


def _layout(messages: Messages, tokenizer: Tokenizer, reply: bool) -> _Layout:
    """Render the messages, and find each of them in the result.

    The messages are rendered twice: as they are, and with a mark in place of each content. The text
    between the marks is the template's; what is left is the contents, which are compared.
    """
    whole = _rendered(messages, tokenizer, reply)
    parts = whole.split(GENERATED)
    text = "".join(parts)
    found = _matched(text, messages, tokenizer, reply)
    if len(parts) > 1:  # the template itself says what is generated: every second part
        ends = np.cumsum([len(part) for part in parts]).tolist()
        said = [(ends[i - 1], ends[i]) for i in range(1, len(parts), 2)]
        return _Layout(text, found.contents if found else [], said, found.begins if found else [])
    if found is None:
        raise ConfigError(
            "the chat template changes what the messages say, so the words of the assistant cannot "
            "be told apart; mark them in the template with {% generation %} ... {% endgeneration %}"
        )
    return found


def _matched(text: str, messages: Messages, tokenizer: Tokenizer, reply: bool) -> _Layout | None:
    """Find the contents in a rendering; None if the template makes something else of them."""
    for kept in _attempts(messages):
        marked = [
            {**message, "content": f"{message['content'][:n]}{PLACE}{i}{PLACE}"}
            if n is not None
            else message
            for i, (message, n) in enumerate(zip(messages, kept, strict=True))
        ]
        skeleton = _rendered(marked, tokenizer, reply).replace(GENERATED, "")
        glue, *rest = re.split(f"{PLACE}([0-9]+){PLACE}", skeleton)
        numbers, glues = [int(number) for number in rest[::2]], [glue, *rest[1::2]]
        places = _places(text, [messages[i]["content"][kept[i] :] for i in numbers], glues)
        if places is not None and len(set(numbers)) == len(numbers):
            roles = [messages[i]["role"] for i in numbers]
            return _read(text, roles, [not kept[i] for i in numbers], glues, places, tokenizer)
    return None


def _attempts(messages: Messages) -> list[Sequence[int | None]]:
    """Return ways to put marks in place of the contents: for each message, the number of characters
    that stay before the mark, or None for no mark.

    Templates may test for an empty content, or cut the reasoning out of an answer.
    """
    blank = [not message["content"].strip() for message in messages]
    found: list[Sequence[int | None]] = []
    for kept in ([0] * len(messages), [_reasoning(message) for message in messages]):
        found += [kept, [None if b else n for n, b in zip(kept, blank, strict=True)]]
    return [kept for i, kept in enumerate(found) if kept not in found[:i]]


def _reasoning(message: dict[str, str]) -> int:
    """Return the length of the reasoning that an answer of the assistant begins with."""
    at = message["content"].rfind(END_OF_REASONING) if message["role"] == "assistant" else -1
    return at + len(END_OF_REASONING) if at >= 0 else 0


def _places(
    text: str, contents: Sequence[str], glues: Sequence[str]
) -> list[tuple[int, int]] | None:
    """Return where each content is in a text of these and, between them, the template's glues."""
    at, found = len(glues[0]), []
    if not text.startswith(glues[0]):
        return None
    for content, after in zip(contents, glues[1:], strict=True):
        for variant in (content, content.strip(), content.lstrip(), content.rstrip()):
            if text.startswith(variant + after, at):
                found.append((at, at + len(variant)))
                at += len(variant) + len(after)
                break
        else:
            return None
    return found if at == len(text) else None


def _read(
    text: str,
    roles: Sequence[str],
    whole: Sequence[bool],
    glues: Sequence[str],
    places: list[tuple[int, int]],
    tokenizer: Tokenizer,
) -> _Layout:
    """Tell what the assistant says, and where messages begin, from the places of the contents.

    whole: False where the reasoning before a content is part of the glue.
    """
    opening = _opening(tokenizer.chat_template, tokenizer.files.get(CONFIG_FILE, "{}"))
    closing = _special_pattern(tuple(tokenizer.special))
    contents, said, begins, at = [], [], [0], 0
    for role, is_whole, glue, (first, end) in zip(roles, whole, glues, places, strict=False):
        if at and glues[-1] and glue.startswith(glues[-1]):  # what ends the last message ends each
            begins.append(at + len(glues[-1]))
        if role == "assistant":
            header = text.find(opening, at, first) if opening else -1
            spoken = header + len(opening) if header >= 0 else first
            closed = closing.match(text, end) if closing else None
            said.append((spoken, closed.end() if closed else end))
            first = first if is_whole else spoken
        contents.append((first, end))
        at = end
    return _Layout(text, contents, said, begins)


@lru_cache(maxsize=4)
def _opening(source: str, config_text: str) -> str:
    """Return what opens an answer, such as "<|im_start|>assistant\n"; "" if nothing does."""
    question, (template, variables) = (
        [{"role": "user", "content": "?"}],
        _template(source, config_text),
    )
    try:
        before, after = (
            template.render(messages=question, add_generation_prompt=reply, **variables)
            for reply in (False, True)
        )
    except Exception:  # it wants more than a question
        return ""
    return after[len(before) :].replace(GENERATED, "") if after.startswith(before) else ""


@lru_cache(maxsize=4)
def _special_pattern(names: tuple[str, ...]) -> re.Pattern[str] | None:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(r"\s*(" + "|".join(map(re.escape, longest_first)) + ")") if names else None


def _rendered(messages: Messages, tokenizer: Tokenizer, reply: bool) -> str:
    """Run the template. Raises ConfigError with the reason if it fails."""
    template, variables = _template(tokenizer.chat_template, tokenizer.files.get(CONFIG_FILE, "{}"))
    try:
        return template.render(messages=messages, add_generation_prompt=reply, **variables)
    except Exception as error:  # whatever the template raises, or does not know
        raise ConfigError(f"the chat template refuses the conversation: {error}") from None


@lru_cache(maxsize=4)
def _template(source: str, config_text: str) -> tuple[Any, dict[str, Any]]:
    """Compile a template, and collect its variables: bos_token, eos_token, ... of the tokenizer.

    It comes with a model, so it runs sandboxed. It is told no date, so that the same conversation
    gives the same ids tomorrow.
    """
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = jinja2.nodes.TemplateData(GENERATED)
            first, last = (jinja2.nodes.Output([mark], lineno=line) for _ in range(2))
            return [first, *body, last]

    def refuse(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(
        value, ensure_ascii=False, **how
    )
    environment.globals["raise_exception"] = refuse
    try:
        compiled = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template cannot be read: {error}") from None
    named = {name: value for name, value in json.loads(config_text).items() if "_token" in name}
    names = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items()}
    variables = {name: text for name, text in names.items() if isinstance(text, str)}
    return compiled, {**variables, "tools": None, "documents": None}


# Ids


def _encode_apart(found: _Layout, tokenizer: Tokenizer) -> tuple[list[int], np.ndarray]:
    """Encode piece by piece: special tokens only where the template has put them, and no piece
    crosses the border of a message. Returns ids and their pieces' character offsets (n, 2)."""
    text, cuts = found.text, {0, len(found.text), *found.begins}
    cuts.update(at for span in (*found.contents, *found.said) for at in span)
    special: dict[int, str] = {}
    pattern = _special_pattern(tuple(tokenizer.special))
    borders = [0, *(at for span in found.contents for at in span), len(text)]
    for first, end in zip(borders[::2], borders[1::2], strict=True):  # outside of contents
        for match in pattern.finditer(text, first, end) if pattern else ():
            special[match.start(1)] = match[1]
            cuts.update(match.span(1))
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    ordered = sorted(cuts)
    for first, end in zip(ordered, ordered[1:], strict=False):
        name = special.get(first)
        some = tokenizer.encode(text[first:end]) if name is None else [tokenizer.special[name]]
        ids += some
        offsets += [(first, end)] * len(some)
    return ids, np.array(offsets, dtype=np.int64).reshape(-1, 2)
