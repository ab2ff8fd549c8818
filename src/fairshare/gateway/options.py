"""What a gateway is built from: plain, checked records. `fairshare.config` makes them from fairshare.yaml.

Nothing here reads a file or a clock. Secrets never show in a `repr`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path

from fairshare.core.decisions import HoldOptions, Mode
from fairshare.core.priority import ServiceClass
from fairshare.gateway.kinds import SglangFlags
from fairshare.storage.address import StoreAddress
from fairshare.wire.usage import CostWeights


class EngineKind(StrEnum):
    """Which engine an instance runs; decides how it is asked for its state and told a priority."""

    VLLM = "vllm"

    SGLANG = "sglang"


class Balance(StrEnum):
    """What decides between instances that are nearly equal for a request's team."""

    PREFIX = "prefix"
    """The instance that likely holds the beginning of the prompt in its prefix cache, then the emptiest."""

    LEAST_LOADED = "least_loaded"
    """The emptiest."""


class Level(StrEnum):
    """Which level of the accounts a pool's shares name."""

    ORGANISATION = "organisation"
    TEAM = "team"
    PROJECT = "project"


class Isolation(StrEnum):
    """Who shares the engines' prefix caches."""

    NONE = "none"
    """Everybody in the pool."""

    TEAM = "team"
    """Each team has its own part: nobody can probe what others sent by timing."""


class TokenEstimates(StrEnum):
    """Where the estimate of a prompt's tokens comes from, for a request whose engine's own count never comes."""

    BYTES = "bytes"
    """From the bytes of the body; costs nothing."""

    TOKENIZE = "tokenize"
    """The engine is asked (`/tokenize`) beside each request; nothing waits for its answer."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a port listens."""

    host: str
    """A name, an IPv4 address or an IPv6 address without brackets."""
    port: int
    """0: the operating system chooses."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSpec:
    """What the data port shows to clients, as files in PEM."""

    certificate: Path
    """With the certificates between it and the root, in this order."""
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTlsSpec(TlsSpec):
    """What a replica shows to its peers, and they to it."""

    ca: Path
    """Who signed the certificates of all of them, in PEM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a pool's engines may take."""

    connect_seconds: float = 2.0
    first_byte_seconds: float = 600.0
    """From the end of the request to the first byte of the answer's head."""
    idle_seconds: float = 600.0
    """Between two pieces of an answer. Long: a preempted borrower's stream pauses."""
    longest_request_seconds: float = 3600.0
    """From arrival to the last byte; also how long phantoms last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the data port."""

    max_body_bytes: int = 64 << 20
    max_header_bytes: int = 64 << 10
    header_timeout_seconds: float = 10.0
    """How long a client may take to send a request's head."""
    max_connections: int = 8000
    drain_seconds: float = 25.0
    """How long requests may go on after SIGTERM; below the 30 s that Kubernetes waits by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """One engine process. Its URL is its id."""

    url: str
    """`http://host:port` or `https://host:port` and maybe a path, without a slash at its end."""
    max_num_seqs: int | None = None
    """Its seats, where the operator knows them. None: discovered or learnt."""
    api_key: str | None = field(default=None, repr=False)
    """Sent to the engine as a bearer token."""
    ca_file: Path | None = None
    """Who may have signed the certificate of an `https` engine. None: the system's roots."""
    kind: EngineKind = EngineKind.VLLM
    sglang: SglangFlags = field(default_factory=SglangFlags)
    """How its priorities work, if it is one."""

    @property
    def id(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsSource:
    """Every address of a name is one instance."""

    url: str
    """As an instance's, with the name in the place of its address."""
    template: InstanceSpec
    """What its instances have in common; its url is empty."""

    def __str__(self) -> str:
        return f"the name of {self.url}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SrvSource:
    """Every target of an SRV name is one instance."""

    name: str
    scheme: str
    template: InstanceSpec

    def __str__(self) -> str:
        return f"the SRV name {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """The instances that a file lists; it may change at any time."""

    path: Path
    template: InstanceSpec

    def __str__(self) -> str:
        return f"the file {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSource:
    """Every ready endpoint of a Kubernetes service is one instance."""

    service: str
    namespace: str | None
    """None: where the gateway itself runs."""
    port: str | None
    """Its number or its name; None: the service has one only."""
    template: InstanceSpec

    def __str__(self) -> str:
        return f"the Kubernetes service {self.namespace + '/' if self.namespace else ''}{self.service}"


InstanceSource = DnsSource | SrvSource | FileSource | KubernetesSource
"""Where instances come from that the configuration does not name one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One capacity domain: who owns what of which engines."""

    name: str
    capacity: int
    """C in slots when every configured instance is healthy."""
    half_life_seconds: float
    """0: usage never decays."""
    shares: Mapping[str, Fraction]
    """Team → exact share; at most 1 together."""
    models: Mapping[str, str]
    """What clients call a model → what the engine calls it."""
    instances: tuple[InstanceSpec, ...]
    """Those that are named one by one."""
    sources: tuple[InstanceSource, ...] = ()
    """Where others come from; then `capacity_per_instance` is given."""
    capacity_per_instance: int | None = None
    """C in slots of one instance; None: `capacity` is of those configured together."""
    level: Level = Level.TEAM
    """Whose name `shares` holds, and so what "team" means in this pool."""
    mode: Mode = Mode.HOLD
    balance: Balance = Balance.PREFIX
    token_estimates: TokenEstimates = TokenEstimates.BYTES
    prefix_secret: bytes | None = field(default=None, repr=False)
    """Salts what each team has in the engines' prefix caches; None: teams share what they have in common."""
    fallback: str | None = None
    """The pool whose free room this pool's borrowers may use."""
    hold: HoldOptions = field(default_factory=HoldOptions)
    trim: bool = False
    """Whether an instance's part of C falls while requests wait inside it (`fairshare.core.trim`)."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    cost: CostWeights = field(default_factory=CostWeights)
    calibrated: bool = False
    """Whether `cost` was given; the status page says *not calibrated* without it."""

    def with_instances(self, instances: Sequence[InstanceSpec]) -> "PoolSpec":
        """The same pool with these instances; its capacity follows their number."""
        if self.capacity_per_instance is not None:
            capacity = self.capacity_per_instance * len(instances)
        else:
            capacity = self.capacity * len(instances) // len(self.instances)
        return replace(self, instances=tuple(instances), capacity=capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedPool:
    """A pool whose engines another program calls (`fairshare.integrations`)."""

    name: str
    capacity: int
    """C in slots, of one process: processes do not know of each other."""
    shares: Mapping[str, Fraction]
    models: tuple[str, ...] = ()
    """What clients call the models that its engines serve."""
    half_life_seconds: float = 7 * 86400.0
    mode: Mode = Mode.HOLD
    hold: HoldOptions = field(default_factory=HoldOptions)
    cost: CostWeights = field(default_factory=CostWeights)
    longest_request_seconds: float = 3600.0
    """A request that nobody released by then is released, so that no fault around it keeps its slots for ever."""


class TeamFrom(StrEnum):
    """Which property of LiteLLM's key names the team that owns a share."""

    TEAM_ALIAS = "team_alias"
    TEAM_ID = "team_id"
    KEY_ALIAS = "key_alias"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSpec:
    """The section `fairshare_settings` of another program's configuration."""

    pools: tuple[EmbeddedPool, ...]
    team_from: TeamFrom = TeamFrom.TEAM_ALIAS


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpec:
    """A client's key, known by its SHA-256 only."""

    sha256: bytes
    """32 bytes."""
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    """The most it may ask for: an interactive key may ask for batch, a batch key never gets interactive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSpec:
    """Who owns shares, and the keys that speak for it."""

    name: str
    keys: tuple[KeySpec, ...] = ()
    models: frozenset[str] | None = None
    """Client model names that it may use; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSpec:
    """The admin port."""

    address: Address
    key: str | None = field(default=None, repr=False)
    """Needed beyond loopback for all but /healthz and /readyz."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Where accounts are kept, and for how long each request's record is."""

    address: StoreAddress
    keep_seconds: float = 400 * 86400.0
    """Whole months whose end is this long ago are replaced by their sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSpec:
    """Who is told."""

    url: str
    """`https://host/path` or, inside a site, `http://...`."""
    secret: str = field(repr=False)
    """Signs what is sent."""
    allow_internal: bool = False
    """Whether it may be in a private network or on this machine. Link-local and metadata addresses never may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLogSpec:
    """Where a line for each finished request goes."""

    path: Path | None
    """None: standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSpec:
    """Where traces go."""

    endpoint: str
    """OTLP over HTTP, with its path."""
    sample: float = 1.0
    """The part of the traces that begin here that is sent, 0 to 1; of others the client decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasSpec:
    """This process shares its pools with others, which the store and the peer link join."""

    listen: Address
    """Where its peers reach it."""
    advertise: str | None = None
    """What they are told instead, as `host:port`; None: where it listens."""
    secret: bytes = field(repr=False)
    """What all of them know, and nobody else."""
    machines: int = 2
    """How many share the pools: what one that has met no owner yet goes by when it must decide alone."""
    tls: PeerTlsSpec | None = None
    """None: the peer link is authenticated, but can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySpec:
    """Everything that one gateway process serves."""

    listen: Address
    admin: AdminSpec
    pools: tuple[PoolSpec, ...]
    teams: tuple[TeamSpec, ...] = ()
    tls: TlsSpec | None = None
    """None: the data port speaks plain HTTP."""
    limits: Limits = field(default_factory=Limits)
    store: StoreSpec | None = None
    """None: nothing is kept over a restart, and keys are those of `teams` only."""
    notify: WebhookSpec | None = None
    """Who is told of budgets; None: the log only."""
    replicas: ReplicasSpec | None = None
    """None: no other machine shares its pools."""
    access_log: AccessLogSpec | None = None
    """None: none is written."""
    tracing: TracingSpec | None = None
    """None: a client's trace context is passed on as it is."""
