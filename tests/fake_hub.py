"""A stand-in for the Hugging Face Hub on 127.0.0.1: what the real client asks for when it downloads files.

    with FakeHub() as hub:
        sha = hub.add("dataset", "owner/name", {"train.safetensors": data})
        hub.fail("/resolve/", delay=2)
        subprocess.run(..., env=hub.environment(tmp_path))
        assert hub.downloads("train.safetensors") == 1

The client reads its environment when it is imported, so it has to run in another process.
"""

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, Self
from urllib.parse import unquote, urlsplit

Kind = Literal["model", "dataset"]
INFO_ROUTE = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/revision/(.+))?")
FILE_ROUTE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """The commits of a repository, by sha, and what its branches and tags point to."""

    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)


@dataclass
class Fault:
    """Wait, then answer with an error, drop the connection, or (status 0) go on as usual."""

    path: str
    status: int
    code: str
    message: str
    delay: float
    times: int


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    authorization: str | None


class FakeHub:
    """Serves repositories from memory; see the module's docstring."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, kind: Kind, name: str, files: Mapping[str, bytes], ref: str = "main") -> str:
        """Commits `files` as the whole content of a repository; `ref` then points there. Returns the sha."""
        repository = self.repositories.setdefault((kind, name), Repository())
        sha = hashlib.sha1(f"{kind}/{name}/{len(repository.commits)}".encode()).hexdigest()
        repository.commits[sha] = dict(files)
        repository.refs[ref] = sha
        return sha

    def fail(
        self,
        path: str,
        status: int = 0,
        code: str = "",
        message: str = "injected",
        delay: float = 0.0,
        times: int = 1000,
    ) -> None:
        """Meets the next `times` requests whose path matches the regular expression `path` with a fault.

        Args:
            path: Regular expression, searched for in the request's path.
            status: The HTTP status; 0 answers as usual (after `delay`), -1 drops the connection.
            code: The header by which the client picks its exception, such as GatedRepo.
            message: The error's text.
            delay: Seconds to wait before anything else.
            times: How many requests.
        """
        self.faults.append(Fault(path, status, code, message, delay, times))

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process that is to take this for the Hub, with its cache in `home`."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        settings = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return inherited | settings | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"} | more

    def downloads(self, file: str) -> int:
        """How often the content of `file` was asked for."""
        return sum(r.method == "GET" and r.path.endswith(f"/{file}") for r in self.requests)

    def take_fault(self, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(Request(self.command, path, self.headers.get("Authorization")))
        fault = self.hub.take_fault(path)
        if fault is not None:
            time.sleep(fault.delay)
            if fault.status < 0:
                self.close_connection = True
                return
            if fault.status > 0:
                self.refuse(fault.status, fault.code, fault.message)
                return
        if match := INFO_ROUTE.fullmatch(path):
            self.send_info(match[1], match[2], match[3] or "main")
        elif match := FILE_ROUTE.fullmatch(path):
            self.send_file("dataset" if match[1] else "model", match[2], match[3], match[4])
        else:
            self.refuse(404, "", f"no route {path}")

    def find(self, kind: str, name: str, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        """The commit that `revision` stands for; None after having refused the request."""
        repository = self.hub.repositories.get((kind, name))
        if repository is None:
            self.refuse(404, "RepoNotFound", "Repository not found")
            return None
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return sha, repository.commits[sha]

    def send_info(self, kind: str, name: str, revision: str) -> None:
        if commit := self.find(kind, name, revision):
            sha, files = commit
            siblings = [{"rfilename": file} for file in sorted(files)]
            info = {"_id": "1", "id": name, "sha": sha, "siblings": siblings, "private": False, "tags": []}
            self.answer(200, json.dumps(info | {"downloads": 0, "likes": 0}).encode(), {})

    def send_file(self, kind: str, name: str, revision: str, file: str) -> None:
        if commit := self.find(kind, name, revision):
            sha, files = commit
            if file not in files:
                self.refuse(404, "EntryNotFound", "Entry not found")
                return
            etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
            self.answer(200, files[file], {"X-Repo-Commit": sha, "ETag": etag})

    def refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code} if code else {}
        self.answer(status, b"{}", headers | {"X-Error-Message": message})

    def answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
