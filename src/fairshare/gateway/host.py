"""What the machine and the store allow the gateway, looked at once by `fairshare doctor`."""

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import text

from fairshare.clock import Clock
from fairshare.gateway.findings import Finding, Severity
from fairshare.gateway.options import GatewaySpec
from fairshare.storage.address import PostgresServer
from fairshare.storage.database import Database, Fit, StoreUnavailable, fit
from fairshare.storage.schema import COMPATIBLE_REVISION, REVISION

DESCRIPTORS_PER_CONNECTION = 2
SPARE_DESCRIPTORS = 200
FEW_BACKLOG = 1024
"""A burst of new connections beyond `somaxconn` is refused or dropped by the kernel before the gateway sees it."""

WORST_SKEW_SECONDS = 1.0
"""Leases and budgets compare times of several machines."""

NO_POOL = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Limits of this machine. None: it does not say."""

    open_files: int
    """The most that this process may raise its limit to."""
    backlog: int | None
    """`net.core.somaxconn`."""
    ports: int | None
    """Ephemeral ports: connections to one engine at once."""
    cores: int


def look_at_host() -> Host:
    """Reads them."""
    first_last = _numbers("/proc/sys/net/ipv4/ip_local_port_range")
    backlog = _numbers("/proc/sys/net/core/somaxconn")
    return Host(
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        backlog=backlog[0] if backlog else None,
        ports=first_last[1] - first_last[0] + 1 if len(first_last) == 2 else None,
        cores=len(os.sched_getaffinity(0)),
    )


def _numbers(path: str) -> list[int]:
    with suppress(OSError, ValueError):
        return [int(word) for word in Path(path).read_text("ascii").split()]
    return []


def judge_host(host: Host, spec: GatewaySpec) -> list[Finding]:
    """What of it is too little for this configuration."""
    connections = spec.limits.max_connections
    needed = DESCRIPTORS_PER_CONNECTION * connections + SPARE_DESCRIPTORS
    found: list[Finding] = []
    if 0 <= host.open_files < needed:
        found.append(
            _warning(
                "few-open-files",
                f"This process may open {host.open_files} files, and {connections} connections need {needed}.",
                "It takes fewer connections then, and answers 503 to the rest.",
                f"LimitNOFILE={needed} in the systemd unit (or ulimit -Hn {needed}), or lower limits.max_connections.",
            )
        )
    if host.backlog is not None and host.backlog < min(FEW_BACKLOG, connections):
        found.append(
            _warning(
                "short-backlog",
                f"The kernel keeps {host.backlog} new connections waiting for a port.",
                "A burst beyond it is dropped before the gateway sees it; clients wait a second or more.",
                "sysctl -w net.core.somaxconn=4096",
            )
        )
    if host.ports is not None and host.ports < connections:
        found.append(
            _warning(
                "few-ports",
                f"There are {host.ports} ephemeral ports for up to {connections} connections to an engine.",
                "When they are used up, connections to the engine fail.",
                'sysctl -w net.ipv4.ip_local_port_range="15000 65000"',
            )
        )
    if host.cores < 2:
        found.append(
            _warning(
                "one-core",
                "This process may use one core only.",
                "The gateway needs one for itself; whatever else runs there delays every stream.",
                "Give it a core that nothing else uses.",
            )
        )
    return found


async def examine_store(spec: GatewaySpec, *, wall: Clock) -> list[Finding]:
    """Whether the store answers, may be written to, and has the same time. Changes nothing in it.

    A SQLite file that is not there yet is made when the gateway starts, and is not asked.
    """
    if spec.store is None:
        return []
    address = spec.store.address
    if not isinstance(address, PostgresServer) and not address.path.exists():
        return []
    database = Database(address)
    try:
        async with database.writing() as connection:
            found = _judge_fit(*await connection.run_sync(fit))
            if not isinstance(address, PostgresServer):
                return found
            asked_at = wall()
            row = (await connection.execute(text("select extract(epoch from clock_timestamp())"))).one()
            skew_seconds = float(row[0]) - (asked_at + wall()) / 2.0
    except StoreUnavailable as error:
        return [
            Finding(
                id="store-unusable",
                severity=Severity.ERROR,
                pool=NO_POOL,
                instance_id=None,
                sentence=f"The store cannot be used: {error}",
                why="Requests are served, but nothing is accounted, and usage is lost at a restart.",
                fix="Correct store: in the configuration, or start the database and give its user the right to write.",
            )
        ]
    finally:
        await database.close()
    if abs(skew_seconds) <= WORST_SKEW_SECONDS:
        return found
    return [
        *found,
        _warning(
            "clock-skew",
            f"The database's clock is {skew_seconds:+.1f} s from this machine's.",
            "Budgets, expiry of keys and leases compare times of both.",
            "Run a time service (chrony, systemd-timesyncd) on both.",
        ),
    ]


def _judge_fit(state: Fit, revision: str | None) -> list[Finding]:
    if state is Fit.OLDER:
        return [
            _warning(
                "store-older",
                f"The store is at revision {revision}; the next start of this version upgrades it to {REVISION}.",
                f"Gateways older than revision {COMPATIBLE_REVISION} cannot use it from then on.",
                "Make a backup first (docs/operations-store.md).",
            )
        ]
    if state is Fit.TOO_NEW:
        return [
            Finding(
                id="store-too-new",
                severity=Severity.ERROR,
                pool=NO_POOL,
                instance_id=None,
                sentence=f"A newer fairshare has upgraded the store to revision {revision}; this one cannot use it.",
                why="The gateway does not start with it.",
                fix="Run the newer version, or restore the backup from before the upgrade.",
            )
        ]
    return []


def _warning(id: str, sentence: str, why: str, fix: str) -> Finding:
    return Finding(
        id=id, severity=Severity.WARNING, pool=NO_POOL, instance_id=None, sentence=sentence, why=why, fix=fix
    )
