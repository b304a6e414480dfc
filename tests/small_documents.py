"""Document files, written from lists of tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Documents = Sequence[Sequence[int]]


def write_documents(path: Path, documents: Documents, masks: Documents | None = None, **tensors: Any) -> Path:
    """Writes a document file; `tensors` replace what would be written."""
    content = {
        "tokens": np.concatenate([np.array(document, dtype=np.uint16) for document in documents]),
        "document_ends": np.cumsum([len(document) for document in documents], dtype=np.int64),
    }
    if masks is not None:
        content["loss_mask"] = np.concatenate([np.array(mask, dtype=np.uint8) for mask in masks])
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(content | {name: np.asarray(tensor) for name, tensor in tensors.items()}, path)
    return path


def documents_of_targets(sequences: Documents, first: int = 5) -> tuple[list[list[int]], list[list[int]]]:
    """Documents and masks whose targets are those given: a first token, which is none, comes before them."""
    documents = [[first, *targets] for targets in sequences]
    return documents, [[1] * len(document) for document in documents]
