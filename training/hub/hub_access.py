"""Tells, before any work is done, whether an upload to the Hugging Face Hub will be allowed."""

from typing import Any

from training.errors import UserError
from training.hub.hub_client import ANSWER_SECONDS, check_token
from training.hub.hub_retry import Say, client_errors, failure_kind, is_unreachable, may_pass, patiently, to_stderr
from training.hub.hub_upload import Destination, problem_of
from training.hub.repository_content import foreign_content

READERS = ("read", "no_access")  # roles in an organisation
TOKEN_PAGE = "https://huggingface.co/settings/tokens"
LICENCE_PAGE = "https://huggingface.co/docs/hub/repositories-licenses"


def check_access(repository: str, named: str, licence: str | None = None, say: Say = to_stderr) -> None:
    """Checks, before any work is done, that there is a Hub, and a token that may write to `repository` there.

    Args:
        repository: `owner/name`.
        named: the key or option that names it, for the message.
        licence: that the page will name; the Hub decides which ones there are.
        say: shows a line to the user.

    Raises:
        UserError: there is no token, or it may not write there, or the Hub knows no such licence.
        RunError: the Hub is in trouble, and stays so, or cannot be reached.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    if get_token() is None:
        raise UserError(
            f"{named}: there is no token to upload to {repository} with; set HF_TOKEN to one that may write "
            f"({TOKEN_PAGE}), or log in with `hf auth login`"
        )
    check_token()

    def ask() -> str | None:
        answer = get_session().get(
            f"{constants.ENDPOINT}/api/whoami-v2", headers=build_hf_headers(), timeout=ANSWER_SECONDS
        )
        hf_raise_for_status(answer)
        problem = _problem_of_account(answer.json(), repository)
        return _problem_of_licence(licence) if licence is not None and problem is None else problem

    def told(error: Exception) -> str:
        unknown = isinstance(error, HfHubHTTPError) and error.response.status_code == 401
        return f"{named}: {repository}: {'HF_TOKEN: ' if unknown else ''}{problem_of(error)}"

    try:  # where nobody answers there is most often no network, and waiting would not help
        problem = patiently(ask, told, say, lambda error: may_pass(error) and not is_unreachable(error))
    except client_errors() as error:
        raise failure_kind(error)(told(error)) from error
    if problem:
        raise UserError(f"{named}: {repository}: {problem}")


def check_destination(
    to: Destination, named: str, licence: str | None, way_on: str, own_page: bytes | None = None
) -> None:
    """Checks, as `check_access`, that an upload will be allowed, and that it would replace nobody's own files.

    Args:
        to: where to.
        named: the key or option that names the repository, for the message.
        licence: that the page will name.
        way_on: what the user can do where there are such files; "" = they may be replaced.
        own_page: a README.md of the user's that will be uploaded as it is, if there is one.

    Raises:
        UserError: as `check_access`; or there are files that were not uploaded from here.
        RunError: the Hub is in trouble.
    """
    check_access(to.repository, named, licence)
    if way_on and (problem := foreign_content(to, to_stderr, own_page)):
        raise UserError(f"{named}: {to.repository}: {problem}; {way_on}")


def _problem_of_account(account: dict[str, Any], repository: str) -> str | None:
    """Why the account behind a token may not write to a repository, as far as the Hub's answer tells."""
    owner, _, _ = repository.partition("/")
    token = (account.get("auth") or {}).get("accessToken") or {}
    remedy = f"make one that may at {TOKEN_PAGE} and set HF_TOKEN to it"
    if token.get("role") == "read":
        return f"the token in HF_TOKEN may only read; {remedy}"
    roles = {entry.get("name"): entry.get("roleInOrg") for entry in account.get("orgs") or []}
    if owner != account.get("name") and owner not in roles:
        writable = [name for name, role in roles.items() if role not in READERS]
        mine = ", ".join(sorted(map(str, [account.get("name"), *writable])))
        return f"the token in HF_TOKEN is {account.get('name')}'s, who may not write to {owner}, but to: {mine}"
    if roles.get(owner) in READERS:
        return (
            f"{account.get('name')} may only read in the organisation {owner}; ask its administrators, or use another"
        )
    scopes = (token.get("fineGrained") or {}).get("scoped")
    if token.get("role") == "fineGrained" and scopes is not None:
        granted = [
            permission
            for scope in scopes
            if (scope.get("entity") or {}).get("name") in (owner, repository)
            for permission in scope.get("permissions") or []
        ]
        if "repo.write" not in granted:
            return f"the fine-grained token in HF_TOKEN has no write permission for {owner}; {remedy}"
    return None


def _problem_of_licence(licence: str) -> str | None:
    """Asks the Hub about a page with this licence: an unknown one would only be refused with the upload."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    answer = get_session().post(  # as ModelCard.validate does, which would wait for ever
        f"{constants.ENDPOINT}/api/validate-yaml",
        json={"repoType": "model", "content": f"---\nlicense: {licence}\n---\n"},
        headers=build_hf_headers(),
        timeout=ANSWER_SECONDS,
    )
    if answer.status_code == 400:
        return f"the Hub knows no licence {licence!r}; {LICENCE_PAGE} lists their names"
    hf_raise_for_status(answer)
    return None
