"""The code blocks of the pages under docs/howto."""

import re
from pathlib import Path

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


def blocks(page: str, language: str) -> list[str]:
    """What stands in the page's fenced blocks of a language, in order."""
    text = (HOWTO / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
