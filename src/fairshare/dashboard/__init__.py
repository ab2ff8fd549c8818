"""The status page: one document without anything to build or to load; it reads /api/v1/pools and decides nothing."""

import base64
import hashlib
import re
from importlib import resources

from fairshare.gateway.admin import Page


def status_page() -> Page:
    """The page, and a policy that lets it run its own script and style and ask its own server, and nothing else."""
    html = resources.files("fairshare.dashboard").joinpath("index.html").read_bytes()
    return Page(
        html=html,
        content_security_policy="; ".join(
            [
                "default-src 'none'",
                f"script-src {_hashes(html, b'script')}",
                f"style-src {_hashes(html, b'style')}",
                "connect-src 'self'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            ]
        ),
    )


def _hashes(html: bytes, element: bytes) -> str:
    """What a content security policy calls the inline elements of this kind."""
    contents = re.findall(rb"<%b>(.*?)</%b>" % (element, element), html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in contents)
