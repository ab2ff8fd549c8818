"""A real headless Chromium for tests: the one that Debian has (`make system-deps`), driven by Playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def without_chromium() -> None:
    """Leave the test out and say so; on CI that is an error."""
    if CHROMIUM is None:
        sentence = "there is no Chromium; `make system-deps` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(sentence)
        pytest.skip(sentence)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own, gone at the end."""
    without_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, headless=True)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, and whatever went wrong in it."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.outside: list[str] = []
        self._origin = urlsplit(origin).netloc
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request: Request) -> None:
        if urlsplit(request.url).netloc != self._origin:
            self.outside.append(request.url)


@contextmanager
def opened(
    browser: Browser, url: str, *, width: int = 1360, height: int = 900, scheme: str = "light", quiet: bool = True
) -> Iterator[Page]:
    """A page in a profile of its own. It asked no other server, and with `quiet` nothing went wrong in it."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
    )
    context.set_default_timeout(15_000)
    try:
        watched = Watched(context.new_page(), url)
        watched.page.goto(url)
        yield watched.page
        assert watched.outside == []
        if quiet:
            assert watched.errors == []
    finally:
        context.close()
