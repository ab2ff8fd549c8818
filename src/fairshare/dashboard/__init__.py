"""The status page and the page of teams: documents without anything to build or to load from elsewhere.

They read the admin port's API and decide nothing. `assets/` holds plain ES modules, one style sheet, and uPlot, a small
library that draws the charts (MIT, its licence beside it).
"""

from importlib import resources
from pathlib import PurePosixPath

from fairshare.gateway.admin import Document, Pages

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
"""Their own scripts and styles, their own server, and nothing else."""


def status_pages() -> Pages:
    """Every document, and a policy that lets them load one another and nothing else."""
    folder = resources.files("fairshare.dashboard")
    documents = {"/": _document("index.html"), "/team": _document("team.html")}
    for asset in folder.joinpath("assets").iterdir():
        documents[f"/assets/{asset.name}"] = _document(f"assets/{asset.name}")
    return Pages(documents=documents, content_security_policy=CONTENT_SECURITY_POLICY)


def _document(name: str) -> Document:
    content = resources.files("fairshare.dashboard").joinpath(name).read_bytes()
    return Document(content, MEDIA_TYPES[PurePosixPath(name).suffix])
