"""Recorded loads in the formats that are published."""

import gzip
from pathlib import Path

import pytest

from fairshare.simulator import traces
from fairshare.simulator.scenario import ScenarioError, TracePlan, parse
from fairshare.simulator.traces import TraceRow

FORMATS = {
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n",
        [TraceRow(0.0, "", 4808, 10), TraceRow(0.052, "", 3180, 8)],
    ),
    "burstgpt": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n46,GPT-4,0,0,0,API log\n",
        [TraceRow(0.0, "", 472, 18), TraceRow(40.0, "", 1087, 230)],
    ),
    "mooncake": (
        '{"timestamp": 27000, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 30500, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2]}\n',
        [TraceRow(0.0, "", 6955, 52), TraceRow(3.5, "", 6472, 26)],
    ),
    "azure of 2024": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n",
        [TraceRow(0.0, "", 2162, 5), TraceRow(0.99007, "", 2399, 6)],
    ),
    "burstgpt with sessions": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n19440161.0,,2,ChatGPT,36,29,65,API log\n",
        [TraceRow(0.0, "1722ac82", 906, 446), TraceRow(51.0, "", 36, 29)],
    ),
    "vtc artifact": (
        '{"config": {"req_rate": 2.5, "mode": "real"}, "result": {"total_time": 751.1, "num_abort": 0, "responses": ['
        '{"adapter_dir": "dummy-lora-7b-rank-8-13", "prompt_len": 13, "output_len": 199, "request_latency": 8.5, '
        '"first_token_latency": 0.7, "req_time": 0.25}, {"adapter_dir": "dummy-lora-7b-rank-8-2", "prompt_len": 36, '
        '"output_len": 137, "request_latency": 6.3, "first_token_latency": 1.0, "req_time": 0.0}]}}\n',
        [TraceRow(0.0, "dummy-lora-7b-rank-8-2", 36, 137), TraceRow(0.25, "dummy-lora-7b-rank-8-13", 13, 199)],
    ),
    "servegen": (
        "request_id,timestamp,input_tokens,output_tokens\n0,0.02,4520,153\n1,0.465,30,1785\n",
        [TraceRow(0.0, "", 4520, 153), TraceRow(0.445, "", 30, 1785)],
    ),
    "seconds, clients and tokens": (
        "t_s,client,input_tokens,output_tokens\n0.0,19,4520,153\n0.445,13,30,1785\n",
        [TraceRow(0.0, "19", 4520, 153), TraceRow(0.445, "13", 30, 1785)],
    ),
    "time, team and tokens": (
        "time,team,input_tokens,output_tokens\n2026-11-30T08:00:00Z,red,20,15\n2026-11-30T09:00:01+01:00,blue,30,17\n",
        [TraceRow(0.0, "red", 20, 15), TraceRow(1.0, "blue", 30, 17)],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_published_format_is_recognised_by_its_columns(name: str, tmp_path: Path) -> None:
    text, rows = FORMATS[name]
    path = tmp_path / "trace"
    path.write_text(text)
    found = traces.read(path)
    assert [row.at for row in found] == pytest.approx([row.at for row in rows], abs=1e-6)
    assert [row[1:] for row in found] == [row[1:] for row in rows]
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert traces.read(packed) == found


def test_unknown_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("when,how_many\n1,2\n")
    with pytest.raises(ScenarioError, match="found the columns when, how_many, but no known format has these"):
        traces.read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace: is empty"),
        ("t_s,input_tokens,output_tokens\n", "has no request with a prompt"),
        (
            "t_s,input_tokens,output_tokens\n1,2,3\n2,x,3\n",
            "trace:3: not a request in the format of seconds and tokens",
        ),
        ("t_s,input_tokens,output_tokens\n1,inf,3\n", "trace:2: not a request"),
        ("t_s,input_tokens,output_tokens\nnan,2,3\n", r"trace:2: not a request .*its time is nan"),
        ("t_s,input_tokens,output_tokens\n1,2\n", "trace:2: not a request"),
        (f"t_s,input_tokens,output_tokens\n{'1' * 200_000},2,3\n", "trace:1: not CSV"),
        ('\n{"timestamp": 1, "input_length": 5, "output_length": 5}\n{"time', "trace:3: not a JSON object"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5}\n5\n', "trace:2: not a JSON object"),
        ('{"result": {"responses": [{"req_time": 1}]}}\n' * 2, "trace:2: is another run; keep the one line"),
    ],
)
def test_what_cannot_be_played_is_said_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ScenarioError, match=message):
        traces.read(tmp_path / "trace")


def test_the_samples_that_are_shipped_can_be_read() -> None:
    found = {path.name: len(traces.read(path)) for path in traces.SAMPLES.glob("*.csv.gz")}
    assert found == {
        "azure2023_code.csv.gz": 3628,
        "azure2023_conv.csv.gz": 5985,
        "mooncake_conversation.csv.gz": 3658,
        "servegen_deepseekr1.csv.gz": 7468,
        "vtc_arena_real.csv.gz": 1500,
    }


def rows(*clients: str) -> list[TraceRow]:
    return [TraceRow(float(at), client, 10, 10) for at, client in enumerate(clients)]


def teams(plan: TracePlan, *clients: str) -> list[str]:
    return [team for _, team in traces.teams_of(rows(*clients), plan, ["red", "blue"])]


def test_round_robin_gives_new_clients_to_the_teams_in_turn() -> None:
    assert teams(TracePlan(file="", teams="round-robin"), "x", "y", "x", "z") == ["red", "blue", "red", "red"]


def test_a_hash_keeps_a_client_with_its_team_wherever_it_comes() -> None:
    plan = TracePlan(file="", teams="hash")
    one, other = teams(plan, "x", "y", "x"), teams(plan, "y", "x")
    assert one == [other[1], other[0], other[1]]


@pytest.mark.parametrize("rule", ["hash", "round-robin", "client"])
def test_a_client_that_has_a_teams_name_is_that_team(rule: str) -> None:
    plan = TracePlan(file="", teams=rule)  # pyright: ignore[reportArgumentType]
    assert teams(plan, "blue", "red", "blue") == ["blue", "red", "blue"]


def test_clients_may_be_teams_or_be_mapped_by_hand() -> None:
    plan = TracePlan(file="", teams="client", clients={"7": "blue"})
    assert teams(plan, "red", "7") == ["red", "blue"]
    with pytest.raises(ScenarioError, match="its client 'green' is no team"):
        teams(plan, "green")


def test_a_scenario_plays_its_part_of_a_trace_at_its_speed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "t_s,input_tokens,output_tokens\n" + "".join(f"{second},5000,{second}\n" for second in range(100))
    )
    plan = parse(
        "{title: t, duration: 10s, pools: [{capacity: 4}], teams: [{name: a, share: 1}], "
        "traces: [{file: t.csv, speed: 2, skip: 10s, longest_prompt: 100}]}"
    )
    found = traces.arrivals(plan, tmp_path)
    assert [(one.at, one.output_tokens) for one in found[:3]] == [(0.0, 10), (0.5, 11), (1.0, 12)]
    assert len(found) == 20
    assert {one.prompt_tokens for one in found} == {100}


def test_a_missing_trace_names_the_samples() -> None:
    with pytest.raises(ScenarioError, match=r"not found as given.*vtc_arena_real"):
        traces.find("nowhere.csv")
