"""Stores and rows for tests."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from fairshare.storage.address import StoreAddress
from fairshare.storage.database import Database
from fairshare.storage.ledger import Entry, LedgerRow, LedgerStore, UsageRow
from fairshare.storage.schema import request_owners, request_ways, requests

Run = Callable[[Callable[[Database], Awaitable[None]]], None]


def running(address: StoreAddress, main: Callable[[Database], Awaitable[None]]) -> None:
    """Runs a coroutine function with a store, for at most 60 s."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            database = Database(address)
            try:
                await main(database)
            finally:
                await database.close()

    asyncio.run(bounded())


def migrate(address: StoreAddress) -> None:
    """Make the tables."""
    running(address, Database.migrate)


def row(number: int, **other: Any) -> LedgerRow:
    """One request that ended at second `number`."""
    base = LedgerRow(
        writer=1,
        number=number,
        request_id=f"request-{number}",
        arrived_at=number - 2.0,
        dispatched_at=number - 1.0,
        first_byte_at=number - 0.5,
        ended_at=float(number),
        organisation="lab",
        team="search",
        project="search/web",
        key_id="abc",
        tag="",
        endpoint="/v1/chat/completions",
        pool="chat",
        served_by="chat",
        instance="http://127.0.0.1:9001",
        model="tiny",
        service_class="interactive",
        standing="within-share",
        priority=0,
        slots=2,
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=5,
        cost_units=0.25,
        estimated=False,
        status=200,
        finish="completed",
        reason="",
        held_seconds=0.5,
        recalls=0,
        wasted_slot_seconds=0.0,
        client_cancelled=False,
        degraded=False,
        finish_reason="stop",
    )
    return msgspec.structs.replace(base, **other)


def entry(row: LedgerRow) -> Entry:
    """What is written of a row."""
    numbers, owner, way = (
        tuple(getattr(row, name) for name in table.c.keys() if name in LedgerRow.__struct_fields__)  # noqa: SIM118
        for table in (requests, request_owners, request_ways)
    )
    return numbers, owner, way


async def write(
    store: LedgerStore,
    rows: Iterable[LedgerRow],
    used: Iterable[UsageRow] = (),
    keys_used: Mapping[str, float] | None = None,
    *,
    now: float = 0.0,
) -> None:
    """Write rows as a gateway does; each is made when it is asked for."""
    await store.write(map(entry, rows), used, keys_used or {}, now=now)
