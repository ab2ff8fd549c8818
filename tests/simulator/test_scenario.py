"""Scenario files: what they may say, and what the messages say when they do not."""

# ruff: noqa: E501 - one line per case

from pathlib import Path

import msgspec
import pytest

from fairshare.simulator import scenario
from fairshare.simulator.scenario import ScenarioError, parse

SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml"))

SMALL = """\
title: small
duration: 10s
pools:
  - capacity: 4
    engines: {max_num_seqs: 4}
teams:
  - name: a
    share: 1/3
    loads:
      - {clients: 2, prompt: 10-20, output: 5}
"""


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_shipped_scenarios_are_valid(path: Path) -> None:
    assert scenario.load(path).title


def test_a_small_scenario_is_read_with_its_units() -> None:
    found = parse(SMALL.replace("10s", "5m") + "    alone: true\n")
    assert found.duration == 300.0
    assert str(found.teams[0].share) == "1/3"
    assert found.teams[0].loads[0].prompt.low == 10
    assert found.teams[0].alone


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("duration: 10s", "duration: 10", "small.yaml:2: duration: must be a duration, written as 250ms, 30s"),
        ("clients: 2", "cleints: 2", 'small.yaml:10: teams[0].loads[0]: unknown key "cleints"; the nearest known one is "clients"'),
        ("share: 1/3", "share: 4/3", "small.yaml:8: teams[0].share: must be a share between 0 and 1"),
        ("output: 5", "output: long", "small.yaml:10: teams[0].loads[0].output: must be lengths in tokens: a number (100)"),
        ("clients: 2", "clients: 2, rate: 3/s", "teams[0].loads[0]: needs exactly one of clients, rate and burst, found clients and rate"),
        ("clients: 2, ", "", "teams[0].loads[0]: needs exactly one of clients, rate and burst, found none"),
        ("clients: 2", "clients: two", "small.yaml:10: teams[0].loads[0].clients: Expected `int`, got `str`"),
        ("capacity: 4", "capacity: 4\n    fallback: other", 'there is no pool "other"'),
        ("title: small", "title: small\ntitle: twice", 'small.yaml:2: not valid YAML: "title" stands twice; remove one'),
        ("max_num_seqs: 4", "max_num_seqs: 4, kv_tokens: 8", "pools[0].engines.kv_tokens: must hold a block of 16 tokens"),
        ("max_num_seqs: 4", "headroom: 0.5", "pools[0].engines.headroom: Expected `float` >= 1.0, found '0.5'"),
        ("capacity: 4", "capacity: 0", "small.yaml:4: pools[0].capacity: Expected `int` >= 1, found '0'"),
        ("capacity: 4", "name: p\n    capacity: 4\n    fallback: q\n  - name: q\n    capacity: 4\n    fallback: p", "goes in a circle (p -> q -> p)"),
        ("clients: 2", "clients: -2", "Expected `int` >= 0, found '-2'"),
        ("prompt: 10-20", "prompt: 0", "teams[0].loads[0].prompt: must be 1 token or more"),
        ("duration: 10s", "duration: 10s\nwarm_up: 10s", "warm_up: must be shorter than the duration (10 s)"),
        ("duration: 10s", "duration: 10s\nchanges: [{at: 1s, phantoms: {a: -1}}]", "Expected `int` >= 0"),
        ("duration: 10s", "duration: 0s", "duration: must be longer than 0"),
        ("duration: 10s", "duration: 10s\nchanges: [{at: 1s, lose_engine: 1}]", "changes[0].lose_engine: must be below"),
        ("title: small", "[", "not valid YAML"),
    ],
)  # fmt: skip
def test_a_wrong_scenario_is_one_sentence_with_the_place_and_the_remedy(line: str, instead: str, message: str) -> None:
    assert line in SMALL
    with pytest.raises(ScenarioError) as error:
        parse(SMALL.replace(line, instead, 1), "small.yaml")
    assert message in str(error.value)


def test_names_stay_what_was_written() -> None:
    found = parse(SMALL.replace("name: a", "name: no"))
    assert found.teams[0].name == "no"


def test_shares_that_add_up_to_more_than_one_are_refused() -> None:
    with pytest.raises(ScenarioError, match="the shares add up to"):
        parse(SMALL + "  - {name: b, share: 0.7}\n")


def test_an_empty_file_and_a_missing_one_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="is empty; the files in scenarios/"):
        parse("")
    with pytest.raises(ScenarioError, match="cannot be read"):
        scenario.load(tmp_path / "nothing.yaml")


def test_the_reference_names_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "scenario-file.md").read_text()
    for record in scenario.RECORDS.values():
        for field in msgspec.structs.fields(record):
            assert f"`{field.encode_name}`" in page, f"{record.__name__}: {field.encode_name}"
