"""What the documents promise: README's tree is the tree, its commands run, and its links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)


def tracked() -> list[str]:
    """The files of the repository as git knows them, those about to be added included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.splitlines() if (REPOSITORY / name).exists()]


def test_tree_is_true() -> None:
    """Each module is named in README's tree, and nothing is named that is not there."""
    tree = next(text for _, text in BLOCKS if text.startswith("ddp_train.py"))
    named, folders = set(), dict[int, str]()
    for line in tree.splitlines():
        name, depth = line.split()[0], len(line) - len(line.lstrip())
        name = "".join(folders[outer] for outer in sorted(folders) if outer < depth) + name
        named.add(name)
        folders = {outer: path for outer, path in folders.items() if outer < depth}
        if name.endswith("/"):
            folders[depth] = line.split()[0]
    for name in named:
        assert (REPOSITORY / name).exists(), f"README's tree names {name}"
    for name in tracked():
        module = re.fullmatch(r"(model|training)/[\w/]+\.py", name) and not name.endswith("__init__.py")
        assert not module or name in named, f"README's tree lacks {name}"
    top = {name.split("/")[0] + "/" for name in tracked() if "/" in name and not name.startswith(".")}
    assert top <= named


def test_links_lead_somewhere() -> None:
    """Relative links of every document."""
    for document in [name for name in tracked() if name.endswith(".md")]:
        path = REPOSITORY / document
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{document} links to {link}"


def test_each_module_has_its_tests() -> None:
    """tests/test_<module>.py one to one."""
    # Tested in test_cli.py, test_config.py, test_runs.py, test_export_check.py, test_push.py, test_hub_upload.py and
    # test_comparison_page.py, and test_report.py.
    elsewhere = ["errors", "config_check", "session", "loop", "load_with_transformers", "hub_commands", "hub_retry"]
    elsewhere += ["comparison_figures", "report_sections"]
    for path in [*REPOSITORY.glob("model/[a-z]*.py"), *REPOSITORY.glob("training/**/[a-z]*.py")]:
        if path.stem not in elsewhere:
            assert (REPOSITORY / "tests" / f"test_{path.stem}.py").exists(), f"{path.stem} has no tests of its own"


def commands() -> list[str]:
    """The commands of README that start our own programs."""
    lines = [line.split("  #")[0].strip() for language, text in BLOCKS if not language for line in text.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith(("torchrun ", "python ddp_train.py ", "isobatch "))]


@pytest.mark.slow
def test_commands_of_the_readme(tmp_path: Path, python_library: Path) -> None:
    """Each runs as written, in a copy of the repository; training is cut short, and what needs a download planned."""
    copy = tmp_path / "isobatch"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    (copy / "datasets" / "python-library").symlink_to(python_library)
    ran = 0
    for command in commands():
        words = shlex.split(command)
        if words[0] == "torchrun":
            words[:1] = [sys.executable, "-m", "torch.distributed.run"]
            # There is no such run here to go on with.
            words = ["auto" if word == "latest" else re.sub(r"(--nproc_per_node)=\d+", r"\1=2", word) for word in words]
            words += ["--set", "data.train_tokens=8192"] if "tiny" in words else ["--dry-run"]
        elif words[0] == "python":
            words[0] = sys.executable
        else:
            words[:1] = [sys.executable, "-m", "training.cli"]
            words += ["--steps", "1"] if "verify" in words else []
            words += ["--dry-run"] if "push" in words else []
            words += ["--rounds", "1", "--accumulation", "1", "--processes", "1"] if "bench" in words else []
        done = subprocess.run(words, cwd=copy, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        ran += 1
    assert ran >= 7
    report = (copy / "checkpoints" / "tiny" / "report.md").read_text()
    assert "validation loss" in report.lower()
