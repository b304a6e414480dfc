"""The format of Hugging Face's GPT-2: the names and layout of its weights, and its config.json; there and back.

transformers keeps the four matrices of a block as (inputs, outputs), the transpose of nn.Linear's, and query, key and
value side by side in one of them, each with a bias. Embeddings and head are as ours. A tied head has no tensor.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model.gpt import GPTConfig
from training.errors import one_line


@dataclass(frozen=True)
class Names:
    """A format's names for our weights, where query, key and value are one."""

    once: Mapping[str, str]
    """Our name and theirs of what is there once."""
    blocks: str
    in_each_block: Mapping[str, str]
    """The same for a block's layers but the fused one; each has a weight and a bias."""
    fused: str


GPT2 = Names(
    once={
        "token_embedding.weight": "transformer.wte.weight",
        "position_embedding.weight": "transformer.wpe.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    },
    blocks="transformer.h",
    in_each_block={
        "attention_norm": "ln_1",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    fused="attn.c_attn",
)
PARTS = ("attention.query", "attention.key", "attention.value")
TRANSPOSED = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")
NOT_WEIGHTS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")
"""Causal masks, which old files hold among the weights."""

SHAPE_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "emb_dim": "n_embd",
    "n_heads": "n_head",
    "n_layers": "n_layer",
}
"""Our key of the model's config and theirs."""
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
LAYER_NORM_EPSILON = 1e-5
TANH_GELU = "gelu_new"
# Values of config.json that our network has built in, and what each is where the file does not say; any other value is
# another network. Keys that are not here change nothing (reorder_and_upcast_attn, summary_*), or are read elsewhere.
BUILT_IN: dict[str, tuple[tuple[Any, ...], Any]] = {
    "model_type": (("gpt2",), None),
    "activation_function": ((TANH_GELU, "gelu_pytorch_tanh"), TANH_GELU),
    "layer_norm_epsilon": ((LAYER_NORM_EPSILON,), LAYER_NORM_EPSILON),
    "scale_attn_weights": ((True,), True),
    "scale_attn_by_inverse_layer_idx": ((False,), False),
    "add_cross_attention": ((False,), False),
    "quantization_config": ((None,), None),
}


def renamed_and_fused(weights: Mapping[str, Tensor], config: GPTConfig, names: Names) -> dict[str, Tensor]:
    """A model's weights by a format's names, query, key and value in one; matrices as nn.Linear has them.

    Args:
        weights: by our names; a tied head is the token embedding and has no name of its own.
        config: the model's.
        names: the format's.

    Returns:
        Query, key and value without biases get zeros, which change nothing.
    """
    tensors = {theirs: weights[ours] for ours, theirs in names.once.items() if ours in weights}
    for index in range(config.n_layers):
        block, theirs = f"blocks.{index}", f"{names.blocks}.{index}"
        for kind in ("weight", "bias"):
            for our_layer, their_layer in names.in_each_block.items():
                tensors[f"{theirs}.{their_layer}.{kind}"] = weights[f"{block}.{our_layer}.{kind}"]
            if kind == "weight" or config.qkv_bias:
                fused = torch.cat([weights[f"{block}.{part}.{kind}"] for part in PARTS])
            else:
                fused = weights[f"{block}.attention.output.bias"].new_zeros(3 * config.emb_dim)
            tensors[f"{theirs}.{names.fused}.{kind}"] = fused
    return tensors


def to_gpt2(weights: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """A model's weights as transformers keeps them, contiguous; arguments as for `renamed_and_fused`."""
    tensors = renamed_and_fused(weights, config, GPT2)
    # A transposed view is not what safetensors writes.
    return {name: (t.T if TRANSPOSED.fullmatch(name) else t).contiguous() for name, t in tensors.items()}


def from_gpt2(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The inverse of to_gpt2, strictly by name and shape; names may lack the prefix `transformer.`.

    Args:
        tensors: by their names, as `with_prefix` gives them.
        config: the model's, as `config_from_gpt2` reads it.

    Raises:
        ValueError: names the first tensor that is missing, not known, or of another shape.
    """
    refuse_misfits(tensors, _gpt2_shapes(config))
    straight = {name: t.T if TRANSPOSED.fullmatch(name) else t for name, t in tensors.items()}
    weights = {ours: straight[theirs] for ours, theirs in GPT2.once.items() if theirs in straight}
    for index in range(config.n_layers):
        block, theirs = f"blocks.{index}", f"{GPT2.blocks}.{index}"
        for kind in ("weight", "bias"):
            for our_layer, their_layer in GPT2.in_each_block.items():
                weights[f"{block}.{our_layer}.{kind}"] = straight[f"{theirs}.{their_layer}.{kind}"]
            if kind == "weight" or config.qkv_bias:
                parts = straight[f"{theirs}.{GPT2.fused}.{kind}"].chunk(3)
                weights |= {f"{block}.{part}.{kind}": value for part, value in zip(PARTS, parts, strict=True)}
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def weight_shapes(config: GPTConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Our name and the shape of each weight of a model, one after another: a foreign config may ask for any number."""
    width = config.emb_dim
    yield "token_embedding.weight", (config.vocab_size, width)
    yield "position_embedding.weight", (config.context_length, width)
    layers = {**dict.fromkeys((*PARTS, "attention.output"), (width, width)), "mlp.up": (4 * width, width)}
    layers["mlp.down"] = (width, 4 * width)
    for index in range(config.n_layers):
        for norm in ("attention_norm", "mlp_norm"):
            yield f"blocks.{index}.{norm}.weight", (width,)
            yield f"blocks.{index}.{norm}.bias", (width,)
        for layer, shape in layers.items():
            yield f"blocks.{index}.{layer}.weight", shape
            if config.qkv_bias or layer not in PARTS:
                yield f"blocks.{index}.{layer}.bias", shape[:1]
    yield "final_norm.weight", (width,)
    yield "final_norm.bias", (width,)
    if not config.tie_weights:
        yield "head.weight", (config.vocab_size, width)


def _gpt2_shapes(config: GPTConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same of what `to_gpt2` makes of the model."""
    for ours, shape in weight_shapes(replace(config, qkv_bias=True)):
        if ours in GPT2.once:
            yield GPT2.once[ours], shape
            continue
        _, index, layer, kind = *ours.split(".", 2)[:2], *ours.split(".", 2)[2].rsplit(".", 1)
        if layer in PARTS[1:]:
            continue
        fused = layer == PARTS[0]
        theirs = f"{GPT2.blocks}.{index}.{GPT2.fused if fused else GPT2.in_each_block[layer]}.{kind}"
        shape = (3 * shape[0], *shape[1:]) if fused else shape
        yield theirs, shape[::-1] if TRANSPOSED.fullmatch(theirs) else shape


def refuse_misfits(tensors: Mapping[str, Tensor], expected: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Compares names and shapes, and stops at the first that does not fit.

    Raises:
        ValueError: names the first tensor that is missing, not known, or of another shape.
    """
    known = set()
    for name, shape in expected:
        if name not in tensors:
            raise ValueError(f"{name} is missing")
        if tensors[name].shape != shape:
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}, wanted {list(shape)}")
        known.add(name)
    if unknown := tensors.keys() - known:
        raise ValueError(f"{min(unknown)} is unknown")


def with_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a file under their full names, without the masks that old files hold among them.

    Raises:
        ValueError: it holds a weight under both of its names.
    """
    full = {}
    for name in tensors:
        if not NOT_WEIGHTS.fullmatch(name):
            full[name] = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
    return renamed(tensors, full)


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors that have a new name, by it.

    Raises:
        ValueError: two have the same one.
    """
    found: dict[str, str] = {}
    for name, new in names.items():
        if new in found:
            raise ValueError(f"{found[new]} and {name} are the same weight; one of them must go")
        found[new] = name
    return {new: tensors[name] for new, name in found.items()}


def has_qkv_bias(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any bias of query, key and value is not zero; where all are, a model without them is the same one."""
    return any(bool(tensor.any()) for name, tensor in tensors.items() if name.endswith(f"{GPT2.fused}.bias"))


def config_to_gpt2(config: GPTConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """The content of config.json. Every value that has a default is written all the same: defaults change.

    Args:
        config: the model's.
        dtype: of the weights in the file, such as "float32".
        end_of_text: the id that separates documents in the data; it begins and ends a text.
    """
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for ours, theirs in SHAPE_KEYS.items()},
        "n_ctx": config.context_length,  # an older name of n_positions, which some programs still read
        "n_inner": None,
        "activation_function": TANH_GELU,
        **{key: float(config.dropout) for key in DROPOUTS},
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": config.tie_weights,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": dtype,
    }


def config_from_gpt2(values: Mapping[str, Any], qkv_bias: bool) -> GPTConfig:
    """Reads the content of a config.json.

    Args:
        values: the content.
        qkv_bias: what `has_qkv_bias` says of the weights.

    Raises:
        ValueError: names the first key that our network cannot follow.
    """
    for key, (accepted, default) in BUILT_IN.items():
        value = values.get(key, default)
        if value not in accepted:
            raise ValueError(f"{key} is {value!r}, and the model that is trained here has {accepted[0]!r}")
    for key in ("n_embd", *DROPOUTS):
        if key in values and (isinstance(values[key], bool) or not isinstance(values[key], int | float)):
            raise ValueError(f"{key} is {one_line(repr(values[key]))}, but must be a number")
    width = values.get("n_embd", 768)
    inner = values.get("n_inner")
    if inner is not None and inner != 4 * width:
        raise ValueError(f"n_inner is {inner!r}, and the model that is trained here has 4 * n_embd, {4 * width}")
    rates = {key: values.get(key, 0.1) for key in DROPOUTS}
    if len(set(rates.values())) > 1:
        said = ", ".join(f"{key} {rate}" for key, rate in rates.items())
        raise ValueError(f"{said}: the model that is trained here has one rate of dropout; make them equal")
    return GPTConfig(
        **{ours: values[theirs] for ours, theirs in SHAPE_KEYS.items() if theirs in values},
        dropout=rates["resid_pdrop"],
        qkv_bias=qkv_bias,
        tie_weights=values.get("tie_word_embeddings", True),
    )
