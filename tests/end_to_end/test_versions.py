"""Two adjacent versions of the program side by side, as while an upgrade is rolled out, or back."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, started
from end_to_end.sharing import Load, load
from end_to_end.test_machines import Machines
from fairshare.storage.schema import REVISION
from support import next_version
from support.postgres import Postgres


def test_a_version_and_the_next_serve_together_and_hand_over_to_each_other_without_a_failed_request(
    tmp_path: Path, postgres: Postgres
) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(started(lambda: EngineProcess("--max-num-seqs", "16", "--step-ms", "5")))
        machines = Machines(tmp_path, engine, postgres, stack, run=False)

        def both_serve(flood: Load, owner: GatewayProcess, follower: GatewayProcess) -> None:
            eventually(
                lambda: (machines.role(owner), machines.role(follower)) == ("owner", "follower"), "one decides for both"
            )
            before = flood.completed
            eventually(lambda: flood.completed > before + 10, "load")
            assert owner.metric("fairshare_degraded_requests_total") == 0
            assert follower.metric("fairshare_degraded_requests_total") == 0

        old = machines.start(machines.configs[0])
        assert machines.rows("select version_num from alembic_version") == [REVISION]
        new = machines.start(machines.configs[1], module="support.next_version")
        assert machines.rows("select version_num from alembic_version") == [next_version.REVISION]
        with load([old.url, new.url], machines.keys["search"], clients=6) as together:
            both_serve(together, old, new)
        with load([new.url], machines.keys["search"], clients=3) as handed_over:
            old.signal(signal.SIGTERM)
            assert old.wait() == 0
            eventually(lambda: machines.role(new) == "owner", "the newer one owns")
            # Back: today's program starts on what the next one made of the store.
            again = machines.start(machines.configs[0])
            both_serve(handed_over, new, again)
        with load([again.url], machines.keys["search"], clients=3) as handed_back:
            new.signal(signal.SIGTERM)
            assert new.wait() == 0
            eventually(lambda: machines.role(again) == "owner", "the older one owns")
            before = handed_back.completed
            eventually(lambda: handed_back.completed > before + 10, "load")
        assert [together.failures, handed_over.failures, handed_back.failures] == [[], [], []]
        assert machines.rows("select next_version from leases") == ["added"]
        charged = "select coalesce(sum(cost_units), 0) from account where team = 'search'"
        eventually(lambda: again.pool()["in_flight"] == 0, "nothing is in flight")
        eventually(
            lambda: again.team("search")["usage"] == pytest.approx(float(machines.rows(charged)[0]), rel=1e-9),
            "each charge was counted once",
        )
