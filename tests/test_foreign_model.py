"""Models that were saved by others: by transformers itself, under old names, and the forerunner's."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_exports import SHAPE, VARIANTS, noisy_model, write_gpt2_tokenizer, write_tokenizer
from torch import Tensor

from model.gpt import GPT, GPTConfig, build_gpt
from training.errors import UserError
from training.exchange.foreign_model import FORERUNNER, ForeignModel, read_foreign_model, read_foreign_tokenizer
from training.exchange.gpt2_format import config_to_gpt2, to_gpt2
from training.tokenizer import load_tokenizer

IDS = torch.randint(281, (2, 16), generator=torch.Generator().manual_seed(7))
PROGRAM = """
import json, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel

ids, folder = json.loads(sys.argv[1]), sys.argv[2]
shape = {"vocab_size": 281, "n_positions": 32, "n_embd": 32, "n_head": 4, "n_layer": 2}
for name, values, options in (
    ("tied", {}, {}),
    ("untied", {"tie_word_embeddings": False}, {}),
    ("parts", {"activation_function": "gelu_pytorch_tanh"}, {"max_shard_size": "50KB"}),
    ("half", {"dtype": torch.bfloat16}, {}),
):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**shape, **values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if name == "half":
            model = model.bfloat16()
        model.save_pretrained(f"{folder}/{name}", **options)
        torch.save(model.float()(torch.tensor(ids)).logits, f"{folder}/{name}/logits.pt")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that transformers wrote, each with the logits of IDS."""
    folder = tmp_path_factory.mktemp("saved")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", PROGRAM, json.dumps(IDS.tolist()), str(folder)]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def model_of(foreign: ForeignModel) -> GPT:
    """Our model with a foreign one's weights."""
    model = build_gpt(foreign.config, seed=0).eval()
    parameters = dict(model.named_parameters())
    assert foreign.weights.keys() == parameters.keys()
    with torch.no_grad():
        for name, weight in foreign.weights.items():
            assert weight.dtype == torch.float32
            parameters[name].copy_(weight)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "untied", "parts", "half"])
def test_a_model_saved_by_transformers_computes_the_same(saved: Path, name: str) -> None:
    """Tied and untied, in several files, in bfloat16; all with biases of query, key and value."""
    foreign = read_foreign_model(saved / name, "source", None)
    expected = dataclasses.replace(SHAPE, qkv_bias=True, tie_weights=name != "untied")
    assert foreign.config == expected
    assert (saved / name / "model.safetensors").exists() is (name != "parts")
    logits = torch.load(saved / name / "logits.pt", weights_only=True)
    with torch.no_grad():
        assert (model_of(foreign)(IDS) - logits).abs().max() < 1e-4
    assert logits.std() > 0.5


def write_gpt2(
    folder: Path, config: GPTConfig = SHAPE, tensors: dict[str, Tensor] | None = None, **values: Any
) -> Path:
    """Writes a folder in transformers' format; some tensors and values of config.json instead of ours."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = to_gpt2({name: p.detach() for name, p in noisy_model(config).named_parameters()}, config)
    save_file({**weights, **(tensors or {})}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config_to_gpt2(config, "float32", None), **values}))
    return folder


def problem(folder: Path, heads: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        read_foreign_model(folder, "source", heads)
    return str(caught.value)


def test_names_without_prefix_and_masks_among_the_weights(tmp_path: Path) -> None:
    """As in the first GPT-2 on the Hub, whose tied head is not in the file either."""
    config = VARIANTS["tied-bias"]
    folder = write_gpt2(tmp_path, config)
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(folder / "model.safetensors").items()}
    masks = {f"h.{block}.attn.bias": torch.ones(1, 1, 32, 32).tril() for block in range(2)}
    save_file(tensors | masks, folder / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(model_of(read_foreign_model(folder, "source", None))(IDS), noisy_model(config).eval()(IDS))


def test_r91_a_file_that_contradicts_its_tying_is_refused(tmp_path: Path) -> None:
    """R91: a head beside a tied embedding must be it, and an untied one must be there."""
    config = VARIANTS["tied-bias"]
    embedding = noisy_model(config).token_embedding.weight.detach().clone()
    same = write_gpt2(tmp_path / "same", config, {"lm_head.weight": embedding})
    assert "head.weight" not in read_foreign_model(same, "source", None).weights
    other = write_gpt2(tmp_path / "other", config, {"lm_head.weight": embedding + 1})
    assert "the config says that weights are tied, but lm_head.weight is not transformer.wte.weight" in problem(other)
    without = write_gpt2(tmp_path / "without", config, tie_word_embeddings=False)
    assert "the config says that weights are not tied, but lm_head.weight is missing" in problem(without)


def test_a_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    """Also in two parts, in which no name is there twice."""
    embedding = noisy_model(SHAPE).token_embedding.weight.detach()
    twice = write_gpt2(tmp_path / "twice", tensors={"wte.weight": torch.zeros_like(embedding)})
    sentence = problem(twice)
    assert "transformer.wte.weight and wte.weight are the same weight; one of them must go" in sentence
    parts = write_gpt2(tmp_path / "parts")
    (parts / "model.safetensors").rename(parts / "first.safetensors")
    save_file({"wte.weight": torch.zeros_like(embedding)}, parts / "second.safetensors")
    index = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "transformer.wte.weight and wte.weight are the same weight" in problem(parts)
    tensors = {"tok_emb.weight": embedding, "model.tok_emb.weight": torch.zeros_like(embedding)}
    (tmp_path / "other").mkdir()
    save_file({**tensors, "trf_blocks.0.att.W_query.weight": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    assert "model.tok_emb.weight and tok_emb.weight are the same weight" in problem(tmp_path / "other")


def test_zero_biases_are_none(tmp_path: Path) -> None:
    assert not read_foreign_model(write_gpt2(tmp_path), "source", None).config.qkv_bias


def test_what_is_not_our_network_is_named(tmp_path: Path) -> None:
    sentence = problem(write_gpt2(tmp_path / "exact", activation_function="gelu"))
    wanted = (
        "source: activation_function is 'gelu', and the model that is trained here has 'gelu_new'; this model cannot"
    )
    assert sentence.startswith(wanted)
    assert "n_inner is 100" in problem(write_gpt2(tmp_path / "inner", n_inner=100))
    assert "n_heads" in problem(write_gpt2(tmp_path / "heads", n_head=[4]))
    assert "score.weight is unknown" in problem(
        write_gpt2(tmp_path / "score", tensors={"score.weight": torch.ones(2, 2)})
    )
    integers = {"transformer.ln_f.bias": torch.ones(32, dtype=torch.int8)}
    assert "transformer.ln_f.bias holds torch.int8" in problem(write_gpt2(tmp_path / "int8", tensors=integers))
    nan = {"transformer.ln_f.bias": torch.full((32,), torch.nan)}
    assert "transformer.ln_f.bias holds values that are not finite" in problem(
        write_gpt2(tmp_path / "nan", tensors=nan)
    )
    assert "wanted [281, 32]" in problem(write_gpt2(tmp_path / "rows", tensors={"lm_head.weight": torch.ones(280, 32)}))
    assert "--heads is 8, but config.json has n_head 4" in problem(write_gpt2(tmp_path / "said"), heads=8)


def test_pickles_and_damaged_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert problem(tmp_path).startswith("source: has no model.safetensors; pickled weights (.bin, .pt, .pth) are never")
    index = {"weight_map": {"a": "../../model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "a file that is not there, ../../model-00001-of-00001.safetensors; fetch it again" in problem(tmp_path)
    folder = write_gpt2(tmp_path / "cut")
    (folder / "config.json").write_text("[1]")
    assert "config.json: must be a JSON object" in problem(folder)
    (folder / "config.json").write_text("{")
    assert "config.json: cannot be read as JSON" in problem(folder)
    (folder / "config.json").unlink()
    assert "source: has no config.json" in problem(folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    assert "model.safetensors: is not a readable safetensors file" in problem(folder)


def forerunners(config: GPTConfig) -> dict[str, Tensor]:
    """The weights of a noisy model under the forerunner's names, spelled out from its own model's code."""
    ours = {name: p.detach().clone() for name, p in noisy_model(config).named_parameters()}
    tensors = {
        "tok_emb.weight": ours["token_embedding.weight"],
        "pos_emb.weight": ours["position_embedding.weight"],
        "final_norm.scale": ours["final_norm.weight"],
        "final_norm.shift": ours["final_norm.bias"],
        "out_head.weight": ours["token_embedding.weight"].clone() if config.tie_weights else ours["head.weight"],
    }
    for number in range(config.n_layers):
        theirs, block = f"trf_blocks.{number}", f"blocks.{number}"
        for layer, name in (("W_query", "query"), ("W_key", "key"), ("W_value", "value"), ("out_proj", "output")):
            for kind in ("weight", "bias"):
                if f"{block}.attention.{name}.{kind}" in ours:
                    tensors[f"{theirs}.att.{layer}.{kind}"] = ours[f"{block}.attention.{name}.{kind}"]
        for kind in ("weight", "bias"):
            tensors[f"{theirs}.ff.layers.0.{kind}"] = ours[f"{block}.mlp.up.{kind}"]
            tensors[f"{theirs}.ff.layers.2.{kind}"] = ours[f"{block}.mlp.down.{kind}"]
        for theirs_kind, kind in (("scale", "weight"), ("shift", "bias")):
            tensors[f"{theirs}.norm1.{theirs_kind}"] = ours[f"{block}.attention_norm.{kind}"]
            tensors[f"{theirs}.norm2.{theirs_kind}"] = ours[f"{block}.mlp_norm.{kind}"]
        tensors[f"{theirs}.att.mask"] = torch.ones(32, 32).triu(diagonal=1)
    return tensors


THEIR_CONFIG = {"vocab_size": 281, "context_length": 32, "emb_dim": 32, "n_heads": 4, "n_layers": 2, "drop_rate": 0.1}


def write_forerunners(folder: Path, config: GPTConfig, layout: str) -> Path:
    """As on the Hub (a wrapper's prefix, `cfg` in config.json), as in its own folders (model.json), or bare."""
    folder.mkdir(parents=True)
    tensors = forerunners(config)
    values = {**THEIR_CONFIG, "qkv_bias": config.qkv_bias} | ({"tie_weights": True} if config.tie_weights else {})
    if layout == "hub":
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        wrapped = {"model_type": "gpjtgpt2", "architectures": ["GPJTGPT2ModelForCausalLM"], "cfg": values}
        (folder / "config.json").write_text(json.dumps(wrapped))
    elif layout == "own":
        (folder / "model.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layout", ["hub", "own", "bare"])
def test_the_forerunners_models_compute_the_same(tmp_path: Path, name: str, layout: str) -> None:
    config = VARIANTS[name]
    folder = write_forerunners(tmp_path / "it", config, layout)
    foreign = read_foreign_model(folder, "source", 4 if layout == "bare" else None)
    assert foreign.config == config
    assert foreign.format == "the forerunner's format"
    with torch.no_grad():
        assert torch.equal(model_of(foreign)(IDS), noisy_model(config).eval()(IDS))


def test_the_forerunners_tied_head_may_be_under_either_name(tmp_path: Path) -> None:
    """A tied pair is one storage, of which a file may keep either name."""
    config = VARIANTS["tied-no-bias"]
    for missing in ("tok_emb.weight", "out_head.weight"):
        folder = write_forerunners(tmp_path / missing, config, "own")
        tensors = load_file(folder / "model.safetensors")
        del tensors[missing]
        save_file(tensors, folder / "model.safetensors")
        with torch.no_grad():
            assert torch.equal(
                model_of(read_foreign_model(folder, "source", None))(IDS), noisy_model(config).eval()(IDS)
            )


def test_what_the_forerunner_has_and_we_do_not_is_named(tmp_path: Path) -> None:
    folder = write_forerunners(tmp_path / "it", SHAPE, "own")
    (folder / "model.json").write_text(json.dumps({**THEIR_CONFIG, "moe": {"num_experts": 8}}))
    assert "moe in its config is not of the model that is trained here" in problem(folder)
    (folder / "model.json").write_text(json.dumps({**THEIR_CONFIG, "n_layers": 3}))
    assert "blocks.2." in problem(folder)
    (folder / "model.json").write_text(json.dumps(THEIR_CONFIG))
    assert "--heads is 8, but its config has n_heads 4" in problem(folder, heads=8)
    (folder / "model.json").unlink()
    assert "no file says how many heads it has; give --heads N" in problem(folder)
    assert "emb_dim: must be divisible by n_heads (5)" in problem(folder, heads=5)
    assert "--heads 0: must be at least 1" in problem(folder, heads=0)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "pos_emb.weight"}, folder / "model.safetensors")
    assert "pos_emb.weight is missing" in problem(folder, heads=4)
    assert len(set(FORERUNNER.values())) == len(FORERUNNER), "no two of its words are one of ours"


def test_a_tokenizer_of_vocab_json_and_merges_txt_gives_the_same_ids(tmp_path: Path) -> None:
    """GPT-2's own files, by their published numbers."""
    write_gpt2_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    tokenizer = read_foreign_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("Every effort moves you").ids == [6109, 3626, 6100, 345]
    assert tokenizer.encode("one<|endoftext|>two").ids == [505, 50256, 11545]
    assert tokenizer.decode([6109, 3626, 6100, 345]) == "Every effort moves you"
    (tmp_path / "merges.txt").write_text("#version: 0.2\nx y z\n")
    with pytest.raises(UserError, match=r"vocab\.json and merges\.txt are not those of"):
        read_foreign_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    assert read_foreign_tokenizer(tmp_path) is None


def test_a_vocabulary_without_the_end_of_text_gets_none(tmp_path: Path) -> None:
    """The model would have no row for its id."""
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    tokenizer = read_foreign_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.get_vocab() == {"a": 0, "b": 1, "ab": 2}


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    tokenizer = read_foreign_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.get_vocab() == load_tokenizer(path).get_vocab()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"n_layer": 2**62}, "transformer.h.2.ln_1.weight is missing"),
        ({"vocab_size": 10**30}, f"transformer.wte.weight has shape [281, 32], wanted [{10**30}, 32]"),
        ({"n_embd": 2**40, "n_head": 1}, f"transformer.wte.weight has shape [281, 32], wanted [281, {2**40}]"),
        ({"resid_pdrop": [1]}, "resid_pdrop is [1], but must be a number; this model cannot be imported as it is"),
        ({"n_embd": None, "n_inner": 128}, "n_embd is None, but must be a number"),
    ],
)
def test_a_config_may_say_anything(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    """It is compared with what the file holds before anything of that size is made."""
    assert said in problem(write_gpt2(tmp_path, **values))


def test_numbers_that_float32_does_not_hold(tmp_path: Path) -> None:
    for name, tensor, said in (
        ("float8", torch.ones(32).to(torch.float8_e4m3fn), "holds torch.float8_e4m3fn, which is no weight"),
        ("large", torch.full((32,), 1e300, dtype=torch.float64), "holds values that are not finite in float32"),
    ):
        folder = write_gpt2(tmp_path / name, tensors={"transformer.ln_f.bias": tensor})
        assert said in problem(folder)
    for name, embedding in (("tok_emb.weight", torch.ones(64)), ("pos_emb.weight", torch.tensor(1.0))):
        folder = write_forerunners(tmp_path / name, SHAPE, "own")
        save_file({**load_file(folder / "model.safetensors"), name: embedding}, folder / "model.safetensors")
        assert "an embedding has shape" in problem(folder)


def test_an_index_of_parts_that_is_none(tmp_path: Path) -> None:
    for weight_map in (["a"], None, {"a": 5}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert "index.json: its weight_map must name the file of each tensor; fetch it again" in problem(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 200_000)
    assert "index.json: cannot be read as JSON (it is nested too deeply)" in problem(tmp_path)
    parts = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert "index.json: names a file that is not there, 1.safetensors; fetch it again" in problem(tmp_path)
    for file in parts.values():
        save_file({"a": torch.ones(1)}, tmp_path / file)
    assert "2.safetensors: holds a, which another of its files holds too" in problem(tmp_path)
