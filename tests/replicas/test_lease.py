"""Who may decide, and until when."""

import math

import pytest

from fairshare.replicas.lease import Call, CallKind, Follows, Keeper, Lease, LeaseOptions, Lost, Role, Won, groups

OPTIONS = LeaseOptions(lease_seconds=5.0, renew_every_seconds=1.0, margin_seconds=0.5, clock_drift=0.01)
ACQUIRE, RENEW = Call(CallKind.ACQUIRE, 0), Call(CallKind.RENEW, 1)


def owner() -> Keeper:
    """It asked at 0 and was answered at 1."""
    keeper = Keeper(OPTIONS, replica="me")
    assert keeper.next_call(0.0) == ACQUIRE
    assert keeper.answered(ACQUIRE, 0.0, Lease(1, "me", "here", 4.0), 1.0) == [Won(1)]
    return keeper


def test_an_owner_decides_from_when_it_asked_less_drift_and_margin() -> None:
    keeper = owner()
    assert keeper.decides(4.44)
    assert not keeper.decides(4.46)
    assert keeper.decides_until == pytest.approx(5.0 * 0.99 - 0.5)


def test_a_renewal_counts_from_when_it_was_sent_too() -> None:
    keeper = owner()
    assert keeper.next_call(1.5) == RENEW
    assert keeper.answered(RENEW, 1.5, Lease(1, "me", "here", 3.0), 3.5) == []
    assert keeper.decides_until == pytest.approx(1.5 + 4.45)


def test_an_owner_that_could_not_renew_in_time_has_lost() -> None:
    keeper = owner()
    assert keeper.next_call(1.5) == RENEW
    assert keeper.answered(RENEW, 1.5, None, 3.5) == []
    (lost,) = keeper.tick(4.45)
    assert isinstance(lost, Lost)
    assert keeper.role is Role.FOLLOWER


def test_an_answer_that_comes_too_late_does_not_make_an_owner() -> None:
    keeper = Keeper(OPTIONS, replica="me")
    assert keeper.next_call(0.0) == ACQUIRE
    won, lost = keeper.answered(ACQUIRE, 0.0, Lease(1, "me", "here", 0.1), 4.9)
    assert isinstance(won, Won)
    assert isinstance(lost, Lost)
    assert not keeper.decides(4.9)


def test_an_owner_of_an_old_epoch_has_lost_when_it_hears_of_the_new_one() -> None:
    keeper = owner()
    assert keeper.next_call(1.5) == RENEW
    lost, follows = keeper.answered(RENEW, 1.5, Lease(2, "other", "there", 5.0), 1.6)
    assert isinstance(lost, Lost)
    assert follows == Follows(2, "other", "there")


def test_one_call_is_made_at_a_time() -> None:
    keeper = owner()
    assert keeper.next_call(1.5) == RENEW
    assert keeper.next_call(4.0) is None


def test_a_replica_that_is_going_gives_back_and_does_not_ask_again_while_another_owns() -> None:
    keeper = owner()
    (lost,) = keeper.resign(2.0)
    assert isinstance(lost, Lost)
    release = keeper.next_call(2.0)
    assert release == Call(CallKind.RELEASE, 1)
    keeper.answered(release, 2.0, Lease(1, "me", "here", 0.0), 2.1)
    assert keeper.has_released
    look = keeper.next_call(3.0)
    assert look is not None
    assert look.kind is CallKind.LOOK
    keeper.answered(look, 3.0, Lease(2, "other", "there", 5.0), 3.1)
    assert keeper.role is Role.RESIGNED


def test_a_lease_that_is_too_short_to_renew_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="a lease of 2 s is too short"):
        LeaseOptions(lease_seconds=2.0, renew_every_seconds=1.0)


def test_pools_that_fallbacks_join_have_one_lease_named_after_the_first() -> None:
    assert groups({"c": None, "a": "b", "b": None, "d": "b"}) == {"a": ("a", "b", "d"), "c": ("c",)}


def test_a_keeper_that_waits_for_an_answer_is_due_for_nothing() -> None:
    keeper = Keeper(OPTIONS, replica="me")
    keeper.next_call(0.0)
    assert keeper.next_due() == math.inf
