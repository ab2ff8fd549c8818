"""The salt of a team's prefixes: an engine's cache answers only prompts that were sent with the same one.

Without it a team can learn from the time of the first token whether somebody else's prompt began like its own guess.
"""

import hmac
from base64 import urlsafe_b64encode

_LABEL = b"fairshare cache_salt 1"
"""Keeps this use of the secret apart from any other."""


def cache_salt(secret: bytes, team: str, own: bytes = b"") -> str:
    """The salt for one request: 43 characters of A-Z a-z 0-9 - _, well within what vLLM takes (128 characters).

    Args:
        secret: of the deployment, the same on every replica. Without it nobody can guess or forge a team's salt.
        team: whose request it is.
        own: the raw JSON of the salt that the client gave itself; empty: none. It divides the team's own cache further
            and never reaches an engine as it is, or a client could name another team's salt.
    """
    message = b"%b\0%d\0%b%b" % (_LABEL, len(team.encode()), team.encode(), own)
    return urlsafe_b64encode(hmac.digest(secret, message, "sha256")).rstrip(b"=").decode()
