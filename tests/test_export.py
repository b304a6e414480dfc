"""Exports of a checkpoint, as transformers loads them in a process of its own: R91, R92, R95 to R98, R106."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from safetensors import safe_open
from safetensors.torch import load_file
from small_checkpoints import set_final_norm
from small_exports import (
    PADDED,
    SHAPE,
    TEXT,
    TOKENS,
    VARIANTS,
    run_config,
    save_noisy,
    without_transformers,
    write_gpt2_tokenizer,
    write_tokenizer,
)
from torch import Tensor

from model.generation import generate
from training.errors import RunError, UserError
from training.exchange import export
from training.exchange.export import Exported, export_model, refuse_names_of_a_run
from training.exchange.gpt2_format import to_gpt2
from training.restore import load_model
from training.tokenizer import END_OF_TEXT, load_tokenizer

IDS = torch.randint(TOKENS, (2, 16), generator=torch.Generator().manual_seed(7))
PROMPT = IDS[0, :4].tolist()
DRAWN = ("padded", "tied-bias")
"""Exports that texts are drawn from, which takes a while."""
PROGRAM = """
import contextlib, io, json, sys, warnings
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

warnings.simplefilter("error")
asked = json.load(sys.stdin)
answers = []
for folder, text, draws in asked["folders"]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    answer = {"class": type(model).__name__, "dtype": str(model.dtype), "rows": len(model.transformer.wte.weight)}
    answer["faults"] = [str(key) for kind in ("missing", "unexpected", "mismatched") for key in info[kind + "_keys"]]
    model, ids = model.float(), torch.tensor(asked["ids"])
    prompt = ids[:1, :4]
    whole = torch.ones(1, model.config.n_positions, dtype=torch.int64)
    with torch.no_grad():
        answer["logits"] = model(ids).logits.tolist()
        greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
        answer["greedy"] = greedy[0, 4:].tolist()
        answer["after the whole context"] = model.generate(whole, attention_mask=whole, max_new_tokens=1).shape[1]
    if draws:
        torch.manual_seed(0)
        drawn = model.generate(do_sample=True, temperature=5.0, top_k=0, max_new_tokens=20, num_return_sequences=16)
        answer["from nothing"] = drawn[:, 0].tolist()
        answer["drawn"] = drawn[:, 1:].flatten().tolist()
    if text is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        answer["ids"] = tokenizer(text)["input_ids"]
        answer["text"] = tokenizer.decode(answer["ids"])
        answer["longest"] = tokenizer.model_max_length
        answer["ends"] = [tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.pad_token]
    answers.append(answer)
with contextlib.redirect_stdout(io.StringIO()) as printed:
    exec(asked["code"])
json.dump([answers, printed.getvalue()], sys.stdout)
"""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What transformers makes of some exports, by name, and what the code in docs/export.md prints."""

    answers: dict[str, dict[str, Any]]
    documented: str


def ask_transformers(folders: list[Path]) -> Asked:
    """Asks strictly, and all in one process, as it takes ten seconds to import; `tiny-export` lies beside them."""
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "export.md").read_text(), re.DOTALL)
    asked = [(str(folder), None if folder.name == "bare" else TEXT, folder.name in DRAWN) for folder in folders]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        input=json.dumps({"ids": IDS.tolist(), "folders": asked, "code": code}),
        env={**environment, "HF_HUB_OFFLINE": "1"},
        cwd=folders[0].parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers, documented = json.loads(done.stdout)
    return Asked({folder.name: answer for folder, answer in zip(folders, answers, strict=True)}, documented)


class Exports:
    """Checkpoints and their exports in a folder, with the built-in check."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = write_tokenizer(folder / "data")
        self.models = {**VARIANTS, "padded": PADDED, "bfloat16": SHAPE, "float16": SHAPE, "bare": SHAPE}
        for name, config in self.models.items():
            checkpoint = save_noisy(folder / "runs" / name, config)
            dtype: export.Dtype = "bfloat16" if name == "bfloat16" else "float16" if name == "float16" else "float32"
            tokenizer = None if name == "bare" else self.tokenizer
            export_model(checkpoint, run_config(config), self / name, dtype, tokenizer)

    def __truediv__(self, name: str) -> Path:
        return self.folder / "exports" / name

    def json(self, name: str, file: str) -> dict[str, Any]:
        """The content of a file of an export."""
        values: dict[str, Any] = json.loads((self / name / file).read_text())
        return values

    def logits(self, name: str) -> Tensor:
        """Our own logits, with the weights rounded as the export's are."""
        model = load_model(self.folder / "runs" / name / "step_00000003")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, self.json(name, "config.json")["dtype"])))
            logits: Tensor = model(IDS)
        return logits


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """One export of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        without_transformers(tmp_path_factory.mktemp("without"), patch)
        return Exports(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def asked(exports: Exports) -> Asked:
    """What transformers says of each."""
    (exports / "tiny-export").symlink_to(exports / "untied-bias")
    return ask_transformers([exports / name for name in exports.models])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*VARIANTS, "padded", "bfloat16", "float16", "bare"])
def test_r92_r96_r98_transformers_computes_what_the_model_computes(exports: Exports, asked: Asked, name: str) -> None:
    """R92, R96, R98, and R91's tied head: nothing missing or too much, and logits within 1e-4 in float32."""
    answer, config = asked.answers[name], exports.models[name]
    assert answer["class"] == "GPT2LMHeadModel"
    assert answer["faults"] == []
    assert answer["dtype"] == f"torch.{exports.json(name, 'config.json')['dtype']}"
    assert answer["rows"] == config.vocab_size
    ours = exports.logits(name)
    assert (torch.tensor(answer["logits"]) - ours).abs().max() < 1e-4
    assert ours.std() > 0.5, "the logits are large enough for faults to show"


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_r106_greedy_text_is_our_samplers_token_for_token(exports: Exports, asked: Asked, name: str) -> None:
    """R106: 20 tokens through generate()."""
    model = load_model(exports.folder / "runs" / name / "step_00000003")
    end_of_text = exports.json(name, "config.json")["eos_token_id"]
    assert asked.answers[name]["greedy"] == generate(model, PROMPT, 20, end_of_text=end_of_text)


def test_r91_a_tied_head_has_no_tensor_and_an_untied_one_has(exports: Exports) -> None:
    """R91: and config.json says which; both load strictly (above)."""
    for name, config in VARIANTS.items():
        tensors = load_file(exports / name / "model.safetensors")
        assert ("lm_head.weight" in tensors) is not config.tie_weights
        assert exports.json(name, "config.json")["tie_word_embeddings"] is config.tie_weights


def test_r96_a_model_without_qkv_bias_exports_zeros(exports: Exports) -> None:
    """R96: a missing bias would be drawn anew."""
    for name, config in VARIANTS.items():
        tensors = load_file(exports / name / "model.safetensors")
        for index in range(config.n_layers):
            bias = tensors[f"transformer.h.{index}.attn.c_attn.bias"]
            assert bias.shape == (96,)
            assert bool(bias.any()) is config.qkv_bias


def test_r98_the_file_is_contiguous_marked_and_readable_by_others(exports: Exports) -> None:
    """R98: the four matrices lie transposed in it."""
    path = exports / "untied-bias" / "model.safetensors"
    model = load_model(exports.folder / "runs" / "untied-bias" / "step_00000003")
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(path)
    for theirs, layer in (("attn.c_proj", "attention.output"), ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down")):
        ours = model.get_parameter(f"blocks.1.{layer}.weight")
        assert torch.equal(tensors[f"transformer.h.1.{theirs}.weight"], ours.T)
        assert tensors[f"transformer.h.1.{theirs}.weight"].is_contiguous()
    assert path.stat().st_mode & 0o777 == (path.parent / "config.json").stat().st_mode & 0o777


@pytest.mark.slow
def test_r95_rows_without_a_token_are_never_sampled(exports: Exports, asked: Asked) -> None:
    """R95: config and file have all rows, and generation leaves those out that stand for no token."""
    config = exports.json("padded", "config.json")
    tensors = load_file(exports / "padded" / "model.safetensors")
    assert (
        config["vocab_size"] == len(tensors["transformer.wte.weight"]) == len(tensors["lm_head.weight"]) == TOKENS + 31
    )
    drawn = asked.answers["padded"]["drawn"]
    assert len(drawn) > 200
    assert max(drawn) < TOKENS
    assert len(set(drawn)) > 50, "at temperature 5 most ids come up"
    assert exports.json("padded", "generation_config.json")["suppress_tokens"] == list(range(TOKENS, TOKENS + 31))
    assert "suppress_tokens" not in exports.json("untied-bias", "generation_config.json")


@pytest.mark.slow
def test_r95_gpt2s_vocabulary_padded_to_50304(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R95: the usual padding, with GPT-2's own tokenizer, whose last token ends a text."""
    without_transformers(tmp_path, monkeypatch)
    model = dataclasses.replace(SHAPE, vocab_size=50304, n_layers=1)
    checkpoint = save_noisy(tmp_path / "run", model)
    tokenizer = write_gpt2_tokenizer(tmp_path / "data")
    folder = export_model(checkpoint, run_config(model), tmp_path / "out", tokenizer=tokenizer).folder
    assert len(load_file(folder / "model.safetensors")["lm_head.weight"]) == 50304
    config, generation = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert (config["vocab_size"], config["eos_token_id"]) == (50304, 50256)
    assert generation["suppress_tokens"] == list(range(50257, 50304))


@pytest.mark.slow
def test_r97_begin_end_and_pad(exports: Exports, asked: Asked) -> None:
    """R97: the end is the id that our data separate documents with; the longest text is the trained context."""
    end = TOKENS - 1
    assert load_tokenizer(exports.tokenizer).token_to_id(END_OF_TEXT) == end
    config, generation = (exports.json("tied-bias", f"{name}.json") for name in ("config", "generation_config"))
    assert [config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [end, end, None]
    assert generation == {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    assert config["n_positions"] == config["n_ctx"] == 32
    answer = asked.answers["tied-bias"]
    assert answer["ends"] == [END_OF_TEXT, end, None], "without a pad, no text's real end is taken for one"
    assert answer["longest"] == 32
    assert set(answer["from nothing"]) == {end}, "an empty prompt begins with the end of a text"
    assert answer["after the whole context"] == 33


@pytest.mark.slow
def test_the_tokenizer_is_the_runs(exports: Exports, asked: Asked) -> None:
    answer = asked.answers["untied-no-bias"]
    assert answer["ids"] == load_tokenizer(exports.tokenizer).encode(TEXT).ids
    assert answer["text"] == TEXT


@pytest.mark.slow
def test_the_code_of_the_documentation_runs(asked: Asked) -> None:
    """docs/export.md, as written, where the export is."""
    assert asked.documented.startswith("def main():")
    assert len(asked.documented) > len("def main():") + 5


def test_config_json_has_floats_and_the_runs_dropout(exports: Exports) -> None:
    text = (exports / "untied-bias" / "config.json").read_text()
    assert '"layer_norm_epsilon": 1e-05' in text
    assert '"resid_pdrop": 0.1' in text
    assert '"activation_function": "gelu_new"' in text


def test_without_a_tokenizer_its_files_are_left_out(exports: Exports) -> None:
    assert sorted(os.listdir(exports / "bare")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert exports.json("bare", "config.json")["eos_token_id"] is None


Write = Callable[..., Exported]


@pytest.fixture
def write(exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Exports a checkpoint of the fixture to tmp_path/out, with the built-in check."""
    without_transformers(tmp_path, monkeypatch)

    def write_here(name: str = "untied-bias", output: str = "out", **options: Any) -> Exported:
        checkpoint = exports.folder / "runs" / name / "step_00000003"
        options = {"tokenizer": exports.tokenizer, **options}
        return export_model(checkpoint, run_config(exports.models[name]), tmp_path / output, **options)

    return write_here


def test_the_built_in_check_says_that_it_is_not_transformers(write: Write, tmp_path: Path) -> None:
    written = write()
    files = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert (written.folder, written.files) == (tmp_path / "out", files)
    assert written.check.startswith("read back by the built-in check, not by transformers (ImportError: blocked here)")
    assert "20 greedy tokens equal" in written.check


def test_the_end_of_text_is_the_recorded_one(write: Write, tmp_path: Path) -> None:
    """R97: dataset.json knows the data's separator better than a special token of that name."""
    (tmp_path / "dataset.json").write_text(json.dumps({"end_of_text": 7}))
    folder = write(description=tmp_path / "dataset.json").folder
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 7
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert "eos_token" not in settings, "an ordinary token stays one"


def test_without_the_dataset_the_description_beside_the_tokenizer_names_the_end_of_text(
    write: Write, exports: Exports, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(exports.tokenizer.read_bytes())
    (tmp_path / "dataset.json").write_text(json.dumps({"end_of_text": 7}))
    folder = write(tokenizer=tokenizer, description=tmp_path / "nix" / "dataset.json").folder
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 7


def test_r97_the_end_of_text_is_known_without_a_tokenizer(write: Write, tmp_path: Path) -> None:
    """R97: the data's description names it."""
    (tmp_path / "dataset.json").write_text(json.dumps({"end_of_text": 7}))
    folder = write(tokenizer=None, description=tmp_path / "dataset.json").folder
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 7
    assert json.loads((folder / "generation_config.json").read_text()) == dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id"), 7
    )
    (tmp_path / "dataset.json").write_text(json.dumps({"end_of_text": 281}))
    with pytest.raises(UserError, match=r"dataset\.json: its ids go up to 281, but the model's end at 280"):
        write(output="other", tokenizer=None, description=tmp_path / "dataset.json")


def test_what_exists_is_not_overwritten(write: Write, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write()
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match=r"out: exists already; an export overwrites nothing"):
        write()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"link: exists already"):
        write(output="link")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: is no folder, so that nothing can be written below it"):
        write(output="file/deep/out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_name_that_a_run_has_for_its_own_files_is_refused_in_its_folder(tmp_path: Path) -> None:
    refuse_names_of_a_run(tmp_path / "latest")
    (tmp_path / "metrics.jsonl").touch()
    for name in ("step_00000099", "latest", "config.yaml", ".hub.partial"):
        with pytest.raises(UserError, match=f"{name}: is a name that the run's own files have in its folder"):
            refuse_names_of_a_run(tmp_path / name)
    refuse_names_of_a_run(tmp_path / "mine")


def test_a_wrong_export_gets_no_name(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R92's mutation: the square matrix alone not transposed, for which no shape speaks."""

    def square_not_transposed(*arguments: Any) -> dict[str, Tensor]:
        tensors = to_gpt2(*arguments)
        return {n: t.T.contiguous() if n.endswith("attn.c_proj.weight") else t for n, t in tensors.items()}

    monkeypatch.setattr(export, "to_gpt2", square_not_transposed)
    with pytest.raises(RunError, match=r"the export's logits differ from the model's by .*nothing was written"):
        write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocked"]


def test_a_full_disk_leaves_nothing(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(RunError, match=r"out: cannot be written .*No space left"):
        write()
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_model_is_refused(write: Write, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write().folder / "tokenizer.json")
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(tmp_path / "larger.json"))
    with pytest.raises(
        UserError, match=r"larger\.json: its ids go up to 281, but the model's end at 280 \(model\.vocab"
    ):
        write(output="other", tokenizer=tmp_path / "larger.json")
    (tmp_path / "dataset.json").write_text(json.dumps({"end_of_text": 50256}))
    with pytest.raises(UserError, match="its ids go up to 50,256"):
        write(output="other", description=tmp_path / "dataset.json")


def test_weights_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = dataclasses.replace(SHAPE, n_layers=1)
    checkpoint = save_noisy(tmp_path / "run", model)
    set_final_norm(checkpoint, 1e5)
    with pytest.raises(UserError, match=r"final_norm\.weight does not fit into float16; export float32 or bfloat16"):
        export_model(checkpoint, run_config(model), tmp_path / "out", "float16")
