"""Makes the pictures beside it from a real run: the demo under load, seen by a headless Chromium (`make pictures`)."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

from playwright.sync_api import Page
from rich.console import Console
from rich.text import Text

from fairshare.cli import top
from fairshare.cli.asking import decoded, fetch
from fairshare.gateway.live import State
from support.browser import chromium, opened

FOLDER = Path(__file__).parent
RUN_SECONDS = 150
"""Three times through the demo's script."""


def main() -> None:
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "fairshare", "demo", "--port", "0", "--admin-port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        admin, key = greeting(demo)
        time.sleep(RUN_SECONDS)
        with chromium() as browser:
            for scheme in ("light", "dark"):
                with opened(browser, f"{admin}/", width=1280, height=980, scheme=scheme) as page:
                    settled(page)
                    page.locator(".pool").screenshot(path=FOLDER / f"status-{scheme}.png")
            with opened(browser, f"{admin}/", width=390, height=844) as page:
                settled(page)
                page.locator(".pool").scroll_into_view_if_needed()
                page.evaluate("document.querySelector('.pool').scrollIntoView()")
                page.screenshot(path=FOLDER / "status-phone.png")
            with opened(browser, f"{admin}/", width=1280, height=980) as page:
                page.get_by_label("A request's id").fill(waited(admin))
                page.get_by_role("button", name="Explain").click()
                page.locator(".steps").wait_for()
                page.locator("#answer").evaluate(
                    "node => { node.style.padding = '0 16px 16px'; node.style.marginTop = '12px'; }"
                )
                page.locator("#answer").screenshot(path=FOLDER / "why.png")
            with opened(browser, f"{admin}/team", width=1280, height=980) as page:
                page.get_by_label("Your key").fill(key)
                page.get_by_role("button", name="Show").click()
                settled(page)
                page.locator("#own .pool").screenshot(path=FOLDER / "team.png")
        in_a_terminal(admin)
    finally:
        demo.terminate()
        demo.communicate()


def greeting(demo: "subprocess.Popen[str]") -> tuple[str, str]:
    """The address of the status page, and the key of a team."""
    assert demo.stdout is not None
    admin = ""
    for line in demo.stdout:
        if found := re.search(r"Status page: (http://[^/]+)/", line):
            admin = found[1]
        if found := re.search(r"Bearer (fs-\S+?)'", line):
            return admin, found[1]
    raise SystemExit("the demo ended before it had started")


def settled(page: Page) -> None:
    """Until the charts are drawn and a few seconds of live events came."""
    page.locator("canvas").nth(1).wait_for()
    page.wait_for_timeout(4000)


def waited(admin: str) -> str:
    """A request that waited and borrowed, if the page lists one."""
    with urlopen(f"{admin}/api/v1/requests?only=waited&most=200") as answer:
        rows = json.load(answer)
    return next((row["id"] for row in rows if row["standing"] == "borrowing"), rows[0]["id"])


def in_a_terminal(admin: str) -> None:
    waits: top.Waits = {}
    state: State | None = None
    for _ in range(20):
        state = decoded(fetch(admin, "/api/v1/state", None), State, admin)
        top.remember(waits, state.pools)
        time.sleep(1.0)
    assert state is not None
    console = Console(record=True, width=132, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text("$ fairshare top\n"), top.picture(state, waits, admin, None, width=132))
    console.save_svg(str(FOLDER / "top.svg"), title="fairshare top")


if __name__ == "__main__":
    main()
