"""fairshare decides the vLLM priority of every request, so that a shared GPU pool is a reservation with borrowing.

These are all of the library's public names; the gateway (`fairshare serve`) is built on them.
"""

from fairshare.core.apportion import apportion
from fairshare.core.pool import Grant, Pool, TeamStat
from fairshare.core.priority import BORROW_BASE, MAX_RANK, RANK_STEP, WITHIN_SHARE_BASE, ServiceClass

__all__ = [
    "BORROW_BASE",
    "MAX_RANK",
    "RANK_STEP",
    "WITHIN_SHARE_BASE",
    "Grant",
    "Pool",
    "ServiceClass",
    "TeamStat",
    "apportion",
]
