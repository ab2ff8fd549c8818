"""What a run leaves behind: plain columns, from which the report and the pictures are made."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class TeamOutcome:
    """One team in one pool, over the measured part of a run. Seconds of virtual time."""

    team: str
    share: float
    whole_slots: int
    """floor(share x C) at the start."""
    submitted: int = 0
    finished: int = 0
    failed: int = 0
    """Broken off with their engine or with their replica of the gateway."""
    refused: int = 0
    """Answers 429 or 503; the client tries again later."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    asked_at: array[float] = field(default_factory=lambda: array("d"))
    """When each request that got a first token was submitted first."""
    first_token_seconds: array[float] = field(default_factory=lambda: array("d"))
    """From then to its first token."""
    borrowed: array[int] = field(default_factory=lambda: array("b"))
    """1 if it ran as a borrower."""
    longest_wait_seconds: float = 0.0
    """From submission until it ran, those still waiting at the end too."""
    longest_borrower_wait_seconds: float = 0.0
    returns: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(when, seconds until it held its whole slots) each time its demand rose to them."""
    unfulfilled_returns: int = 0
    """Returns that never led there before the demand was gone or the run ended."""
    evicted: int = 0
    """Times one of its sequences lost its KV blocks."""
    recalled: int = 0


@dataclass(slots=True, eq=False)
class Windows:
    """Samples, one row per window; the columns of teams are in the order of `teams`."""

    teams: list[str]
    ends: array[float] = field(default_factory=lambda: array("d"))
    lengths: array[float] = field(default_factory=lambda: array("d"))
    output_tokens: list[list[float]] = field(default_factory=list[list[float]])
    prompt_tokens: list[list[float]] = field(default_factory=list[list[float]])
    slot_seconds: list[list[float]] = field(default_factory=list[list[float]])
    """Time in which its sequences ran."""
    waiting_seconds: list[list[float]] = field(default_factory=list[list[float]])
    """Time in which at least one of its sequences waited, in the gateway or in an engine."""
    running: list[list[float]] = field(default_factory=list[list[float]])
    """Sequences running at the end of the window."""
    waiting: list[list[float]] = field(default_factory=list[list[float]])
    """Sequences waiting at the end of the window."""
    capacity: array[float] = field(default_factory=lambda: array("d"))
    """Mean C in the window."""


@dataclass(slots=True, eq=False)
class PoolOutcome:
    """One pool."""

    pool: str
    capacity: int
    shares: dict[str, float]
    teams: dict[str, TeamOutcome]
    windows: Windows
    idle_slot_seconds: float = 0.0
    """Slots of C that nothing was sent to while something was held."""
    recalls: int = 0
    recalled_slot_seconds: float = 0.0
    thrown_away_tokens: int = 0
    """Generated and computed for nobody: recalled or broken off."""
    recomputed_tokens: int = 0
    """Computed again after an eviction."""
    evictions: int = 0
    steps: int = 0
    kv_tokens: int = 0
    longest_prompt_tokens: int = 0
    step_seconds: float = 0.0
    """Mean length of an engine's step."""


@dataclass(frozen=True, slots=True)
class Reign:
    """From when on a replica decides for a pool and those that `fallback` joins with it."""

    at: float
    pool: str
    """The first of them by name."""
    replica: str
    """Empty: nobody decides."""


@dataclass(slots=True, eq=False)
class Outcome:
    """One run: a scenario under one policy with one seed."""

    scenario: str
    policy: str
    seed: int
    measured_from: float
    until: float
    pools: list[PoolOutcome]
    requests: int = 0
    wall_seconds: float = 0.0
    reigns: list[Reign] = field(default_factory=list[Reign])
    """Who decided when, where the scenario has replicas."""
    degraded_grants: int = 0
    """Requests that a replica sent without an owner."""
