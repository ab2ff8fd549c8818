"""Who may change what. Pure.

The site is a tree: organisation → team → project → key. A role reaches one node and all below it; without a node, the
whole site.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fairshare.errors import CallerError


class Role(StrEnum):
    """What an operator may do within its reach."""

    ADMIN = "admin"
    """Everything, but for the limits and budgets of the node that it reaches itself: those are set from above."""

    MEMBER = "member"
    """See, and make, rotate and revoke keys."""

    VIEWER = "viewer"
    """See."""


class Act(StrEnum):
    """What somebody wants to do with a node."""

    SEE = "see"
    KEYS = "make or change keys of"
    INSIDE = "change what is in"
    FROM_ABOVE = "change the limits, budgets or existence of"


class Forbidden(CallerError):
    """The actor's role does not reach this, or does not allow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Somebody who uses the admin API or the command line."""

    name: str
    role: Role = Role.ADMIN
    node_id: int | None = None
    """What the role reaches; None: the whole site."""


def check(actor: Actor, act: Act, node_id: int | None, parents: Mapping[int, int | None]) -> None:
    """Whether somebody may do something with a node (None: the site itself).

    `parents`: every node's parent. Raises `Forbidden`.
    """
    if allowed(actor, act, node_id, parents):
        return
    reach = "its own part of the site" if actor.node_id is not None else "the site"
    raise Forbidden(f"{actor.name} is {actor.role} of {reach} and may not {act.value} this")


def allowed(actor: Actor, act: Act, node_id: int | None, parents: Mapping[int, int | None]) -> bool:
    """As `check`, as an answer."""
    chain: list[int | None] = []
    at = node_id
    while at is not None:
        chain.append(at)
        at = parents.get(at)
    chain.append(None)
    if actor.node_id not in chain:
        return False
    match act:
        case Act.SEE:
            return True
        case Act.KEYS:
            return actor.role in (Role.ADMIN, Role.MEMBER)
        case Act.INSIDE:
            return actor.role is Role.ADMIN
        case Act.FROM_ABOVE:
            return actor.role is Role.ADMIN and (actor.node_id is None or actor.node_id != node_id)
