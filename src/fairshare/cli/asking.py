"""What the commands that ask a running gateway have in common: its port, a key, and plain sentences for trouble."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fairshare.errors import FairshareError, OperatorError

T = TypeVar("T")

TIMEOUT_SECONDS = 5.0
USUAL_ADMIN = "http://127.0.0.1:8081"

AdminOption = Annotated[str, typer.Option("--admin", help="The gateway's admin port.", metavar="URL")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help="A file with the admin key; else the environment variable FAIRSHARE_ADMIN_KEY, if it is set.",
        metavar="FILE",
    ),
]


class Unreachable(OperatorError):
    """The gateway does not answer; it may later."""


class NotKnown(FairshareError):
    """The gateway answers that there is no such thing."""


def admin_key(key_file: Path | None) -> str | None:
    """The admin key, if there is one. Raises `OperatorError`."""
    return os.environ.get("FAIRSHARE_ADMIN_KEY") if key_file is None else key_in(key_file, what="admin key")


def key_in(file: Path, *, what: str) -> str:
    """The key that a file holds. Raises `OperatorError`."""
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "no text").lower() if isinstance(error, OSError) else "not text"
        raise OperatorError(f"the {what} cannot be read from {file} ({reason})") from None


def fetch(
    admin: str, path: str, key: str | None, query: Mapping[str, str] | None = None, *, method: str = "GET"
) -> bytes:
    """What the admin port answers.

    Raises:
        NotKnown: it answers 404, with a sentence of its own.
        Unreachable: nobody answers.
        OperatorError: the key is refused, or what answers is no fairshare gateway.
    """
    import http.client
    import urllib.error
    import urllib.parse
    import urllib.request

    url = admin.rstrip("/") + path
    if not url.startswith(("http://", "https://")):
        raise OperatorError(f'--admin must be an address such as {USUAL_ADMIN}, found "{admin}"')
    request = urllib.request.Request(f"{url}?{urllib.parse.urlencode(query)}" if query else url, method=method)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    # No proxy: the admin port is near, and a key must not go elsewhere.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        with error:
            sentence = _said(error.read(1 << 16))
        if error.code == 401:
            raise OperatorError(f"{url} refuses the key; give the right one with --key-file") from None
        if error.code == 404 and sentence:
            raise NotKnown(sentence) from None
        if error.code in (403, 409, 429) and sentence:
            raise OperatorError(sentence) from None
        raise OperatorError(f"{url} answers with status {error.code}; is this a fairshare admin port?") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        detail = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
        raise Unreachable(f"{url} cannot be reached ({str(detail).lower()}); is the gateway running?") from None


def decoded(body: bytes, kind: type[T], admin: str) -> T:
    """An answer as what it should be. Raises `OperatorError`."""
    import msgspec

    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError:
        raise OperatorError(f"{admin} does not answer like the admin port of a fairshare gateway") from None


def _said(body: bytes) -> str:
    """The sentence of an error in OpenAI's shape; empty: it has none."""
    import msgspec

    try:
        answer: Any = msgspec.json.decode(body)
        return str(answer["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return ""
