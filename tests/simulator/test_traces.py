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
    "vtc": (
        "scheduler,client,input_tokens,output_tokens,t_s,ttft_s,latency_s\n"
        "FCFS,5,256,256,1.9,1.6,12.7\nFCFS,6,256,255,1.7,1.2,12.3\n",
        [TraceRow(0.0, "6", 256, 255), TraceRow(pytest.approx(0.2), "5", 256, 256)],  # pyright: ignore[reportArgumentType]
    ),
    "servegen": (
        "t_s,client,input_tokens,output_tokens\n0.0,19,4520,153\n0.445,13,30,1785\n",
        [TraceRow(0.0, "19", 4520, 153), TraceRow(0.445, "13", 30, 1785)],
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


def test_unknown_columns_and_broken_lines_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("when,how_many\n1,2\n")
    with pytest.raises(ScenarioError, match="found the columns when, how_many, but no known format has these"):
        traces.read(path)
    path.write_text("t_s,input_tokens,output_tokens\n1,2,3\n2,x,3\n")
    with pytest.raises(ScenarioError, match=r"trace\.csv:3: not a request"):
        traces.read(path)


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
