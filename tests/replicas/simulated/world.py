"""Replicas, their store, their links, their clients and engines, and everything that goes wrong: all from one seed."""

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fairshare.core.priority import ServiceClass
from fairshare.replicas.lease import LeaseOptions
from fairshare.replicas.member import MemberOptions
from fairshare.replicas.owner import OwnerOptions
from fairshare.replicas.replica import ReplicaOptions
from replicas.simulated.database import Database
from replicas.simulated.network import Network
from replicas.simulated.node import Node
from replicas.simulated.timeline import Timeline

LONGEST_REQUEST_SECONDS = 12.0
TRACE_LINES = 400


class BrokenPromise(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run is made of."""

    replicas: int = 3
    capacities: Mapping[str, int] = field(default_factory=lambda: {"a": 8})
    fallbacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """Pool → its fallback, which comes before it in `capacities`."""
    shares: Mapping[str, str] = field(default_factory=lambda: {"x": "1/2", "y": "5/16", "z": "3/16"})
    half_life_seconds: float | None = None
    load_seconds: float = 40.0
    faults: int = 6
    kinds: tuple[str, ...] = ()
    """Of faults; empty: all."""
    requests_per_second: float = 12.0
    mean_seconds: float = 1.0
    """Of engine time."""
    clock_drift: float = 0.005
    options: MemberOptions = field(
        default_factory=lambda: MemberOptions(
            lease=LeaseOptions(lease_seconds=5.0, renew_every_seconds=1.0),
            owner=OwnerOptions(longest_request_seconds=LONGEST_REQUEST_SECONDS, show_every_seconds=2.0),
            replica=ReplicaOptions(degraded_longest_seconds=20.0, replicas_expected=2, idle_seconds=0.1),
        )
    )
    fenced: bool = True


def plan_of(seed: int) -> Plan:
    """Another mixture for every seed."""
    rng = random.Random(f"plan {seed}")
    two = rng.random() < 0.3
    plan = Plan(
        replicas=rng.choice((2, 3, 3, 4)),
        capacities={"b": 4, "a": 8} if two else {"a": rng.choice((4, 8, 8, 13))},
        fallbacks={"a": "b"} if two else {},
        half_life_seconds=rng.choice((None, None, 20.0)),
        requests_per_second=rng.choice((4.0, 10.0, 16.0)),
        faults=rng.choice((0, 2, 5, 8)),
    )
    return with_lending(plan) if not two and rng.random() < 0.5 else plan


def with_lending(plan: Plan) -> Plan:
    """So much room, and so many short requests, that slots are lent, used again and called back all the time."""
    return replace(plan, capacities={"a": 24}, requests_per_second=40.0, mean_seconds=0.3)


class World:
    """One run. `run` raises `BrokenPromise` at the first step after which an invariant does not hold."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.seed = seed
        self.plan = plan = plan or plan_of(seed)
        self.rng = random.Random(seed)
        self.timeline = Timeline()
        self.database = Database(self.timeline, self.rng, fenced=plan.fenced)
        self.network = Network(self.timeline, self.rng)
        self._trace: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=TRACE_LINES)
        self.submitted = self.served = self.cancelled = 0
        self.refused: Counter[str] = Counter()
        self.crashed = 0
        """Requests that ended with their process."""
        self.epochs = 0
        """Owners that began to decide."""
        self.steps = 0
        self.degraded_grants = 0
        self.past: list[Node] = []
        """Processes that are no more."""
        self.inherited: set[str] = set()
        """Replicas that had announced themselves when the owner of `epoch` began to decide."""
        self.epoch = 0
        """Of the newest owner that decides (it has gathered)."""
        self.checked_sums: tuple[object, ...] = ()
        """Of what was charged, when it was last found to be right."""
        self.capacities = dict(plan.capacities)
        self.most_slots = dict(plan.capacities)
        """The largest C that a pool had: what was given then may still run."""
        self._number = 0
        self._lives = Counter[int]()
        self.nodes: list[Node] = []
        self._ended = False

    # ------------------------------------------------------------------ for its parts

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def note(self, node: Node | None, *what: object) -> None:
        self._trace.append((self.timeline.now, node.name if node else "world", what))

    @property
    def trace(self) -> list[str]:
        """The last things that happened."""
        return [f"{at:9.4f} {who:5} {' '.join(map(str, what))}" for at, who, what in self._trace]

    def happened(self, node: Node) -> None:
        """After every step of a process."""
        self.steps += 1
        from replicas.simulated.checks import check

        check(self, node)

    # ------------------------------------------------------------------ the run

    def run(self) -> "World":
        try:
            self._run()
        except BrokenPromise:
            raise
        except Exception as error:
            raise BrokenPromise(f"{type(error).__name__}: {error}") from error
        return self

    def _run(self) -> None:
        from replicas.simulated.checks import check_end

        plan, timeline = self.plan, self.timeline
        for place in range(plan.replicas):
            self._boot(place)
        self._dial()
        self._load()
        for _ in range(plan.faults):
            timeline.at(self.rng.uniform(3.0, plan.load_seconds), self._fault)
        timeline.at(plan.load_seconds + 15.0, self._heal)
        end = plan.load_seconds + 15.0 + 60.0
        while timeline.now < end and timeline.step():
            pass
        check_end(self)

    def _boot(self, place: int) -> None:
        self._lives[place] += 1
        node = Node(self, place, self._lives[place])
        self.note(node, "begins")
        self.nodes.append(node)

    def _dial(self) -> None:
        self.network.dial(self.nodes)
        self.timeline.after(self.rng.uniform(0.02, 0.3), self._dial)

    def _load(self) -> None:
        if self.timeline.now > self.plan.load_seconds:
            return
        rng = self.rng
        # One team floods now and then, the others come and go.
        team = rng.choices(("x", "y", "z", "stranger"), (6 if self.timeline.now % 20 < 10 else 1, 2, 2, 0.3))[0]
        node = rng.choice(self.nodes) if self.nodes else None
        if node is not None and not node.is_draining:
            pool = rng.choice(tuple(self.plan.capacities))
            seconds = min(LONGEST_REQUEST_SECONDS * 0.9, rng.expovariate(1.0 / self.plan.mean_seconds))
            node.arrive(pool, team, seconds, rng.choice(tuple(ServiceClass)))
        self.timeline.after(rng.expovariate(self.plan.requests_per_second), self._load)

    # ------------------------------------------------------------------ what goes wrong

    @property
    def owner(self) -> Node | None:
        return next((node for node in self.nodes if node.member.owns), None)

    def _some(self) -> Node | None:
        """A process; the owner as often as all others."""
        if not self.nodes:
            return None
        owner = self.owner
        return owner if owner is not None and self.rng.random() < 0.5 else self.rng.choice(self.nodes)

    def _fault(self) -> None:
        faults: dict[str, Callable[[Node], None]] = {
            "crash": self.crash,
            "pause": self.pause,
            "cut": self._cut,
            "partition": self._partition,
            "alone": self._alone,
            "no store": self._no_store,
            "store down": self._store_down,
            "store slow": self._store_slow,
            "store refuses": self._store_refuses,
            "slow links": self._slow_links,
            "drain": self.drain,
            "resize": self._resize,
        }
        node = self._some()
        if node is not None:
            kind = self.rng.choice(self.plan.kinds or tuple(faults))
            self.note(node, "FAULT", kind)
            faults[kind](node)

    def crash(self, node: Node, *, back_after_seconds: float | None = None) -> None:
        """kill -9; the place gets a new process after a while."""
        if node not in self.nodes:
            return
        self.crashed += len(node.calls)
        node.die()
        self.nodes.remove(node)
        self.past.append(node)
        back = self.rng.uniform(0.2, 8.0) if back_after_seconds is None else back_after_seconds
        self.timeline.after(back, lambda: self._boot(node.place))

    def pause(self, node: Node, *, seconds: float | None = None) -> None:
        if node.is_paused:
            return
        node.pause()
        seconds = self.rng.choice((0.3, 3.0, 7.0, 10.0)) if seconds is None else seconds
        # Others find that it is silent.
        for link in self.network.links:
            if node in link.sides and self.rng.random() < 0.9 and seconds > 2.0:
                self.timeline.after(2.0, lambda link=link: self._silent(link, node))
        self.timeline.after(seconds, node.resume)

    def _silent(self, link: object, node: Node) -> None:
        from replicas.simulated.network import Link

        assert isinstance(link, Link)
        if node.is_paused and link.carries:
            # What was sent before may still be in the stopped side's buffer.
            side = link.sides.index(node)
            link.notice(1 - side)
            self.timeline.after(self.rng.uniform(0.0, 1.0), link.cut)

    def drain(self, node: Node) -> None:
        """A rolling restart of one: it hands over, serves to its end, and is replaced."""
        if node.is_draining or node.is_paused or not node.is_alive:
            return
        node.drain()

        def ends() -> None:
            if node.is_alive and node in self.nodes:
                if node.calls or not node.member.drained:
                    self.timeline.after(0.5, ends)
                else:
                    self.crash(node, back_after_seconds=0.0)

        self.timeline.after(1.0, ends)

    def _resize(self, node: Node) -> None:
        """Elastic capacity: every process finds out by itself."""
        name = self.rng.choice(tuple(self.capacities))
        capacity = self.capacities[name] = self.rng.choice((2, 4, 8, 12, 24))
        self.most_slots[name] = max(capacity, self.most_slots[name])
        for each in self.nodes:
            self.timeline.after(self.rng.uniform(0.0, 0.5), lambda each=each: each.resize(name, capacity))

    def _cut(self, node: Node) -> None:
        for link in self.network.links:
            if node in link.sides:
                link.cut()

    def _partition(self, node: Node) -> None:
        """Between two places only."""
        others = [other for other in range(self.plan.replicas) if other != node.place]
        other = self.rng.choice(others)
        self.network.separate(node.place, other)
        pair = frozenset((node.place, other))
        self.timeline.after(self.rng.choice((1.0, 5.0, 15.0)), lambda: self.network.apart.discard(pair))

    def _alone(self, node: Node) -> None:
        """From all others, and perhaps from the store."""
        seconds = self.rng.choice((1.0, 5.0, 15.0, 20.0))
        for other in range(self.plan.replicas):
            if other != node.place:
                self.network.separate(node.place, other)
                pair = frozenset((node.place, other))
                self.timeline.after(seconds, lambda pair=pair: self.network.apart.discard(pair))
        if self.rng.random() < 0.5:
            self._no_store(node, seconds)

    def _no_store(self, node: Node, seconds: float | None = None) -> None:
        node.reaches_store = False

        def again() -> None:
            node.reaches_store = True

        self.timeline.after(seconds or self.rng.choice((1.0, 4.0, 9.0)), again)

    def _store_down(self, node: Node) -> None:
        self.database.is_up = False

        def again() -> None:
            self.database.is_up = True

        self.timeline.after(self.rng.choice((1.0, 5.0, 12.0, 30.0)), again)

    def _store_slow(self, node: Node) -> None:
        self.database.latest_seconds = self.rng.choice((0.5, 2.0, 6.0))

        def again() -> None:
            self.database.latest_seconds = 0.02

        self.timeline.after(self.rng.choice((3.0, 10.0)), again)

    def _store_refuses(self, node: Node) -> None:
        self.database.refuses = self.rng.choice((0.3, 0.9))

        def again() -> None:
            self.database.refuses = 0.0

        self.timeline.after(self.rng.choice((3.0, 10.0)), again)

    def _slow_links(self, node: Node) -> None:
        self.network.latest_seconds = self.rng.choice((0.2, 1.5))

        def again() -> None:
            self.network.latest_seconds = 0.003

        self.timeline.after(self.rng.choice((3.0, 10.0)), again)

    def _heal(self) -> None:
        self.note(None, "all is well again")
        self.network.apart.clear()
        self.network.latest_seconds = 0.003
        self.database.is_up, self.database.refuses, self.database.latest_seconds = True, 0.0, 0.02
        for node in self.nodes:
            node.reaches_store = True

    # ------------------------------------------------------------------ what is true

    def within_share_slots(self) -> dict[str, int]:
        """Live within-share grants by where they come from."""
        found = {"owner": 0, "degraded": 0, "late": 0}
        for node in self.nodes:
            found["degraded"] += node.alone_slots
            for epoch, slots in node.given_slots.items():
                is_late = epoch < self.epoch and node.name not in self.inherited
                found["late" if is_late else "owner"] += slots
        return found
