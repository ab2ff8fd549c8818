"""`fairshare top`: every pool of a running gateway, live in a terminal."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.cli.asking import USUAL_ADMIN, AdminOption, KeyFileOption, Unreachable, admin_key, decoded, fetch

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from fairshare.gateway.live import State
    from fairshare.gateway.status import PoolStatus, TeamStatus

BAR_CHARACTERS = 24
NARROW_BAR_CHARACTERS = 12

WIDE_COLUMNS = 124
"""From this width on every column is shown."""

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_POINTS = 30
"""What the small pictures of who waits reach back, in looks."""

Waits = dict[tuple[str, str], deque[int]]
"""(pool, team) → how many of it waited, look by look."""


def register(app: typer.Typer) -> None:
    app.command("top", epilog="Example: fairshare top --admin http://127.0.0.1:8081")(top)


def top(
    admin: AdminOption = USUAL_ADMIN,
    key_file: KeyFileOption = None,
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, max=3600.0, help="From one look to the next.", metavar="SECONDS")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print it and end.")] = False,
) -> None:
    """Watch who owns, uses, borrows and waits, live. Ctrl-C ends it. Where there is no terminal: plain lines."""
    import time

    from rich.console import Console
    from rich.live import Live

    key = admin_key(key_file)
    console = Console(highlight=False)
    if once:
        print("\n".join(lines(_look(admin, key))))
        return
    waits: Waits = {}
    last: State | None = None
    live = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else None
    try:
        with live or nullcontext():
            while True:
                trouble = None
                try:
                    last = _look(admin, key)
                    remember(waits, last.pools)
                except Unreachable as gone:
                    # It may be restarting, so what was seen last stays in view. A wrong address is told at once.
                    if last is None:
                        raise
                    trouble = f"{gone} Trying again."
                if live is not None:
                    live.update(picture(last, waits, admin, trouble, width=console.width), refresh=True)
                else:
                    print(trouble or "\n".join(lines(last)), flush=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _look(admin: str, key: str | None) -> "State":
    from fairshare.gateway.live import State

    return decoded(fetch(admin, "/api/v1/state", key), State, admin)


def remember(waits: Waits, pools: Iterable["PoolStatus"]) -> None:
    """Add a look; teams that are gone are forgotten."""
    present = {(pool.name, team.team): team.held for pool in pools for team in pool.teams}
    for gone in waits.keys() - present.keys():
        del waits[gone]
    for place, held in present.items():
        waits.setdefault(place, deque(maxlen=SPARK_POINTS)).append(held)


# ---------------------------------------------------------------------- plain lines


def lines(state: "State") -> list[str]:
    """A look as plain lines: one per pool, team, engine that is not healthy, problem and budget that is nearly used."""
    from datetime import datetime

    from fairshare.gateway.history import borrowed_slots

    at = datetime.fromtimestamp(state.at).astimezone().strftime("%H:%M:%S")
    found: list[str] = []
    for pool in state.pools:
        healthy = sum(instance.healthy for instance in pool.instances)
        found.append(
            f"{at} {pool.name}: {pool.in_flight} of {pool.capacity} slots in flight, {pool.held} held, "
            f"{pool.recalls} recalled, {healthy} of {len(pool.instances)} engines healthy"
        )
        found += [
            f"{at} {pool.name} {team.team}: owns {team.reserved}, in flight {team.in_flight}, borrows "
            f"{borrowed_slots(team)}, held {team.held}, usage {team.usage:.0f}, LF {_level(team)}, rank {team.rank}"
            for team in pool.teams
        ]
        found += [
            f"{at} {pool.name} {finding.severity}: {finding.sentence} {finding.fix}".rstrip()
            for finding in pool.finding_details
            if finding.severity != "note"
        ]
    found += [
        f"{at} budget of {budget.owner}: {budget.left:.0f} of {budget.hard:.0f} left"
        for budget in state.budgets
        if budget.hard is not None and budget.left is not None
    ]
    return [printable(line) for line in found]


# ---------------------------------------------------------------------- a terminal


def picture(
    state: "State", waits: Mapping[tuple[str, str], Sequence[int]], admin: str, trouble: str | None, *, width: int
) -> "RenderableType":
    """A look as a terminal of so many columns shows it; a narrow one shows less of each row."""
    from datetime import datetime

    from rich.console import Group
    from rich.text import Text

    at = datetime.fromtimestamp(state.at).astimezone().strftime("%H:%M:%S")
    parts: list[RenderableType] = [
        Text.assemble(("fairshare ", "bold"), (f"{admin}  {at}", "dim")),
        Text(trouble, style="bold red") if trouble is not None else Text(""),
    ]
    for pool in state.pools:
        is_wide = width >= WIDE_COLUMNS
        parts += [_heading(pool), _teams(pool, state, waits, is_wide), _engines(pool, is_wide)]
        parts += [
            _plain(f"  {finding.sentence} {finding.fix}", style="red" if finding.severity == "error" else "yellow")
            for finding in pool.finding_details
            if finding.severity != "note"
        ]
        parts.append(Text(""))
    parts.append(
        Text.assemble(
            ("█", "blue"),
            (" runs on its own  ", "dim"),
            ("▒", "yellow"),
            (" borrowed  ", "dim"),
            ("░", "dim"),
            (" owned and idle   Ctrl-C ends it", "dim"),
        )
    )
    return Group(*parts)


def _heading(pool: "PoolStatus") -> "Text":
    from rich.text import Text

    state = "saturated" if pool.saturated else "has room"
    return Text.assemble(
        (printable(pool.name), "bold"),
        f"  {pool.in_flight} of {pool.capacity} slots ({state}), {pool.held} waiting, {pool.recalls} taken back",
        (f"  {pool.dispatch}, {', '.join(pool.models)}", "dim"),
    )


def _teams(
    pool: "PoolStatus", state: "State", waits: Mapping[tuple[str, str], Sequence[int]], is_wide: bool
) -> "Table":
    from fairshare.gateway.history import borrowed_slots

    left = _budget_left(state)
    numbers = ("owns", "in flight", "borrows", "held", "LF", "rank")
    if is_wide:
        table = _table("team", "slots", "waiting lately", numbers=(*numbers, "share", "usage", "budget left"))
    else:
        table = _table("team", "slots", numbers=numbers)
    widest = max((max(team.in_flight, team.reserved) for team in pool.teams), default=1)
    for team in pool.teams:
        part = left.get(team.team)
        bar = _bar(team, widest, BAR_CHARACTERS if is_wide else NARROW_BAR_CHARACTERS)
        cells: list[Text | str] = [_plain(team.team), bar]
        if is_wide:
            cells.append(_spark(waits.get((pool.name, team.team), ())))
        cells += [
            str(team.reserved),
            str(team.in_flight),
            str(borrowed_slots(team)),
            str(team.held),
            _level(team),
            str(team.rank),
        ]
        if is_wide:
            cells += [f"{team.share:.1%}", f"{team.usage:,.0f}", "" if part is None else f"{part:.0%}"]
        table.add_row(*cells)
    return table


def _engines(pool: "PoolStatus", is_wide: bool) -> "Table":
    numbers = ("in flight", "runs", "waits", "KV")
    table = _table("engine", "health", numbers=(*numbers, "part", "seats", "preempted") if is_wide else numbers)
    for instance in pool.instances:
        health = "leaving" if instance.leaving else "healthy" if instance.healthy else "unhealthy"
        cells: list[Text | str] = [
            _plain(instance.id),
            _plain(health, style="" if instance.healthy else "red"),
            str(instance.in_flight),
            _known(instance.running),
            _known(instance.waiting),
            "?" if instance.kv_usage is None else f"{instance.kv_usage:.0%}",
        ]
        if is_wide:
            cells += [str(instance.part), _known(instance.seats), _known(instance.preemptions)]
        table.add_row(*cells)
    return table


def _table(*headings: str, numbers: Iterable[str]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=40)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _bar(team: "TeamStatus", widest: int, characters: int) -> "Text":
    """What a team runs on its own slots, what it borrows, and what it owns and leaves idle."""
    from rich.text import Text

    from fairshare.gateway.history import borrowed_slots

    scale = min(1.0, characters / max(1, widest))
    borrowed = borrowed_slots(team)
    own, lent = round((team.in_flight - borrowed) * scale), round(borrowed * scale)
    idle = max(0, round(team.reserved * scale) - own)
    return Text.assemble(("█" * own, "blue"), ("░" * idle, "dim"), ("▒" * lent, "yellow"))


def _spark(values: Sequence[int]) -> str:
    """The last looks as blocks; empty while nothing waited."""
    highest = max(values, default=0)
    if not highest:
        return ""
    return "".join(" " if not value else BLOCKS[(value * (len(BLOCKS) - 1)) // highest] for value in values)


def _budget_left(state: "State") -> dict[str, float]:
    """The least part that is left of a team's budgets."""
    left: dict[str, float] = {}
    for budget in state.budgets:
        if budget.left is not None and budget.hard:
            name = budget.owner.partition(":")[2]
            left[name] = min(left.get(name, 1.0), budget.left / budget.hard)
    return left


def _plain(text: str, style: str = "") -> "Text":
    """Names are shown as they are, whatever markup or control characters somebody put into them."""
    from rich.text import Text

    return Text(printable(text), style=style)


def printable(text: str) -> str:
    """A name may hold what commands a terminal."""
    return "".join(letter if letter.isprintable() else "·" for letter in text)


def _level(team: "TeamStatus") -> str:
    return "∞" if team.level_fairshare is None else f"{team.level_fairshare:.3g}"


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)
