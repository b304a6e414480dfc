"""Reads models that were trained elsewhere: weights by our names, the config, the tokenizer.

The format of Hugging Face's GPT-2 (gpt2_format.py), and that of the models that the forerunner published, whose weights
have the names of Raschka's "Build a Large Language Model (From Scratch)". Only safetensors: nothing is unpickled.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from model.gpt import GPTConfig
from training.errors import UserError, one_line
from training.exchange.gpt2_format import (
    config_from_gpt2,
    from_gpt2,
    has_qkv_bias,
    refuse_misfits,
    renamed,
    weight_shapes,
    with_prefix,
)
from training.foreign_file import instead
from training.json_file import read_json_object
from training.tokenizer import TOKENIZER as TOKENIZER
from training.tokenizer import load_tokenizer, read_published

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "fetch it again"
FORERUNNER = {
    "tok_emb": "token_embedding",
    "pos_emb": "position_embedding",
    "trf_blocks": "blocks",
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "att.W_query": "attention.query",
    "att.W_key": "attention.key",
    "att.W_value": "attention.value",
    "att.out_proj": "attention.output",
    "ff.layers.0": "mlp.up",
    "ff.layers.2": "mlp.down",
    "out_head": "head",
    "scale": "weight",
    "shift": "bias",
}
"""The forerunner's words in a weight's name, and ours."""
FORERUNNER_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "context_length",
    "emb_dim": "emb_dim",
    "n_heads": "n_heads",
    "n_layers": "n_layers",
    "drop_rate": "dropout",
    "qkv_bias": "qkv_bias",
    "tie_weights": "tie_weights",
}


@dataclass(frozen=True)
class ForeignModel:
    """A model read from elsewhere, its weights by our names, in float32."""

    format: str
    config: GPTConfig
    weights: dict[str, Tensor]


def read_foreign_model(folder: Path, source: str, heads: int | None) -> ForeignModel:
    """Reads weights and config of a folder.

    Args:
        folder: with model.safetensors, whole or in parts, and mostly config.json.
        source: what the user calls it.
        heads: attention heads, where no file says.

    Raises:
        UserError: names the file and the key or tensor that our model cannot follow.
    """
    tensors = _read_tensors(folder, source)
    if heads is not None and heads < 1:
        raise UserError(f"--heads {heads}: must be at least 1")
    from_forerunner = any(".W_query." in name for name in tensors)
    reader = _read_forerunners if from_forerunner else _read_gpt2
    try:
        return reader(tensors, folder, heads)
    except (ValueError, TypeError) as error:  # GPTConfig's too, which names the key
        raise UserError(f"{source}: {error}; this model cannot be imported as it is") from None


def _read_tensors(folder: Path, source: str) -> dict[str, Tensor]:
    """All weights, in the dtype of the file."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        parts = read_json_object(folder / INDEX, AGAIN).get("weight_map")
        if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
            raise UserError(f"{folder / INDEX}: its weight_map must name the file of each tensor; {AGAIN}")
        if missing := [part for part in parts.values() if not os.path.isfile(folder / Path(part).name)]:
            raise UserError(f"{folder / INDEX}: names a file that is not there, {one_line(missing[0])}; {AGAIN}")
        names = sorted({Path(part).name for part in parts.values()})  # .name: never outside the folder
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"{source}: has no {name}; pickled weights (.bin, .pt, .pth) are never read, as they may run code: "
                "save the model as safetensors"
            )
        try:
            part = load_file(folder / name)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{folder / name}: is not a readable safetensors file ({error}{instead(folder / name)}); {AGAIN}"
            ) from error
        if twice := tensors.keys() & part.keys():
            raise UserError(f"{folder / name}: holds {min(twice)}, which another of its files holds too; {AGAIN}")
        tensors |= part
    return tensors


def _as_float32(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"{name} holds {tensor.dtype}, which is no weight (quantised models are not read)")
        weights[name] = tensor.float()
        if not weights[name].isfinite().all():
            raise ValueError(f"{name} holds values that are not finite in float32")
    return weights


def _read_gpt2(tensors: dict[str, Tensor], folder: Path, heads: int | None) -> ForeignModel:
    if not (folder / "config.json").is_file():
        raise ValueError("has no config.json, which says how many heads it has")
    values = read_json_object(folder / "config.json", AGAIN)
    if heads is not None and heads != values.get("n_head"):
        raise ValueError(f"--heads is {heads}, but config.json has n_head {values.get('n_head')}; leave it out")
    tensors = _as_float32(with_prefix(tensors))
    config = config_from_gpt2(values, has_qkv_bias(tensors))
    tensors = _with_head_as_said(tensors, "transformer.wte.weight", "lm_head.weight", config.tie_weights)
    return ForeignModel("transformers' GPT-2 format", config, from_gpt2(tensors, config))


def _with_head_as_said(tensors: dict[str, Tensor], embedding: str, head: str, tied: bool) -> dict[str, Tensor]:
    """Leaves a tied head out, under whichever of its two names the file has it; an untied one must be there."""
    if not tied and head not in tensors:
        raise ValueError(f"the config says that weights are not tied, but {head} is missing; correct the config")
    if not tied:
        return tensors
    if embedding not in tensors and head in tensors:  # how safetensors' save_model may leave a tied pair
        tensors = {**tensors, embedding: tensors[head]}
    if head in tensors and not torch.equal(tensors[head], tensors[embedding]):
        raise ValueError(f"the config says that weights are tied, but {head} is not {embedding}; correct the config")
    return {name: tensor for name, tensor in tensors.items() if name != head}


def _read_forerunners(tensors: dict[str, Tensor], folder: Path, heads: int | None) -> ForeignModel:
    names = {name: _our_name(name) for name in tensors if not name.endswith(".att.mask")}
    weights = _as_float32(renamed(tensors, names))
    values = _forerunners_config(folder)
    unknown = values.keys() - FORERUNNER_KEYS.keys()
    if unknown:
        raise ValueError(f"{min(unknown)} in its config is not of the model that is trained here")
    said = {ours: values[theirs] for theirs, ours in FORERUNNER_KEYS.items() if theirs in values}
    if heads is not None:
        said.setdefault("n_heads", heads)
    if "n_heads" not in said:
        raise ValueError("no file says how many heads it has; give --heads N (12 for GPT-2 small)")
    if heads not in (None, said["n_heads"]):
        raise ValueError(f"--heads is {heads}, but its config has n_heads {said['n_heads']}; leave it out")
    embedding = weights.get("token_embedding.weight", weights.get("head.weight"))
    positions = weights.get("position_embedding.weight")
    if embedding is None or positions is None:
        raise ValueError(f"{'tok_emb' if embedding is None else 'pos_emb'}.weight is missing")
    for weight in (embedding, positions):
        if weight.dim() != 2:
            raise ValueError(f"an embedding has shape {list(weight.shape)}, wanted rows and columns")
    shapes = {
        "vocab_size": embedding.shape[0],
        "emb_dim": embedding.shape[1],
        "context_length": positions.shape[0],
        "n_layers": len({name.split(".")[1] for name in weights if name.startswith("blocks.")}),
        "qkv_bias": "blocks.0.attention.query.bias" in weights,
        "tie_weights": "head.weight" not in weights or torch.equal(weights["head.weight"], embedding),
    }
    config = GPTConfig(**{**shapes, **said})
    weights = _with_head_as_said(weights, "token_embedding.weight", "head.weight", config.tie_weights)
    refuse_misfits(weights, weight_shapes(config))
    return ForeignModel(
        "the forerunner's format", config, {name: tensor.contiguous() for name, tensor in weights.items()}
    )


def _our_name(name: str) -> str:
    """Our name of one of the forerunner's weights; its wrapper for the Hub puts `model.` in front."""
    for theirs, ours in FORERUNNER.items():
        name = re.sub(rf"(^|\.){re.escape(theirs)}(?=\.|$)", rf"\g<1>{ours}", name)
    return name.removeprefix("model.")


def _forerunners_config(folder: Path) -> dict[str, Any]:
    """What the forerunner's files say of the model: `cfg` in config.json on the Hub, model.json in its own folders."""
    for file in ("config.json", "model.json"):
        if (folder / file).is_file():
            values = read_json_object(folder / file, AGAIN)
            values = values.get("cfg", values)
            if isinstance(values, dict) and "emb_dim" in values:
                return values
    return {}


def read_foreign_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer: tokenizer.json, or GPT-2's older vocabulary and merges; None without either."""
    if (folder / TOKENIZER).is_file():
        return load_tokenizer(folder / TOKENIZER)
    return read_published(folder)
