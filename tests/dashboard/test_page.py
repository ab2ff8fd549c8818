"""The status page: one document that loads nothing and turns no text into markup."""

import base64
import hashlib
import re

import msgspec

from fairshare.dashboard import status_page
from fairshare.gateway.status import InstanceStatus, PoolStatus, TeamStatus

PAGE = status_page()
HTML = PAGE.html.decode()
(SCRIPT,) = re.findall(r"<script>(.*?)</script>\s*</body>", HTML, re.DOTALL)
(STYLE,) = re.findall(r"<style>(.*?)</style>", HTML, re.DOTALL)


def test_the_policy_lets_exactly_this_script_and_this_style_run() -> None:
    for kind, content in (("script-src", SCRIPT), ("style-src", STYLE)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in PAGE.content_security_policy
    assert PAGE.content_security_policy.startswith("default-src 'none';")
    assert "unsafe" not in PAGE.content_security_policy


def test_the_page_loads_nothing_from_elsewhere() -> None:
    addresses = set(re.findall(r"(?:https?:)?//[a-z][^\s'\"%]*", HTML))
    assert addresses <= {"http://www.w3.org/2000/svg", "//www.w3.org/2000/svg"}
    assert not re.findall(r"""(?:src|href)=["'](?!data:|/)""", HTML)


def test_what_the_gateway_says_is_never_read_as_markup() -> None:
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert way not in SCRIPT
    assert not re.search(r"""<[^>]+\son[a-z]+=["']""", HTML)
    assert not re.search(r"""<[^>]+\sstyle=["']""", HTML), "the policy refuses inline style attributes"


def test_the_page_reads_only_fields_that_the_api_has() -> None:
    known = {field.name for kind in (PoolStatus, TeamStatus, InstanceStatus) for field in msgspec.structs.fields(kind)}
    read = set(re.findall(r"\b(?:pool|team|t|instance|i)\.([a-z_]+)\b(?!\()", SCRIPT))
    made_here = {"team"}
    columns = set(re.findall(r"""key: "([a-z_]+)\"""", SCRIPT)) - {"picture", "doing", "health"}
    assert (read | columns) - made_here <= known
