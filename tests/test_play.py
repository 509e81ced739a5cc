"""The playground: its numbers are the model's, its doors are closed, a dropped request stops."""

from __future__ import annotations

import base64
import json
import threading
import time

import pytest
import torch

from data.tokenizer import prompt_ids
from model.config import SamplingConfig
from model.generate import generate, next_distribution
from model.inspect import attention_maps
from tools.play.__main__ import main
from training.weights import find_weights

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

SECRET = "s3cret"
TEXT = "def f1(x):\n"


@pytest.fixture(scope="module")
def model_and_tokenizer(trained_once):
    return find_weights(trained_once).load(torch.device("cpu"))


@pytest.fixture
def session(model_and_tokenizer):
    from tools.play.session import Session

    return Session("tiny", *model_and_tokenizer)


@pytest.fixture
def client(session):
    from starlette.testclient import TestClient

    from tools.play.server import make_app

    app = make_app([session, session], SECRET)
    headers = {"X-Token": SECRET}
    return TestClient(app, base_url="http://127.0.0.1:1234", headers=headers)


def ids_of(tokenizer, text: str) -> list[int]:
    return prompt_ids(tokenizer, text, tokenizer.vocab_size)[0]


# Numbers


def test_every_token_comes_with_the_models_own_probability(client, model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    asked = {"text": TEXT, "temperature": 0.9, "top_k": 5, "seed": 3, "max_new_tokens": 4}
    answer = client.post("/generate", json=asked)
    events = [json.loads(line) for line in answer.text.splitlines()]
    prompt, new = events[0]["prompt"], [event["token"] for event in events[1:]]
    ids = ids_of(tokenizer, TEXT)
    assert [token["id"] for token in prompt] == ids
    settings = SamplingConfig(temperature=0.9, top_k=5, max_new_tokens=4)
    rng = torch.Generator().manual_seed(3)
    drawn = [int(i) for i in generate(model, torch.tensor([ids]), settings, rng)]
    assert [token["id"] for token in new] == drawn
    with torch.no_grad():
        chances = model(torch.tensor([ids + drawn]))[0].softmax(-1)
    for at, token in enumerate([*prompt, *new]):
        if at == 0:
            assert token["p"] is None
            continue
        assert token["p"] == pytest.approx(float(chances[at - 1, token["id"]]), abs=2e-6)
        best = chances[at - 1].topk(10)
        assert [row[0] for row in token["top"]] == best.indices.tolist()
        assert [row[2] for row in token["top"]] == pytest.approx(best.values.tolist(), abs=2e-6)


def test_a_branch_continues_the_ids_it_is_given(client, model_and_tokenizer):
    ids = ids_of(model_and_tokenizer[1], TEXT)[:5]
    answer = client.post("/generate", json={"ids": ids, "max_new_tokens": 2})
    first = json.loads(answer.text.splitlines()[0])
    assert [token["id"] for token in first["prompt"]] == ids
    assert len(answer.text.splitlines()) == 3


def test_a_prompt_beyond_the_context_is_shown_whole_and_scored_at_its_end(client):
    text = "return x + 1\n" * 5  # 65 characters, the context is 16
    answer = client.post("/generate", json={"text": text, "max_new_tokens": 1})
    prompt = json.loads(answer.text.splitlines()[0])["prompt"]
    assert "".join(token["text"] for token in prompt) == text
    scored = [token["p"] is not None for token in prompt]
    assert scored == [False] * (65 - 15) + [True] * 15


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.5}, {"temperature": 1.0, "top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}],
)
def test_the_distribution_is_what_is_drawn_from(client, model_and_tokenizer, settings):
    model, tokenizer = model_and_tokenizer
    ids = ids_of(tokenizer, TEXT)
    found = client.post("/distribution", json={"ids": ids, **settings}).json()
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[:, -1]
    p = next_distribution(logits, SamplingConfig(**settings), None)[0]
    assert found["kept"] == int((p > 0).sum())
    assert {row[0]: row[2] for row in found["top"]} == pytest.approx(
        {row[0]: float(p[row[0]]) for row in found["top"]}, abs=2e-6
    )
    assert found["top"][0][0] == int(p.argmax())


def test_at_temperature_0_one_token_is_left(client):
    found = client.post("/distribution", json={"text": TEXT, "temperature": 0}).json()
    assert found["kept"] == 1
    assert [row[2] for row in found["top"]] == [1.0]


def test_attention_is_that_of_the_head(client, model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    ids = ids_of(tokenizer, TEXT * 3)  # 33: the last 16 count
    found = client.post("/attention", json={"ids": ids, "layer": 0, "head": 1}).json()
    assert (found["start"], found["size"]) == (17, 16)
    bytes_ = list(base64.b64decode(found["weights"]))
    expected = attention_maps(model, torch.tensor([ids[-16:]]))[0, 0, 1] * 255
    assert bytes_ == expected.round().flatten().int().tolist()


def test_the_lens_ends_with_the_models_own_prediction(client, model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    ids = ids_of(tokenizer, TEXT)
    rows = client.post("/lens", json={"ids": ids}).json()
    assert len(rows) == model.config.n_layers + 1
    with torch.no_grad():
        own = model(torch.tensor([ids]))[0, -1].softmax(-1)
        bare = (model.norm(model.embed(torch.tensor(ids[-1]))) @ model.head_weight.T).softmax(-1)
    for row, p in ((rows[-1], own), (rows[0], bare)):
        assert [token for token, _, _ in row] == p.topk(2).indices.tolist()
        assert [value for _, _, value in row] == pytest.approx(p.topk(2).values.tolist(), abs=2e-6)


# Doors


@pytest.mark.parametrize("path", ["about", "generate", "distribution", "attention", "lens"])
def test_nothing_is_answered_without_the_token(client, path):
    method = "GET" if path == "about" else "POST"
    for headers in ({"X-Token": "wrong"}, {"X-Token": ""}):
        assert client.request(method, f"/{path}", headers=headers, json={}).status_code == 403


def test_the_page_needs_the_token_and_loads_nothing(client):
    assert client.get("/").status_code == 403
    assert client.get("/?token=wrong").status_code == 403
    page = client.get(f"/?token={SECRET}")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    nonce = policy.split("'nonce-")[1].split("'")[0]
    assert f'<script nonce="{nonce}">' in page.text
    assert "default-src 'none'" in policy
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_another_name_for_this_machine_is_refused(client):
    for path in (f"/?token={SECRET}", "/about"):
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 403
        assert client.get(path, headers={"Host": "localhost:1234"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "asked", "named"),
    [
        ("generate", {"text": 5}, "text"),
        ("generate", {"text": "x" * 100_001}, "text"),
        ("generate", {"ids": []}, "ids"),
        ("generate", {"ids": [10**9]}, "ids"),
        ("generate", {"ids": [-1]}, "ids"),
        ("generate", {"ids": [True]}, "ids"),
        ("generate", {"ids": "abc"}, "ids"),
        ("generate", {"text": "x", "model": 2}, "model"),
        ("generate", {"text": "x", "seed": -1}, "seed"),
        ("generate", {"text": "x", "max_new_tokens": 2001}, "max_new_tokens"),
        ("generate", {"text": "x", "max_new_tokens": 0}, "max_new_tokens"),
        ("distribution", {"text": "x", "temperature": "hot"}, "temperature"),
        ("distribution", {"text": "x", "temperature": -1}, "temperature"),
        ("distribution", {"text": "x", "top_k": 0.5}, "top_k"),
        ("distribution", {"text": "x", "top_p": 2}, "top_p"),
        ("attention", {"text": "x", "head": 2}, "head"),
        ("attention", {"text": "x", "layer": -1}, "layer"),
        ("lens", [1, 2], "object"),
    ],
)
def test_a_bad_request_names_what_is_wrong(client, path, asked, named):
    answer = client.post(f"/{path}", json=asked)
    assert answer.status_code == 400
    assert named in answer.text


def test_a_request_that_is_no_json_or_too_large_is_refused(client):
    assert client.post("/lens", content=b"{").status_code == 400
    assert client.post("/lens", content=b"[" * 100_000).status_code == 400
    assert client.post("/lens", content=b" " * (1 << 21)).status_code == 413


# Serving


@pytest.fixture
def served(session):
    """The address of a server in a thread, and its session."""
    from tools.play.server import make_app

    config = uvicorn.Config(make_app([session], SECRET), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", session
    server.should_exit = True
    thread.join(10)


def test_a_dropped_request_stops_computing(served):
    address, session = served
    computed = []

    def endless(*args):
        while True:
            computed.append(time.monotonic())
            time.sleep(0.005)
            yield {"token": {"id": 0, "text": "a", "p": 0.5, "top": []}}

    session.generate = endless
    headers = {"X-Token": SECRET}
    with httpx.stream("POST", f"{address}/generate", json={"text": "x"}, headers=headers) as got:
        lines = got.iter_lines()
        for _ in range(3):  # they come while more are computed
            next(lines)
    time.sleep(0.5)
    stopped_at = len(computed)
    time.sleep(0.3)
    assert len(computed) == stopped_at


def test_two_answers_take_turns(served):
    address, session = served
    order = []

    def slow(ids, *args):
        for _ in range(20):
            order.append(ids[0])
            time.sleep(0.01)
            yield {"token": {"id": 0, "text": "a", "p": 0.5, "top": []}}

    session.generate = slow
    headers = {"X-Token": SECRET}

    def ask(first: int) -> None:
        httpx.post(f"{address}/generate", json={"ids": [first]}, headers=headers, timeout=30)

    threads = [threading.Thread(target=ask, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order.count(0) == order.count(1) == 20
    both = order[: len(order) - 20]
    assert {0, 1} <= set(both)  # neither waited for the other's end


# The command


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "RUN"),
        (["a", "b", "c"], "3 models"),
        (["RUN", "--port=70000"], "port=70000"),
        (["missing"], "missing"),
    ],
)
def test_mistakes_end_with_2(command, argv, named):
    code, _, err = command(main, *argv)
    assert code == 2
    assert named in err


def test_a_port_in_use_is_a_mistake(command, trained):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = command(main, trained, f"--port={port}")
    assert code == 2
    assert f"port={port}" in err


def test_a_missing_server_package_is_told_in_a_line(command, trained, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    code, _, err = command(main, trained)
    assert code == 2
    assert "pip install starlette uvicorn" in err
    assert len(err.strip().splitlines()) == 1
