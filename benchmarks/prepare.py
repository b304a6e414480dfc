"""How fast `isobatch prepare` is, and how much memory it takes, by the number of processes that tokenize.

    python benchmarks/prepare.py --megabytes 1000 --folder /tmp/prepare

Makes JSON lines of the sources and texts of Python's library, again and again: paragraphs in another order, and one
word in fifty another one each time, as new words keep coming in real texts. Prints, for each way, the MB of text per
second, and the peak memory of all processes together, as the sum of their highest resident sets: what they share is
counted for each, so it is more than the machine must have.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from training.preparation.python_library import python_library_documents


def varied_texts(size: int) -> Iterator[str]:
    """Texts of `size` bytes in all, each another one; the same each time."""
    draw = random.Random(0)
    originals = [text for _, text in sorted(python_library_documents())]
    while size > 0:
        draw.shuffle(originals)
        for original in originals:
            paragraphs = original.split("\n\n")
            draw.shuffle(paragraphs)
            text = re.sub(
                r"[A-Za-z]{4,}",
                lambda word: word[0] if draw.random() > 0.02 else f"{word[0]}{draw.randrange(10**6):x}",
                "\n\n".join(paragraphs),
            )
            yield text
            size -= len(text.encode())
            if size <= 0:
                return


def write_source(path: Path, megabytes: int) -> int:
    """Writes the JSON lines, unless they are there; returns the bytes of text in them."""
    if not path.exists():
        with path.with_suffix(".new").open("w") as file:
            for text in varied_texts(megabytes * 10**6):
                file.write(json.dumps({"text": text}) + "\n")
        path.with_suffix(".new").rename(path)
    with path.open() as file:
        return sum(len(json.loads(line)["text"].encode()) for line in file)


def measure(command: list[str]) -> tuple[float, float]:
    """Runs a command; returns its seconds, and the sum of its processes' peak resident sets in MiB."""
    began, peaks = time.monotonic(), dict[str, int]()
    process = subprocess.Popen(command, start_new_session=True)
    while process.poll() is None:
        for pid in processes_of(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), peak_of(pid))
        time.sleep(0.05)
    if process.returncode:
        sys.exit(process.returncode)
    return time.monotonic() - began, sum(peaks.values()) / 2**10


def processes_of(group: int) -> Iterator[str]:
    """The processes of a group."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(") ")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == group:
            yield path.parent.name


def peak_of(pid: str) -> int:
    """The highest resident set of a process, in KiB."""
    try:
        status = Path("/proc", pid, "status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) if found else 0


def main() -> None:
    """Measures each number of processes, with the tokenizer given or one that is trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, required=True, help="for the source and the datasets; kept")
    parser.add_argument("--tokenizer", help="as isobatch prepare takes it; without it a BPE of 8192 tokens is trained")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--decontaminate", action="store_true", help="also with --decontaminate 13")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    source = arguments.folder / f"{arguments.megabytes}.jsonl"
    size = write_source(source, arguments.megabytes) / 1e6
    tokenizer = ["--tokenizer", arguments.tokenizer] if arguments.tokenizer else ["--train-bpe", "8192"]
    print(f"{size:,.0f} MB of text; {' '.join(tokenizer)}", flush=True)
    for more in [[], ["--decontaminate", "13"]] if arguments.decontaminate else [[]]:
        for workers in arguments.workers:
            output = arguments.folder / "dataset"
            shutil.rmtree(output, ignore_errors=True)
            command = [sys.executable, "-m", "training.cli", "prepare", str(source), "--output", str(output)]
            seconds, peak = measure([*command, *tokenizer, "--workers", str(workers), *more])
            said = f"{workers} processes{' '.join(['', *more])}"
            print(f"{said}: {seconds:,.0f} s, {size / seconds:.2f} MB/s, {peak:,.0f} MiB at most", flush=True)


if __name__ == "__main__":
    main()
