"""Who is asking: a client's key, and the team it speaks for.

A key is `fs-` and 256 random bits in url-safe base64. Only its SHA-256 is kept anywhere: with that much
randomness a plain hash cannot be searched, and a table lookup by hash tells a guesser nothing by its timing.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fairshare.core.priority import ServiceClass
from fairshare.gateway.options import Level, TeamSpec

_TEAM = Level.TEAM

KEY_PREFIX = "fs-"
KEY_RANDOM_BYTES = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """What a valid key stands for."""

    key_id: str
    """The first 12 hex digits of the key's SHA-256: names the key in records without giving it away."""
    team: str
    service_class: ServiceClass
    """The most the key may ask for."""
    models: frozenset[str] | None = None
    """Client model names it may use; None: all."""
    organisation: str = ""
    project: str = ""
    tag: str = ""
    owners: tuple[str, ...] = ()
    """Whose limits and budgets bound it, as `team:search`, from the key up."""

    def team_at(self, level: Level) -> str:
        """Whom a pool counts it for; its team, where it has nothing at that level."""
        if level is _TEAM:
            return self.team
        return (self.organisation if level is Level.ORGANISATION else self.project) or self.team


class Directory(Protocol):
    """Finds who a key belongs to."""

    def find(self, sha256: bytes) -> Identity | None:
        """The identity behind a key's SHA-256 (32 bytes), or None: no such key."""
        ...


class StaticDirectory:
    """The keys of the configuration; `replace` switches all of them at once."""

    def __init__(self, identities: Mapping[bytes, Identity] | None = None) -> None:
        self._identities = dict(identities or {})

    @classmethod
    def of(cls, teams: Iterable[TeamSpec]) -> "StaticDirectory":
        """The directory of configured teams."""
        return cls(identities_of(teams))

    def find(self, sha256: bytes) -> Identity | None:
        return self._identities.get(sha256)

    def replace(self, identities: Mapping[bytes, Identity]) -> None:
        """From now on these keys are valid and no others. Requests already admitted go on."""
        self._identities = dict(identities)


def identities_of(teams: Iterable[TeamSpec]) -> dict[bytes, Identity]:
    """Every key of the teams, by its SHA-256."""
    return {
        key.sha256: Identity(
            key_id=key.sha256.hex()[:12], team=team.name, service_class=key.service_class, models=team.models
        )
        for team in teams
        for key in team.keys
    }


def hash_key(key: str) -> bytes:
    """SHA-256 of a key as a client sends it (32 bytes)."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_key(random_bytes: Callable[[int], bytes]) -> str:
    """A new key: `fs-` and 43 url-safe characters. `random_bytes` must be fit for secrets (`secrets.token_bytes`)."""
    return KEY_PREFIX + base64.urlsafe_b64encode(random_bytes(KEY_RANDOM_BYTES)).rstrip(b"=").decode("ascii")
