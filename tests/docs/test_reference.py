"""The pages in docs/reference say what the code does: nothing is missing, and nothing is there that does not exist."""

import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import typer
from starlette.applications import Starlette

from fairshare.accounts.reports import EXPORTED
from fairshare.cli import program
from fairshare.config import SECTIONS, parse
from fairshare.core.decisions import HoldOptions
from fairshare.core.priority import Standing
from fairshare.dashboard import status_pages
from fairshare.gateway.accounts_api import OPERATIONS
from fairshare.gateway.admin import OPEN_PATHS, admin_app
from fairshare.gateway.discovery.api import OPERATIONS as INSTANCE_OPERATIONS
from fairshare.gateway.metrics import METRICS, Metrics
from fairshare.gateway.options import Limits, Timeouts
from fairshare.gateway.phantoms_api import OPERATION as PHANTOMS
from fairshare.gateway.ports import Counters
from fairshare.gateway.state_dump import StateDump
from fairshare.gateway.status import InstanceStatus, PoolStatus, TeamStatus
from fairshare.gateway.status_api import StatusApi
from fairshare.wire.endpoints import ENDPOINTS
from fairshare.wire.headers import FORWARDED_UP, fairshare_lines, upstream_head, upstream_opening
from fairshare.wire.problems import PROBLEMS
from fairshare.wire.usage import FINISH_REASONS

NO_PARTS: Any = None

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def page(name: str) -> str:
    return (REFERENCE / name).read_text("utf-8")


def sections(text: str) -> dict[str, str]:
    """Each heading's text, and what stands below it until the next heading."""
    parts = re.split(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without their heads; cells as they are written."""
    found: list[list[str]] = []
    in_body = False
    for line in text.splitlines():
        if not line.startswith("|"):
            in_body = False
        elif re.fullmatch(r"[|\s-]+", line):
            in_body = True
        elif in_body:
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def words(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


# --- configuration.md ---------------------------------------------------------------------------------------------

HEADINGS = {
    "Top level": "",
    "tls": "tls",
    "admin": "admin",
    "pools": "pools[]",
    "instances": "pools[].instances[]",
    "kubernetes": "pools[].instances[].kubernetes",
    "the file of instances": "instances_file[]",
    "hold": "pools[].hold",
    "timeouts": "pools[].timeouts",
    "cost": "pools[].cost",
    "teams": "teams[]",
    "keys": "teams[].keys[]",
    "limits": "limits",
    "store": "store",
    "notify": "notify",
    "replicas": "replicas",
    "replicas.tls": "replicas.tls",
    "tracing": "tracing",
    "fairshare_settings": "fairshare_settings",
    "embedded pools": "fairshare_settings.pools[]",
    "embedded hold": "fairshare_settings.pools[].hold",
}


def test_every_section_of_the_configuration_has_its_table() -> None:
    assert set(HEADINGS.values()) == set(SECTIONS)


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_table_of_a_section_has_its_keys_and_no_others(heading: str) -> None:
    table = rows(sections(page("configuration.md"))[heading])
    assert [words(row[0]) for row in table] == [[key] for key in SECTIONS[HEADINGS[heading]]]


def test_the_defaults_are_the_ones_of_the_code() -> None:
    by_heading = sections(page("configuration.md"))

    def documented(heading: str) -> dict[str, str]:
        return {words(row[0])[0]: words(row[1])[0] for row in rows(by_heading[heading])}

    def mapping(heading: str) -> str:
        return "{" + ", ".join(f"{key}: {value}" for key, value in documented(heading).items()) + "}"

    text = f"""
limits: {mapping("limits")}
pools: [{{name: a, capacity: 1, shares: {{}}, models: [m], instances: ["http://h:1"],
          hold: {mapping("hold")}, timeouts: {mapping("timeouts")}, cost: {mapping("cost")}}}]
"""
    written = parse(text, path=Path("f.yaml"), environ={}).gateway
    bare = "pools: [{name: a, capacity: 1, shares: {}, models: [m], instances: ['http://h:1']}]"
    default = parse(bare, path=Path("f.yaml"), environ={}).gateway
    assert (written.limits, default.limits) == (Limits(), Limits())
    assert (written.pools[0].hold, default.pools[0].hold) == (HoldOptions(), HoldOptions())
    assert (written.pools[0].timeouts, default.pools[0].timeouts) == (Timeouts(), Timeouts())
    assert written.pools[0].cost == default.pools[0].cost
    top = {words(row[0])[0]: words(row[1])[:1] for row in rows(by_heading["Top level"])}
    assert top["listen"] == [str(default.listen)]
    assert top["admin"] == [str(default.admin.address)]
    pool = {words(row[0])[0]: words(row[1])[:1] for row in rows(by_heading["pools"])}
    assert pool["dispatch"] == [str(default.pools[0].mode)]
    assert pool["half_life"] == ["7d"]
    assert default.pools[0].half_life_seconds == 7 * 86400


def test_every_example_file_can_be_used() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", page("configuration.md"), re.DOTALL)
    assert examples
    for example in examples:
        parse(example, path=Path("f.yaml"), environ={})


# --- commands.md --------------------------------------------------------------------------------------------------


def commands() -> dict[str, click.Command]:
    """Every command and group by its words."""

    def below(command: click.Command, name: str) -> dict[str, click.Command]:
        found = {name: command}
        for word, inner in getattr(command, "commands", {}).items():
            found |= below(inner, f"{name} {word}")
        return found

    return below(typer.main.get_command(program()), "fairshare")


def test_every_command_has_its_section_and_there_is_no_other() -> None:
    assert {heading for heading in sections(page("commands.md")) if heading != "Commands"} == set(commands())


@pytest.mark.parametrize("name", commands())
def test_the_table_of_a_command_has_its_options_and_no_others(name: str) -> None:
    options = {
        option
        for parameter in commands()[name].params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if parameter.param_type_name == "option" and parameter.name != "help"
    }
    documented = [option for row in rows(sections(page("commands.md"))[name]) for option in words(row[0])]
    assert sorted(documented) == sorted(options)


@pytest.mark.parametrize("name", [name for name, command in commands().items() if not hasattr(command, "commands")])
def test_the_example_of_a_command_uses_options_that_it_has(name: str) -> None:
    examples = re.findall(r"^    (fairshare .+)$", sections(page("commands.md"))[name], re.MULTILINE)
    assert examples
    for example in examples:
        assert example.startswith(name)
        used = set(re.findall(r"(?<= )--?[a-z][a-z-]*", example))
        assert used <= {option for parameter in commands()[name].params for option in parameter.opts}


# --- metrics.md ---------------------------------------------------------------------------------------------------


def test_the_table_of_metrics_has_every_metric_with_its_kind_and_labels_and_no_other() -> None:
    documented = [(words(row[0])[0], row[1], tuple(words(row[2]))) for row in rows(page("metrics.md"))]
    assert documented == [(metric.name, metric.kind, metric.labels) for metric in METRICS]


def test_questions_ask_for_metrics_that_exist() -> None:
    asked = set(re.findall(r"fairshare_[a-z_]+", page("metrics.md")))
    names = {metric.name for metric in METRICS}
    names |= {f"{metric.name}_bucket" for metric in METRICS if metric.kind == "histogram"}
    assert asked <= names


# --- headers.md ---------------------------------------------------------------------------------------------------


def test_what_goes_up_is_exactly_what_is_listed() -> None:
    listed, ours = sections(page("headers.md"))["What goes up to the engine"].strip().split("\n\n")[:2]
    assert sorted(words(listed)) == sorted(name.decode() for name in FORWARDED_UP)
    opening = upstream_opening(method="POST", path="/", host=b"h", priority=0, api_key="k")
    head = upstream_head(opening, b"", "r", 1)
    sent = {line.split(b":")[0].decode() for line in head.split(b"\r\n")[1:] if line} - {"content-length"}
    assert {word.split(":")[0] for word in words(ours)} - {"observe"} == sent


def test_what_comes_down_is_exactly_what_is_listed() -> None:
    table = rows(sections(page("headers.md"))["What comes down to the client"])
    lines = fairshare_lines("p", Standing.BORROWING, 10, 0.1, b"why").split(b"\r\n")
    written = ["x-request-id", *(line.split(b":")[0].decode() for line in lines if line)]
    assert [words(row[0])[0] for row in table] == written
    assert {standing.value for standing in Standing} <= {word for row in table for word in words(row[1])}


# --- errors.md ----------------------------------------------------------------------------------------------------


def test_the_table_of_errors_has_every_code_with_its_status_and_no_other() -> None:
    documented = [(words(row[0])[0], int(row[1]), row[2]) for row in rows(page("errors.md"))]
    assert documented == [
        (problem.code, problem.status, "" if problem.retry_after_seconds is None else str(problem.retry_after_seconds))
        for problem in PROBLEMS
    ]


# --- http-api.md --------------------------------------------------------------------------------------------------


def test_the_table_of_paths_has_every_endpoint_and_no_other() -> None:
    documented = [
        (row[0], words(row[1])[0], row[2] == "yes", "body" in row[3])
        for row in rows(sections(page("http-api.md"))["The data port"])
    ]
    assert documented == [
        (endpoint.method, endpoint.path, endpoint.takes_slots, endpoint.priority_in_body) for endpoint in ENDPOINTS
    ]


def test_the_table_of_the_admin_port_has_every_route_and_no_other() -> None:
    counters = Counters()
    app: Any = admin_app(
        pools=lambda: (),
        metrics=Metrics(lambda: (), lambda: counters),
        not_ready=lambda: None,
        pages=status_pages(),
        status=StatusApi(NO_PARTS).routes(),
        dump=StateDump(NO_PARTS).routes(),
        key=lambda: None,
    )
    starlette: Starlette = vars(app)["_app"]
    documented = {words(row[0])[0]: row[1] for row in rows(sections(page("http-api.md"))["The admin port"])}
    assert set(documented) == {getattr(route, "path", None) for route in starlette.routes}
    assert {path for path, text in documented.items() if "Needs no key" in text} == OPEN_PATHS


def test_the_table_of_the_accounts_has_every_operation_and_no_other() -> None:
    documented = [(row[0], words(row[1])[0], row[2]) for row in rows(sections(page("http-api.md"))["The accounts"])]
    assert documented == [(each.method, each.path, each.what) for each in OPERATIONS]


def test_the_table_of_the_instances_has_every_operation_and_no_other() -> None:
    documented = [(row[0], words(row[1])[0], row[2]) for row in rows(sections(page("http-api.md"))["The instances"])]
    assert documented == [(each.method, each.path, each.what) for each in INSTANCE_OPERATIONS]


def test_the_table_of_phantoms_has_the_operation() -> None:
    documented = [(row[0], words(row[1])[0], row[2]) for row in rows(sections(page("http-api.md"))["Phantoms"])]
    assert documented == [(PHANTOMS.method, PHANTOMS.path, PHANTOMS.what)]


@pytest.mark.parametrize(
    ("what", "record"), [("a pool", PoolStatus), ("a team", TeamStatus), ("an instance", InstanceStatus)]
)
def test_the_fields_of_the_api_are_listed_as_they_are(what: str, record: type[msgspec.Struct]) -> None:
    text = sections(page("http-api.md"))["`/api/v1/pools`"]
    table = next(part for part in text.split("\n\n") if part.startswith(f"| field of {what} "))
    assert [words(row[0])[0] for row in rows(table)] == [field.name for field in msgspec.structs.fields(record)]


# --- all of them --------------------------------------------------------------------------------------------------


def test_links_between_the_pages_lead_somewhere() -> None:
    for path in REFERENCE.glob("*.md"):
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text("utf-8")):
            name, _, anchor = target.partition("#")
            text = page(name) if name else path.read_text("utf-8")
            anchors = {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in sections(text)}
            assert not anchor or anchor in anchors, f"{path.name}: {target}"


def test_every_field_of_the_account_has_its_row() -> None:
    found = rows(page("ledger.md"))
    assert sorted(name for row in found for name in words(row[0])) == sorted(EXPORTED)
    (reasons,) = [row[1] for row in found if row[0] == "`finish_reason`"]
    assert set(FINISH_REASONS) <= set(words(reasons))
