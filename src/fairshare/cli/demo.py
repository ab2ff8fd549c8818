"""`fairshare demo`: two stand-in engines, a gateway and two teams with scripted load, shown live."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.errors import OperatorError

if TYPE_CHECKING:
    import asyncio

    from rich.console import RenderableType
    from rich.text import Text

    from fairshare.gateway.status import PoolStatus, TeamStatus

CAPACITY_SLOTS = 16
SHARES = {"search": 10, "ads": 6}
"""Slots of the pool's sixteen."""
ENGINE_SEATS = CAPACITY_SLOTS // 2
"""No headroom, so that recalls can be seen; production engines should have some."""
ENGINE_OPTIONS = f"--model tiny --max-num-seqs {ENGINE_SEATS} --kv-tokens 65536 --policy priority".split()
START_SECONDS = 30.0
REFRESH_SECONDS = 0.5
REQUEST_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the script."""

    text: str
    clients: Mapping[str, int]
    """How many clients of each team keep one request open, one after the other."""
    seconds: float


SCRIPT = (
    Phase("search works alone: it borrows what ads leaves idle", {"search": 24}, 8.0),
    Phase("ads comes back: what it owns is there at once", {"search": 24, "ads": 6}, 8.0),
    Phase("ads floods: it gets what it owns, and search keeps its own", {"search": 24, "ads": 60}, 10.0),
    Phase("search pauses: ads may use everything", {"ads": 60}, 8.0),
    Phase("search comes back: borrowers give way", {"search": 24, "ads": 60}, 10.0),
)


@dataclass(slots=True)
class Team:
    """The clients of one team."""

    name: str
    key: str
    wanted_clients: int = 0
    clients: "set[asyncio.Task[None]]" = field(default_factory=lambda: set())
    answered: int = 0
    failed: int = 0


def register(app: typer.Typer) -> None:
    app.command("demo", epilog="Example: fairshare demo --once")(demo)


def demo(
    once: Annotated[bool, typer.Option("--once", help="End after one run through the script.")] = False,
    port: Annotated[int, typer.Option("--port", help="The gateway's data port; 0: any free one.", metavar="P")] = 8080,
    admin_port: Annotated[
        int, typer.Option("--admin-port", help="The gateway's admin port; 0: any free one.", metavar="P")
    ] = 8081,
) -> None:
    """Watch two teams share a pool: alone, flooding, and the owner coming back. Ctrl-C ends it and leaves nothing."""
    import asyncio
    import signal
    import tempfile

    async def until_stopped() -> None:
        running = asyncio.ensure_future(_run(Path(folder), port=port, admin_port=admin_port, once=once))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            print("\nThe demo has ended; engines and gateway are stopped.", flush=True)

    with tempfile.TemporaryDirectory(prefix="fairshare-demo-") as folder:
        asyncio.run(until_stopped())


async def _run(folder: Path, *, port: int, admin_port: int, once: bool) -> None:
    import asyncio
    import secrets

    from fairshare.gateway.identity import hash_key, new_key

    teams = {name: Team(name, new_key(secrets.token_bytes)) for name in SHARES}
    ports = _free_ports([port, admin_port, 0, 0])
    data_url, admin_url = (f"http://127.0.0.1:{number}" for number in ports[:2])
    engine_urls = [f"http://127.0.0.1:{number}" for number in ports[2:]]
    config = folder / "fairshare.yaml"
    config.write_text(
        _config(data_url, admin_url, engine_urls, {t.name: hash_key(t.key).hex() for t in teams.values()})
    )
    print("Starting two engines and a gateway ...", flush=True)
    async with asyncio.TaskGroup() as group, _processes(folder) as start:
        for url in engine_urls:
            number = url.rpartition(":")[2]
            await start(
                f"engine-{number}",
                ["engine", "--port", number, *ENGINE_OPTIONS],
                f"{url}/health",
            )
        await start("gateway", ["serve", "-c", str(config), "--log-level", "warning"], f"{admin_url}/readyz")
        _greet(data_url, admin_url, teams["ads"])
        pacer = group.create_task(_keep_clients(teams, data_url))
        try:
            await _play(teams, admin_url, once=once)
        finally:
            pacer.cancel()
            for team in teams.values():
                for client in team.clients:
                    client.cancel()


def _free_ports(wanted: Sequence[int]) -> list[int]:
    """The ports wanted, or free ones in place of 0 and of those that something else uses."""
    import socket

    holders: list[socket.socket] = []
    try:
        for number in wanted:
            try:
                holder = socket.create_server(("127.0.0.1", number))
            except OSError:
                holder = socket.create_server(("127.0.0.1", 0))
            holders.append(holder)
        return [int(holder.getsockname()[1]) for holder in holders]
    finally:
        for holder in holders:
            holder.close()


def _config(data_url: str, admin_url: str, engine_urls: Sequence[str], key_hashes: Mapping[str, str]) -> str:
    """The configuration file of the demo; JSON is YAML, and nothing needs quoting rules."""
    return json.dumps(
        {
            "listen": data_url.removeprefix("http://"),
            "admin": admin_url.removeprefix("http://"),
            "pools": [
                {
                    "name": "chat",
                    "capacity": CAPACITY_SLOTS,
                    "half_life": "5m",
                    "shares": {team: f"{slots}/{CAPACITY_SLOTS}" for team, slots in SHARES.items()},
                    "models": ["tiny"],
                    "instances": [{"url": url, "max_num_seqs": ENGINE_SEATS} for url in engine_urls],
                }
            ],
            "teams": [{"name": team, "keys": [{"sha256": sha256}]} for team, sha256 in key_hashes.items()],
        },
        indent=1,
    )


@asynccontextmanager
async def _processes(folder: Path) -> "AsyncGenerator[_Start]":
    """Starts processes of this program; all of them have ended when the block is left, whatever happened in it."""
    start = _Start(folder)
    try:
        yield start
    finally:
        await start.end_all()


class _Start:
    """Starts one process of this program and waits until it answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[asyncio.subprocess.Process] = []

    async def __call__(self, name: str, arguments: Sequence[str], health_url: str) -> None:
        import asyncio
        import sys

        from fairshare.gateway.engine_http import EngineSilent, ask

        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            # A session of its own: Ctrl-C in the terminal reaches the demo alone, which then ends them in order.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fairshare", *arguments), stdout=output, stderr=output, start_new_session=True
            )
        self._processes.append(process)
        for _ in range(round(START_SECONDS / 0.1)):
            if process.returncode is not None:
                break
            try:
                if (await ask("GET", health_url, timeout_seconds=2.0)).status == 200:
                    return
            except EngineSilent:
                pass
            await asyncio.sleep(0.1)
        tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-12:])
        raise OperatorError(f"{name} did not start within {START_SECONDS:g} s. What it said last:\n{tail}")

    async def end_all(self) -> None:
        """SIGTERM to the last started first; SIGKILL to what is still there after five seconds."""
        import asyncio

        for process in reversed(self._processes):
            if process.returncode is None:
                process.terminate()
        for process in self._processes:
            try:
                async with asyncio.timeout(5.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def _greet(data_url: str, admin_url: str, team: Team) -> None:
    body = json.dumps({"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]})
    print(f"Status page: {admin_url}/\n")
    print("Ask it yourself, as team ads:\n")
    print(
        f"  curl -s {data_url}/v1/chat/completions -H 'Authorization: Bearer {team.key}' "
        f"-H 'Content-Type: application/json' -d '{body}'\n",
        flush=True,
    )


async def _keep_clients(teams: Mapping[str, Team], data_url: str) -> None:
    """Keep as many clients of each team as the script wants; those that are too many end with their request."""
    import asyncio

    while True:
        for team in teams.values():
            while len(team.clients) < team.wanted_clients:
                client = asyncio.ensure_future(_client(team, data_url))
                team.clients.add(client)
                client.add_done_callback(team.clients.discard)
        await asyncio.sleep(0.05)


async def _client(team: Team, data_url: str) -> None:
    import asyncio
    import random

    from fairshare.gateway.engine_http import EngineSilent, ask

    while len(team.clients) <= team.wanted_clients:
        request = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"Tell me about {team.name}, please. " * random.randint(1, 8)}],
            "max_tokens": random.randint(60, 180),
            "ignore_eos": True,
            # Half of them stream: what has begun to stream cannot be recalled any more.
            "stream": random.random() < 0.5,
        }
        try:
            answer = await ask(
                "POST",
                f"{data_url}/v1/chat/completions",
                api_key=team.key,
                body=json.dumps(request).encode(),
                timeout_seconds=REQUEST_TIMEOUT_SECONDS,
            )
            answered = answer.status == 200
        except EngineSilent:
            answered = False
        if answered:
            team.answered += 1
        else:
            team.failed += 1
            await asyncio.sleep(0.5)


async def _play(teams: Mapping[str, Team], admin_url: str, *, once: bool) -> None:
    """Run through the script and show the pool while it lasts."""
    import asyncio

    import msgspec
    from rich.console import Console
    from rich.live import Live

    from fairshare.gateway.engine_http import ask
    from fairshare.gateway.status import PoolStatus

    console = Console()
    decoder = msgspec.json.Decoder(list[PoolStatus])
    loop = asyncio.get_running_loop()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            for number, phase in enumerate(SCRIPT, 1):
                for team in teams.values():
                    team.wanted_clients = phase.clients.get(team.name, 0)
                if not console.is_terminal:
                    print(f"\n[{number}/{len(SCRIPT)}] {phase.text}", flush=True)
                ends_at = loop.time() + phase.seconds
                while loop.time() < ends_at:
                    await asyncio.sleep(REFRESH_SECONDS if console.is_terminal else 2.0)
                    answer = await ask("GET", f"{admin_url}/api/v1/pools", timeout_seconds=5.0)
                    pool = decoder.decode(answer.body)[0]
                    if console.is_terminal:
                        title = f"[{number}/{len(SCRIPT)}] {phase.text}"
                        live.update(_picture(pool, teams, title, admin_url), refresh=True)
                    else:
                        print(_line(pool, teams), flush=True)
            if once:
                return


def _picture(pool: "PoolStatus", teams: Mapping[str, Team], title: str, admin_url: str) -> "RenderableType":
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("team")
    table.add_column(f"{pool.capacity} slots: owned and used, owned and idle, borrowed")
    for heading in ("owns", "in flight", "borrows", "waits", "usage", "LF", "rank", "answered", "failed"):
        table.add_column(heading, justify="right")
    for team in pool.teams:
        clients = teams[team.team]
        table.add_row(
            team.team,
            _bar(team),
            str(team.reserved),
            str(team.in_flight),
            str(team.borrowing),
            str(team.held),
            f"{team.usage:,.0f}",
            "∞" if team.level_fairshare is None else f"{team.level_fairshare:.2f}",
            str(team.rank),
            str(clients.answered),
            str(clients.failed),
        )
    below = Text(
        f"{pool.in_flight} of {pool.capacity} slots in flight, {pool.held} waiting, {pool.recalls} recalled so far    "
        f"{admin_url}/",
        style="dim",
    )
    return Group(Text(title, style="bold"), table, below)


def _bar(team: "TeamStatus") -> "Text":
    """One character a slot: what the team uses of its own, what of it is idle, and what it borrows."""
    from rich.text import Text

    own = min(team.in_flight - team.borrowing, team.reserved)
    return Text.assemble(
        ("█" * own, "green"), ("░" * (team.reserved - own), "dim"), ("▒" * (team.in_flight - own), "yellow")
    )


def _line(pool: "PoolStatus", teams: Mapping[str, Team]) -> str:
    parts = [
        f"{team.team}: owns {team.reserved}, in flight {team.in_flight} ({team.borrowing} borrowed), "
        f"{team.held} waiting, answered {teams[team.team].answered}, failed {teams[team.team].failed}"
        for team in pool.teams
    ]
    return " | ".join([*parts, f"recalled {pool.recalls}"])
