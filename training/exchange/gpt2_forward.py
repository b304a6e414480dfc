"""What a folder in the format of Hugging Face's GPT-2 computes, from its two files alone.

Written from the format's definition, apart from model/gpt.py and from the mapping in gpt2_format.py, so that a mistake
in either shows. Where transformers is not installed, an export is checked with this.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor


def gpt2_logits(config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The logits of each position.

    Args:
        config: the content of config.json; activation, epsilon, heads and tying are as it says.
        tensors: the content of model.safetensors, in the dtype to compute in.
        ids: token ids, (B, T) int64.

    Returns:
        (B, T, V).

    Raises:
        KeyError: a tensor or a key is missing.
    """
    epsilon, heads = config["layer_norm_epsilon"], config["n_head"]
    activation = {"gelu_new": "tanh", "gelu": "none"}[config["activation_function"]]

    def normalised(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], epsilon)

    def product(x: Tensor, name: str) -> Tensor:  # weights are (inputs, outputs)
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    x = tensors["transformer.wte.weight"][ids] + tensors["transformer.wpe.weight"][: ids.shape[1]]  # (B, T, E)
    future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(diagonal=1)
    for index in range(config["n_layer"]):
        block = f"transformer.h.{index}"
        query, key, value = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, T, E) -> (B, H, T, D)
            for part in product(normalised(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=-1)
        )
        scores = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + product(mixed, f"{block}.attn.c_proj")
        widened = F.gelu(product(normalised(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"), approximate=activation)
        x = x + product(widened, f"{block}.mlp.c_proj")
    head = tensors["transformer.wte.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return normalised(x, "transformer.ln_f") @ head.T
