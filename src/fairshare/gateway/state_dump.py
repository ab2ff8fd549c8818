"""Everything that the decisions depend on, at one moment, as one JSON document: for a fault that cannot be explained.

Configured names, ids and numbers only: no key, no secret, nothing of a prompt. Made on the event loop, so that it is
consistent; written to its file by whoever asked for it.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fairshare.clock import Clock
from fairshare.gateway.accounts_api import json_answer
from fairshare.gateway.decision_log import HeldEntry, RecalledEntry, RefusedEntry, SentEntry
from fairshare.gateway.driver import Driven, PoolDriver
from fairshare.gateway.ports import LedgerCounts
from fairshare.gateway.status import BudgetStatus, PoolStatus

DUMP_PATH = "/api/v1/dump"

MOST_DECISIONS = 2_000
MOST_RECORDS = 1_000

_WHAT = {SentEntry: "sent", HeldEntry: "held", RecalledEntry: "recalled", RefusedEntry: "refused"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpParts:
    """What a dump is made of."""

    driver: PoolDriver
    pools: Callable[[], Sequence[PoolStatus]]
    budgets: Callable[[], Sequence[BudgetStatus]]
    ledger: Callable[[], LedgerCounts | None]
    wall: Clock


class StateDump:
    """Makes dumps. Lives on the event loop's thread."""

    def __init__(self, parts: DumpParts) -> None:
        self._parts = parts

    def made(self) -> dict[str, Any]:
        """The dump of this moment; its parts are described in the reference of the admin port."""
        parts, driver = self._parts, self._parts.driver
        at, now = parts.wall(), driver.clock()
        return {
            "at": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "pools_clock": now,
            "version": version("fairshare"),
            "process": os.getpid(),
            "pools": parts.pools(),
            "queues": {name: pool.queue.snapshot() for name, pool in driver.pools.items()},
            "requests": [_request(each, now) for each in driver.open_exchanges()],
            "decisions": [
                {"what": _WHAT[type(each)], "decision": each} for each in driver.decisions.last(MOST_DECISIONS)
            ],
            "records": driver.decisions.records(most=MOST_RECORDS),
            "counters": driver.counters,
            "ledger": parts.ledger(),
            "budgets": parts.budgets(),
        }

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.made(), enc_hook=float)  # shares are fractions

    def routes(self) -> list[Route]:
        """`GET` it with the admin key."""

        async def answer(_: Request) -> Response:
            return json_answer(self.encoded())

        return [Route(DUMP_PATH, answer)]


def _request(exchange: Driven, now: float) -> dict[str, Any]:
    request = exchange.request
    return {
        "id": exchange.id,
        "queue_id": request.id,
        "key_id": exchange.key_id,
        "team": request.team,
        "pool": exchange.home.spec.name,
        "service_class": request.service_class.name.lower(),
        "slots": request.slots,
        "place": exchange.place,
        "answer_begun": exchange.began,
        "instance": exchange.instance_id,
        "silent_seconds": round(now - exchange.heard_at, 3),
        "must_end_in_seconds": round(exchange.ends_at - now, 3),
    }


def written(content: bytes, *, process: int) -> Path:
    """Write a dump to a new file of the folder for temporary files (`TMPDIR`), which only its owner may read."""
    descriptor, path = tempfile.mkstemp(prefix=f"fairshare-dump-{process}-", suffix=".json")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return Path(path)
