"""Loads an exported folder with transformers and writes down what it computes: a program of its own.

    python -P load_with_transformers.py FOLDER QUESTION.json ANSWER < PIPE

It imports nothing of ours and must not find this repository on sys.path: transformers would take the folder `datasets`
for Hugging Face's library of that name. It writes ANSWER.json and ANSWER.safetensors, which export_check.py compares,
and ends, removing its files, when its standard input does: with the process that asked.
Exit status 3: transformers cannot be imported, and the last line on standard error says why.
"""

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

CANNOT_IMPORT = 3
FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def answer(folder: str, question: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What transformers makes of a folder: plain values, and the logits by the number of their sequence."""
    import torch
    import transformers

    library: Any = transformers  # whose types change from version to version
    model, info = library.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model = model.double().eval()
    logits = {}
    for number, row in enumerate(question["rows"]):
        with torch.no_grad():
            hidden = model.transformer(torch.tensor([row])).last_hidden_state[0, -question["last"] :]
            logits[str(number)] = model.lm_head(hidden).contiguous()
    prompt = torch.tensor([question["prompt"]])
    # In place of the folder's, which may end the text or leave ids out: the network alone is compared.
    model.generation_config = library.GenerationConfig(do_sample=False, pad_token_id=0)
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=question["greedy"])
    values = {
        "version": transformers.__version__,
        "keys": {kind: [str(key) for key in info[kind]] for kind in FAULTS},
        "greedy": written[0, prompt.shape[1] :].tolist(),
        "texts": None,
    }
    if question["texts"] is not None:
        tokenizer = library.AutoTokenizer.from_pretrained(folder)
        values["texts"] = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in question["texts"]]
    return values, logits


def leave_with_asker(*files: str) -> None:
    """Ends this process once nobody holds the other end of its standard input, however that one ended."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock Python would wait for at its end
            pass
        for file in files:
            Path(file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it
            Path(files[0]).parent.rmdir()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Answers the question on the command line."""
    folder, question, destination = sys.argv[1:]
    leave_with_asker(question, f"{destination}.json", f"{destination}.safetensors")
    try:
        import transformers  # noqa: F401  (before PyTorch, which takes longer)
        from safetensors.torch import save_file
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(CANNOT_IMPORT)
    values, logits = answer(folder, json.loads(Path(question).read_text(encoding="utf-8")))
    Path(f"{destination}.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(logits, f"{destination}.safetensors")


if __name__ == "__main__":
    main()
