"""`fairshare simulate`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairshare.cli import program

SCENARIO = """
title: two teams
promise: each has half
duration: 5s
pools: [{capacity: 4, engines: {max_num_seqs: 4}}]
teams:
  - {name: a, share: 1/2, alone: true, loads: [{clients: 6, prompt: 10-50, output: 10-50}]}
  - {name: b, share: 1/2, loads: [{clients: 6, start: 2s, prompt: 10-50, output: 10-50}]}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(SCENARIO)
    return path


def simulate(*words: str) -> str:
    result = CliRunner().invoke(program(), ["simulate", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_has_a_line_for_every_policy_and_team(scenario: Path) -> None:
    shown = simulate(str(scenario))
    assert "two teams  seed 1, 5 s of virtual time" in shown
    for word in ("fcfs", "pass", "hold+recall", "promise: each has half", "a alone: first token p50"):
        assert word in shown
    assert "…" not in shown


def test_json_is_the_same_every_time_and_another_seed_gives_other_figures(scenario: Path) -> None:
    words = (str(scenario), "--policy", "hold+recall", "--json", "-")
    first = simulate(*words)
    assert first == simulate(*words)
    assert first != simulate(*words, "--seed", "2")
    (run,) = json.loads(first)
    assert run["policy"] == "hold+recall"
    assert run["pools"][0]["teams"][0]["team"] == "a"
    assert run["throughput_to_fcfs"] == pytest.approx(1.0, abs=0.05)


def test_a_trace_takes_the_place_of_the_scenarios_own(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("t_s,input_tokens,output_tokens\n" + "0.1,10,5\n" * 7)
    path = tmp_path / "s.yaml"
    path.write_text("{title: t, duration: 5s, pools: [{capacity: 4}], teams: [{name: a, share: 1}]}")
    (run,) = json.loads(simulate(str(path), "--trace", str(tmp_path / "t.csv"), "--policy", "pass", "--json", "-"))
    assert run["requests"] == 7


def test_pictures_are_drawn_and_small(scenario: Path, tmp_path: Path) -> None:
    simulate(str(scenario), "--plots", str(tmp_path / "png"))
    names = {path.name: path.stat().st_size for path in (tmp_path / "png").iterdir()}
    assert set(names) == {"share.png", "queue.png", "first-token.png", "reclaim.png"}
    assert max(names.values()) < 100_000
    simulate(str(scenario), "--plots", str(tmp_path / "svg"), "--svg")
    assert {path.suffix for path in (tmp_path / "svg").iterdir()} == {".svg"}


def test_without_a_terminal_short_runs_say_nothing_on_the_way(scenario: Path) -> None:
    result = CliRunner().invoke(program(), ["simulate", str(scenario), "--policy", "fcfs"])
    assert result.stderr == ""


@pytest.mark.parametrize("words", [("nothing.yaml",), (".",), ("{}", "--policy", "lifo")])
def test_what_is_wrong_is_one_sentence(words: tuple[str, ...], scenario: Path) -> None:
    from fairshare.errors import OperatorError

    result = CliRunner().invoke(
        program(), ["simulate", *(word.format(scenario) if word != "{}" else str(scenario) for word in words)]
    )
    assert isinstance(result.exception, OperatorError)
    assert "\n" not in str(result.exception)
    assert "Errno" not in str(result.exception)
