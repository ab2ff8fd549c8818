"""Scenario files: pools with their engines, teams with their loads, and what goes wrong on the way.

YAML, read strictly: unknown and doubled keys are errors, and every message says where, what was found and what to do.
"""

import difflib
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import yaml

from fairshare.core.decisions import BorrowOrder, HoldOptions
from fairshare.core.priority import ServiceClass
from fairshare.engine.scheduler import SchedulerConfig
from fairshare.errors import OperatorError
from fairshare.simulator.lengths import Lengths, parse_lengths

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d|w)")
_DURATION_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)/(s|m|h)")


class ScenarioError(OperatorError):
    """The scenario or trace cannot be used; the message says where and why."""


class Seconds(float):
    """A duration, written as 250ms, 30s, 5m, 1h or 7d."""


class PerSecond(float):
    """A rate, written as 3/s or 20/m."""


class Share(Fraction):
    """A share between 0 and 1, written as 26/32 or 0.5."""


Count = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records of the file: unknown keys are errors."""


class Load(_Strict, frozen=True, kw_only=True):
    """What the clients of one team do. Exactly one of `clients`, `rate`, `burst` says how requests arrive."""

    clients: Count = 0
    """Closed loop: that many clients, each sends its next request `think` after the last answer ended."""
    rate: PerSecond = PerSecond(0.0)
    """Open loop: Poisson arrivals."""
    burst: Count = 0
    """That many requests at once, at `start` and then `every` so often."""
    every: Seconds = Seconds(0.0)
    think: Seconds = Seconds(0.0)
    """Mean think time, exponentially distributed; 0: none."""
    start: Seconds = Seconds(0.0)
    stop: Seconds = Seconds(float("inf"))
    on: Seconds = Seconds(0.0)
    """With `off`: clients send for this long, pause for `off`, and so on from `start`."""
    off: Seconds = Seconds(0.0)
    prompt: Lengths
    """Tokens of a prompt: 100, 50-150, {median: 200, p99: 4000} (heavy-tailed) or {mean: 300}."""
    output: Lengths
    """Tokens of an answer."""
    n: AtLeastOne = 1
    """Answers per request: each takes a slot."""
    service_class: Literal["interactive", "batch"] = msgspec.field(default="interactive", name="class")
    stream: bool = True
    """Whether the client sees the first token when it is there; else everything at the end."""
    pool: str = ""
    """The pool it goes to; the first one if not said."""

    @property
    def core_class(self) -> ServiceClass:
        return ServiceClass.INTERACTIVE if self.service_class == "interactive" else ServiceClass.BATCH


class Team(_Strict, frozen=True, kw_only=True):
    """A team, what it owns of each pool, and its loads."""

    name: str
    share: Share = Share(0)
    """Of the first pool, or of every pool that does not list its own `shares`."""
    loads: list[Load] = []
    alone: bool = False
    """Also run it without the others, to compare its time to first token."""


class Hold(_Strict, frozen=True, kw_only=True):
    """As `hold` in fairshare.yaml."""

    borrow_order: BorrowOrder = BorrowOrder.LEVEL_FAIRSHARE
    batch_every: Count = 10
    recall: bool = True
    recall_waste: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.1
    max_held: AtLeastOne = 1_000_000
    max_held_per_team: AtLeastOne = 1_000_000
    longest_wait: Seconds = Seconds(86400.0)

    def options(self) -> HoldOptions:
        return HoldOptions(
            borrow_order=self.borrow_order,
            batch_every=self.batch_every,
            recall=self.recall,
            recall_waste=self.recall_waste,
            max_held=self.max_held,
            max_held_per_team=self.max_held_per_team,
            longest_wait_seconds=self.longest_wait,
        )


class Engines(_Strict, frozen=True, kw_only=True):
    """The engines of a pool, all alike. A step takes `step` + `token` x tokens in it."""

    count: AtLeastOne = 1
    max_num_seqs: AtLeastOne = 256
    headroom: Annotated[float, msgspec.Meta(ge=1.0)] = 1.0
    """Policies that hold requests back at C get engines with this many times the seats: `max_num_seqs` above C."""
    known_seats: bool = True
    """Whether the gateway is told `max_num_seqs`."""
    kv_tokens: AtLeastOne = 1 << 20
    block_size: AtLeastOne = 16
    max_num_batched_tokens: AtLeastOne = 2048
    max_model_len: AtLeastOne = 16384
    step: Seconds = Seconds(0.010)
    token: Seconds = Seconds(20e-6)

    def config(self, *, with_headroom: bool = False) -> SchedulerConfig:
        """What the engine's scheduler runs with."""
        seats = self.max_num_seqs
        if with_headroom:
            seats = int(seats * self.headroom)
        return SchedulerConfig(
            max_num_seqs=seats,
            num_blocks=self.kv_tokens // self.block_size + 1,
            block_size=self.block_size,
            max_num_batched_tokens=max(self.max_num_batched_tokens, seats),
            max_model_len=min(self.max_model_len, self.kv_tokens // self.block_size * self.block_size),
            step_seconds=self.step,
            token_seconds=self.token,
        )


class PoolPlan(_Strict, frozen=True, kw_only=True):
    """One pool."""

    name: str = "pool"
    capacity: AtLeastOne
    """C, in slots, of all its engines together."""
    half_life: Seconds = Seconds(7 * 86400.0)
    hold: Hold = Hold()
    trim: bool = False
    """Adaptive capacity, as in fairshare.yaml; for the policies that are `hold`."""
    engines: Engines = Engines()
    fallback: str = ""
    shares: dict[str, Share] = {}
    """Team to share, if they differ from what the teams say."""


class Change(_Strict, frozen=True, kw_only=True):
    """Something that happens at a time: a new C, an engine lost for a while, a restart with phantoms."""

    at: Seconds
    pool: str = ""
    capacity: Count | None = None
    lose_engine: int | None = None
    """Number of the engine, from 0: what it runs breaks off; it is back `lasting` later."""
    lasting: Seconds = Seconds(30.0)
    phantoms: dict[str, Count] = {}
    """Team to slots: what a new owner counts after a failover, for `lasting`."""
    usage: dict[str, Annotated[float, msgspec.Meta(ge=0.0)]] = {}
    """Team to decayed usage in cost units, as restored."""


OWNER = "owner"


class Failure(_Strict, frozen=True, kw_only=True):
    """A replica's process is killed; what it held and ran is lost to its clients."""

    at: Seconds
    which: int | Literal["owner"] = OWNER
    """Its number, from 0, or whichever decides for the first pool then."""
    lasting: Seconds = Seconds(30.0)
    """So long until it is there again."""


class Replicas(_Strict, frozen=True, kw_only=True):
    """Several replicas of the gateway, which get requests in turn; for the policies that are `hold`."""

    count: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    link: Seconds = Seconds(0.001)
    """From one replica to another."""
    longest_request: Seconds = Seconds(3600.0)
    """As in fairshare.yaml under `timeouts`: so long what ran at a dead replica counts as possibly running."""
    fail: list[Failure] = []


class TracePlan(_Strict, frozen=True, kw_only=True):
    """A recorded load, split into the teams."""

    file: str
    """A path, beside the scenario file or one of the samples that are shipped."""
    teams: Literal["round-robin", "hash", "client"] = "hash"
    """How its clients (or, without clients, its requests) become teams, unless they have the name of one.

    `client`: there must be no others.
    """
    clients: dict[str, str] = {}
    """Client to team; others by `teams`."""
    only: list[str] = []
    """The teams that it is split into; all teams without loads if not said."""
    speed: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    """2: twice as fast as it was recorded."""
    skip: Seconds = Seconds(0.0)
    """Leave out what came before, on the trace's own clock."""
    service_class: Literal["interactive", "batch"] = msgspec.field(default="interactive", name="class")
    pool: str = ""
    longest_prompt: AtLeastOne = 1 << 30
    """Longer prompts are cut to this."""
    longest_output: AtLeastOne = 1 << 30


class Scenario(_Strict, frozen=True, kw_only=True):
    """A whole scenario."""

    title: str
    about: str = ""
    promise: str = ""
    """What must hold, in one sentence, for the report."""
    duration: Seconds
    warm_up: Seconds = Seconds(0.0)
    """Measures leave this out."""
    window: Seconds = Seconds(1.0)
    """How often service is sampled."""
    seed: int = 1
    round_trip: Seconds = Seconds(0.001)
    """Gateway to engine and back. With it a freed seat is refilled one engine step later."""
    pools: Annotated[list[PoolPlan], msgspec.Meta(min_length=1)]
    teams: Annotated[list[Team], msgspec.Meta(min_length=1)]
    traces: list[TracePlan] = []
    changes: list[Change] = []
    replicas: Replicas | None = None
    """One gateway if not said."""
    policies: list[str] = []
    """What is compared if the command line does not say."""
    short: Seconds = Seconds(0.0)
    """The duration of its short form, for tests."""

    def pool_named(self, name: str) -> PoolPlan:
        return next(pool for pool in self.pools if pool.name == name) if name else self.pools[0]

    def shares_of(self, pool: PoolPlan) -> dict[str, Fraction]:
        """Who owns what of a pool."""
        if pool.shares:
            return {team: Fraction(share) for team, share in pool.shares.items()}
        return {team.name: Fraction(team.share) for team in self.teams}


def load(path: Path) -> Scenario:
    """Read and check a scenario file. Raises `ScenarioError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or type(error).__name__).lower() if isinstance(error, OSError) else "not text"
        raise ScenarioError(f"{path}: cannot be read ({reason}); give a scenario file") from None
    return parse(text, str(path))


def parse(text: str, name: str = "scenario") -> Scenario:
    """As `load`, from text; `name` is what messages call it."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        document: object = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ScenarioError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ScenarioError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    if node is None or document is None:
        raise ScenarioError(f"{name}: is empty; the files in scenarios/ show what belongs here")
    try:
        scenario = msgspec.convert(document, Scenario, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ScenarioError(_explain(str(error), node, name)) from None
    _check(scenario, name)
    return scenario


# --- Reading ------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML whose words stay words: only true, false, null and numbers are anything else; no doubled keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'"{key}" stands twice; remove one', key_node.start_mark
                )
            seen.add(key)
        return cast("dict[Any, Any]", super().construct_mapping(node, deep=deep))


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"true|false", "tf"),
    ("tag:yaml.org,2002:null", r"null|~|", "n~"),
    ("tag:yaml.org,2002:int", r"-?\d+", "-0123456789"),
    ("tag:yaml.org,2002:float", r"-?\d+\.\d+", "-0123456789"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))  # pyright: ignore[reportUnknownMemberType]
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"\Z"), [""])  # pyright: ignore[reportUnknownMemberType]


def _decode(kind: type, value: object) -> object:
    if kind is Seconds:
        return _seconds(value)
    if kind is PerSecond:
        match = _RATE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"must be a rate, written as 3/s or 20/m, found {value!r}")
        return PerSecond(float(match[1]) / _DURATION_SECONDS[match[2]])
    if kind is Share:
        return _share(value)
    if kind is Lengths:
        return parse_lengths(value)
    raise NotImplementedError(kind)


def duration_seconds(text: str) -> float:
    """What 250ms, 30s, 5m, 1h or 7d means. Raises ValueError for anything else."""
    return _seconds(text)


def _seconds(value: object) -> Seconds:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        if value == 0:
            return Seconds(0.0)
        raise ValueError(f"must be a duration, written as 250ms, 30s, 5m, 1h or 7d, found {value!r}")
    return Seconds(float(match[1]) * _DURATION_SECONDS[match[2]])


def _share(value: object) -> Share:
    try:
        # A float is read as the decimal that was written: 0.1 is one tenth.
        share = Share(str(value).replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        share = Share(-1)
    if not 0 <= share <= 1:
        raise ValueError(f"must be a share between 0 and 1, written as 26/32 or 0.5, found {value!r}")
    return share


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.+?)`")
RECORDS: dict[str, type[msgspec.Struct]] = {
    "": Scenario,
    "pools": PoolPlan,
    "hold": Hold,
    "engines": Engines,
    "teams": Team,
    "loads": Load,
    "changes": Change,
    "traces": TracePlan,
    "replicas": Replicas,
    "fail": Failure,
}
"""What stands under a key."""


def _explain(message: str, root: yaml.Node, name: str) -> str:
    """msgspec's message with the line of the file, and for an unknown key the nearest known one."""
    message, _, path = message.partition(" - at `$")
    path = path.rstrip("`")
    node = root
    for part in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
        node = _child(node, part[0] or int(part[1])) or node
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown is not None:
        known = _fields_at(path)
        nearest = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.0)[0]
        node = _child(node, unknown[1], key=True) or node
        message = f'unknown key "{unknown[1]}"; the nearest known one is "{nearest}"'
    elif isinstance(node, yaml.ScalarNode) and message.startswith("Expected "):
        message += f", found {node.value!r}"
    where = path.lstrip(".")
    return f"{name}:{node.start_mark.line + 1}: {f'{where}: ' if where else ''}{message}"


def _child(node: yaml.Node, step: str | int, *, key: bool = False) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if key_node.value == step:
                return key_node if key else value_node
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step]
    return None


def _fields_at(path: str) -> list[str]:
    """The keys that may stand at a path of the file."""
    last = re.findall(r"\.([^.\[]+)", path)
    record = RECORDS.get(last[-1] if last else "", Scenario)
    return [field.encode_name for field in msgspec.structs.fields(record)]


# --- Checking -----------------------------------------------------------------------------------------------------


def _check(scenario: Scenario, name: str) -> None:
    """What types cannot say."""

    def wrong(where: str, message: str) -> ScenarioError:
        return ScenarioError(f"{name}: {where}: {message}")

    if not 0.0 < scenario.duration < float("inf"):
        raise wrong("duration", "must be longer than 0")
    if not 0.0 < scenario.window <= scenario.duration:
        raise wrong("window", f"must be longer than 0 and not longer than the duration ({scenario.duration:g} s)")
    if scenario.warm_up >= scenario.duration:
        raise wrong("warm_up", f"must be shorter than the duration ({scenario.duration:g} s)")
    pools = [pool.name for pool in scenario.pools]
    teams = [team.name for team in scenario.teams]
    for kind, names in (("pools", pools), ("teams", teams)):
        for repeated in sorted({one for one in names if names.count(one) > 1}):
            raise wrong(kind, f'the name "{repeated}" stands twice; names must differ')

    def known(where: str, what: str, found: str, names: list[str]) -> None:
        if found and found not in names:
            others = f"; there is {', '.join(names)}" if names else " here"
            raise wrong(where, f'there is no {what} "{found}"{others}')

    for index, pool in enumerate(scenario.pools):
        where = f"pools[{index}]"
        known(f"{where}.fallback", "pool", pool.fallback, [one for one in pools if one != pool.name])
        way = [pool.name]
        while following := scenario.pool_named(way[-1]).fallback:
            if following in way:
                raise wrong(f"{where}.fallback", f"goes in a circle ({' -> '.join([*way, following])}); leave one out")
            way.append(following)
        for team in pool.shares:
            known(f"{where}.shares", "team", team, teams)
        total = sum(scenario.shares_of(pool).values())
        if total > 1:
            raise wrong(where, f"the shares add up to {float(total):g}; they must not exceed 1")
        if pool.engines.kv_tokens < pool.engines.block_size:
            raise wrong(f"{where}.engines.kv_tokens", f"must hold a block of {pool.engines.block_size} tokens at least")
        try:
            pool.engines.config()
        except ValueError as error:
            raise wrong(f"{where}.engines", str(error)) from None
    for index, team in enumerate(scenario.teams):
        for number, load_plan in enumerate(team.loads):
            where = f"teams[{index}].loads[{number}]"
            known(f"{where}.pool", "pool", load_plan.pool, pools)
            ways = [way for way in ("clients", "rate", "burst") if getattr(load_plan, way)]
            if len(ways) != 1:
                said = " and ".join(ways) or "none"
                raise wrong(where, f"needs exactly one of clients, rate and burst, found {said}")
            if load_plan.prompt.low < 1:
                raise wrong(f"{where}.prompt", "must be 1 token or more")
            if bool(load_plan.on) != bool(load_plan.off):
                raise wrong(where, "on and off belong together: give both or none")
    for index, change in enumerate(scenario.changes):
        where = f"changes[{index}]"
        known(f"{where}.pool", "pool", change.pool, pools)
        engines = scenario.pool_named(change.pool).engines.count
        if change.lose_engine is not None and not 0 <= change.lose_engine < engines:
            raise wrong(f"{where}.lose_engine", f"must be below the number of engines ({engines}), from 0")
        for team in (*change.phantoms, *change.usage):
            known(where, "team", team, teams)
    _check_replicas(scenario, wrong)
    for index, trace in enumerate(scenario.traces):
        for team in (*trace.only, *trace.clients.values()):
            known(f"traces[{index}]", "team", team, teams)


def _check_replicas(scenario: Scenario, wrong: Callable[[str, str], ScenarioError]) -> None:
    replicas = scenario.replicas
    if replicas is None:
        return
    if not 0.0 <= replicas.link <= 0.1:
        raise wrong("replicas.link", f"must be at most 100ms, found {1000 * replicas.link:g}ms")
    for index, failure in enumerate(replicas.fail):
        where = f"replicas.fail[{index}].which"
        if isinstance(failure.which, int) and not 0 <= failure.which < replicas.count:
            raise wrong(where, f"must be below the number of replicas ({replicas.count}), from 0")
    for index, pool in enumerate(scenario.pools):
        if pool.trim:
            raise wrong(f"pools[{index}].trim", "cannot be simulated together with replicas; leave one of them out")
    for index, change in enumerate(scenario.changes):
        if change.phantoms or change.usage:
            raise wrong(
                f"changes[{index}]",
                "phantoms and usage are what replicas find by themselves; leave them out, and let a replica fail",
            )
