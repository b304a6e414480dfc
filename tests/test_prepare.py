"""`isobatch prepare` as it is called: which options make sense, and which of the two kinds of dataset comes out."""

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Workplace
from fake_hub import FakeHub
from safetensors.numpy import load_file
from small_corpora import GPT2, contents, isobatch, json_lines, read_dataset, small_texts

from training.errors import UserError
from training.preparation.prepare import Options, prepare
from training.tokenizer import train_tokenizer

RECORDS = [{"prompt": f"What is {n}?", "response": f"It is {n * n}."} for n in range(50)]


def written(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A file of documents."""
    (tmp_path / "a.jsonl").write_bytes(json_lines(small_texts()))
    return str(tmp_path / "a.jsonl")


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with a tokenizer.json."""
    (tmp_path / "tokenizer").mkdir()
    train_tokenizer(["a"], 257).save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    return str(tmp_path / "tokenizer")


def test_gpt2_s_tokens_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Every effort moves you")
    prepare([str(tmp_path / "a.txt")], tmp_path / "set", Options(tokenizer=str(GPT2), validation_share=0))
    assert load_file(tmp_path / "set" / "train.safetensors")["tokens"].tolist() == [6109, 3626, 6100, 345, 50256]
    assert json.loads((tmp_path / "set" / "dataset.json").read_text())["vocab_size"] == 50257


@pytest.mark.slow
def test_a_run_trains_on_it(workplace: Workplace) -> None:
    """And finds its tokenizer: the validation loss is also one in bits per byte, where a token is a byte."""
    source = workplace.folder / "a.txt"
    source.write_text("\f".join(small_texts(150)))
    options = Options(bytes=True, separator="\f", validation_share=0.2)
    prepare([str(source)], workplace.datasets / "mine", options)
    data = {"dataset": "mine", "train_tokens": 2 * 512, "validation_start": 0}
    run = workplace.train_here(workplace.write_config("run", data=data, checkpoint={"every": 2}))
    assert len(run.losses) == 2
    [*_, validation] = run.of_kind("validation")
    assert 5 < validation["loss"] < 6
    assert 0.95 * validation["loss"] < validation["bits_per_byte"] * math.log(2) < 1.05 * validation["loss"]


def test_a_hundredth_of_the_documents_is_for_validation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(",".join(map(str, range(5000))))
    prepare([str(tmp_path / "a.txt")], tmp_path / "set", Options(bytes=True, separator=","))
    found = read_dataset(tmp_path / "set")
    assert 25 < len(found["validation"]) < 85  # 50 expected, standard deviation 7
    assert len(found["train"]) + len(found["validation"]) == 5000


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "--tokenizer, --train-bpe, --bytes: none is given; a dataset has one tokenizer; give one"),
        ({"bytes": True, "train_bpe": 300}, "--tokenizer, --train-bpe, --bytes: several are given"),
        ({"train_bpe": 256}, "--train-bpe: is 256; a byte-level BPE has 257 tokens, the bytes and the end of text"),
        ({"train_bpe": 2**24 + 1}, "--train-bpe: is 16,777,217;"),
        ({"bytes": True, "validation_share": 1.0}, "--validation-share: is 1; it is a share of the documents, from 0"),
        ({"bytes": True, "validation_share": -0.5}, "--validation-share: is -0.5;"),
        ({"bytes": True, "validation_share": float("nan")}, "--validation-share: is nan;"),
        ({"bytes": True, "separator": ""}, "--separator: is empty; it is the text between two documents"),
        ({"bytes": True, "decontaminate": 0}, "--decontaminate: is 0; it is a number of words, such as 13"),
        ({"bytes": True, "decontaminate": 13, "validation_share": 0.0}, "--decontaminate: needs a validation split"),
        ({"tokenizer": "no-such-file"}, "no-such-file: no such file; a tokenizer.json belongs there"),
        ({"tokenizer": "no/such.json"}, "no/such.json: no such file"),
        ({"tokenizer": "n" * 300}, f"{'n' * 300}: no such file"),
        ({"bytes": True, "separator": "\udcff"}, r"--separator: is '\udcff', which is not UTF-8, as all texts are"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, source: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        prepare([source], tmp_path / "set", Options(**options))
    assert str(caught.value).startswith(sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("first", "options", "kind"),
    [
        ({"text": "a"}, {}, "packed"),
        ({"text": "a", "prompt": "b"}, {}, "packed"),
        ({"prompt": "a", "response": "b"}, {}, "documents"),
        ({"instruction": "a", "output": "b", "text": "c"}, {}, "documents"),
        ({"instruction": "a", "output": "b", "text": "c"}, {"text_key": "text"}, "packed"),
        ({"prompt": "a", "response": "b"}, {"text_key": "response"}, "packed"),
    ],
)
def test_the_first_record_decides_what_the_file_holds(
    tmp_path: Path, tokenizer: str, first: dict[str, Any], options: dict[str, Any], kind: str
) -> None:
    source = written(tmp_path / "a.jsonl", [first])
    prepare([source], tmp_path / "set", Options(tokenizer=tokenizer, validation_share=0, **options))
    assert json.loads((tmp_path / "set" / "dataset.json").read_text())["kind"] == kind


def test_a_later_record_of_the_other_kind_is_refused(tmp_path: Path, tokenizer: str) -> None:
    """By file and line, and nothing is left."""
    options = Options(tokenizer=tokenizer, validation_share=0)
    documents, instructions = {"text": "a"}, RECORDS[0]
    first = written(tmp_path / "a.jsonl", [documents, documents, instructions])
    second = written(tmp_path / "b.jsonl", [instructions, documents])
    third = written(tmp_path / "c.jsonl", [instructions])
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=r"a\.jsonl, line 3: has no text, only prompt, response; a document is a JSON"):
        prepare([first], tmp_path / "set", options)
    with pytest.raises(UserError, match=r"b\.jsonl, line 2: has no instruction and no output; a record is a JSON"):
        prepare([second], tmp_path / "set", options)
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: has no instruction and no output"):
        prepare([third, first], tmp_path / "set", options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_instructions_may_be_compressed_and_need_a_tokenizer(tmp_path: Path, tokenizer: str) -> None:
    plain = written(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(Path(plain).read_bytes()))
    for number, source in enumerate((plain, f"{plain}.gz")):
        prepare([source], tmp_path / f"set{number}", Options(tokenizer=tokenizer))
    assert contents(tmp_path / "set0") == contents(tmp_path / "set1")
    description = json.loads((tmp_path / "set0" / "dataset.json").read_text())
    assert (description["kind"], description["validation_share"]) == ("documents", 0.05)
    with pytest.raises(UserError, match=r"a\.jsonl: holds instructions, which need the tokenizer of the model"):
        prepare([plain], tmp_path / "set", Options(bytes=True))
    with pytest.raises(UserError, match="--decontaminate: is for running text; leave it out for instructions"):
        prepare([plain], tmp_path / "set", Options(tokenizer=tokenizer, decontaminate=13))


@pytest.mark.parametrize("name", [".", "sets/..", "sets/a\nb"])
@pytest.mark.parametrize("kind", ["documents", "instructions"])
def test_an_output_without_a_name_is_refused(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    record = RECORDS[0] if kind == "instructions" else {"text": "a"}
    source = written(tmp_path / "a.jsonl", [record] * 3)
    (tmp_path / "empty" / "sets").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(
        UserError, match=r"^.*: is not the name of a new folder; give one that is, such as datasets/mine"
    ):
        prepare([source], Path(name), Options(tokenizer=tokenizer, validation_share=0))
    assert [path.name for path in (tmp_path / "empty").rglob("*")] == ["sets"]


def test_a_file_that_grows_too_large_is_told(tmp_path: Path, tokenizer: str) -> None:
    """As where the system limits their size; of instructions, nothing is left."""
    source = written(tmp_path / "a.jsonl", [{"prompt": "a" * 500, "response": "b" * 500}] * 20)
    program = f"""if True:
        import resource, sys
        from pathlib import Path
        from training.errors import RunError
        from training.preparation.prepare import Options, prepare
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            prepare([{source!r}], Path({str(tmp_path / "set")!r}), Options(tokenizer={tokenizer!r}))
        except RunError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(f"{tmp_path / 'set'}: cannot be written ([Errno 27] File too large); make room, or")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "tokenizer"]


@pytest.mark.slow
def test_documents_and_tokenizer_from_the_hub(tmp_path: Path, source: str, tokenizer: str) -> None:
    """By revision and pattern; the description names the commit."""
    content = (Path(tokenizer) / "tokenizer.json").read_bytes()
    with FakeHub() as hub:
        hub.add("model", "owner/gpt2", {"tokenizer.json": content})
        files = {"data/a.jsonl": Path(source).read_bytes(), "data/b.jsonl": b"no json", "README.md": b"card"}
        commit = hub.add("dataset", "owner/texts", files, ref="v1")
        hub.add("dataset", "owner/texts", {"data/a.jsonl": b"{}"}, ref="main")
        arguments = ["prepare", "owner/texts", "--revision", "v1", "--files", "*/a.*", "--tokenizer", "owner/gpt2"]
        environment = hub.environment(tmp_path / "home")
        isobatch(*arguments, "--workers", 1, "--output", tmp_path / "sets" / "one", env=environment)
    prepare([source], tmp_path / "sets" / "local", Options(tokenizer=tokenizer))
    descriptions = []
    for name in ("one", "local"):
        assert contents(tmp_path / "sets" / name) == contents(tmp_path / "sets" / "local")
        descriptions.append(json.loads((tmp_path / "sets" / name / "dataset.json").read_text()))
    assert len({description["fingerprint"] for description in descriptions}) == 1
    expected = [{"repository": "owner/texts", "revision": commit, "files": ["data/a.jsonl"]}]
    assert descriptions[0]["source"] == expected


def test_the_module_waits_for_no_heavy_import() -> None:
    program = "import sys, training.preparation.prepare\n"
    program += "sys.exit(bool({'torch', 'pyarrow', 'huggingface_hub'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)
