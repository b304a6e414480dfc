"""GGUF files, run by llama.cpp in a process of its own."""

import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_exports import (
    PADDED,
    SHAPE,
    TOKENS,
    VARIANTS,
    run_config,
    save_noisy,
    write_gpt2_tokenizer,
    write_tokenizer,
)
from tokenizers import Tokenizer, pre_tokenizers

from training.errors import UserError
from training.exchange import gguf_file
from training.exchange.export import Dtype
from training.exchange.gguf_file import export_gguf
from training.restore import load_model
from training.tokenizer import load_tokenizer

TEXT = "Every effort moves 314 you\n\n  naïve 東京 it's<|endoftext|>x"
# Token by token: the log-probabilities of all tokens after each beginning of the ids. The bias only chooses the token
# that is taken, an ASCII one: of one that is no UTF-8 text by itself, llama.cpp gives no probabilities.
PROGRAM = """
import json, sys, urllib.request
import xllamacpp as llama

path, text, ids, rows, letter = json.loads(sys.stdin.read())
params = llama.CommonParams()
params.model.path = path
params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = 32, 1, 0, False
params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cpuparams.n_threads = 1
server = llama.Server(params)
asked = {"n_predict": 1, "n_probs": rows, "temperature": 0.0, "cache_prompt": False, "logit_bias": [[letter, 1000.0]]}
answers = []
for stop in range(1, len(ids) + 1):
    done = server.handle_completions({"prompt": ids[:stop], **asked})
    (content,) = done["choices"][0]["logprobs"]["content"]
    answers.append({entry["id"]: entry["logprob"] for entry in content["top_logprobs"]})
body = json.dumps({"content": text, "parse_special": True}).encode()
request = urllib.request.Request(server.listening_address + "/tokenize", body, {"Content-Type": "application/json"})
print(json.dumps([answers, json.load(urllib.request.urlopen(request, timeout=120))["tokens"]]))
"""


def write(folder: Path, name: str, dtype: Dtype = "float32", **options: Any) -> Path:
    config = options.pop("config", None) or {**VARIANTS, "padded": PADDED}[name]
    checkpoint = save_noisy(folder / "run", config)
    tokenizer = options["tokenizer"] if "tokenizer" in options else write_tokenizer(folder / "data")
    output = options.pop("output", folder / "out" / "model.gguf")
    written = export_gguf(checkpoint, run_config(config), output, dtype, tokenizer, options.get("description"))
    assert written.check.startswith("read back with gguf: all ")
    return written.folder / written.files[0]


def ask_llama(path: Path, ids: list[int], rows: int, letter: int) -> tuple[list[dict[str, float]], list[int]]:
    """Log-probabilities by id after each beginning of `ids`, and the ids that it makes of TEXT."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        input=json.dumps([str(path), TEXT, ids, rows, letter]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers, of_text = json.loads(done.stdout.splitlines()[-1])
    return answers, of_text


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    # llama.cpp's GELU is a table in half precision, which shows in proportion to how far the logits spread.
    [(name, "float32", 5e-4) for name in ("untied-bias", "tied-no-bias", "padded")] + [("tied-bias", "float16", 2e-2)],
)
def test_llama_cpp_computes_what_the_model_computes(tmp_path: Path, name: str, dtype: Dtype, tolerance: float) -> None:
    """With and without a tied head and biases of query, key and value; the padded one has neither."""
    path = write(tmp_path, name, dtype)
    tokenizer = load_tokenizer(tmp_path / "data" / "tokenizer.json")
    ids = tokenizer.encode(TEXT).ids
    model = load_model(tmp_path / "run" / "step_00000003")
    letter = tokenizer.token_to_id("a")
    assert letter is not None
    answers, of_text = ask_llama(path, ids[:24], model.config.vocab_size, letter)
    assert of_text == ids
    with torch.no_grad():
        ours = model(torch.tensor([ids[:24]]))[0].log_softmax(-1)
    for expected, answer in zip(ours, answers, strict=True):
        theirs = torch.tensor([answer[str(token)] for token in range(model.config.vocab_size)])
        assert (theirs - expected).abs().max() < tolerance * max(1.0, float(ours.std()))
    assert ours.std() > 0.5


@pytest.mark.slow
def test_gpt2s_own_vocabulary_has_the_same_ids_there(tmp_path: Path) -> None:
    """50257 tokens, 50000 merges."""
    config = dataclasses.replace(SHAPE, vocab_size=50257, n_layers=1)
    tokenizer = write_gpt2_tokenizer(tmp_path / "data")
    path = write(tmp_path, "gpt2", config=config, tokenizer=tokenizer)
    assert ask_llama(path, [], 1, 64)[1] == load_tokenizer(tokenizer).encode(TEXT).ids


def test_rows_without_a_token_are_marked_as_unused(tmp_path: Path) -> None:
    """R95: the vocabulary of the file has all rows."""
    from gguf import GGUFReader, TokenType

    fields = GGUFReader(str(write(tmp_path, "padded"))).fields
    tokens, types = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
    assert len(tokens) == len(types) == PADDED.vocab_size
    assert (tokens[TOKENS - 1], types[TOKENS - 1]) == ("<|endoftext|>", TokenType.CONTROL)
    assert (tokens[TOKENS], types[TOKENS]) == (f"[PAD{TOKENS}]", TokenType.UNUSED)
    assert fields["tokenizer.ggml.eos_token_id"].contents() == TOKENS - 1


def test_the_end_of_text_is_the_one_beside_the_tokenizer_where_the_dataset_is_not_here(tmp_path: Path) -> None:
    from gguf import GGUFReader

    tokenizer = write_tokenizer(tmp_path / "data")
    tokenizer.with_name("dataset.json").write_text(json.dumps({"end_of_text": 7}))
    path = write(tmp_path, "tied-bias", tokenizer=tokenizer, description=tmp_path / "nix" / "dataset.json")
    assert GGUFReader(str(path)).fields["tokenizer.ggml.eos_token_id"].contents() == 7


def test_what_cannot_be_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--format gguf: the file holds the vocabulary.*give --tokenizer FILE"):
        write(tmp_path, "tied-bias", tokenizer=None)
    with pytest.raises(UserError, match=r"out: a GGUF export is one file; give it a name that ends in \.gguf"):
        write(tmp_path, "tied-bias", output=tmp_path / "out")
    with pytest.raises(UserError, match="--dtype bfloat16: a GGUF export is float32 or float16"):
        write(tmp_path, "tied-bias", "bfloat16")
    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path / "data")))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    with pytest.raises(UserError, match=r"words\.json: is not a byte-level BPE that splits text as GPT-2's"):
        write(tmp_path, "tied-bias", tokenizer=tmp_path / "words.json")
    assert not (tmp_path / "out").exists()


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path, "tied-bias")
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"model\.gguf: exists already"):
        write(tmp_path, "tied-bias")
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"]
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(UserError, match=r"pipe\.gguf: exists already"):
        write(tmp_path, "tied-bias", output=tmp_path / "pipe.gguf")
    assert (tmp_path / "pipe.gguf").is_fifo()
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(UserError, match=r"folder\.gguf: exists already"):
        write(tmp_path, "tied-bias", output=tmp_path / "folder.gguf")
    with pytest.raises(UserError, match=r"model\.gguf: is no folder, so that nothing can be written below it"):
        write(tmp_path, "tied-bias", output=path / "below.gguf")


def test_what_another_process_has_made_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each process checks the file that it has written itself."""
    output = tmp_path / "out" / "model.gguf"
    difference = gguf_file._difference

    def and_the_other_is_faster(library: Any, path: Path, arrays: dict[str, Any]) -> str | None:
        assert path.name == f".model.gguf.partial-{socket.gethostname()}-{os.getpid()}"
        output.write_bytes(b"another's")
        return difference(library, path, arrays)

    monkeypatch.setattr(gguf_file, "_difference", and_the_other_is_faster)
    with pytest.raises(UserError, match=r"model\.gguf: was made by another process in the meantime, and stays"):
        write(tmp_path, "tied-bias")
    assert [(path.name, path.read_bytes()) for path in output.parent.iterdir()] == [("model.gguf", b"another's")]


def test_a_disk_without_hard_links_gets_the_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_paths: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = write(tmp_path, "tied-bias")
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"]
