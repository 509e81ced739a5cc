"""Generation: the loop around the model, with real models and with rigged ones."""

from __future__ import annotations

import pytest
import torch

from model.config import ModelConfig, SamplingConfig
from model.generate import generate
from model.gpt import GPT

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=12)


def make_model(context_length=8, vocab_size=30, dropout=0.0, **given) -> GPT:
    sizes = dict(n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, context_length=context_length)
    model = GPT(ModelConfig(dropout=dropout, **(sizes | given)).resolved(vocab_size))
    rng = torch.Generator().manual_seed(1)
    for p in model.parameters():  # large, so that greedy choices are clear and all tokens matter
        p.data = torch.randn(p.shape, generator=rng) * (0.5 if p.dim() > 1 else 1.0)
    return model


def make_prompt(B=2, P=5, V=30):
    return torch.randint(0, V, (B, P), generator=torch.Generator().manual_seed(2))


def run(model, prompt, settings=GREEDY, seed=0, **options) -> list[list[int]]:
    """Return the new ids of each row."""
    steps = generate(model, prompt, settings, torch.Generator().manual_seed(seed), **options)
    return torch.stack(list(steps), dim=1).tolist()


class Rigged(torch.nn.Module):
    """A model whose most likely next token comes from a script; the second most likely is 0.

    It has no layers, so it needs use_cache=False.
    """

    def __init__(self, script: list[list[int]], V: int = 10) -> None:
        super().__init__()
        self.config = ModelConfig(n_layers=1, context_length=64).resolved(V)
        self.script, self.V, self.asked = script, V, 0

    def forward(self, tokens, *, cache=None, last_only=False):
        logits = torch.zeros(len(self.script), 1, self.V)
        logits[:, 0, 0] = 1.0
        for row, ids in enumerate(self.script):
            logits[row, 0, ids[self.asked]] = 5.0
        self.asked += 1
        return logits


def ask(script, prompt, settings=GREEDY, **options) -> list[list[int]]:
    return run(Rigged(script), prompt, settings, use_cache=False, **options)


@pytest.mark.parametrize("kind", [{}, dict(position="learned", qk_norm=False)], ids=str)
@pytest.mark.parametrize("context", [1, 2, 7, 8])
def test_cached_equals_uncached_over_three_contexts(context, kind):
    model, settings = make_model(context, **kind), SamplingConfig(0.0, max_new_tokens=24)
    prompt = make_prompt(P=min(3, context))
    cached = run(model, prompt, settings)
    assert run(model, prompt, settings, use_cache=False) == cached
    assert len({id for row in cached for id in row}) > 2  # not one id for ever


@pytest.mark.parametrize(("context", "half"), [(8, 4), (7, 3), (1, 1)])
def test_a_full_context_keeps_its_last_half(context, half):
    """By hand: the window grows to the context, then the last half of it is encoded again."""
    model, prompt = make_model(context), make_prompt(B=1, P=1)
    text, start = prompt[0].tolist(), 0
    for _ in range(24):
        if len(text) - start > context:
            start = len(text) - half
        with torch.no_grad():
            text.append(int(model.eval()(torch.tensor([text[start:]]))[0, -1].argmax()))
    assert run(model, prompt, SamplingConfig(0.0, max_new_tokens=24)) == [text[1:]]


def test_only_new_tokens_are_computed():
    model, sizes = make_model(8), []
    model.embed.register_forward_pre_hook(lambda module, given: sizes.append(given[0].shape[1]))
    run(model, make_prompt(P=5))
    assert sizes == [5, 1, 1, 1, 4, 1, 1, 1, 1, 4, 1, 1]


def test_a_batch_equals_its_rows_alone():
    model, prompt = make_model(), make_prompt(B=3)
    assert run(model, prompt) == [run(model, row[None])[0] for row in prompt]


@pytest.mark.parametrize("P", [8, 9, 58])
def test_a_prompt_longer_than_the_context_is_cut_from_the_left(P):
    model, prompt = make_model(8), make_prompt(P=P)
    assert run(model, prompt) == run(model, prompt[:, -8:])


def test_greedy_is_repeatable_whatever_the_seed():
    model, prompt = make_model(), make_prompt()
    assert run(model, prompt, seed=1) == run(model, prompt, seed=2)


def test_a_seed_draws_the_same_again_and_nothing_from_torchs_generator():
    model, settings = make_model(dropout=0.5).train(), SamplingConfig(max_new_tokens=12)
    before = torch.random.get_rng_state()
    first = run(model, make_prompt(), settings, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(5)
    assert run(model, make_prompt(), settings, seed=1) == first
    assert run(model, make_prompt(), settings, seed=2) != first
    assert run(model.eval(), make_prompt(), settings, seed=1) == first  # dropout was off


def test_the_mode_is_restored_before_each_yield():
    model = make_model(dropout=0.5)
    for mode in (True, False):
        model.train(mode)
        for _ in generate(model, make_prompt(), GREEDY, torch.Generator()):
            assert all(module.training == mode for module in model.modules())
            assert torch.is_grad_enabled()
    model.train()
    with pytest.raises(IndexError):
        run(model, torch.full((1, 3), 99))
    assert model.training  # after a failure too


def test_ids_are_ordinary_tensors():
    """Tensors of inference_mode could not be modified or trained on by the caller."""
    for ids in generate(make_model(), make_prompt(), GREEDY, torch.Generator()):
        assert not ids.is_inference()
        ids.zero_()  # the caller's own: nothing that follows is changed


def test_each_row_stops_by_itself():
    """Row 0 draws one stop id at step 2, row 1 another at step 3: it is repeated to the end."""
    script = [[3, 9, 4, 4, 4, 4, 4], [5, 5, 6, 6, 9, 4, 4]]
    ids = ask(script, torch.zeros(2, 3, dtype=torch.long), stop_ids=[9, 6])
    assert ids == [[3, 9, 9], [5, 5, 6]]
    ids = ask(script, torch.zeros(2, 3, dtype=torch.long), stop_ids=[9])
    assert ids == [[3, 9, 9, 9, 9], [5, 5, 6, 6, 9]]
    settings = SamplingConfig(0.0, max_new_tokens=7)
    ids = ask(script, torch.zeros(2, 3, dtype=torch.long), settings)
    assert ids == script  # without a stop id, 9 is an id like others


def test_max_new_tokens_is_exact():
    ids = run(make_model(), make_prompt(), SamplingConfig(0.0, max_new_tokens=3))
    assert [len(row) for row in ids] == [3, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_ids_of_a_padded_vocabulary_are_never_drawn(temperature):
    script = [[9, 8, 7, 6] * 25]
    settings = SamplingConfig(temperature, max_new_tokens=100)
    (ids,) = ask(script, torch.zeros(1, 1, dtype=torch.long), settings, never=[0, 7, 8, 9])
    assert set(ids) <= set(range(1, 7))
    (ids,) = ask(script, torch.zeros(1, 1, dtype=torch.long), settings)
    assert max(ids) == 9


def test_tokens_of_the_prompt_and_the_answer_are_penalized():
    """The script always wants 5. A penalty of 10 brings its logit from 5 to 0.5, below the 1 of
    token 0, until 0 has been used too (0.1)."""
    settings = SamplingConfig(0.0, repetition_penalty=10.0, max_new_tokens=3)
    zeros = torch.tensor([[0, 7]])
    assert ask([[5, 5, 5]], zeros, settings) == [[5, 5, 5]]
    assert ask([[5, 5, 5]], torch.tensor([[7, 7]]), settings) == [[5, 0, 5]]
    # A token that has left the window still counts.
    long = torch.tensor([[5] + [7] * 70])
    assert ask([[5, 5, 5]], long, settings) == [[0, 5, 5]]


@pytest.mark.parametrize("prompt", [torch.zeros(1, 0), torch.zeros(3), torch.zeros(1, 2, 2)])
def test_a_prompt_without_tokens_or_rows_is_refused(prompt):
    with pytest.raises(ValueError, match="expected \\(B, P\\) with P >= 1"):
        run(make_model(), prompt.long())


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="top_p=0.0"):
        run(make_model(), make_prompt(), SamplingConfig(top_p=0.0))


def test_a_compiled_model_is_not_compiled_again_for_every_length():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = make_model()
    expected = run(model, make_prompt())
    model.compile(backend=backend)
    assert run(model, make_prompt()) == expected
    assert not compiled


def test_the_cache_is_no_larger_than_needed(monkeypatch):
    from model import generate as module

    taken = []
    cache = module.KVCache
    monkeypatch.setattr(
        module, "KVCache", lambda layers, size: taken.append(size) or cache(layers, size)
    )
    run(make_model(64), make_prompt(P=5))
    run(make_model(8), make_prompt(P=5))
    assert taken == [17, 8]
