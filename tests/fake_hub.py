"""A stand-in for the Hugging Face Hub on 127.0.0.1: what the real client asks for when it downloads and uploads.

    with FakeHub() as hub:
        sha = hub.add("dataset", "owner/name", {"train.safetensors": data})
        hub.fail("/resolve/", delay=2)
        subprocess.run(..., env=hub.environment(tmp_path))
        assert hub.downloads("train.safetensors") == 1
        assert hub.read("model", "tester/model", "config.json") == b"{}"

The client reads its environment when it is imported, so it has to run in another process. Large files come by git-lfs,
or with `FakeHub(xet=FOLDER)` by Xet into that folder. fake_hub_server.py answers the requests.
"""

import hashlib
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self

from fake_hub_server import Handler
from fake_xet import find_xet, read_xet

Kind = Literal["model", "dataset"]
TOKEN, READ_TOKEN = "hf_write", "hf_read"


@dataclass(frozen=True)
class Stored:
    """A file of a commit; its bytes lie in `FakeHub.blobs` under its digest, or in the Xet folder."""

    size: int
    git_sha: str
    sha256: str | None = None
    """Of a file that came by git-lfs or Xet."""
    xet_hash: str | None = None

    @property
    def digest(self) -> str:
        """By which the client knows whether it has changed."""
        return self.sha256 or self.git_sha


@dataclass(frozen=True)
class Commit:
    title: str
    parent: str | None
    files: Mapping[str, Stored]


@dataclass
class Repository:
    """The commits of a repository, by sha, and what its branches and tags point to."""

    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False

    def commit(self, title: str, parent: str | None, files: Mapping[str, Stored], ref: str) -> str:
        sha = hashlib.sha1(f"{id(self)} {len(self.commits)} {title}".encode()).hexdigest()
        self.commits[sha] = Commit(title, parent, files)
        self.refs[ref] = sha
        return sha


@dataclass
class Fault:
    """Wait, then answer with an error, drop the connection, or (status 0) go on as usual."""

    path: str
    status: int
    code: str
    message: str
    delay: float
    times: int
    method: str
    skip: int
    headers: Mapping[str, str]
    lost: bool


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    authorization: str | None
    body: bytes = b""


class FakeHub:
    """Keeps repositories in memory; see the module's docstring."""

    def __init__(self, xet: Path | None = None, user: str = "tester", organisations: Mapping[str, str] | None = None):
        """Args: the folder for Xet; whose tokens are given out; the user's role in each organisation."""
        self.xet, self.user, self.organisations = xet, user, dict(organisations or {})
        self.tokens: dict[str, dict[str, Any]] = {TOKEN: {"role": "write"}, READ_TOKEN: {"role": "read"}}
        """What whoami says of each token."""
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def reset(self) -> None:
        """Forgets everything that a test has done."""
        for kept in (self.repositories, self.blobs, self.requests, self.faults):
            kept.clear()

    def add(self, kind: Kind, name: str, files: Mapping[str, bytes], ref: str = "main", private: bool = False) -> str:
        """Commits `files` as the whole content of a repository; `ref` then points there. Returns the sha."""
        repository = self.repositories.setdefault((kind, name), Repository(private=private))
        stored = {path: self.store(content) for path, content in files.items()}
        return repository.commit("added", repository.refs.get(ref), stored, ref)

    def fail(
        self,
        path: str,
        status: int = 0,
        code: str = "",
        message: str = "injected",
        delay: float = 0.0,
        times: int = 1000,
        method: str = "",
        skip: int = 0,
        headers: Mapping[str, str] | None = None,
        lost: bool = False,
    ) -> None:
        """Meets the next `times` requests that match with a fault.

        Args:
            path: Regular expression, searched for in the request's path.
            status: The HTTP status; 0 answers as usual (after `delay`), -1 drops the connection.
            code: The header by which the client picks its exception, such as GatedRepo.
            message: The error's text.
            delay: Seconds to wait before anything else.
            times: How many requests.
            method: GET, POST or PUT; any unless given.
            skip: So many matching requests are answered as usual first.
            headers: More headers of the answer.
            lost: Do what is asked, then drop the connection instead of answering.
        """
        self.faults.append(Fault(path, status, code, message, delay, times, method, skip, headers or {}, lost))

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process that is to take this for the Hub, with its cache in `home`."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        settings = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        settings |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"} | ({} if self.xet else {"HF_HUB_DISABLE_XET": "1"})
        return inherited | settings | more

    def downloads(self, file: str) -> int:
        """How often the content of `file` was asked for."""
        return sum(r.method == "GET" and r.path.endswith(f"/{file}") for r in self.requests)

    def count(self, method: str, path: str) -> int:
        """How many requests of this method had a path in which the regular expression is found."""
        return sum(r.method == method and re.search(path, r.path) is not None for r in self.requests)

    def head(self, kind: Kind, name: str, ref: str = "main") -> Commit:
        """The last commit of a branch."""
        repository = self.repositories[kind, name]
        return repository.commits[repository.refs[ref]]

    def files(self, kind: Kind, name: str, ref: str = "main") -> list[str]:
        """The names of the files on a branch, but for .gitattributes."""
        return sorted(set(self.head(kind, name, ref).files) - {".gitattributes"})

    def read(self, kind: Kind, name: str, file: str, ref: str = "main") -> bytes:
        """The content of a file on a branch."""
        return self.content(self.head(kind, name, ref).files[file])

    def titles(self, kind: Kind, name: str, ref: str = "main") -> list[str]:
        """The titles of a branch's commits, from the first."""
        repository = self.repositories[kind, name]
        titles: list[str] = []
        sha: str | None = repository.refs[ref]
        while sha is not None:
            titles.insert(0, repository.commits[sha].title)
            sha = repository.commits[sha].parent
        return titles

    def store(self, content: bytes) -> Stored:
        """Keeps a small file, under the name that git would give it."""
        stored = Stored(len(content), hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())
        self.blobs[stored.git_sha] = content
        return stored

    def large_file(self, sha256: str) -> Stored | None:
        """What a commit means by this sha256, once it has been uploaded."""
        git_sha = hashlib.sha1(sha256.encode()).hexdigest()
        if sha256 in self.blobs:
            return Stored(len(self.blobs[sha256]), git_sha, sha256)
        found = find_xet(self.xet, sha256) if self.xet else None
        return Stored(found[1], git_sha, sha256, found[0]) if found else None

    def content(self, stored: Stored) -> bytes:
        if stored.digest not in self.blobs:
            assert self.xet is not None, "it came by Xet"
            assert stored.xet_hash is not None, "it came by Xet"
            self.blobs[stored.digest] = read_xet(self.xet, stored.xet_hash, stored.size)
        return self.blobs[stored.digest]

    def record(self, *request: Any) -> None:
        self.requests.append(Request(*request))

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method in ("", method) and re.search(fault.path, path):
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None
