"""The commands of `isobatch` that upload to the Hugging Face Hub."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from training.datasets_folder import known_datasets

if TYPE_CHECKING:
    from training.exchange.export import Dtype


ReplaceOption = Annotated[
    bool, typer.Option("--replace", help="Replace files and a page there that were not uploaded from here.")
]


def push(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="RUN (its latest checkpoint), RUN/step_00000617, or a folder.")
    ],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="The repository on the Hub, owner/name.")],
    which: Annotated[
        str, typer.Option("--checkpoint", help="Of a run: last, or best (the lowest validation loss).")
    ] = "last",
    public: Annotated[bool, typer.Option("--public", help="Make the repository public, if it is made.")] = False,
    licence: Annotated[
        str | None, typer.Option(metavar="ID", help="Of the model, as the Hub calls it: apache-2.0, mit, ...")
    ] = None,
    replace: ReplaceOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Build the folder, RUN/hub, and upload nothing.")] = False,
    branch: Annotated[str, typer.Option(help="The branch to upload to; made if need be.")] = "main",
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = "float32",
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json, instead of the run's own.")] = None,
    datasets: Annotated[
        Path | None,
        typer.Option(help="Folder of the datasets, instead of the repository's datasets/.", callback=known_datasets),
    ] = None,
) -> None:
    """Upload a model to the Hugging Face Hub, with its page, charts, config and metrics, in one commit."""
    from training.config import REPOSITORY
    from training.hub.hub_access import check_destination
    from training.hub.hub_upload import Destination
    from training.hub.push import REPLACE, Push, built_folder, check_options, push_model
    from training.lookup import find_checkpoint_and_config, find_tokenizer_if_any

    check_options(repository, licence, which, dtype, branch)
    if not dry_run:
        check_destination(Destination(repository, branch=branch), "REPO", licence, "" if replace else REPLACE)
    folder, config = find_checkpoint_and_config(f"{checkpoint}/best" if which == "best" else checkpoint)
    datasets = datasets or REPOSITORY / "datasets"
    wish = Push(
        checkpoint=folder,
        config=config,
        repository=repository,
        datasets=datasets,
        private=not public,
        licence=licence,
        tokenizer=tokenizer or find_tokenizer_if_any(config, datasets),
        dtype=cast("Dtype", dtype),
        branch=branch,
        replace=replace,
    )
    if dry_run:
        with built_folder(wish, _say) as folder:
            print(folder)
    else:
        push_model(wish, _say)


def push_dataset(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The dataset's, datasets/NAME.")],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="The repository on the Hub, owner/name.")],
    public: Annotated[bool, typer.Option("--public", help="Make the repository public, if it is made.")] = False,
    licence: Annotated[
        str | None,
        typer.Option(metavar="ID", help="As the Hub calls it: cc-by-4.0, ...  [default: that in dataset.json]"),
    ] = None,
    replace: ReplaceOption = False,
) -> None:
    """Upload a dataset to the Hugging Face Hub, checked, with a page, so that others train on the same tokens."""
    from training.hub.hub_access import check_destination
    from training.hub.hub_upload import Destination
    from training.hub.push import REPLACE, check_options
    from training.hub.push_dataset import own_page
    from training.hub.push_dataset import push_dataset as push

    check_options(repository, licence=licence)
    to, way_on = Destination(repository, "dataset"), "" if replace else REPLACE
    check_destination(to, "REPO", licence, way_on, own_page(folder))
    sha = push(folder, repository, not public, licence, _say)
    print(f"data: {{dataset: {repository}, revision: {sha}}}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
