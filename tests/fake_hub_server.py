"""How the stand-in for the Hub answers requests; fake_hub.py says what it is for.

POST /api/repos/create, /api/validate-yaml; GET /api/whoami-v2
GET  /api/{models,datasets}/ID[/revision/REV]               the sha and the files of a revision
GET  /api/{models,datasets}/ID/tree/REV[/PATH]             the same with sizes
POST /api/{models,datasets}/ID/branch/NAME, /preupload/REV, /commit/REV
GET  /api/{models,datasets}/ID/xet-{read,write}-token/REV   where Xet's own client finds its store
POST /[datasets/]ID.git/info/lfs/objects/batch; PUT /_lfs/OID; POST /_lfs/verify
GET  /[datasets/]ID/resolve/REV/PATH
"""

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import yaml

if TYPE_CHECKING:
    from fake_hub import FakeHub, Fault, Kind, Repository, Stored

BINARY = (".safetensors", ".png", ".parquet", ".gz", ".zst", ".gguf")
LICENCES = ("mit", "apache-2.0", "cc0-1.0", "other")  # of those that the Hub knows
SMALL = 10 * 1024 * 1024


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str = "", body: Mapping[str, Any] | None = None) -> None:
        self.status, self.message, self.code, self.body = status, message, code, body or {"error": message}


class Handler(BaseHTTPRequestHandler):
    hub: "FakeHub"
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_request(self) -> None:
        hub, self.path_asked = self.hub, unquote(urlsplit(self.path).path)
        self.body = self.read_body()
        self.extra: dict[str, str] = {}
        fault = hub.take_fault(self.command, self.path_asked)
        with hub.lock:  # not the large bodies
            kept = self.body if "commit" in self.path_asked or "repos" in self.path_asked else b""
            hub.record(self.command, self.path_asked, self.headers.get("Authorization"), kept)
        if fault is not None and self.meet(fault):
            return
        try:
            with hub.lock:
                content = self.route()
        except RefusedError as refusal:
            self.refuse(refusal)
            return
        if fault is not None and fault.lost:
            self.close_connection = True
            return
        self.answer(200, content if isinstance(content, bytes) else json.dumps(content).encode(), self.extra)

    def do_GET(self) -> None:
        self.handle_request()

    def do_HEAD(self) -> None:
        self.handle_request()

    def do_POST(self) -> None:
        self.handle_request()

    def do_PUT(self) -> None:
        self.handle_request()

    def meet(self, fault: "Fault") -> bool:
        """Whether nothing else is left to do."""
        time.sleep(fault.delay)
        if fault.status < 0:
            self.close_connection = True
        elif fault.status > 0:
            self.extra = dict(fault.headers)
            self.refuse(RefusedError(fault.status, fault.message, fault.code))
        return fault.status != 0

    def read_body(self) -> bytes:
        """The whole body, so that the connection can be used again."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def refuse(self, refusal: RefusedError) -> None:
        code = {"X-Error-Code": refusal.code} if refusal.code else {}
        headers = self.extra | code | {"X-Error-Message": refusal.message}
        self.answer(refusal.status, json.dumps(refusal.body).encode(), headers)

    def answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | dict(headers)).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # Who asks

    @property
    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def require(self, write: bool) -> None:
        """Refuses a request without a token that may do this."""
        if self.token not in self.hub.tokens:
            raise RefusedError(401, "Invalid username or password." if self.token is None else "Invalid credentials")
        if write and self.hub.tokens[self.token]["role"] == "read":
            raise RefusedError(403, "You don't have the rights to write under this namespace")

    def repository(self, kind: str, name: str, write: bool = False) -> "Repository":
        repository = self.hub.repositories.get((kind, name))
        if write or (repository is not None and repository.private):
            self.require(write)
        if repository is None:
            raise RefusedError(404, "Repository not found", "RepoNotFound")
        return repository

    def revision(self, repository: "Repository", revision: str) -> tuple[str, Mapping[str, "Stored"]]:
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, repository.commits[sha].files

    # What is asked

    def route(self) -> Any:
        for method, pattern, action in ROUTES:
            match = re.fullmatch(pattern, self.path_asked)
            if match and method == ("GET" if self.command == "HEAD" else self.command):
                return action(self, *match.groups(default=""))
        raise RefusedError(404, f"no route {self.command} {self.path_asked}")

    def json(self) -> Any:
        return json.loads(self.body)

    def whoami(self) -> Any:
        self.require(write=False)
        organisations = [{"name": name, "roleInOrg": role} for name, role in self.hub.organisations.items()]
        token = self.hub.tokens[str(self.token)]
        return {"type": "user", "name": self.hub.user, "orgs": organisations, "auth": {"accessToken": token}}

    def validate_yaml(self) -> Any:
        match = re.match(r"---\n(.*?)\n---\n", self.json()["content"], re.DOTALL)
        metadata = yaml.safe_load(match[1]) if match else None
        problems = [] if isinstance(metadata, dict) else ["empty or missing yaml metadata in repo card"]
        for entry in metadata.get("model-index", []) if isinstance(metadata, dict) else []:
            problems += [f'"model-index[0].{key}" is required' for key in ("name", "results") if key not in entry]
        if isinstance(metadata, dict) and metadata.get("license", "mit") not in LICENCES:
            problems.append('"license" must be one of [...]')
        if problems:
            errors = [{"message": problem} for problem in problems]
            raise RefusedError(400, "Invalid metadata", body={"errors": errors, "warnings": []})
        return {"errors": [], "warnings": []}

    def create(self) -> Any:
        self.require(write=True)
        wish = self.json()
        kind: Kind = wish.get("type") or "model"
        owner = wish.get("organization") or self.hub.user
        if owner != self.hub.user and self.hub.organisations.get(owner, "read") == "read":
            raise RefusedError(403, f'You don\'t have the rights to create a {kind} under the namespace "{owner}"')
        name = f"{owner}/{wish['name']}"
        where = {"url": f"{self.hub.url}/{'datasets/' if kind == 'dataset' else ''}{name}"}
        if (kind, name) in self.hub.repositories:
            raise RefusedError(409, "You already created this repo", body=where)
        files = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
        self.hub.add(kind, name, files, private=wish.get("visibility") == "private")
        return where

    def info(self, kind: str, name: str, revision: str) -> Any:
        repository = self.repository(kind, name)
        sha, files = self.revision(repository, revision or "main")
        siblings = [{"rfilename": file} for file in sorted(files)]
        info = {"_id": "1", "id": name, "sha": sha, "siblings": siblings, "private": repository.private, "tags": []}
        return info | {"downloads": 0, "likes": 0}

    def tree(self, kind: str, name: str, revision: str, folder: str) -> Any:
        _, files = self.revision(self.repository(kind, name), revision)
        if folder and not any(path.startswith(folder) for path in files):
            raise RefusedError(404, f"{folder} does not exist", "EntryNotFound")
        return [
            {"type": "file", "path": path, "oid": stored.git_sha, "size": stored.size}
            | ({"lfs": {"oid": stored.sha256, "size": stored.size, "pointerSize": 134}} if stored.sha256 else {})
            for path, stored in sorted(files.items())
            if path.startswith(folder)
        ]

    def branch(self, kind: str, name: str, branch: str) -> Any:
        repository = self.repository(kind, name, write=True)
        if branch in repository.refs:
            raise RefusedError(409, f"Reference already exists: {branch}")
        repository.refs[branch], _ = self.revision(repository, self.json().get("startingPoint") or "main")
        return {}

    def preupload(self, kind: str, name: str, revision: str) -> Any:
        _, present = self.revision(self.repository(kind, name, write=True), revision)
        answers = []
        for file in self.json()["files"]:
            path, sample = file["path"], base64.b64decode(file.get("sample") or "")
            large = path.endswith(BINARY) or "tfevents" in path or file["size"] > SMALL or b"\0" in sample
            known = present[path].digest if path in present else None
            mode = "lfs" if large else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": known})
        return {"files": answers}

    def lfs_batch(self, kind: str, name: str) -> Any:
        self.repository("dataset" if kind else "model", name, write=True)
        objects = []
        for wanted in self.json()["objects"]:
            upload = {"href": f"{self.hub.url}/_lfs/{wanted['oid']}", "header": {}}
            actions = {"upload": upload, "verify": {"href": f"{self.hub.url}/_lfs/verify", "header": {}}}
            objects.append(wanted if wanted["oid"] in self.hub.blobs else wanted | {"actions": actions})
        return {"transfer": "basic", "objects": objects}

    def lfs_upload(self, sha256: str) -> Any:
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise RefusedError(400, "sha256 mismatch")
        self.hub.blobs[sha256] = self.body
        return {}

    def lfs_verify(self) -> Any:
        if self.json()["oid"] not in self.hub.blobs:
            raise RefusedError(404, "object not found")
        return {}

    def commit(self, kind: str, name: str, revision: str) -> Any:
        repository = self.repository(kind, name, write=True)
        parent, present = self.revision(repository, revision)
        files, title = dict(present), ""
        for item in map(json.loads, self.body.splitlines()):
            value = item["value"]
            if item["key"] == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, parent):
                    raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
            elif item["key"] == "file":
                files[value["path"]] = self.hub.store(base64.b64decode(value["content"]))
            elif item["key"] == "lfsFile":
                stored = self.hub.large_file(value["oid"])
                if stored is None:
                    raise RefusedError(400, f"LFS pointer points to a file that does not exist: {value['oid']}")
                files[value["path"]] = stored
            elif files.pop(value["path"], None) is None:
                raise RefusedError(404, "A file with this name doesn't exist", "EntryNotFound")
        sha = repository.commit(title, parent, files, revision)
        return {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"}

    def xet_token(self, kind: str, name: str, access: str) -> Any:
        self.repository(kind, name, write=access == "write")
        if self.hub.xet is None:
            raise RefusedError(404, "this stand-in was started without Xet")
        store, expiry = f"local://{self.hub.xet}", str(int(time.time()) + 3600)
        self.extra = {"X-Xet-Cas-Url": store, "X-Xet-Access-Token": "x", "X-Xet-Token-Expiration": expiry}
        return {"casUrl": store, "accessToken": "x", "exp": int(expiry)}

    def resolve(self, kind: str, name: str, revision: str, path: str) -> bytes:
        kind = "dataset" if kind else "model"
        sha, files = self.revision(self.repository(kind, name), revision)
        if path not in files:
            raise RefusedError(404, "Entry not found", "EntryNotFound")
        stored = files[path]
        self.extra = {"X-Repo-Commit": sha, "ETag": f'"{stored.git_sha}"', "Content-Length": str(stored.size)}
        if stored.sha256:
            self.extra |= {"X-Linked-Etag": f'"{stored.sha256}"', "X-Linked-Size": str(stored.size)}
        if stored.xet_hash:
            where = f"{self.hub.url}/api/{kind}s/{name}/xet-read-token/{sha}"
            self.extra |= {"X-Xet-Hash": stored.xet_hash, "Link": f'<{where}>; rel="xet-auth"'}
        return b"" if self.command == "HEAD" else self.hub.content(stored)


API = r"/api/(model|dataset)s/([^/]+/[^/]+)"
PLAIN = r"/(datasets/)?([^/]+/[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("POST", "/api/repos/create", Handler.create),
    ("GET", rf"{API}(?:/revision/(.+))?", Handler.info),
    ("GET", rf"{API}/tree/([^/]+)(?:/(.+))?", Handler.tree),
    ("POST", rf"{API}/branch/(.+)", Handler.branch),
    ("POST", rf"{API}/preupload/(.+)", Handler.preupload),
    ("POST", rf"{API}/commit/(.+)", Handler.commit),
    ("GET", rf"{API}/xet-(read|write)-token/.+", Handler.xet_token),
    ("POST", rf"{PLAIN}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("POST", "/_lfs/verify", Handler.lfs_verify),
    ("PUT", "/_lfs/(.+)", Handler.lfs_upload),
    ("GET", rf"{PLAIN}/resolve/([^/]+)/(.+)", Handler.resolve),
]
