"""The commands of `isobatch` that make and check datasets."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from training.errors import UserError

ShareOption = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE", help="Of the documents, to validate on; 0 = none.  [default: 0.01; of instructions 0.05]"
    ),
]
WordsOption = Annotated[
    int | None,
    typer.Option(
        metavar="WORDS",
        help="Drop training documents that share so many words in a row with the validation split; GPT-3: 13.",
    ),
]


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE", help="Files, folders, or a dataset on the Hub: owner/name."),
    ],
    output: Annotated[Path | None, typer.Option(help="The new dataset's folder, datasets/NAME.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer.json, a folder that has one or GPT-2's two files, or a model on the Hub."),
    ] = None,
    train_bpe: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Instead: train a byte-level BPE of so many tokens.")
    ] = None,
    as_bytes: Annotated[bool, typer.Option("--bytes", help="Instead: a token is a byte.")] = False,
    text_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Of the text in JSON lines and Parquet.  [default: text]")
    ] = None,
    separator: Annotated[
        str | None, typer.Option(metavar="TEXT", help=r"Between two documents of a text file, such as '\n\n'.")
    ] = None,
    validation_share: ShareOption = None,
    decontaminate: WordsOption = None,
    revision: Annotated[str | None, typer.Option(help="A branch, a tag or a commit of the dataset on the Hub.")] = None,
    files: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Of folder or repository: only these, as 'data/*.parquet'; repeatable."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that tokenize; the result is the same.  [default: all cores]")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the dataset SOURCE instead of making one.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print one JSON object.")] = False,
) -> None:
    r"""Make a dataset from documents, or from instructions; or check one.

    Documents: text (.txt, .md), JSON lines (.jsonl) and Parquet, also .gz and .zst of the first two. Instructions: JSON
    lines of prompt and response, or Alpaca's instruction, input and output. Killed, the same command goes on where it
    was.
    """
    if check:
        _check(sources, as_json)
        return
    if output is None:
        raise UserError("--output: is missing; the new dataset needs a folder; give --output datasets/NAME")
    from training.preparation.prepare import Options
    from training.preparation.prepare import prepare as make

    options = Options(tokenizer, train_bpe, as_bytes, text_key, _unescaped(separator), validation_share, decontaminate)
    make(sources, output, options, revision, files or [], workers or _cores())


def _cores() -> int:
    """The cores that this process may use."""
    # Not on every system can a process be kept to some of them.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(sources: list[str], as_json: bool) -> None:
    from training.preparation.check_dataset import check_dataset

    checked = [check_dataset(Path(source)) for source in sources]
    problems = [problem for dataset in checked for problem in dataset.problems]
    if as_json:
        print(json.dumps([asdict(dataset) for dataset in checked] if len(checked) > 1 else asdict(checked[0])))
        if problems:
            raise typer.Exit(2)
        return
    if problems:
        raise UserError(*([f"{len(problems)} problems:"] if len(problems) > 1 else []), *problems)
    for dataset in checked:
        print(dataset.summary)


def _unescaped(text: str | None) -> str | None:
    r"""Understands \n, \r, \t and \\, which a shell leaves as they are."""
    meanings = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}
    return None if text is None else re.sub(r"\\[nrt\\]", lambda found: meanings[found[0]], text)
