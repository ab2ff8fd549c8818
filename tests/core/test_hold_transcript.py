"""Seeded runs of the hold queue, decision by decision, as they are written in `tests/scenarios/hold.txt`.

A change of any rule changes lines there. After a change that is meant, write the file anew and read the difference:

    python -m pytest tests/core/test_hold_transcript.py --rewrite
"""

from pathlib import Path

import pytest

from fairshare.core.decisions import Held, QueueStat, Recall, Refused
from fairshare.core.hold import HoldQueue
from support.seeded_run import SeededRun

TRANSCRIPT = Path(__file__).parents[1] / "scenarios" / "hold.txt"
SEEDS = 24
EVENTS = 70


def line(seen: object) -> str:
    match seen:
        case (request_id, instance_id, priority, held_seconds):
            return f"send {request_id} to {instance_id} at {priority} after {held_seconds:.3f}"
        case Recall():
            return f"recall {seen.request_id} from {seen.instance_id}, {seen.wasted_slot_seconds:.3f} thrown away"
        case Held():
            return f"hold {seen.request_id}: {seen.team_held} of its team, {seen.team_in_flight_slots} in flight"
        case Refused():
            return f"refuse {seen.request_id}: {seen.reason} {seen.found:.2f}, again in {seen.retry_after_seconds:g}"
        case (deadline, QueueStat() as queue, teams):
            held = " ".join(f"{team.team}={team.held}" for team in queue.teams)
            runs = " ".join(f"{load.id}={load.in_flight_slots}+{load.aborting_slots}" for load in queue.instances)
            usage = " ".join(f"{team.team}={team.in_flight}/{team.usage:.2f}/{team.rank}" for team in teams)
            due = "never" if deadline is None else f"{deadline:.3f}"
            return f"  held {held or '-'}; runs {runs}; turns {queue.turns_taken}; {usage}; due {due}"
    raise AssertionError(f"no words for {seen!r}")


def transcript() -> str:
    lines: list[str] = []
    for seed in range(SEEDS):
        run = SeededRun(HoldQueue, seed)
        lines.append(f"# seed {seed}: C = {run.pool.capacity}, " + str(run.pool.reserved()))
        for _ in range(EVENTS):
            run.event()
        lines += map(line, run.log)
    return "\n".join(lines) + "\n"


def test_seeded_runs_decide_as_they_are_written_down(request: pytest.FixtureRequest) -> None:
    found = transcript()
    if request.config.getoption("--rewrite"):
        TRANSCRIPT.write_text(found)
    assert found.splitlines() == TRANSCRIPT.read_text().splitlines()
