"""Pool statuses for the tests of what shows them."""

from typing import Any

from fairshare.gateway.status import BudgetStatus, InstanceStatus, PoolStatus, TeamStatus


def team_status(team: str, **fields: Any) -> TeamStatus:
    defaults: dict[str, Any] = {
        "share": 0.5,
        "reserved": 8,
        "in_flight": 0,
        "borrowing": 0,
        "in_flight_tokens": 0,
        "usage": 0.0,
        "level_fairshare": None,
        "rank": 0,
        "phantoms": 0,
        "held": 0,
        "oldest_held_seconds": 0.0,
    }
    return TeamStatus(team=team, **(defaults | fields))


def instance_status(id: str, **fields: Any) -> InstanceStatus:
    defaults: dict[str, Any] = {
        "healthy": True,
        "part": 8,
        "seats": 16,
        "in_flight": 0,
        "running": 0,
        "waiting": 0,
        "kv_usage": 0.0,
        "preemptions": 0,
        "version": None,
    }
    return InstanceStatus(id=id, **(defaults | fields))


def pool_status_of(name: str, **fields: Any) -> PoolStatus:
    defaults: dict[str, Any] = {
        "capacity": 16,
        "dispatch": "hold",
        "in_flight": 0,
        "held": 0,
        "saturated": False,
        "teams": [],
        "configured_capacity": 16,
        "half_life_seconds": 604800.0,
        "fallback": None,
        "models": ["tiny"],
        "cost_unit": "tokens",
        "calibrated": False,
        "turn_slots": 0,
        "turns_taken": 0,
        "recalls": 0,
        "recalled_slot_seconds": 0.0,
        "instances": [],
        "findings": [],
        "finding_details": [],
    }
    return PoolStatus(name=name, **(defaults | fields))


def budget_status(owner: str, **fields: Any) -> BudgetStatus:
    defaults: dict[str, Any] = {
        "model": None,
        "tag": None,
        "period": "month",
        "soft": None,
        "hard": None,
        "used": 0.0,
        "reserved": 0.0,
        "left": None,
        "borrows_only": False,
        "resets_at": None,
    }
    return BudgetStatus(owner=owner, **(defaults | fields))
