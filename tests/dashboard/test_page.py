"""The documents of the status page: plain files that load one another and turn no text into markup."""

import re

import msgspec

from fairshare.dashboard import status_pages
from fairshare.gateway.live import State
from fairshare.gateway.status import BudgetStatus, FindingStatus, InstanceStatus, PoolStatus, TeamStatus
from fairshare.gateway.status_api import OwnPool, OwnState, RequestRow

PAGES = status_pages()
OURS = {
    path: document.content.decode()
    for path, document in PAGES.documents.items()
    if "uPlot" not in path and not path.endswith(".svg")
}
SCRIPTS = {path: text for path, text in OURS.items() if path.endswith(".js")}
HTML = {path: text for path, text in OURS.items() if path in ("/", "/team")}


def test_the_policy_allows_nothing_but_our_own_files() -> None:
    policy = PAGES.content_security_policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert set(re.findall(r"(?:script|style|connect|img)-src ([^;]+)", policy)) == {"'self'"}


def test_the_documents_name_nothing_of_another_server() -> None:
    for text in OURS.values():
        addresses = set(re.findall(r"(?:https?:)?//[a-z][^\s'\"%`)]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg", "//www.w3.org/2000/svg"}


def test_every_file_that_a_document_loads_is_there() -> None:
    for text in HTML.values():
        for path in re.findall(r'(?:src|href)="(/assets/[^"]+)"', text):
            assert path in PAGES.documents
    for text in SCRIPTS.values():
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert f"/assets/{name}" in PAGES.documents


def test_the_library_that_draws_the_charts_has_its_licence_beside_it() -> None:
    assert b"The MIT License" in PAGES.documents["/assets/uPlot-LICENSE.txt"].content
    assert b"v1.6.32" in PAGES.documents["/assets/uPlot.js"].content


def test_what_the_gateway_says_is_never_read_as_markup() -> None:
    for path, text in SCRIPTS.items():
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert way not in text, path
    for text in HTML.values():
        assert not re.search(r"""<[^>]+\s(?:on[a-z]+|style)=["']""", text), (
            "the policy refuses inline scripts and styles"
        )
        assert not re.search(r"<script(?![^>]*\ssrc=)", text)


def test_a_key_is_kept_in_the_session_of_the_tab_only() -> None:
    for path, text in SCRIPTS.items():
        assert "localStorage" not in text, path
        assert "document.cookie" not in text, path


def test_the_scripts_read_only_fields_that_the_api_has() -> None:
    kinds = (PoolStatus, TeamStatus, InstanceStatus, FindingStatus, BudgetStatus, State, OwnState, OwnPool, RequestRow)
    known = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
    for path in ("/assets/status.js", "/assets/team.js", "/assets/shared.js"):
        read = set(re.findall(r"\b(?:pool|team|budget|state|detail|instance|t|i)\.([a-z_]+)\b(?!\()", SCRIPTS[path]))
        assert read - {"sentences"} <= known, path
