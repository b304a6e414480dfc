"""Exports a model as one GGUF file, which llama.cpp and what is built on it read.

The architecture is llama.cpp's gpt2: names of its own, matrices as nn.Linear has them, query, key and value in one. The
vocabulary must be in the file, so there is no GGUF without a tokenizer.
"""

import contextlib
import errno
import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from model.gpt import GPT
from training.config import RunConfig
from training.errors import RunError, UserError
from training.exchange.export import Dtype, Exported, read_vocabulary, refuse_what_exists, rounded_model
from training.exchange.gpt2_format import LAYER_NORM_EPSILON, Names, renamed_and_fused
from training.left_behind import partial_path, remove_left_behind

GPT2 = Names(
    once={
        "token_embedding.weight": "token_embd.weight",
        "position_embedding.weight": "position_embd.weight",
        "final_norm.weight": "output_norm.weight",
        "final_norm.bias": "output_norm.bias",
        "head.weight": "output.weight",
    },
    blocks="blk",
    in_each_block={
        "attention_norm": "attn_norm",
        "attention.output": "attn_output",
        "mlp_norm": "ffn_norm",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
    },
    fused="attn_qkv",
)
# llama.cpp wants everything with one dimension, and the positions, in float32 whatever the rest is in.
ALWAYS_FLOAT32 = ("position_embd.weight",)
FILE_TYPES = {"float32": 0, "float16": 1}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""What a token is, in llama.cpp's numbers."""


def export_gguf(
    checkpoint: Path,
    config: RunConfig,
    output: Path,
    dtype: Dtype = "float32",
    tokenizer: Path | None = None,
    description: Path | None = None,
) -> Exported:
    """Writes the file `output`, which appears only when it is whole and was read back as it should be.

    Args:
        checkpoint: the folder of a checkpoint.
        config: its run's.
        output: the new file, NAME.gguf.
        dtype: of the matrices in the file: float32 or float16.
        tokenizer: the run's tokenizer.json; a byte-level BPE of GPT-2's kind.
        description: the dataset's dataset.json, as for `export_model`.

    Raises:
        UserError: an argument does not fit, the checkpoint is damaged, or gguf is not installed.
        RunError: the file cannot be written, or reads back otherwise; nothing is left then.
    """
    refuse_what_exists(output, may_be_empty_folder=False)
    remove_left_behind(output.parent)
    if output.suffix != ".gguf":
        raise UserError(f"--output {output}: a GGUF export is one file; give it a name that ends in .gguf")
    if dtype not in FILE_TYPES:
        raise UserError(f"--dtype {dtype}: a GGUF export is float32 or float16; llama.cpp's own tools make the others")
    if tokenizer is None:
        raise UserError("--format gguf: the file holds the vocabulary, and the run has none; give --tokenizer FILE")
    library = _library()
    vocabulary, end_of_text = read_vocabulary(tokenizer, description, config.model.vocab_size)
    assert vocabulary is not None, "a tokenizer was given"
    _refuse_other_kinds(vocabulary, tokenizer)
    model = rounded_model(checkpoint, dtype)
    arrays = gguf_arrays(model, dtype)
    beside = partial_path(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _write(
            library, beside, model, arrays, dtype, _vocabulary_values(vocabulary, config.model.vocab_size, end_of_text)
        )
        problem = _difference(library, beside, arrays)
        if problem:
            raise RunError(f"{output}: {problem} when read back; nothing was written; check the disk and try again")
        _publish(beside, output)
    except OSError as error:
        raise RunError(f"{output}: cannot be written ({error}); make room, or choose another --output") from error
    finally:
        with contextlib.suppress(OSError):  # it has been told already why there is none
            beside.unlink(missing_ok=True)
    check = f"read back with gguf: all {len(arrays)} tensors are the model's; no program that runs it was asked"
    return Exported(output.parent, [output.name], check)


def _publish(beside: Path, output: Path) -> None:
    """Gives the file its name, unless something has it by now."""
    try:
        os.link(beside, output)
    except FileExistsError:
        raise UserError(
            f"{output}: was made by another process in the meantime, and stays as it is; nothing is overwritten; "
            "choose another name"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        refuse_what_exists(output)  # a disk without hard links: nothing there refuses what appears after this
        os.replace(beside, output)


def _library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(f"--format gguf: needs the package gguf ({error}); pip install -e '.[export]'") from None


def _refuse_other_kinds(tokenizer: Tokenizer, path: Path) -> None:
    """llama.cpp's "gpt-2" splits text as GPT-2 does; a tokenizer that splits otherwise would get other ids there."""
    description = json.loads(tokenizer.to_str())
    splitting = description["pre_tokenizer"] or {}
    wanted = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    if description["model"]["type"] != "BPE" or description["normalizer"] or not wanted.items() <= splitting.items():
        raise UserError(
            f"{path}: is not a byte-level BPE that splits text as GPT-2's, the only kind a GGUF export writes; "
            "export the transformers format"
        )


def gguf_arrays(model: GPT, dtype: Dtype) -> dict[str, NDArray[Any]]:
    """The tensors of the file by llama.cpp's names, in the dtype that each of them gets."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors = renamed_and_fused(weights, model.config, GPT2)
    matrices = np.dtype(dtype)
    return {
        name: tensor.numpy().astype(np.float32 if tensor.dim() == 1 or name in ALWAYS_FLOAT32 else matrices)
        for name, tensor in tensors.items()
    }


def _vocabulary_values(tokenizer: Tokenizer, vocab_size: int, end_of_text: int | None) -> dict[str, Any]:
    """Tokens by id, what each is, and the merges. A row of the model that stands for no token gets a stand-in."""
    added = tokenizer.get_added_tokens_decoder()
    tokens, types = [], []
    for token in range(vocab_size):
        text = tokenizer.id_to_token(token)
        tokens.append(f"[PAD{token}]" if text is None else text)
        if text is None:
            types.append(UNUSED)
        elif token in added:
            types.append(CONTROL if added[token].special else USER_DEFINED)
        else:
            types.append(NORMAL)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    joined = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return {"tokens": tokens, "types": types, "merges": joined, "end_of_text": end_of_text}


def _write(
    library: Any, path: Path, model: GPT, arrays: dict[str, NDArray[Any]], dtype: Dtype, vocabulary: dict[str, Any]
) -> None:
    config = model.config
    writer = library.GGUFWriter(str(path), "gpt2")
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.emb_dim)
    writer.add_feed_forward_length(4 * config.emb_dim)
    writer.add_head_count(config.n_heads)
    writer.add_layer_norm_eps(LAYER_NORM_EPSILON)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if vocabulary["merges"]:  # an empty list cannot be written
        writer.add_token_merges(vocabulary["merges"])
    if vocabulary["end_of_text"] is not None:
        writer.add_bos_token_id(vocabulary["end_of_text"])
        writer.add_eos_token_id(vocabulary["end_of_text"])
    writer.add_add_bos_token(False)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _difference(library: Any, path: Path, arrays: dict[str, NDArray[Any]]) -> str | None:
    """The first tensor that is not in the file as it should be."""
    found = {tensor.name: tensor.data for tensor in library.GGUFReader(str(path)).tensors}
    if found.keys() != arrays.keys():
        return f"{min(found.keys() ^ arrays.keys())} is missing or unknown"
    for name, array in arrays.items():
        if found[name].dtype != array.dtype or not np.array_equal(found[name], array):
            return f"{name} differs"
    return None
