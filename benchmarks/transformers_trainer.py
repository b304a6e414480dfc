"""Trains a GPT-2 with transformers' Trainer for some steps, and writes down how long they took: a program of its own.

    python -P transformers_trainer.py QUESTION.json ANSWER.json

trainer.py starts it. It imports nothing of ours and must not find this repository on sys.path: transformers would take
the folder `datasets` for Hugging Face's library of that name.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def train(question: dict[str, Any]) -> dict[str, Any]:
    """Trains on the tokens that the question names; seconds of a step, the first loss, peak memory in bytes."""
    import torch
    import transformers
    from safetensors.torch import load_file

    library: Any = transformers  # whose types change from version to version
    folder, context = question["folder"], question["context"]
    tokens = load_file(f"{folder}/train.safetensors")["tokens"].long()
    inputs, targets = tokens[:-1].view(-1, context), tokens[1:].view(-1, context)
    # With targets of its own, a sequence has as many as it has tokens; shifted by transformers, one fewer.
    rows = [
        {"input_ids": one, "labels": other, "shift_labels": other} for one, other in zip(inputs, targets, strict=True)
    ]
    ends: list[float] = []

    class Clock(library.TrainerCallback):  # type: ignore[misc]  # whose base is not typed
        """Notes when each step ends."""

        def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
            """Notes the moment."""
            ends.append(time.perf_counter())

    class InOrder(library.Trainer):  # type: ignore[misc]
        """Reads the rows in their order, so that both train on the same."""

        def _get_train_sampler(self, *arguments: Any) -> Iterator[int]:
            return torch.utils.data.SequentialSampler(rows)  # type: ignore[return-value]

    settings = library.TrainingArguments(
        output_dir=folder,
        max_steps=question["warm_up"] + question["steps"],
        per_device_train_batch_size=question["microbatch"],
        gradient_accumulation_steps=question["accumulation"],
        learning_rate=question["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=question["weight_decay"],
        adam_beta1=question["betas"][0],
        adam_beta2=question["betas"][1],
        max_grad_norm=question["clip_norm"],
        bf16=question["bf16"],
        use_cpu=question["use_cpu"],
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    model = library.GPT2LMHeadModel.from_pretrained(folder)
    trainer = InOrder(model=model, args=settings, train_dataset=rows, callbacks=[Clock()])
    trainer.train()
    return {
        "seconds": (ends[-1] - ends[question["warm_up"] - 1]) / question["steps"],
        "loss": trainer.state.log_history[0]["loss"],
        "memory": peak_resident_set() if question["use_cpu"] else torch.cuda.max_memory_allocated(),
        "by": f"transformers {transformers.__version__}",
    }


def peak_resident_set() -> int:
    """Bytes, since the process began."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says it"
    return int(found[1]) * 1024


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(train(json.loads(Path(sys.argv[1]).read_text()))))
