"""Borders inside the code: what each module may import, and what nothing may use."""

import ast
from pathlib import Path

import pytest
from conftest import REPOSITORY

SOURCES = [REPOSITORY / "ddp_train.py"]
SOURCES += [path for folder in ("model", "training") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
HUB = ("hub_client", "hub_access", "hub_retry", "hub_upload", "repository_content", "model_card", "dataset_card")
# Module: the only files that may import it.
FEW_PLACES = {
    "torch.distributed": ["training/distributed.py"],
    "yaml": ["training/yaml_reader.py"],
    "huggingface_hub": [f"training/hub/{name}.py" for name in HUB],
    "fcntl": ["training/lock.py"],
}
STANDARD = {"dataclasses", "typing", "math", "collections"}


def imports(path: Path) -> set[str]:
    """Full names of all that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_each_file_keeps_to_its_side(path: Path) -> None:
    """model imports torch, numpy and itself alone; some libraries are known to few files; nothing is pickled."""
    own = str(path.relative_to(REPOSITORY))
    for name in imports(path):
        if own.startswith("model/"):
            assert name.split(".")[0] in STANDARD | {"torch", "numpy", "model"}, f"{own} imports {name}"
        for module, places in FEW_PLACES.items():
            assert own in places or not within(name, module), f"{own} imports {name}, which belongs into {places}"
        assert not within(name, "pickle"), f"{own} imports pickle"
        assert name.split(".")[0] != "ddp_train", f"{own} imports the command"
    text = path.read_text()
    for forbidden in ("torch.load(", "torch.save(", 'device == "cuda"'):
        assert forbidden not in text, f"{own} uses {forbidden}"
