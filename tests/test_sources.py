"""What a SOURCE may be: a file, a folder, or a dataset on the Hub, which the real client gets from a stand-in."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from fake_hub import FakeHub

from training.errors import UserError
from training.preparation.sources import Source, find_sources

PROGRAM = """
import json, sys
from training.errors import UserError
from training.preparation.sources import find_sources
for line in sys.stdin:
    name, revision, patterns = json.loads(line)
    try:
        [source] = find_sources([name], revision, patterns)
        files = {file.name: file.path.read_text() for file in source.files}
        answer = {"files": files, "revision": source.revision, "state": source.state, "description": source.description}
    except UserError as error:
        answer = {"refusal": str(error)}
    print(json.dumps(answer))
"""


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names(source: Source) -> list[str]:
    return [file.name for file in source.files]


def test_the_files_of_a_folder_are_taken_by_their_path(tmp_path: Path) -> None:
    """Those of known formats, but what is hidden, and what is rather about the data."""
    kept = ["b/a.parquet", "b/c.JSONL", "b.txt", "b.d/x.md.gz", "z.ndjson.zst"]
    touch(tmp_path, *kept, ".hidden/a.txt", ".a.txt", "README.md", "info.json", "image.png", "a.parquet.gz", "a.gz")
    [source] = find_sources([str(tmp_path)], None, [])
    assert names(source) == sorted(kept)
    assert [file.path for file in source.files] == [tmp_path / name for name in sorted(kept)]
    assert [(file.format, file.compression) for file in source.files] == [
        ("text", ".gz"), ("text", ""), ("Parquet", ""), ("JSON lines", ""), ("JSON lines", ".zst"),
    ]  # fmt: skip


def test_patterns_choose_among_the_files_of_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "train/a.jsonl", "train/b.json", "test/a.jsonl", "README.md")
    assert names(find_sources([str(tmp_path)], None, ["train/*"])[0]) == ["train/a.jsonl", "train/b.json"]
    assert names(find_sources([str(tmp_path)], None, ["*.md", "test/*"])[0]) == ["README.md", "test/a.jsonl"]
    with pytest.raises(UserError, match=r"has no file that matches x/\* or y and can be read, only README.md, test/a"):
        find_sources([str(tmp_path)], None, ["x/*", "y"])
    with pytest.raises(UserError, match="--files: chooses in folders and repositories, but all sources are files here"):
        find_sources([str(tmp_path / "README.md")], None, ["*.md"])


def test_a_pattern_with_a_suffix_names_text(tmp_path: Path) -> None:
    """Sources of programs, say; a pattern for everything still takes known formats alone."""
    for name in ("a.py", "b.txt", "c.py.gz", "d.zip"):
        (tmp_path / name).write_text("x")
    [source] = find_sources([str(tmp_path)], None, ["*.py"])
    assert [(file.name, file.format) for file in source.files] == [("a.py", "text")]
    [source] = find_sources([str(tmp_path)], None, ["*"])
    assert [file.name for file in source.files] == ["b.txt"]


def test_several_sources_keep_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is read twice, also by way of a link, is told."""
    touch(tmp_path, "b.txt", "a.txt", "f/c.json")
    found = find_sources([str(tmp_path / name) for name in ("b.txt", "a.txt", "b.txt", "f/c.json")], None, [])
    assert [names(source) for source in found] == [["b.txt"], ["a.txt"], ["b.txt"], ["c.json"]]
    assert (
        capsys.readouterr().err == f"{tmp_path / 'b.txt'}: is read more than once, as it is named twice or linked to\n"
    )
    assert [entry["file"] for source in found for entry in source.description] == ["b.txt", "a.txt", "b.txt", "c.json"]


def test_a_changed_file_is_another_source(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt")
    before = find_sources([str(tmp_path)], None, [])[0].state
    assert find_sources([str(tmp_path / "a.txt")], None, [])[0].state == before, "however it is named"
    os.utime(tmp_path / "a.txt", ns=(0, 0))
    assert find_sources([str(tmp_path)], None, [])[0].state != before


@pytest.mark.parametrize(
    "name",
    ["", "./out", "a/b/c", "datasets/u/x", "u/x--y", "u/..", "../u/x", "u/x.jsonl", "no-such", "n" * 300, "a\nb"],
)
def test_r90_what_is_neither_here_nor_the_name_of_a_repository_is_refused(name: str) -> None:
    """R90: a path is never taken for a repository: no request leaves this machine."""
    with pytest.raises(UserError, match=r"there is no such file or folder, and it is no name of a dataset on the Hub"):
        find_sources([name], None, [])


def test_r90_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R90: also where it could be the name of a repository."""
    monkeypatch.chdir(tmp_path)
    touch(tmp_path, "owner/name/a.txt")
    [source] = find_sources(["owner/name"], None, [])
    assert source.repository is None
    with pytest.raises(UserError, match="--revision: is one of a dataset on the Hub, but all sources are files here"):
        find_sources(["owner/name"], "main", [])


@pytest.mark.parametrize(("module", "name"), [("zstandard", "b.txt.zst"), ("pyarrow", "b.parquet")])
def test_a_missing_package_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    """Whether the file is named or lies in a folder, behind others."""
    for file in ("a.txt", name):
        (tmp_path / file).write_bytes(b"content")
    monkeypatch.setitem(sys.modules, module, None)
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=rf"{name}: needs the package {module}; install it with: pip install -e '"):
            find_sources([str(source)], None, [])
    assert len(find_sources([str(tmp_path / "a.txt")], None, [])) == 1


def test_a_format_that_is_not_known_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.csv", "b/c.pdf", "d.parquet.zst")
    for name in ("a.csv", "d.parquet.zst"):
        with pytest.raises(UserError, match=rf"{name}: is of no format that is known here; read are \.txt"):
            find_sources([str(tmp_path / name)], None, [])
    with pytest.raises(UserError, match=r"b: has no file to read, only c.pdf; read are \.txt"):
        find_sources([str(tmp_path / "b")], None, [])


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0f" * 32 + "\nsize 12345\n"


def test_what_is_no_file_of_documents_is_refused_wherever_it_lies(tmp_path: Path) -> None:
    """A pipe, which would be waited for; a link to nothing; what git-lfs leaves. In a folder, it would be left out."""
    touch(tmp_path, "data/a.txt")
    wrong = tmp_path / "data" / "b\n.txt"

    def refusal(source: Path) -> str:
        with pytest.raises(UserError) as caught:
            find_sources([str(source)], None, [])
        return str(caught.value)

    os.mkfifo(wrong)
    for source in (wrong, tmp_path / "data"):
        assert refusal(source).startswith(
            rf"{tmp_path}/data/b\n.txt: is no file that can be read, but a pipe, a device"
        )
    wrong.unlink()
    wrong.symlink_to("nothing")
    assert refusal(tmp_path / "data").startswith(rf"{tmp_path}/data/b\n.txt: is no file that can be read, but a pipe")
    wrong.unlink()
    for text in (POINTER, POINTER.replace("oid", "ext-0-x sha256:12\noid").rstrip()):
        wrong.write_text(text)
        for source in (wrong, tmp_path / "data"):
            assert refusal(source).startswith(rf"{tmp_path}/data/b\n.txt: is not the file itself but git-lfs's pointer")
    for text in (f"{POINTER}That is a pointer.", POINTER[:40]):
        wrong.write_text(text)
        assert len(find_sources([str(tmp_path / "data")], None, [])[0].files) == 2


def test_nothing_in_a_folder_is_left_out_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder behind a link, and one that may not be looked into; but links to files are files."""
    touch(tmp_path, "a/a.txt", "b/b.txt", ".hidden/c.txt")
    (tmp_path / "a" / "link.txt").symlink_to(tmp_path / "b" / "b.txt")
    (tmp_path / "a" / ".link").symlink_to(tmp_path / "b")
    assert names(find_sources([str(tmp_path / "a")], None, [])[0]) == ["a.txt", "link.txt"]
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b")
    with pytest.raises(
        UserError, match="a/link: is a link to a folder, which is not followed; its files would be left"
    ):
        find_sources([str(tmp_path / "a")], None, [])
    assert names(find_sources([str(tmp_path / "a" / "link")], None, [])[0]) == ["b.txt"]
    (tmp_path / "a" / "link").unlink()
    look = os.scandir

    def look_or_not(folder: str) -> Any:
        if str(folder).endswith("/b"):  # permissions keep nobody out who is root
            raise PermissionError(13, "Permission denied", str(folder))
        return look(folder)

    monkeypatch.setattr(os, "scandir", look_or_not)
    with pytest.raises(
        UserError, match=r"/b: cannot be looked into \(Permission denied\); its files would be left out"
    ):
        find_sources([str(tmp_path)], None, [])


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


def ask(hub: FakeHub, home: Path, *questions: tuple[str, str | None, list[str]], **env: str) -> list[dict[str, Any]]:
    """What find_sources answers in a process that has the stand-in for its Hub."""
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=REPOSITORY,
        env=hub.environment(home, **env),
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_repository_s_files_come_from_one_commit_into_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    """By revision and pattern; what is there is not fetched again, and offline it is enough. What cannot be had is
    refused in a sentence."""
    hub.add("dataset", "owner/images", {"a.png": b"", "README.md": b""})
    old = {"README.md": b"card", "data/b.jsonl": b"old b", "data/a.jsonl": b"old a", "x.bin": b""}
    first = hub.add("dataset", "owner/texts", old)
    second = hub.add("dataset", "owner/texts", old | {"data/a.jsonl": b"new a", "more/c.txt": b"new c"})
    home = tmp_path / "home"

    everything, tagged, some, missing, revision, nothing = ask(
        hub,
        home,
        ("owner/texts", None, []),
        ("owner/texts", first, []),
        ("owner/texts", None, ["more/*"]),
        ("owner/none", None, []),
        ("owner/images", "v1", []),
        ("owner/images", None, []),
    )

    new = {"data/a.jsonl": "new a", "data/b.jsonl": "old b", "more/c.txt": "new c"}
    assert (everything["files"], everything["revision"]) == (new, second)
    assert list(everything["files"]) == sorted(new)
    assert (tagged["files"], tagged["revision"]) == ({"data/a.jsonl": "old a", "data/b.jsonl": "old b"}, first)
    assert some["files"] == {"more/c.txt": "new c"}
    assert everything["description"] == [{"repository": "owner/texts", "revision": second, "files": sorted(new)}]
    assert everything["state"] == ["owner/texts", second, sorted(new)]
    assert hub.downloads("x.bin") == hub.downloads("README.md") == 0
    asked = len(hub.requests)
    offline, by_commit, not_here = ask(
        hub, home, ("owner/texts", None, []), ("owner/texts", first, []), ("owner/none", None, []), HF_HUB_OFFLINE="1"
    )
    assert (offline["files"], offline["state"]) == (new, everything["state"])
    assert by_commit["state"] == tagged["state"]
    assert len(hub.requests) == asked
    assert missing["refusal"].startswith("dataset owner/none: the Hub has no such repository")
    assert revision["refusal"].startswith("dataset owner/images: the repository has no revision 'v1'")
    assert nothing["refusal"].startswith("owner/images: has no file to read, only README.md, a.png; read are .txt")
    assert "owner/none: not on this machine, and HF_HUB_OFFLINE forbids" in not_here["refusal"]
