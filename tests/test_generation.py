"""generate(): greedy and drawn continuations, and where they stop."""

import pytest
import torch

from model.generation import generate
from model.gpt import GPT, GPTConfig, build_gpt

CONFIG = GPTConfig(vocab_size=50, context_length=8, emb_dim=16, n_heads=2, n_layers=2, dropout=0.5)
PROMPT = [3, 1, 4]


@pytest.fixture
def model() -> GPT:
    return build_gpt(CONFIG, seed=42)


def logits_after(model: GPT, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model.eval()(torch.tensor([ids[-8:]]))[0, -1])


def with_fixed_probabilities(model: GPT) -> GPT:
    """Ids 0 to 3 get probability 0.1, 0.2, 0.3 and 0.4 after any context, all others 0."""
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.zero_()[0] = 1
        model.head.weight.fill_(-1e4)
        model.head.weight[:4, 0] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    return model


def test_greedy_takes_the_likeliest_token_each_time(model: GPT) -> None:
    text = list(PROMPT)
    for _ in range(20):  # well past the context length of 8
        text.append(int(logits_after(model, text).argmax()))
    new = text[len(PROMPT) :]
    assert len(set(new)) > 3  # not one token over and over
    assert generate(model, PROMPT, max_new_tokens=20) == new


def test_prompt_of_the_context_length_or_longer(model: GPT) -> None:
    prompt = list(range(8))
    expected = generate(model, prompt, max_new_tokens=5)
    assert expected[0] == int(logits_after(model, prompt).argmax())
    assert generate(model, [40, 41, 42, *prompt], max_new_tokens=5) == expected


def test_prompt_is_left_alone(model: GPT) -> None:
    prompt = list(PROMPT)
    generate(model, prompt, max_new_tokens=3)
    assert prompt == PROMPT


def test_nothing_to_add(model: GPT) -> None:
    assert generate(model, PROMPT, max_new_tokens=0) == []


def test_same_seed_same_text(model: GPT) -> None:
    first = generate(model, PROMPT, 30, temperature=1.0, seed=1)
    torch.rand(5)  # the global random state plays no part
    assert generate(model, PROMPT, 30, temperature=1.0, seed=1) == first
    assert generate(model, PROMPT, 30, temperature=1.0, seed=2) != first


def test_random_state_and_mode_are_left_alone(model: GPT) -> None:
    state = torch.get_rng_state()
    generate(model.train(), PROMPT, 5, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    generate(model.eval(), PROMPT, 5)
    assert not model.training


def test_mode_is_restored_after_a_failure(model: GPT) -> None:
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError):
        generate(model.train(), PROMPT, 5, temperature=1.0)
    assert model.training


@pytest.mark.parametrize(
    ("temperature", "top_k", "expected"),
    [
        (1.0, None, [0.1, 0.2, 0.3, 0.4]),
        (0.5, None, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),  # squares of the above, normalised
        (1.0, 2, [0, 0, 3 / 7, 4 / 7]),
        (1.0, 1, [0, 0, 0, 1]),
        (1e-40, None, [0, 0, 0, 1]),
        (1.0, 1000, [0.1, 0.2, 0.3, 0.4]),  # more than the vocabulary: all of it
    ],
)
def test_frequencies_of_drawn_tokens(model: GPT, temperature: float, top_k: int | None, expected: list[float]) -> None:
    draws = generate(with_fixed_probabilities(model), [0], 400, temperature=temperature, top_k=top_k, seed=5)
    frequencies = [draws.count(token) / 400 for token in range(4)]
    # Four standard errors at most: 4 x sqrt(0.25 / 400).
    assert frequencies == pytest.approx(expected, abs=0.1)
    assert [frequency == 0 for frequency in frequencies] == [probability == 0 for probability in expected]


def test_forbidden_ids_are_never_taken(model: GPT) -> None:
    """Neither greedily nor drawn; top_k counts the others."""
    with_fixed_probabilities(model)
    assert generate(model, [0], 3) == [3, 3, 3]
    assert generate(model, [0], 3, forbidden=[3, 49]) == [2, 2, 2]
    assert generate(model, [3], 3, temperature=1.0, top_k=1, forbidden=[3]) == [2, 2, 2]
    draws = generate(model, [0], 400, temperature=1.0, seed=5, forbidden=[3])
    assert [draws.count(token) / 400 for token in range(4)] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 0], abs=0.1)
    assert set(draws) == {0, 1, 2}


def test_stops_after_end_of_text(model: GPT) -> None:
    free = generate(model, PROMPT, 20)
    end = free[5]
    stopped = generate(model, PROMPT, 20, end_of_text=end)
    assert stopped == free[: free.index(end) + 1]
    # In the prompt it is an ordinary token.
    assert len(generate(model, [end], 3, end_of_text=49)) == 3


def test_empty_prompt_is_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(model, [], 5)


@pytest.mark.parametrize("token", [-1, 50])
def test_token_outside_the_vocabulary_is_refused(model: GPT, token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token} .* vocab_size 50"):
        generate(model, [0, token], 5)


@pytest.mark.parametrize("temperature", [-1.0, float("nan")])
def test_wrong_temperature_is_refused(model: GPT, temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be 0 or more"):
        generate(model, PROMPT, 5, temperature=temperature)


def test_wrong_top_k_is_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match="top_k must be 1 or more, got 0"):
        generate(model, PROMPT, 5, temperature=1.0, top_k=0)
