"""A machine that is gone at once, with all that could have told its end: an operator says so."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from end_to_end.processes import PATIENCE_SECONDS, EngineProcess, eventually, started
from end_to_end.sharing import load
from end_to_end.test_machines import Machines
from support.postgres import Postgres


@pytest.fixture
def machines(tmp_path: Path, postgres: Postgres) -> Iterator[Machines]:
    with ExitStack() as stack:
        engine = stack.enter_context(started(lambda: EngineProcess("--max-num-seqs", "16", "--step-ms", "5")))
        yield Machines(tmp_path, engine, postgres, stack, longest_request="1h")


@pytest.mark.replicas
def test_slots_of_a_machine_that_is_gone_are_free_when_an_operator_says_so(machines: Machines) -> None:
    owner, other = machines.owner(), machines.other()
    with load([owner.url], machines.keys["search"], clients=4, tokens=2000) as lost:
        eventually(lambda: owner.pool()["in_flight"] == 4, "all of them run")
        # A second, as the owner saves it: what its successor finds.
        saved = "select 1 from leases where position(convert_to('search', 'UTF8') in state) > 0"
        eventually(lambda: machines.rows(saved) == ["1"], "the store knows that they run")
        owner.signal(signal.SIGKILL)
        eventually(lambda: machines.role(other) == "owner", "the other one owns")
    assert len(lost.failures) >= 4
    eventually(lambda: other.pool()["replication"]["phantom_slots"] == 4, "slots are kept for what it ran")
    assert any("fairshare clear-phantoms" in finding for finding in other.pool()["findings"])
    arguments = (sys.executable, "-m", "fairshare", "clear-phantoms", "chat", "--admin", other.admin_url)
    said = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True).stdout
    assert "4 slots of pool chat are free." in said
    assert other.pool()["replication"]["phantom_slots"] == 0
    assert machines.rows("select action, target from audit") == ["clear phantoms|chat 4 slots"]
