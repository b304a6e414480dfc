"""Text from a model: one token after another, greedy or drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.gpt import GPT


def generate(
    model: GPT,
    ids: list[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    end_of_text: int | None = None,
    forbidden: Sequence[int] = (),
) -> list[int]:
    """Continues a prompt.

    Every new token reads its whole context again: a cache of keys and values would not survive the crop of
    the context, and samples are short.

    Args:
        model: the model, in either mode; it is in that mode again afterwards.
        ids: the prompt's token ids, at least one; the model reads the last context_length only.
        max_new_tokens: tokens to add, at most.
        temperature: 0 takes the likeliest token; else logits are divided by it before a token is drawn.
        top_k: draw among the k likeliest tokens only; None for all.
        seed: of the draws, which neither use nor move the global random state.
        end_of_text: id after which to stop.
        forbidden: ids that are never taken, such as rows that stand for no token; not all of them.

    Returns:
        The new ids alone; the last one is end_of_text if that ended the text.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, a negative temperature, or top_k below 1.
    """
    _check_arguments(model, ids, temperature, top_k)
    # On the CPU whatever the model's device: the same draws everywhere.
    generator = torch.Generator().manual_seed(seed)
    never = torch.tensor(forbidden, dtype=torch.int64)
    sequence = list(ids)
    was_training = model.training
    model.eval()
    try:
        while len(sequence) < len(ids) + max_new_tokens:
            logits = _next_logits(model, sequence)
            logits[never] = -torch.inf
            sequence.append(_next_id(logits, temperature, top_k, generator))
            if sequence[-1] == end_of_text:
                break
    finally:
        model.train(was_training)
    return sequence[len(ids) :]


def _check_arguments(model: GPT, ids: list[int], temperature: float, top_k: int | None) -> None:
    if not ids:
        raise ValueError("the prompt is empty; it needs at least one token, for instance the end of text")
    vocab_size = model.config.vocab_size
    for token in ids:
        if not 0 <= token < vocab_size:  # on a GPU the lookup would fail far from the cause
            raise ValueError(f"token id {token} of the prompt is outside vocab_size {vocab_size}")
    if not temperature >= 0:  # so written that NaN is refused too
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be 1 or more, got {top_k}")


def _next_logits(model: GPT, sequence: list[int]) -> Tensor:
    """Logits of the token after `sequence`: (V,) float32 on the CPU."""
    context = sequence[-model.config.context_length :]
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([context], device=model.head.weight.device))  # (1, T, E)
        logits: Tensor = model.head(hidden[0, -1])  # (E,) -> (V,): of the last position only
    return logits.float().cpu()


def _next_id(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    likeliest, candidates = logits.topk(min(top_k or len(logits), len(logits)))  # (K,) each, descending
    # Relative to the largest, or a tiny temperature would overflow to infinity minus infinity.
    probabilities = ((likeliest - likeliest[0]).double() / temperature).softmax(dim=0)
    return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])
