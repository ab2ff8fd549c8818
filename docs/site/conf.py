"""The documentation as a site (`make site`). The pages are plain Markdown that reads well without it.

Which page is of which kind is decided here, by where it is: a new page is in the contents without a list to keep.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]

project = "fairshare"
html_title = "fairshare"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
extensions = ["myst_parser"]
exclude_patterns = ["site"]
myst_heading_anchors = 4
"""Links to headings are written as the repository's host makes their anchors."""

KINDS = {
    "Tutorial": ["tutorial.md"],
    "How to": ["howto/*.md", "operations*.md", "runbook.md", "status-page.md"],
    "Reference": ["reference/*.md", "glossary.md"],
    "Explanation": ["*.md", "*/*.md"],
}
"""A page belongs to the first kind that it fits."""


def contents() -> dict[str, list[str]]:
    """The pages of each kind, by name, without `index`."""
    placed = {"index"}
    kinds: dict[str, list[str]] = {}
    for kind, patterns in KINDS.items():
        found = [path for pattern in patterns for path in sorted(DOCS.glob(pattern))]
        names = [path.relative_to(DOCS).with_suffix("").as_posix() for path in found]
        kinds[kind] = [name for name in names if name not in placed and not name.startswith("site/")]
        placed.update(kinds[kind])
    return kinds


def add_contents(_: "Sphinx", name: str, source: list[str]) -> None:
    """The contents are for the site only; in the repository `index.md` is a page of links."""
    if name == "index":
        for kind, pages in contents().items():
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {kind}\n\n" + "\n".join(pages) + "\n```\n"


def setup(app: "Sphinx") -> None:
    app.connect("source-read", add_contents)
