"""A process that uploads, and checks whether it may, under an environment of its own, with waits 500 times shorter.

with Client(hub, tmp_path / "home") as client:
    answer = client.ask(check="tester/model")
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from fake_hub import TOKEN, FakeHub

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = "tester/model"
PROGRAM = """
import json, os, sys
from pathlib import Path
from impatient import hurry
hurry()
from training.errors import RunError, UserError
from training.hub import hub_access
from training.hub.hub_upload import Destination, files_of, upload_files
from training.hub.repository_content import foreign_content, foreign_state

for line in sys.stdin:
    wish = json.loads(line)
    os.environ["HF_TOKEN"] = wish["token"]
    said = []
    try:
        if "check" in wish:
            hub_access.ANSWER_SECONDS = wish.get("patience", 5.0)
            words = (wish["check"], "--push-to-hub", wish.get("licence"), said.append)
            answer = {"checked": hub_access.check_access(*words)}
        elif "look" in wish:
            look = {"content": foreign_content, "state": foreign_state}[wish["look"]]
            own = () if wish.get("own") is None else (wish["own"].encode(),)
            answer = {"found": look(Destination(**wish["to"]), said.append, *own)}
        else:
            to, stale = Destination(**wish["to"]), wish.get("stale", ())
            answer = {"sha": upload_files(files_of(Path(wish["folder"])), to, "A title", said.append, stale)}
    except (RunError, UserError) as error:
        answer = {"refusal": str(error), "kind": type(error).__name__}
    print(json.dumps(answer | {"said": said}), flush=True)
"""


class Client:
    """A process that has imported training.hub.hub_upload under the given environment, and uploads on request."""

    def __init__(self, hub: FakeHub, home: Path, **environment: str) -> None:
        home.mkdir()
        self.errors = home / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                cwd=REPOSITORY,
                env=hub.environment(home, **{"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}", **environment}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.process.communicate()

    def ask(self, token: str = TOKEN, **wish: Any) -> dict[str, Any]:
        """What comes of a wish; nothing of the client's own must reach the user, least of all the token."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"token": token, **wish}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert self.errors.read_text() == ""
        assert not token.strip() or token.strip() not in line
        return dict(json.loads(line))

    def upload(self, folder: Path, repository: str = MODEL, token: str = TOKEN, **more: Any) -> dict[str, Any]:
        stale = {"stale": more.pop("stale")} if "stale" in more else {}
        return self.ask(token, folder=str(folder), to={"repository": repository, **more}, **stale)

    def refusal(self, folder: Path, **more: Any) -> str:
        """The one sentence of an upload that fails; the folder is as it was."""
        before = {path for path in folder.rglob("*") if path.is_file()}
        answer = self.upload(folder, **more)
        assert answer["kind"] == "RunError"
        assert "\n" not in answer["refusal"]
        assert {path for path in folder.rglob("*") if path.is_file()} == before
        return str(answer["refusal"])
