"""Why a request waited or borrowed, in one sentence on its answer (`x-fairshare-explain`).

On the hot path for requests that waited or borrowed, so it formats once and looks nothing up. Names are not in it: a
team's name may hold what a header cannot, and the client knows its own team.
"""

from fairshare.core.decisions import Held, Send
from fairshare.core.priority import BORROW_BASE, RANK_STEP, Standing


def explained(send: Send, held: Held | None, *, recalls: int) -> bytes:
    """One sentence in ASCII; empty: it neither waited nor borrowed."""
    borrows = send.standing is Standing.BORROWING
    if held is None:
        if not borrows and not recalls:
            return b""
        waited = b"did not wait on arrival"
    else:
        waited = (
            b"waited %d ms: on arrival its team had %d slots in flight and owns %d, %d of the pool's %d were taken, "
            % (
                round(send.held_seconds * 1000),
                held.team_in_flight_slots,
                held.reserved_slots,
                held.pool_in_flight_slots,
                held.capacity_slots,
            )
            + b"and %d of its team's requests waited before it" % (held.team_held - 1)
        )
    if recalls:
        waited += b"; it was taken back %d times for owners" % recalls
    if not borrows:
        return waited + b"; it runs within its team's share"
    if send.priority is None:
        return waited + b"; it is beyond its team's share"
    ahead = (send.priority - BORROW_BASE) // RANK_STEP
    return waited + b"; it runs on idle capacity with rank %d of 0 to 9 (0: nobody was ahead)" % ahead


def refused_after_waiting(held: Held) -> str:
    """What is added to the message of a request that is refused after it waited."""
    return (
        f" On arrival its team had {held.team_in_flight_slots} slots in flight and owns {held.reserved_slots}, "
        f"{held.pool_in_flight_slots} of the pool's {held.capacity_slots} were taken, and {held.team_held - 1} of its "
        "team's requests waited before it."
    )
