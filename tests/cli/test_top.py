"""`fairshare top` and `fairshare explain` against an admin port as a gateway serves it."""

import json
from collections import deque
from io import StringIO

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.test_status import admin_port
from dashboard.admin_port import Desk, serving
from fairshare.cli import program, top
from fairshare.core.priority import ServiceClass
from fairshare.gateway.identity import Identity
from fairshare.gateway.live import State
from fairshare.gateway.status import FindingStatus
from gateway.statuses import budget_status, instance_status, pool_status_of, team_status

TEAMS = [
    team_status("search [bold]\x1b[2J", in_flight=10, borrowing=2, held=4, usage=48_400.0, level_fairshare=0.8, rank=1),
    team_status("ads"),
]
OUT = FindingStatus(
    id="instance-out", severity="error", instance="http://b:1", sentence="It is out.", why="", fix="Start it."
)
NOTE = FindingStatus(id="not-calibrated", severity="note", instance=None, sentence="Not calibrated.", why="", fix="")
POOL = pool_status_of(
    "chat",
    in_flight=10,
    held=4,
    recalls=3,
    teams=TEAMS,
    instances=[instance_status("http://a:1"), instance_status("http://b:1", healthy=False, seats=None, kv_usage=None)],
    finding_details=[OUT, NOTE],
)
STATE = State(
    at=0.0,
    version="1",
    history_kept=False,
    pools=[POOL],
    budgets=[budget_status("team:ads", hard=100.0, used=75.0, left=25.0), budget_status("team:search", soft=5.0)],
)


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(program(), [*arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output, result.exception


def shown(width: int = 160, trouble: str | None = None) -> str:
    console = Console(file=StringIO(), width=width, height=60, force_terminal=False)
    waits = {("chat", TEAMS[0].team): deque([0, 1, 2, 4])}
    console.print(top.picture(STATE, waits, "http://admin:1", trouble, width=width))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_once_prints_plain_lines_and_ends() -> None:
    with admin_port(msgspec.json.encode(STATE)) as (url, _):
        code, output, _ = run("top", "--once", "--admin", url)
    assert code == 0
    lines = [line.partition(" ")[2] for line in output.splitlines()]
    assert lines[0] == "chat: 10 of 16 slots in flight, 4 held, 3 recalled, 1 of 2 engines healthy"
    assert "chat ads: owns 8, in flight 0, borrows 0, held 0, usage 0, LF ∞, rank 0" in lines
    assert "chat error: It is out. Start it." in lines
    assert "\x1b" not in output
    assert "budget of team:ads: 25 of 100 left" in lines
    assert len(lines) == 5, "notes and budgets without an end are no lines"


def test_a_terminal_shows_teams_engines_and_problems() -> None:
    text = shown()
    row = next(line for line in text.splitlines() if line.strip().startswith("search"))
    assert "search [bold]·[2J" in row, "markup is shown, control characters are not"
    assert "████" in row
    assert "▒" in row
    assert " ▂▄█" in row, "how many waited lately"
    assert row.split()[-8:] == ["8", "10", "2", "4", "0.8", "1", "50.0%", "48,400"]
    assert "25%" in next(line for line in text.splitlines() if line.strip().startswith("ads"))
    assert "It is out. Start it." in text
    assert "Not calibrated" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_any_terminal(width: int) -> None:
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    if width >= 80:
        assert "search [bold]·[2J" in text
        assert "http://a:1" in text


def test_a_gateway_that_is_gone_is_said_above_what_was_seen_last() -> None:
    text = shown(trouble="http://admin:1 cannot be reached. Trying again.")
    assert "cannot be reached. Trying again." in text
    assert "ads" in text


def test_a_gateway_that_goes_and_comes_back_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([STATE, top.Unreachable("it is gone."), STATE])

    def look(*_: object) -> State:
        answer = next(answers, KeyboardInterrupt())
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(top, "_look", look)
    monkeypatch.setattr("time.sleep", lambda _: None)
    code, output, _ = run("top")
    assert code == 0
    assert output.count("chat: 10 of 16") == 2
    assert "it is gone. Trying again." in output


def test_a_wrong_address_is_a_plain_sentence_at_once() -> None:
    with admin_port(b"") as (url, _):
        pass
    assert "is the gateway running?" in str(run("top", "--admin", url)[2])


def test_waits_of_teams_that_are_gone_are_forgotten() -> None:
    waits: top.Waits = {}
    for _ in range(100):
        top.remember(waits, [POOL])
    assert {place: len(counts) for place, counts in waits.items()} == {("chat", team.team): 30 for team in TEAMS}
    top.remember(waits, [])
    assert waits == {}


def test_explain_says_why_a_request_waited_and_how_a_team_stands() -> None:
    desk = Desk([pool_status_of("chat", teams=[team_status("search", held=2), team_status("ads")])])
    desk.waited("request-1", "search")
    with serving(desk) as url:
        code, output, _ = run("explain", "request-1", "--admin", url)
        assert code == 0
        assert "16 of the 16 slots of pool chat were taken" in output
        assert "search owns 8 of the 16 slots" in run("explain", "search", "--admin", url)[1]
        as_json = json.loads(run("explain", "request-1", "--json", "--admin", url)[1])
        assert [step["what"] for step in as_json["steps"]] == ["arrived", "held", "sent", "ended"]
        code, _, error = run("explain", "request-2", "--admin", url)
        assert code == 1
        assert "Nothing is known of a request or team 'request-2'" in str(error)


def test_a_team_asks_with_its_own_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    desk = Desk(
        [pool_status_of("chat", teams=[team_status("search"), team_status("ads")])],
        identities={"fs-search": Identity("k", "search", ServiceClass.INTERACTIVE)},
    )
    desk.admin_key = "admin"
    desk.waited("request-1", "search", key_id="k")
    desk.waited("request-2", "ads")
    key = tmp_path_factory.mktemp("keys") / "team.key"
    key.write_text("fs-search\n")
    with serving(desk) as url:
        assert "of its own team" in run("explain", "request-1", "--team-key-file", str(key), "--admin", url)[1]
        assert "Nothing is known" in str(run("explain", "request-2", "--team-key-file", str(key), "--admin", url)[2])
        assert "refuses the key" in str(run("explain", "request-1", "--admin", url)[2])
