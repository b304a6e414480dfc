"""Runs to be compared: their folders as training leaves them, written from a few values."""

from pathlib import Path
from typing import Any

from recorded_runs import event, train_row, validation_row, write_run

CONFIG: dict[str, Any] = {
    "resolved": True,
    "model": {"vocab_size": 257, "context_length": 32, "emb_dim": 48, "n_heads": 4, "n_layers": 3, "dropout": 0.1},
    "data": {"dataset": "data", "train_tokens": 20480, "validation_tokens": 4096},
    "batch": {"world_size": 2, "microbatch": 4, "accumulation": 4},
    "optimizer": {"clip_norm": None},
}
DIGESTS = {
    "weights_sha256": "aa" * 32,
    "data_order_sha256": "bb" * 32,
    "validation_sha256": "cc" * 32,
    "tokenizer_sha256": "dd" * 32,
}


def write_result(
    folder: Path,
    loss: float | None,
    seeds: tuple[int, int] = (42, 42),
    /,
    *,
    steps: int = 20,
    speed: float = 1.0,
    end: str | None = "finished",
    bits_per_byte: float | None = None,
    begin: dict[str, Any] | None = None,
    target_tokens: int = 4096,
    **sections: Any,
) -> Path:
    """A run of so many steps of 1,024 tokens, half a second each at speed 1, that ended in a validation loss.

    Args:
        folder: of the run, in a folder that is made if need be.
        loss: of the last validation; None for one that was not finite.
        seeds: of weights and training.
        steps: trained, of 20.
        speed: how many times as fast as usual.
        end: event with which it ended; None = killed.
        bits_per_byte: of the last validation.
        begin: what the start event says; without it, digests that all such runs share.
        target_tokens: of the validation.
        sections: of the config, over CONFIG's.
    """
    config = {**CONFIG, "seeds": {"weights": seeds[0], "training": seeds[1]}}
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    start = DIGESTS if begin is None else begin
    rows = [event(0, "start", total_steps=20, device="cpu", machine="box", **start)]
    for step in range(1, steps + 1):
        seconds = 0.5 * step / speed
        offset = 0.0 if loss is None else loss - 4.0
        rows.append(train_row(step, seconds=seconds, loss=4.0 + offset + 2.0 / step, tokens_per_second=2048.0 * speed))
        if step % 5 == 0 and step < steps:
            rows.append(validation_row(step, 4.1 + offset + 2.0 / step, target_tokens=target_tokens))
    rows.append(validation_row(steps, loss, bits_per_byte=bits_per_byte, target_tokens=target_tokens))
    rows += [event(steps, end)] if end else []
    folder.parent.mkdir(parents=True, exist_ok=True)
    return write_run(folder, rows, config)


def write_import(folder: Path, loss: float | None) -> Path:
    """An imported model, with an evaluation or without."""
    rows = [event(0, "import", source="openai-community/gpt2", parameters=124439808)]
    rows += [] if loss is None else [validation_row(0, loss)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    return write_run(folder, rows, CONFIG)
