"""A run that is to be pushed: its small dataset with a tokenizer, and its config."""

import json
from pathlib import Path

from conftest import Workplace
from tokenizers import Tokenizer

from training.tokenizer import train_tokenizer

TEXT = "Every effort moves you a little further than the last one did. "
PUSHED = [
    *("README.md", "config.json", "config.yaml", "generation_config.json", "grad_norm.png", "learning_rate.png"),
    *("loss.png", "metrics.jsonl", "model.safetensors", "runs/run/events.out.tfevents.0.isobatch", "tokenizer.json"),
    "tokenizer_config.json",
]
"""What lies in a repository, and in the folder that is built for it."""


def prepare_push(place: Workplace) -> tuple[Path, Tokenizer]:
    """A small dataset with a tokenizer, and a config of 10 steps on it."""
    tokenizer = train_tokenizer([TEXT], 270)
    ids = [*tokenizer.encode(TEXT).ids, 269] * 400
    place.write_tokens(tokens=ids)
    place.write_tokens(file="validation", tokens=ids[:2000])
    tokenizer.save(str(place.datasets / "data" / "tokenizer.json"))
    (place.datasets / "data" / "dataset.json").write_text(json.dumps({"end_of_text": 269, "licence": "CC0-1.0"}))
    config = place.write_config(
        model={"vocab_size": 270}, data={"validation_start": 0}, optimizer={"learning_rate": 0.01}
    )
    return config, tokenizer
