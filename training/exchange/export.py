"""Exports a model as a folder that transformers loads by itself, checked before it gets its name.

    config.json, generation_config.json, model.safetensors; with a tokenizer tokenizer.json, tokenizer_config.json

See docs/export.md.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer

from model.gpt import GPT
from training.config import RunConfig
from training.errors import RunError, UserError
from training.exchange.export_check import check_folder
from training.exchange.gpt2_format import config_to_gpt2, to_gpt2
from training.preparation.dataset_files import staged_folder
from training.restore import load_model
from training.tokenizer import end_of_text_id, load_tokenizer

Dtype = Literal["float32", "bfloat16", "float16"]
FORMATS = ("transformers", "gguf")


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    folder: Path
    files: list[str]
    check: str
    """How it was verified: one sentence."""


def write_export(
    checkpoint: Path,
    config: RunConfig,
    output: Path,
    file_format: str,
    dtype: str,
    tokenizer: Path | None,
    description: Path,
) -> Exported:
    """`isobatch export`: checks the words of the command line, which are those of `export_model` or `export_gguf`."""
    if file_format not in FORMATS:
        raise UserError(f"--format: must be one of {', '.join(FORMATS)}, got {file_format!r}")
    if dtype not in get_args(Dtype):
        raise UserError(f"--dtype: must be one of {', '.join(get_args(Dtype))}, got {dtype!r}")
    if not description.is_file() and tokenizer is not None:
        description = tokenizer.with_name("dataset.json")
    if file_format == "gguf":
        from training.exchange.gguf_file import export_gguf  # which builds on this module

        return export_gguf(checkpoint, config, output, cast(Dtype, dtype), tokenizer, description)
    return export_model(checkpoint, config, output, cast(Dtype, dtype), tokenizer, description)


def export_model(
    checkpoint: Path,
    config: RunConfig,
    output: Path,
    dtype: Dtype = "float32",
    tokenizer: Path | None = None,
    description: Path | None = None,
) -> Exported:
    """Writes the folder `output`, which appears only when it is whole and verified.

    Args:
        checkpoint: the folder of a checkpoint.
        config: its run's.
        output: the new folder; an empty one may be there.
        dtype: of the weights in the file.
        tokenizer: the run's tokenizer.json; None leaves it out.
        description: the dataset's dataset.json, which names the end of text; None = the one beside the tokenizer.

    Raises:
        UserError: `output` holds something, the checkpoint is damaged, the tokenizer is not that of the model, or the
            dtype cannot hold the weights.
        RunError: the folder cannot be written, or the check finds it wrong; nothing is left then.
    """
    refuse_what_exists(output)
    vocabulary, end_of_text = None, None
    if tokenizer is not None:
        vocabulary = load_tokenizer(tokenizer)
        end_of_text = end_of_text_id(vocabulary, description or tokenizer.with_name("dataset.json"))
        refuse_foreign_tokenizer(vocabulary, end_of_text, config.model.vocab_size, tokenizer)
    model = rounded_model(checkpoint, dtype)
    try:
        with staged_folder(output) as folder:
            _write_json(folder / "config.json", config_to_gpt2(config.model, dtype, end_of_text))
            _write_json(folder / "generation_config.json", _generation_config(model, vocabulary, end_of_text))
            _write_weights(folder / "model.safetensors", model, dtype)
            if vocabulary is not None:
                vocabulary.save(str(folder / "tokenizer.json"))
                length = config.model.context_length
                _write_json(folder / "tokenizer_config.json", _tokenizer_config(vocabulary, end_of_text, length))
            # For GPT-2 small it takes a minute or two on a CPU.
            print("the export is written and is now being checked", file=sys.stderr, flush=True)
            check = check_folder(folder, model, vocabulary)
            files = sorted(path.name for path in folder.iterdir())
    except (OSError, SafetensorError) as error:
        raise RunError(f"{output}: cannot be written ({error}); make room, or choose another --output") from error
    return Exported(output, files, check)


def refuse_what_exists(output: Path) -> None:
    """Refuses a path that holds something: an export never overwrites."""
    if output.is_symlink() or output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UserError(f"{output}: exists already; an export overwrites nothing: choose another --output or remove it")


def refuse_foreign_tokenizer(tokenizer: Tokenizer, end_of_text: int | None, vocab_size: int, path: Path) -> None:
    """Refuses a tokenizer with ids that the model has no row for."""
    largest = max([*tokenizer.get_vocab().values(), -1 if end_of_text is None else end_of_text])
    if largest >= vocab_size:
        raise UserError(
            f"{path}: its ids go up to {largest:,}, but the model's end at {vocab_size - 1:,} (model.vocab_size "
            f"{vocab_size:,}); give the tokenizer.json of the model's data with --tokenizer"
        )


def rounded_model(checkpoint: Path, dtype: Dtype) -> GPT:
    """Loads a checkpoint's model and rounds its weights, which stay float32, as a file of `dtype` does.

    Raises:
        UserError: the checkpoint is damaged, or the dtype cannot hold a weight.
    """
    model = load_model(checkpoint)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
            if not parameter.isfinite().all():
                raise UserError(f"{checkpoint}: {name} does not fit into {dtype}; export float32 or bfloat16")
    return model


def _write_weights(path: Path, model: GPT, dtype: str) -> None:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in to_gpt2(weights, model.config).items()}
    save_file(tensors, path, metadata={"format": "pt"})  # older versions of transformers refuse a file without
    shutil.copymode(path.with_name("config.json"), path)  # the library lets its owner alone read it


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, allow_nan=False, indent=2) + "\n", encoding="utf-8")


def _generation_config(model: GPT, tokenizer: Tokenizer | None, end_of_text: int | None) -> dict[str, Any]:
    """How transformers generates: up to the end of text, and never a row that stands for no token."""
    values: dict[str, Any] = {
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,  # fills up texts that have ended, in a batch
    }
    without_token = set(range(model.config.vocab_size))
    without_token -= set() if tokenizer is None else set(tokenizer.get_vocab().values())
    if tokenizer is not None and without_token:
        values["suppress_tokens"] = sorted(without_token)
    return values


def _tokenizer_config(tokenizer: Tokenizer, end_of_text: int | None, context_length: int) -> dict[str, Any]:
    # The class that takes tokenizer.json as it is; GPT2Tokenizer would replace parts of it by its own.
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context_length}
    values |= {"clean_up_tokenization_spaces": False}
    added = tokenizer.get_added_tokens_decoder()
    if end_of_text not in added:  # to name an ordinary token would make it a special one, which is split off a text
        return values
    return {**values, "bos_token": added[end_of_text].content, "eos_token": added[end_of_text].content}
