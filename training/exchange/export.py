"""Exports a model as a folder that transformers loads by itself, checked before it gets its name.

    config.json, generation_config.json, model.safetensors; with a tokenizer tokenizer.json, tokenizer_config.json

See docs/export.md.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from model.gpt import GPT
from training.config import RunConfig
from training.errors import RunError, UserError
from training.exchange.export_check import check_folder
from training.exchange.gpt2_format import config_to_gpt2, to_gpt2
from training.left_behind import remove_left_behind
from training.preparation.dataset_files import staged_folder
from training.restore import load_model
from training.run_folder import METRICS, OURS
from training.tokenizer import end_of_text_id, ids_without_token, load_tokenizer

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    folder: Path
    files: list[str]
    check: str
    """How it was verified: one sentence."""


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
        description: the dataset's dataset.json, which names the end of text; where there is none, the one beside the
            tokenizer is read.

    Raises:
        UserError: `output` holds something, the checkpoint is damaged, the tokenizer is not that of the model, or the
            dtype cannot hold the weights.
        RunError: the folder cannot be written, or the check finds it wrong; nothing is left then.
    """
    refuse_what_exists(output)
    remove_left_behind(output.parent)
    vocabulary, end_of_text = read_vocabulary(tokenizer, description, config.model.vocab_size)
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


def refuse_what_exists(output: Path, may_be_empty_folder: bool = True) -> None:
    """Refuses a path that holds something, as an export never overwrites, and one where nothing of the kind can be."""
    empty_folder = output.is_dir() and not output.is_symlink() and not any(output.iterdir())
    if os.path.lexists(output) and not (empty_folder and may_be_empty_folder):
        raise UserError(f"{output}: exists already; an export overwrites nothing: choose another --output or remove it")
    above = next(parent for parent in (*output.parents, Path()) if parent.exists())
    if not above.is_dir():
        raise UserError(f"{above}: is no folder, so that nothing can be written below it; choose another --output")


def refuse_names_of_a_run(output: Path) -> None:
    """Refuses a user's --output in a run's folder that a file of the run's own would have, and would collide with."""
    if (output.parent / METRICS).is_file() and OURS.fullmatch(output.name):
        raise UserError(f"{output}: is a name that the run's own files have in its folder; choose another --output")


def read_vocabulary(
    tokenizer: Path | None, description: Path | None, vocab_size: int
) -> tuple[Tokenizer | None, int | None]:
    """Reads a run's tokenizer, and the id that ends a text, which is known without one if dataset.json names it.

    Args:
        tokenizer: the run's tokenizer.json, if it has one.
        description: the dataset's dataset.json; where there is none, the one beside the tokenizer is read.
        vocab_size: the model's rows.

    Raises:
        UserError: a file is damaged, or has ids that the model has no row for.
    """
    if tokenizer is not None and (description is None or not description.is_file()):
        description = tokenizer.with_name("dataset.json")
    vocabulary = None if tokenizer is None else load_tokenizer(tokenizer)
    known = vocabulary or Tokenizer(models.BPE())  # without any token
    end_of_text = None if description is None else end_of_text_id(known, description)
    for path, largest in ((tokenizer, max(known.get_vocab().values(), default=-1)), (description, end_of_text or -1)):
        if largest >= vocab_size:
            raise UserError(
                f"{path}: its ids go up to {largest:,}, but the model's end at {vocab_size - 1:,} (model.vocab_size "
                f"{vocab_size:,}); give the tokenizer.json of the model's data with --tokenizer, or the folder of the "
                "datasets with --datasets"
            )
    return vocabulary, end_of_text


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
    if tokenizer is not None and (without := ids_without_token(tokenizer, model.config.vocab_size, end_of_text)):
        values["suppress_tokens"] = without
    return values


def _tokenizer_config(tokenizer: Tokenizer, end_of_text: int | None, context_length: int) -> dict[str, Any]:
    # The class that takes tokenizer.json as it is; GPT2Tokenizer would replace parts of it by its own.
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context_length}
    values |= {"clean_up_tokenization_spaces": False}
    added = tokenizer.get_added_tokens_decoder()
    if end_of_text not in added:  # to name an ordinary token would make it a special one, which is split off a text
        return values
    return {**values, "bos_token": added[end_of_text].content, "eos_token": added[end_of_text].content}
