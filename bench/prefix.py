"""What `balance: prefix` brings: `make bench-prefix`.

Plays the conversations of the Mooncake trace on 2 to 16 engines in virtual time: the dispatch queue, the gateway's
prefix keys and memory, and the stand-in's scheduler with vLLM's rules for prefix caches. The load per engine is as high
with every number of engines. `round robin` sends in turn, as a plain load balancer does. Writes docs/performance.md.
"""

import argparse
import csv
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import NamedTuple

from fairshare import Pool
from fairshare.core.decisions import Decision, HoldOptions, Instance, Mode, Recall, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.engine.scheduler import Scheduler, SchedulerConfig
from fairshare.gateway.affinity import PrefixMemory
from fairshare.wire.prefix import prefix_keys

TRACE = Path(__file__).with_name("data") / "mooncake_prefixes.csv.gz"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- bench-prefix: begin -->", "<!-- bench-prefix: end -->"

BLOCK_TOKENS = 512  # the trace's blocks
PART_SLOTS, SEATS = 32, 64
TEAMS = ("a", "b", "c", "d")
ENGINE = SchedulerConfig(
    max_num_seqs=SEATS,
    num_blocks=4_001,  # two million tokens of KV cache
    block_size=BLOCK_TOKENS,
    max_num_batched_tokens=4_096,
    max_model_len=200_000,
    prefix_caching=True,
    step_seconds=0.010,
    token_seconds=40e-6,  # some 25,000 prompt tokens a second
)
POLICIES = ("round robin", "least_loaded", "prefix")


class Asked(NamedTuple):
    """One request of the trace."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[str, ...]
    """What its prompt consists of; equal names are equal text."""
    team: str


def read(limit: int) -> list[Asked]:
    """The trace says how many leading blocks were seen before, not where: in its conversation's last one so long."""
    conversations: dict[str, list[tuple[str, ...]]] = {}
    asked: list[Asked] = []
    with gzip.open(TRACE, "rt") as file:
        for number, row in zip(range(limit), csv.DictReader(file), strict=False):
            name, length, seen = row["first_new_or_root_block"], int(row["n_blocks"]), int(row["prefix_blocks_seen"])
            earlier = conversations.setdefault(name, [])
            known = next((blocks[:seen] for blocks in reversed(earlier) if len(blocks) >= seen >= 2), ("root", name))
            blocks = (known + tuple(f"{number}.{index}" for index in range(len(known), length)))[:length]
            earlier.append(blocks)
            team = TEAMS[zlib.crc32(name.encode()) % len(TEAMS)]
            asked.append(Asked(float(row["t_s"]), int(row["input_tokens"]), int(row["output_tokens"]), blocks, team))
    return asked


def text_of(blocks: Sequence[str]) -> bytes:
    """Four bytes for each token, as English has."""
    return b"".join(blake2b(block.encode()).hexdigest().encode() * 16 for block in blocks)


@dataclass
class Outcome:
    """What the requests of a run met with."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list[float])

    def row(self) -> list[str]:
        waits = sorted(self.first_token_seconds)
        mean = sum(waits) / len(waits)
        median, late = waits[len(waits) // 2], waits[len(waits) * 95 // 100]
        return [f"{self.cached_tokens / self.prompt_tokens:.1%}", f"{mean:.2f}", f"{median:.2f}", f"{late:.2f}"]


class World:
    """Engines behind a dispatch queue, in virtual time."""

    def __init__(self, trace: Sequence[Asked], policy: str, engines: int) -> None:
        self.now = 0.0
        self.policy = policy
        self.trace = trace
        self.outcome = Outcome()
        self.engines: dict[str, Scheduler] = {}
        self.accepting: list[str] = []
        self.pool = Pool("chat", PART_SLOTS, dict.fromkeys(TEAMS, "1/4"), 3600.0, clock=lambda: self.now)
        options = HoldOptions(max_held=1 << 30, max_held_per_team=1 << 30, longest_wait_seconds=1e9)
        self.queue = make_queue(self.pool, Mode.HOLD, options=options)
        self.prefixes = PrefixMemory()
        self.keys: dict[str, list[int]] = {}
        self.waiting_first: dict[str, Asked] = {}
        self.began_at: dict[str, float] = {}
        for _ in range(engines):
            self.add_engine()

    def add_engine(self) -> None:
        name = f"e{len(self.engines)}"
        self.engines[name] = Scheduler(ENGINE)
        self.accepting.append(name)
        self.tell(name, accepting=True)

    def lose_engine(self) -> None:
        """It accepts nothing any more; what it runs may finish."""
        self.tell(self.accepting.pop(), accepting=False)

    def tell(self, name: str, *, accepting: bool) -> None:
        self.pool.set_capacity(PART_SLOTS * len(self.accepting))
        part = PART_SLOTS if accepting else 0
        self.carry_out(
            self.queue.instance_changed(Instance(id=name, part_slots=part, seats=SEATS, accepting=accepting))
        )
        self.carry_out(self.queue.capacity_changed())

    def arrive(self, number: int, asked: Asked) -> None:
        name = str(number)
        self.waiting_first[name], self.began_at[name] = asked, self.now
        if self.policy == "round robin":
            self.start(name, self.accepting[number % len(self.accepting)], 0)
            return
        keys = prefix_keys("model", text_of(asked.blocks)) if self.policy == "prefix" else []
        self.keys[name] = keys
        preferred = self.prefixes.preferred(keys, self.accepting)
        self.carry_out(self.queue.submitted(Request(id=name, team=asked.team, preferred_instances=preferred)))

    def start(self, name: str, engine: str, priority: int) -> None:
        asked, scheduler = self.waiting_first[name], self.engines[engine]
        if not scheduler.busy:
            scheduler.advance(self.now)
        scheduler.add(
            name,
            prompt_tokens=asked.prompt_tokens,
            output_tokens=max(1, asked.output_tokens),
            priority=priority,
            arrival=self.now,
            block_keys=asked.blocks,
        )

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Send):
                self.prefixes.sent(self.keys[decision.request_id], decision.instance_id)
                self.start(decision.request_id, decision.instance_id, decision.priority or 0)
            elif isinstance(decision, Recall):
                self.engines[decision.instance_id].abort(decision.request_id)
                self.carry_out(self.queue.aborted(decision.request_id))

    def play(self, *, per_engine_rate: float, at_half: str = "") -> Outcome:
        """The whole trace at this many requests a second for each engine; `at_half`: `lost` or `added`."""
        speed = per_engine_rate * len(self.engines) * self.trace[-1].at / len(self.trace)
        arrivals = [asked.at / speed for asked in self.trace]
        arrived = 0
        while True:
            next_arrival = arrivals[arrived] if arrived < len(arrivals) else inf
            busy = sorted((scheduler.now, name) for name, scheduler in self.engines.items() if scheduler.busy)
            if busy and busy[0][0] < next_arrival:
                until = min(busy[1][0] if len(busy) > 1 else inf, next_arrival)
                self.step(self.engines[busy[0][1]], until)
            elif arrived < len(arrivals):
                self.now = max(self.now, next_arrival)
                if arrived == len(arrivals) // 2 and at_half:
                    self.lose_engine() if at_half == "lost" else self.add_engine()
                self.arrive(arrived, self.trace[arrived])
                arrived += 1
            else:
                return self.outcome

    def step(self, scheduler: Scheduler, until: float) -> None:
        events = scheduler.advance(max(until, scheduler.now + 1e-9))
        self.now = max(self.now, scheduler.now)
        queued = self.policy != "round robin"
        for event in events:
            asked = self.waiting_first.pop(event.request_id, None)
            if asked is not None:
                self.outcome.first_token_seconds.append(scheduler.now - self.began_at[event.request_id])
                self.outcome.prompt_tokens += asked.prompt_tokens
                self.outcome.cached_tokens += event.cached_tokens
                if queued:
                    self.queue.first_byte(event.request_id)
            if event.finished and queued:
                self.carry_out(self.queue.released(event.request_id, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5_000, help="how much of the trace (default: all of it)")
    parser.add_argument("--rate", type=float, default=1.2, help="requests a second for each engine")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/performance.md")
    options = parser.parse_args()
    trace = read(options.requests)
    seen, total, known = 0, 0, set[str]()
    for asked in trace:
        seen += next((n for n, block in enumerate(asked.blocks) if block not in known), len(asked.blocks))
        total += len(asked.blocks)
        known.update(asked.blocks)
    lines = [
        f"{len(trace):,} requests of the Mooncake conversation trace at {options.rate:g} requests a second for each "
        f"engine, in virtual time; {seen / total:.1%} of their blocks were seen before. An engine caches "
        f"{(ENGINE.num_blocks - 1) * BLOCK_TOKENS / 1e6:.1f} million tokens and computes at most "
        f"{1 / ENGINE.token_seconds:,.0f} prompt tokens a second. Times are seconds to the first token, from arrival.",
        "",
        "| engines | balance | prompt tokens from the cache | mean | median | p95 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    cases = [(engines, "") for engines in (2, 4, 8, 16)] + [(4, "lost"), (4, "added")]
    for engines, at_half in cases:
        label = f"{engines}, one {at_half} at half-time" if at_half else str(engines)
        for policy in POLICIES:
            outcome = World(trace, policy, engines).play(per_engine_rate=options.rate, at_half=at_half)
            lines.append(f"| {' | '.join([label, policy, *outcome.row()])} |")
            print(lines[-1], flush=True)
    if options.write:
        page = PAGE.read_text("utf-8")
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
