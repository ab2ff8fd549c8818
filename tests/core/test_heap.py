"""The keyed heap, by hand and against a dictionary that is searched from end to end."""

from hypothesis import given
from hypothesis import strategies as st

from fairshare.core.heap import KeyedHeap


def test_the_smallest_priority_comes_first() -> None:
    heap: KeyedHeap[float] = KeyedHeap()
    heap.set("late", 3.0)
    heap.set("early", 1.0)
    assert (heap.peek(), heap.first_priority(), len(heap.priorities)) == ("early", 1.0, 2)


def test_equal_priorities_come_in_the_order_of_names() -> None:
    heap: KeyedHeap[float] = KeyedHeap()
    for name in ("b", "a", "c"):
        heap.set(name, 1.0)
    assert heap.peek() == "a"


def test_a_name_moves_when_its_priority_changes() -> None:
    heap: KeyedHeap[float] = KeyedHeap()
    heap.set("a", 1.0)
    heap.set("b", 2.0)
    heap.set("a", 3.0)
    assert heap.peek() == "b"
    heap.set("a", 1.0)
    assert heap.peek() == "a"


def test_what_was_taken_out_does_not_come_back() -> None:
    heap: KeyedHeap[float] = KeyedHeap()
    heap.set("a", 1.0)
    heap.discard("a")
    heap.discard("never there")
    assert (heap.peek(), heap.first_priority(), "a" in heap.priorities, len(heap.priorities)) == (None, None, False, 0)
    heap.set("a", 5.0)
    assert heap.first_priority() == 5.0


def test_a_churn_of_names_and_priorities_leaves_nothing_behind() -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    heap.set("stays", -1)
    for number in range(10_000):
        heap.set(f"name {number}", number)
        heap.set("moves", -number)
        heap.discard(f"name {number}")
    assert len(heap.priorities) == 2
    assert len(heap._heap) < 20  # pyright: ignore[reportPrivateUsage]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.sampled_from("abcdefgh"), st.integers(0, 5)),
            st.tuples(st.just("discard"), st.sampled_from("abcdefgh"), st.just(0)),
            st.tuples(st.just("clear"), st.just(""), st.just(0)),
        ),
        max_size=80,
    )
)
def test_it_is_a_dictionary_of_which_one_may_ask_the_least(steps: list[tuple[str, str, int]]) -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    naive: dict[str, int] = {}
    for what, name, priority in steps:
        if what == "set":
            heap.set(name, priority)
            naive[name] = priority
        elif what == "discard":
            heap.discard(name)
            naive.pop(name, None)
        else:
            heap.clear()
            naive.clear()
        least = min(naive, key=lambda known: (naive[known], known), default=None)
        assert heap.peek() == least
        assert heap.first_priority() == (None if least is None else naive[least])
        assert len(heap.priorities) == len(naive)
        assert all((known in heap.priorities) == (known in naive) for known in "abcdefgh")
