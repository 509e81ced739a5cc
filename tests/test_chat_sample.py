"""sample.py --chat: a conversation in the terminal and over pipes; the cache changes no answer."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT
from test_chat import BYTES, talk, write_talks
from test_chat_templates import TEMPLATES, folder, unmarked, with_template  # noqa: F401 (fixture)

import sample
from cli.options import ConfigError
from data.chat import render
from data.tokenizer import StreamDecoder, byte_tokenizer
from model.config import ModelConfig, SamplingConfig
from model.generate import generate
from model.gpt import GPT
from training.chat import Conversation, obeyed
from training.inference import Row, new_texts

CONTEXT = 128
BRIEF = SamplingConfig(max_new_tokens=12)


def model(context: int = CONTEXT, n_ids: int = 259) -> GPT:
    sizes = {"vocab_size": n_ids, "context_length": context}
    config = ModelConfig(n_layers=2, n_heads=2, d_model=16, **sizes)
    made = GPT(config).eval()
    torch.manual_seed(0)
    for p in made.parameters():  # sharp attention: every key matters
        torch.nn.init.normal_(p, std=0.4)
    return made


def ask(conversation: Conversation, question: str, settings: SamplingConfig = BRIEF) -> str:
    return "".join(conversation.answer(question, settings))


def uncached(
    made: GPT, messages: list, rng: torch.Generator, tokenizer=BYTES, stops=BYTES.stop_ids
) -> str:
    """The answer to these messages from nothing but their rendering."""
    prompt = torch.from_numpy(render(messages, tokenizer, reply=True).ids)[None]
    never = tokenizer.unused_ids(made.config.vocab_size)
    new = generate(made, prompt, BRIEF, rng, stop_ids=stops, never=never, use_cache=False)
    row = Row(StreamDecoder(tokenizer), ())
    return "".join(text for _, text in new_texts(new, [row], stops))


# History


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_answers_are_those_of_the_whole_rendering_also_when_old_turns_are_left_out(system):
    made, rng = model(), torch.Generator().manual_seed(5)
    conversation = Conversation(made, BYTES, system, seed=5)
    shown = talk(f"system: {system}") if system else []
    opening, left_out = len(shown), 0
    for number in range(6):
        shown += talk(f"user: question {number}?")
        while len(render(shown, BYTES, reply=True).ids) + BRIEF.max_new_tokens > CONTEXT:
            del shown[opening : opening + 2]
            left_out += 1
        expected = uncached(made, shown, rng)
        assert ask(conversation, f"question {number}?") == expected
        assert conversation.left_out == left_out
        shown += talk(f"assistant: {expected}")
    assert left_out >= 2
    assert len(conversation.messages) == opening + 12  # nothing is forgotten for /save


@pytest.mark.parametrize("family", TEMPLATES)
def test_answers_in_the_templates_of_other_models(folder, family):  # noqa: F811
    tokenizer = with_template(folder, unmarked(TEMPLATES[family]))
    made = model(1024, tokenizer.vocab_size)
    conversation, rng = Conversation(made, tokenizer, seed=5), torch.Generator().manual_seed(5)
    ends = {"Llama 3": "<|eot_id|>", "Mistral": "</s>"}
    assert tokenizer.special[ends.get(family, "<|im_end|>")] in conversation.stop_ids
    for number in range(3):
        question = talk(f"user: question {number}, naïve?")
        shown = [*conversation.messages, *question]
        expected = uncached(made, shown, rng, tokenizer, conversation.stop_ids)
        assert ask(conversation, question[0]["content"]) == expected
    assert len(conversation.messages) == 6


def test_an_answer_costs_only_the_ids_that_are_new():
    made = model(1024)
    conversation, forward, seen = Conversation(made, BYTES), made.forward, []

    def counted(tokens, *args, **options):
        seen.append(tokens.shape[1])
        return forward(tokens, *args, **options)

    with mock.patch.object(made, "forward", counted):
        ask(conversation, "a" * 200)
        assert seen[0] > 200
        seen.clear()
        ask(conversation, "b")
    before = render(conversation.messages[:2], BYTES).ids
    now = render(conversation.messages[:3], BYTES, reply=True).ids
    # At most what follows the last answer, and that answer, if it was no valid UTF-8.
    assert seen[0] <= len(now) - len(before) + 3 * BRIEF.max_new_tokens + 2


def test_a_closed_answer_stays_in_the_history_as_far_as_it_was_written():
    conversation = Conversation(model(), BYTES)
    answer = conversation.answer("Hi", BRIEF)
    said = next(answer) + next(answer) + next(answer)
    answer.close()
    assert conversation.messages == talk("user: Hi", f"assistant: {said}")
    rng = torch.Generator()
    rng.set_state(conversation.rng.get_state())
    expected = uncached(conversation.model, [*conversation.messages, *talk("user: On")], rng)
    assert ask(conversation, "On") == expected


def test_a_question_too_long_for_the_context_changes_nothing():
    conversation = Conversation(model(), BYTES)
    ask(conversation, "Hi")
    before = list(conversation.messages)
    with pytest.raises(ConfigError, match="the context of 128 has to leave 12 for an answer"):
        ask(conversation, "x" * 120)
    assert conversation.messages == before and conversation.left_out == 0
    assert ask(conversation, "x" * 60) is not None


def test_the_end_of_a_turn_stops_an_answer_even_if_the_tokenizer_does_not_name_it():
    conversation = Conversation(model(), replace(BYTES, ends=()))
    assert set(conversation.stop_ids) == {256, 258}
    assert replace(BYTES, ends=()).stop_ids == (256,)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ConfigError, match="byte has no chat template"):
        Conversation(model(), byte_tokenizer())


# Commands


def test_commands(tmp_path):
    conversation, said = Conversation(model(), BYTES, "Be brief."), []
    ask(conversation, "Hi /reset")
    path = tmp_path / "talk.jsonl"
    assert obeyed(f"/save {path}", conversation, said.append)
    (row,) = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert row == {"messages": conversation.messages} and len(row["messages"]) == 3
    with pytest.raises(ConfigError, match="talk.jsonl: not saved .File exists."):
        obeyed(f"/save {path}", conversation, said.append)
    with pytest.raises(ConfigError, match="/nosuch: not a command; /reset: forget"):
        obeyed("/nosuch x", conversation, said.append)
    with pytest.raises(ConfigError, match="/save: not a command"):
        obeyed("/save", conversation, said.append)
    assert obeyed("/reset", conversation, said.append)
    assert conversation.messages == talk("system: Be brief.")
    assert not obeyed("What is 1/2?", conversation, said.append)
    assert len(said) == 2


# Over pipes


@pytest.fixture(scope="module")
def chat_run(train_tiny, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("chat")
    shown = {"source": write_talks(place / "talks.jsonl"), "format": "chat", "tokenizer": "byte"}
    options = {**shown, "prepared_dir": place / "prepared", "context_length": 96}
    assert train_tiny(place / "run", **options, sample_prompt="say red") == 0
    return place / "run"


@pytest.fixture
def piped(chat_run, command, monkeypatch):
    """piped(b"say red", "--seed=2") -> (code, out, err) of sample.py --chat."""

    def run(text: bytes, *argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        return command(sample.main, chat_run, "--chat", "--max_new_tokens=20", *argv)

    return run


def test_every_piped_line_gets_one_line(piped, tmp_path):
    code, out, err = piped(b"say red\n\nsay blue\r\n/reset\nsay red")
    assert code == 0
    lines = out.split("\n")
    assert len(lines) == 5 and lines[1] == "" and lines[4] == ""
    assert lines[0] and lines[2] and lines[3]
    assert err.splitlines()[-1] == "(the conversation begins again)"
    assert piped(b"say red\n\nsay blue\r\n/reset\nsay red")[1] == out  # the seed decides
    assert piped(b"say red\n", "--temperature=0")[1] == piped(b"say red", "--temperature=0")[1]
    assert piped(b"say red\n", "--temperature=0", "--system=x")[0] == 0


def test_that_the_context_is_full_is_said_once(piped):
    code, out, err = piped(b"say red\n" * 8)
    assert code == 0 and len(out.splitlines()) >= 8
    assert err.count("the oldest turns are left out") == 1


def test_a_line_that_cannot_be_answered_is_a_mistake(piped):
    assert "error: line 2 is not UTF-8 at byte 3" in piped(b"say red\nsay\xff\n")[2]
    code, out, err = piped(b"x" * 100)
    assert (code, out) == (2, "") and "the question has" in err


def test_newlines_of_an_answer_are_escaped_in_a_pipe(capsys, monkeypatch):
    from training import chat

    class Fixed(Conversation):
        def answer(self, question, settings):
            yield from ("one\n", "two\\n\n")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    chat.converse(Fixed(model(), BYTES), BRIEF)
    assert capsys.readouterr().out == "one\\ntwo\\\\n\\n\n" * 2


def test_options_without_effect_are_refused(chat_run, trained_once, command):
    code, _, err = command(
        sample.main, chat_run, "--chat", "--prompt=x", "--num_samples=2", "--special=true"
    )
    assert code == 2
    for name in ("prompt", "num_samples", "special"):
        assert f"error: {name} has no effect with --chat: remove it" in err
    assert "system has an effect only with" in command(sample.main, chat_run, "--system=x")[2]
    code, _, err = command(sample.main, trained_once, "--chat")
    assert code == 2 and "char has no chat template" in err
    code, _, err = command(sample.main, chat_run, "Hi", "--chat")
    assert code == 2 and "unexpected argument 'Hi': with --chat, type it when asked" in err


def test_special_tokens_of_a_plain_prompt_are_one_id_each_if_asked(chat_run, command):
    prompt = "<|im_start|>user\nsay red<|im_end|>\n<|im_start|>assistant\n"
    ids = BYTES.encode(prompt, special=True)
    assert ids == render(talk("user: say red"), BYTES, reply=True).ids.tolist()
    argv = (chat_run, f"--prompt={prompt}", "--temperature=0", "--max_new_tokens=8")
    _, as_ids, err = command(sample.main, *argv, "--special=true")
    _, as_text, err_text = command(sample.main, *argv, "--special=false")
    assert as_ids.startswith(prompt) and as_text.startswith(prompt)
    assert "note: the prompt has" not in err  # 29 ids; as text they are 62


# In a terminal

SCRIPT = """
from data.tokenizer import Tokenizer, byte_tokenizer, chat_tokenizer
from model.config import ModelConfig, SamplingConfig
from model.gpt import GPT
from training.chat import Conversation, converse
Tokenizer.unused_ids = lambda self, n: [i for i in range(n) if i not in (27, 65)]  # ESC, A
made = GPT(ModelConfig(n_layers=1, n_heads=1, d_model=8, vocab_size=259, context_length=30000))
talk = Conversation(made, chat_tokenizer(byte_tokenizer()))
converse(talk, SamplingConfig(max_new_tokens=29000))
"""


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, code: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**os.environ, "TERM": "dumb"},
            preexec_fn=self._own_terminal,
        )
        os.close(slave)
        self.shown = ""

    @staticmethod
    def _own_terminal() -> None:
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        os.set_blocking(self.master, False)
        until = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < until, self.shown[-500:]
            try:
                self.shown += os.read(self.master, 65536).decode("utf-8", "replace")
            except BlockingIOError:
                time.sleep(0.01)
        return self.shown


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(tmp_path):
    terminal = Terminal(SCRIPT)
    try:
        assert "/reset: forget" in terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("\\x1b")
        terminal.type("\x03")
        terminal.wait_for(" ...\r\n> ")
        terminal.type("\x03")  # at the prompt
        terminal.wait_for("(Ctrl-D ends the conversation)\r\n> ")
        terminal.type("/nosuch\n")
        terminal.wait_for("error: /nosuch: not a command")
        terminal.type(f"/save {tmp_path}/talk.jsonl\n")
        shown = terminal.wait_for("(saved as")
        assert "\x1b" not in shown
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.master)
    question, answer = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
    assert question["content"] == "hi"
    assert 0 < len(answer["content"]) < 29000
    assert set(answer["content"]) <= {"\x1b", "A"}
