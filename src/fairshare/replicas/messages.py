"""What replicas tell each other: version 1 of the protocol (docs/decisions/0007-replicas.md).

A link is ordered and loses nothing while it lives; a new one begins with `Announce` and `Welcome`, which bring both
sides to the same view whatever was lost with the old one. Structs are arrays on the wire: fields are only ever added at
the end, with a default.
"""

from collections.abc import Sequence

import msgspec

from fairshare.core.decisions import RefusalReason, Request
from fairshare.core.priority import ServiceClass, Standing

VERSION = 1

# ---------------------------------------------------------------------- replica → owner


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request arrived at the replica and waits there (`DispatchQueue.submitted`)."""

    id: str
    pool: str
    team: str
    service_class: ServiceClass
    slots: int
    estimated_tokens: int
    body_bytes: int
    recallable: bool
    preferred_instances: Sequence[str]
    state_instance: str | None

    @staticmethod
    def of(request: Request, pool: str) -> "Submitted":
        return Submitted(
            request.id,
            pool,
            request.team,
            request.service_class,
            request.slots,
            request.estimated_tokens,
            request.body_bytes,
            request.recallable,
            request.preferred_instances,
            request.state_instance,
        )

    def request(self, id: str) -> Request:
        """The same for the owner's queue, under the id that it has there."""
        return Request(
            id,
            self.team,
            self.service_class,
            self.slots,
            self.estimated_tokens,
            self.body_bytes,
            self.recallable,
            self.preferred_instances,
            self.state_instance,
        )


class Began(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The client received the first byte of its answer (`DispatchQueue.first_byte`)."""

    id: str


class Released(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A request has ended at its engine; what it consumed is to be charged, once (`DispatchQueue.released`).

    Kept and sent again until the owner says that it is `Saved`.
    """

    number: int
    """1, 2, … of this replica: an owner that has counted up to a number ignores it and those before."""
    id: str
    pool: str
    """Whose capacity it used."""
    team: str
    cost_units: float


class Cancelled(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The client of a request that the replica holds left."""

    id: str


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The engine's connection of a recalled request is closed."""

    id: str


class Kept(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A recall came too late: the client had its first byte already, so the request goes on where it is."""

    grant: "LiveGrant"


class Moved(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A request could not reach its instance and was sent to another (`DispatchQueue.reassigned`)."""

    id: str
    instance_id: str


class LiveGrant(msgspec.Struct, frozen=True, array_like=True):
    """A request that runs at an engine, wherever its standing was decided."""

    request: Submitted
    pool: str
    """Whose capacity it uses: its own pool's, or the fallback's."""
    instance_id: str
    priority: int | None
    standing: Standing
    began: bool


class Announce(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """First on every link: all that this replica has, so that the owner's view of it is exact."""

    replica: str
    """Of one life of one process: a restart is another replica."""
    charges: Sequence[Released]
    """Everything not known to be saved, by number."""
    grants: Sequence[LiveGrant]
    held: Sequence[Submitted]
    """In the order of arrival."""
    at: float = 0.0
    """On the replica's clock; comes back in `Welcome`."""
    borrows: bool = False
    """Slots may be lent to it."""


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Now and then: which requests run, so that a grant that leaked is found."""

    heard: int
    """How many messages of the owner on this link were processed before this was said."""
    running: Sequence[str]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Every second: how long may what the owner says be trusted?"""

    at: float
    """On the replica's clock."""


class Returned(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """A slot that was lent is free: nothing uses it any more, and what used it was charged."""

    id: str
    """Of the request with which it was lent."""


class CalledBack(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The answer to `CallBack`: the team's free slots were `Returned`, those in use end with what uses them."""

    team: str


# ---------------------------------------------------------------------- owner → replica


class PoolShown(msgspec.Struct, frozen=True, array_like=True):
    """What a replica must know of a pool to go on alone for a while."""

    pool: str
    usage: dict[str, float]
    """Team → decayed usage, cost units, now."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The answer to `Announce`: this is the owner."""

    epoch: int
    saved: int
    """All charges of this replica up to this number are saved."""
    replicas: int
    """How many there are, the owner among them."""
    pools: Sequence[PoolShown]
    at: float = 0.0
    trusted_seconds: float = 0.0
    """As in `Trust`."""


class Refresh(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Now and then, the same as in `Welcome`."""

    saved: int
    replicas: int
    pools: Sequence[PoolShown]


class Trust(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """The answer to `Beat`. What arrives before `at + trusted_seconds` was decided while this owner had the right to.

    What arrives later may be older than the next owner, who does not know of it: it is not carried out.
    """

    at: float
    """As the replica said it, on its clock: before the owner read its own."""
    trusted_seconds: float


class Sent(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Send the request to an engine now (`fairshare.core.decisions.Send`)."""

    id: str
    pool: str
    instance_id: str
    priority: int | None
    standing: Standing
    held_seconds: float
    lent: bool = False
    """When it has ended, its slot may serve the team's next request there, under the same right, without being asked
    for. It is in flight, for the owner, until it is `Released` under this id or `Returned`."""


class CallBack(msgspec.Struct, frozen=True, array_like=True, tag=28):
    """No slot that was lent to this team may serve another request. The answer is `CalledBack`."""

    team: str


class Waits(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """The request waits (`fairshare.core.decisions.Held`)."""

    id: str
    team_held: int
    team_in_flight_slots: int
    reserved_slots: int
    pool_in_flight_slots: int
    capacity_slots: int


class Recalled(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """Take the request back from its engine (`fairshare.core.decisions.Recall`)."""

    id: str
    instance_id: str
    wasted_slot_seconds: float


class Denied(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """The request is not served (`fairshare.core.decisions.Refused`)."""

    id: str
    reason: RefusalReason
    found: float
    limit: float
    retry_after_seconds: float


class Resigned(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """This owner decides no more; its lease is free, or soon will be. Look for the next one at once."""

    epoch: int


# ---------------------------------------------------------------------- between any two, for the shells


class Asked(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """A question of a shell (the admin port's, say): the machines do not look into it."""

    number: int
    about: str
    content: bytes


class Told(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """The answer to `Asked` of that number; number 0: told without having been asked."""

    number: int
    about: str
    content: bytes


Message = (
    Submitted
    | Began
    | Released
    | Cancelled
    | Aborted
    | Kept
    | Moved
    | Announce
    | Alive
    | Beat
    | Returned
    | CalledBack
    | Welcome
    | Refresh
    | Sent
    | Waits
    | Recalled
    | Denied
    | Resigned
    | Trust
    | CallBack
)


class Envelope(msgspec.Struct, frozen=True, array_like=True, tag=50):
    """What one side of a session says to the other in one turn, in order."""

    lease: str
    """The group of pools it is about."""
    session: int
    """Numbered by the replica that announces itself: what belongs to an older one is void."""
    to_owner: bool
    messages: Sequence[Message]


OnLink = Envelope | Asked | Told
"""What travels on a peer link."""


class Codec:
    """Version 1: MessagePack arrays."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[OnLink])

    def encode(self, messages: Sequence[OnLink]) -> bytes:
        return self._encoder.encode(messages)

    def decode(self, payload: bytes) -> list[OnLink]:
        """Raises `msgspec.MsgspecError` if they are none of this version."""
        return self._decoder.decode(payload)


class Estate(msgspec.Struct, frozen=True, array_like=True):
    """What an owner saves beside usage, in one transaction with it, for its successor."""

    counted: dict[str, int]
    """Replica → up to which number its charges are in the saved usage."""
    in_flight: dict[str, dict[str, dict[str, int]]]
    """Replica → pool → team → slots that run there."""
    silent_seconds: dict[str, float] = {}
    """Replica that is not heard of → until what it had in flight has ended for certain."""
    trusting_seconds: dict[str, float] = {}
    """Of an owner that gives its lease back before it ends: replica → for how long it may still carry out what that
    owner said, which may be on its way."""
