"""`isobatch VERB ...`: all that is done with a run but training it, in one process.

PyTorch and matplotlib take seconds to import, so each command imports what it needs: `--help` needs neither.
"""

import sys
from pathlib import Path
from typing import Annotated, Never, cast, get_args

import typer

from training.benchmark.bench_command import bench
from training.command import run_command
from training.datasets_folder import known_datasets
from training.errors import RunError, UserError
from training.hub.hub_commands import push, push_dataset
from training.json_file import strict_json
from training.laboratory.compare_commands import compare
from training.laboratory.study_commands import study
from training.preparation.dataset_commands import prepare

app = typer.Typer(
    help="What is done with a run but training it.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

CHECKPOINT = "RUN (its latest checkpoint), RUN/best, RUN/step_00000617, or the path of a folder."
CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help=CHECKPOINT)]
DATASETS = "Folder of the datasets; what is missing is fetched into it."
DatasetsArgument = Annotated[Path, typer.Argument(metavar="DATASETS", help=DATASETS, callback=known_datasets)]
DatasetsOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the datasets, instead of the repository's datasets/.", callback=known_datasets),
]
OutputOption = Annotated[
    Path | None, typer.Option(help="Folder of the runs, instead of the repository's checkpoints/.")
]
TokenizerOption = Annotated[Path | None, typer.Option(help="A tokenizer.json, instead of the run's own.")]
LayoutOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N[xM]",
        help="N processes with at most M sequences at once; repeatable. Without it: 1 to 4 processes, or as many as "
        "there are GPUs, and half the microbatch.",
    ),
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Largest relative difference of a loss that is still rounding; of a gradient norm ten times that. Without "
        "it: 1e-5 in float32, 1e-3 with TF32, 2e-3 in bf16 and fp16.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app.command()(prepare)
app.command()(compare)
app.command()(push)
app.command()(push_dataset)
app.command()(study)
app.command()(bench)


@app.command()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The name of a run, or the path of its folder.")],
    output: OutputOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run as it goes on, here, until it ends; Ctrl-C leaves.")
    ] = False,
) -> None:
    """Write a run's report.md and its charts again, also while it trains."""
    from training.config import REPOSITORY
    from training.lookup import find_run, find_run_or_beginning
    from training.report import write_report

    runs = output or REPOSITORY / "checkpoints"
    if watch:
        from training.watch import watch_run

        watch_run(find_run_or_beginning(run, runs))
    else:
        print(write_report(find_run(run, runs)))


@app.command()
def sample(
    checkpoints: Annotated[
        list[str] | None, typer.Argument(metavar="CHECKPOINT...", help=f"One or more: {CHECKPOINT}")
    ] = None,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The beginning of the text.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among so many likeliest tokens; 0 = among all.")] = 50,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most; the end of the text comes first.")] = 100,
    seed: Annotated[
        int, typer.Option(min=0, max=2**62, help="Of the first text's draws; the next text has the next.")
    ] = 0,
    number: Annotated[int, typer.Option(min=1, help="How many texts of each checkpoint.")] = 1,
    tokenizer: TokenizerOption = None,
    datasets: DatasetsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let models continue a text, in float32: each checkpoint with the same prompt and seeds."""
    from training.config import REPOSITORY
    from training.sampling import Draw, sample_checkpoints

    if not checkpoints or prompt is None:  # which of the two is missing, the command line cannot tell
        raise UserError(
            f"sample: takes a checkpoint and a prompt, got {prompt!r} alone; give both, as in "
            "isobatch sample tiny 'Every effort'"
            if prompt is not None
            else "sample: takes a checkpoint and a prompt; give both, as in isobatch sample tiny 'Every effort'"
        )
    draw = Draw(tokens, temperature, top_k or None, seed)
    samples = sample_checkpoints(checkpoints, prompt, draw, number, datasets or REPOSITORY / "datasets", tokenizer)
    if as_json:
        texts = [written.values() for written in samples]
        print(strict_json({"prompt": prompt, "temperature": temperature, "top_k": draw.top_k, "samples": texts}))
        return
    for written in samples:
        print("\n".join(written.lines(headed=len(checkpoints) > 1, numbered=number > 1, first_seed=seed)), flush=True)
        if written.ended and written.tokens == 1:
            print("(the model ends the text at once)", file=sys.stderr)


@app.command()
def export(
    checkpoint: CheckpointArgument,
    output: Annotated[Path, typer.Option(help="The new folder; for gguf the new file, NAME.gguf.")],
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = "float32",
    file_format: Annotated[
        str, typer.Option("--format", help="transformers: a folder; gguf: a file for llama.cpp.")
    ] = "transformers",
    tokenizer: TokenizerOption = None,
    datasets: DatasetsOption = None,
) -> None:
    """Write a model as other programs load it, checked before it gets its name."""
    from training.config import REPOSITORY
    from training.exchange.export import Dtype, export_model, refuse_names_of_a_run
    from training.exchange.gguf_file import export_gguf
    from training.lookup import find_checkpoint_and_config, find_tokenizer_if_any, no_tokenizer

    writers = {"transformers": export_model, "gguf": export_gguf}
    for option, value, known in (("--format", file_format, writers), ("--dtype", dtype, get_args(Dtype))):
        if value not in known:
            raise UserError(f"{option}: must be one of {', '.join(known)}, got {value!r}")
    if output.suffix == ".gguf" and file_format != "gguf":
        raise UserError(f"--output {output}: is the name of a GGUF file; add --format gguf, or name a folder")
    refuse_names_of_a_run(output)
    write = writers[file_format]
    folder, config = find_checkpoint_and_config(checkpoint)
    datasets = datasets or REPOSITORY / "datasets"
    description = datasets / config.data.dataset / "dataset.json"
    tokenizer = tokenizer or find_tokenizer_if_any(config, datasets)
    exported = write(folder, config, output, cast(Dtype, dtype), tokenizer, description)
    if tokenizer is None:
        print(f"without a tokenizer: {no_tokenizer(config, datasets)}", file=sys.stderr)
    print(f"{exported.folder}: {', '.join(exported.files)}\n{exported.check}")


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder, or a model on the Hub: owner/name. Safetensors only.")
    ],
    name: Annotated[str, typer.Option(help="The new run's name.")],
    like: Annotated[
        str | None, typer.Option(metavar="CONFIG", help="Config whose data and evaluation it gets, or the defaults.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, if no file of the source says.")] = None,
    output: OutputOption = None,
    datasets: DatasetsOption = None,
) -> None:
    """Make a run of a GPT-2 that was trained elsewhere: to evaluate, sample, export or start from."""
    from training.config import REPOSITORY
    from training.exchange.import_model import import_model

    output, datasets = output or REPOSITORY / "checkpoints", datasets or REPOSITORY / "datasets"
    print(import_model(source, name, like, revision, heads, output, datasets))


@app.command()
def evaluate(
    checkpoint: CheckpointArgument,
    datasets: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DATASETS]", help=f"{DATASETS} Without it: the repository's datasets/.", callback=known_datasets
        ),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Another dataset, made with the run's tokenizer.")
    ] = None,
    split: Annotated[str, typer.Option(help="validation or train.")] = "validation",
    start: Annotated[
        int | None, typer.Option(min=0, help="First token. Without it: the run's; of another dataset 0.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="How many, in whole sequences. Without it: as the run; of another dataset all."),
    ] = None,
    amp: Annotated[str | None, typer.Option(help="off, bf16 or fp16, instead of the run's precision.amp.")] = None,
    microbatch: Annotated[int | None, typer.Option(min=1, help="Sequences at once, instead of the run's.")] = None,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model's loss over its run's validation range, or over one that is stated."""
    from training.checkpoint_evaluation import Range, evaluate_checkpoint
    from training.config import REPOSITORY
    from training.lookup import find_checkpoint_and_config

    wanted = Range(dataset, split, start, tokens)
    folder, config = find_checkpoint_and_config(checkpoint)
    datasets = datasets or REPOSITORY / "datasets"
    measured = evaluate_checkpoint(folder, config, datasets, wanted, amp, microbatch, tokenizer)
    print(strict_json(measured.values()) if as_json else "\n".join(measured.lines()))


@app.command()
def verify(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A config: its name, or the path of a YAML file.")],
    datasets: DatasetsArgument,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train on each layout.")] = 4,
    layout: LayoutOption = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a config value; repeatable.")
    ] = None,
    tolerance: ToleranceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train some steps of a run on several layouts, in real processes, and compare: is it the same run?"""
    import torch

    from training.config_check import refuse_fp16_without_gpu
    from training.config_file import load_run_config
    from training.data import open_training_data, provide_dataset
    from training.verify import (
        agrees,
        default_layouts,
        describe_result,
        measure,
        parse_layout,
        refuse_impossible,
        table,
        tolerance_of,
    )

    config = load_run_config(run, overrides or [])
    gpus = torch.cuda.device_count()
    layouts = [parse_layout(text) for text in layout or []] or default_layouts(config, gpus)
    refuse_impossible(layouts, config)
    tolerance = tolerance_of(config, gpus) if tolerance is None else tolerance
    refuse_fp16_without_gpu(config.precision, gpus > 0, "verify another precision with --set precision.amp=bf16")
    provide_dataset(config.data, datasets)
    open_training_data(config, datasets / config.data.dataset)  # a mistake in the data ends here, before any launch
    results = []
    for measured in measure(run, config, datasets, layouts, steps):
        results.append(measured)
        print(f"{len(results)} of {len(layouts)}: {measured.layout}, {measured.seconds:.0f} s", file=sys.stderr)
    same = all(agrees(measured, results[0], config.bitwise, tolerance) for measured in results)
    if as_json:
        print(strict_json({"same": same, "tolerance": tolerance, "layouts": [vars(measured) for measured in results]}))
    else:
        print("\n".join([*table(results), describe_result(same, config, tolerance)]))
    if not same:
        raise RunError(f"{run}: the layouts differ {'in bits' if config.bitwise else 'by more than rounding'}")


def main() -> Never:
    """The command `isobatch`."""
    run_command(app)


if __name__ == "__main__":
    main()
