"""How engines are addressed: one form of each URL, so that it can be the engine's id."""

from urllib.parse import urlsplit

WHAT = "an engine's address, for example http://127.0.0.1:8000"


def engine_url(text: str) -> str:
    """`scheme://host:port/path`, always with its port and never with a slash at its end.

    Raises:
        ValueError: it is no such address; the message says what it must be, as the rest of a sentence.
    """
    if "@" in text:  # before anything that repeats what was found
        raise ValueError("must not hold a user or password; write the engine's key as api_key_file")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(f'must be {WHAT}, found "{text}"') from None
    if (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or not text.isprintable()
        or any(map(str.isspace, text))
    ):
        raise ValueError(f'must be {WHAT}, found "{text}"')
    if parts.query or parts.fragment or port == 0:
        raise ValueError(f'must be {WHAT}, without ? or #, found "{text}"')
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(f'must be the engine\'s root; leave out the "/v1" of "{text}"')
    return f"{parts.scheme}://{host_in_url(parts.hostname)}:{port or (443 if parts.scheme == 'https' else 80)}{path}"


def host_in_url(host: str) -> str:
    """A host as a URL writes it: an IPv6 address stands in brackets."""
    return f"[{host}]" if ":" in host else host
