"""Checks an exported folder before it gets its name: does it compute what the run's model computes?

transformers itself loads the folder, in a process of its own; where it cannot be imported, gpt2_forward.py computes
what the two files say. Both compute in float64. There the right file differs by 1e-15 of the largest logit, and every
fault by far more; in float32, rounding alone makes 1e-4 of logits around 500, which a tied head may have (measured).
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from model.generation import generate
from model.gpt import GPT
from training.config import REPOSITORY
from training.errors import RunError
from training.exchange.gpt2_forward import gpt2_logits
from training.exchange.load_with_transformers import CANNOT_IMPORT

TOLERANCE = 1e-7
"""Largest difference of two logits, relative to the largest logit where that is above 1."""
PROGRAM = Path(__file__).with_name("load_with_transformers.py")
LAST = 16
"""Positions of a sequence whose logits are compared; those before act on them."""
GREEDY = 20
TEXTS = (
    "Every effort moves you",
    "  def main() -> None:\n\t\treturn {'a': 1_000}\n\n",
    "It's 3.14, naïve café; 東京 \U0001f600 – “quoted”",
    "one<|endoftext|>two",
)


@dataclass(frozen=True)
class Answer:
    """What a folder computes, by whoever read it."""

    by: str
    """Who, as a sentence's beginning."""
    keys: dict[str, list[str]]
    """Tensors that the file lacks or has too many of, by kind of fault."""
    logits: list[Tensor]
    greedy: list[int]
    texts: list[list[int]] | None


def check_folder(folder: Path, model: GPT, tokenizer: Tokenizer | None) -> str:
    """Compares a folder with the model that it was written from.

    Args:
        folder: config.json, model.safetensors and, if there is a tokenizer, its files.
        model: with the weights of the file: rounded, if the file's dtype rounds. It is in float64 afterwards.
        tokenizer: the run's.

    Returns:
        A sentence: what was checked and how.

    Raises:
        RunError: the folder is wrong; says in what.
    """
    question = questions(model, tokenizer)
    answer = ask_transformers(folder, question)
    if isinstance(answer, str):
        answer = ask_built_in(folder, question, answer)
    return compare(question, answer, model.double().eval(), tokenizer)


def questions(model: GPT, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Two short sequences and one of the whole context, of fixed random ids; a prompt; texts."""
    context, vocab_size = model.config.context_length, model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    lengths = (min(16, context), min(16, context), context)
    rows = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    prompt = rows[0][: max(1, min(4, context - 1))]
    return {
        "rows": rows,
        "last": LAST,
        "prompt": prompt,
        "greedy": max(1, min(GREEDY, context - len(prompt))),  # transformers does not crop the context
        "texts": None if tokenizer is None else TEXTS,
    }


def ask_transformers(folder: Path, question: dict[str, Any]) -> Answer | str:
    """Lets transformers load the folder, without a network; a text says why it cannot be imported.

    Raises:
        RunError: it can, and does not take the folder.
    """
    with tempfile.TemporaryDirectory() as elsewhere:
        written, destination = Path(elsewhere, "question.json"), Path(elsewhere, "answer")
        written.write_text(json.dumps(question), encoding="utf-8")
        with subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), str(folder.resolve()), str(written), str(destination)],
            cwd=elsewhere,
            env=_environment(),
            stdin=subprocess.PIPE,  # it ends with this process, which holds the other end
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as asked:
            assert asked.stderr is not None, "it is a pipe"
            last_line = (asked.stderr.read().strip().splitlines() or ["no message"])[-1]
            status = asked.wait()
        if status == CANNOT_IMPORT:
            return last_line
        if status != 0:
            raise RunError(f"{folder}: transformers does not load the export ({last_line}); {_REMEDY}")
        values = json.loads(destination.with_suffix(".json").read_text(encoding="utf-8"))
        logits = load_file(destination.with_suffix(".safetensors"))
    return Answer(
        by=f"loaded with transformers {values['version']}",
        keys=values["keys"],
        logits=[logits[str(number)] for number in range(len(question["rows"]))],
        greedy=values["greedy"],
        texts=values["texts"],
    )


def _environment() -> dict[str, str]:
    """That of a process which cannot take our folder `datasets` for a library, and uses neither network nor GPU."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in paths if path and Path(path).resolve() != REPOSITORY]
    settings = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(kept)}


def ask_built_in(folder: Path, question: dict[str, Any], reason: str) -> Answer:
    """Computes what the folder's files say, without transformers, which `reason` says the lack of.

    Raises:
        RunError: the files do not fit each other.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def logits(row: list[int]) -> Tensor:
        return gpt2_logits(config, tensors, torch.tensor([row]))[0, -question["last"] :]

    try:
        rows = [logits(row) for row in question["rows"]]
        sequence = list(question["prompt"])
        for _ in range(question["greedy"]):
            sequence.append(int(logits(sequence)[-1].argmax()))
    except (KeyError, RuntimeError) as error:
        raise RunError(f"{folder}: the export's files do not fit each other ({error}); {_REMEDY}") from error
    texts = None
    if question["texts"] is not None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in question["texts"]]
    by = f"read back by the built-in check, not by transformers ({reason})"
    return Answer(by, {}, rows, sequence[len(question["prompt"]) :], texts)


_REMEDY = "nothing was written; this is a fault of Isobatch or of an unforeseen version of transformers: report it"


def compare(question: dict[str, Any], answer: Answer, model: GPT, tokenizer: Tokenizer | None) -> str:
    """Compares an answer with the model's own, in float64; the sentence of what was found to be equal.

    Raises:
        RunError: the first difference that is not rounding.
    """
    for kind, keys in answer.keys.items():
        if keys:
            raise RunError(f"the export has {kind.replace('_', ' ')}: {', '.join(sorted(keys)[:5])}; {_REMEDY}")
    largest = 0.0
    for row, theirs in zip(question["rows"], answer.logits, strict=True):
        with torch.no_grad():
            ours = model.head(model.hidden(torch.tensor([row]))[0, -question["last"] :])
        difference, allowed = float((ours - theirs).abs().max()), TOLERANCE * max(1.0, float(ours.abs().max()))
        if not difference <= allowed:  # so written that NaN is refused too
            raise RunError(f"the export's logits differ from the model's by {difference:.2g}; {_REMEDY}")
        largest = max(largest, difference)
    equal = _equal_greedy_tokens(question, answer.greedy, model)
    found = [f"logits within {largest:.1g} of the model's in float64", f"{equal} greedy tokens equal"]
    if answer.keys:
        found.insert(0, "no missing, unexpected or mismatched keys")
    if tokenizer is not None:
        expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in question["texts"]]
        if answer.texts != expected:
            raise RunError(f"the export's tokenizer gives other ids than the run's; {_REMEDY}")
        found.append("the tokenizer's ids equal")
    return f"{answer.by}: {', '.join(found)}"


def _equal_greedy_tokens(question: dict[str, Any], theirs: list[int], model: GPT) -> int:
    """How many greedy tokens are equal: all of them, or those up to a near-tie, a choice that rounding may decide.

    A near-tie is one where our own logits of the two choices differ by less than TOLERANCE allows.
    """
    ours = generate(model, question["prompt"], question["greedy"])
    for count, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own != other:
            with torch.no_grad():
                logits = model(torch.tensor([question["prompt"] + ours[:count]]))[0, -1]
            if not logits[own] - logits[other] <= TOLERANCE * max(1.0, float(logits.abs().max())):
                raise RunError(f"the export continues a text otherwise after {count} greedy tokens; {_REMEDY}")
            return count
    return len(ours)
