"""A service's endpoints are followed at a fake API server that speaks the list and watch protocol, over sockets."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare.gateway.discovery.endpoints import Endpoints, EndpointSliceList, PortUnclear, WatchEvent
from fairshare.gateway.discovery.kubernetes import WATCH_SECONDS, KubernetesFollower
from fairshare.gateway.options import InstanceSpec, KubernetesSource
from gateway.discovery.api_server import ApiServer, endpoint_slice
from gateway.discovery.hearing import Heard, following, run

SOURCE = KubernetesSource(service="vllm", namespace=None, port=None, template=InstanceSpec(url="", api_key="secret"))


def follower(server: ApiServer, **more: Any) -> Callable[[Heard], KubernetesFollower]:
    now = iter(range(0, 1_000_000, 100))  # whatever happens lasts long enough not to be hasty
    options: dict[str, Any] = {"config": server.config, "clock": lambda: next(now), "spread": lambda: 0.0} | more
    return lambda heard: KubernetesFollower(SOURCE, sleep=heard.sleep, **options)


def urls(*addresses: str) -> list[str]:
    return [f"http://{address}:8000" for address in addresses]


def test_ready_endpoints_of_the_service_are_instances_and_changes_are_seen_as_they_happen() -> None:
    async def scenario() -> None:
        async with ApiServer() as server:
            await server.put(endpoint_slice("a", "10.0.0.1", "10.0.0.2!"))
            await server.put(endpoint_slice("other", "10.5.5.5", service="else"))
            async with following(follower(server)) as heard:
                await server.watched(1)
                await heard.next(2)
                assert heard.said == [urls("10.0.0.1")] * 2, "from the list, and again when the watch stands"
                await server.put(endpoint_slice("a", "10.0.0.1", "10.0.0.2"))
                await heard.next(3)
                await server.put(endpoint_slice("b", "10.0.0.3"))
                await heard.next(4)
                await server.put(endpoint_slice("a", "10.0.0.1~", "10.0.0.2"))
                await heard.next(5)
                await server.put(endpoint_slice("other", "10.5.5.6", service="else"))
                await server.delete("b")
                await heard.next(6)
                assert heard.said[2:] == [
                    urls("10.0.0.1", "10.0.0.2"),
                    urls("10.0.0.1", "10.0.0.2", "10.0.0.3"),
                    urls("10.0.0.2", "10.0.0.3"),
                    urls("10.0.0.2"),
                ]
                assert server.lists == 1
                assert server.asked[1] == {
                    "labelSelector": "kubernetes.io/service-name=vllm",
                    "watch": "true",
                    "allowWatchBookmarks": "true",
                    "resourceVersion": "102",
                    "timeoutSeconds": str(WATCH_SECONDS),
                }

    run(scenario)


def test_a_broken_watch_goes_on_where_it_broke_and_nothing_between_is_lost() -> None:
    async def scenario() -> None:
        async with ApiServer() as server:
            await server.put(endpoint_slice("a", "10.0.0.1"))
            async with following(follower(server)) as heard:
                await heard.next(2)
                server.cut()
                await heard.slept(1)
                await server.put(endpoint_slice("a", "10.0.0.2"))
                await server.put(endpoint_slice("b", "10.0.0.3"))
                heard.wake()
                await heard.next(6)
                assert "the API server does not answer" in str(heard.said[2])
                assert heard.said[3:] == [urls("10.0.0.1"), urls("10.0.0.2"), urls("10.0.0.2", "10.0.0.3")]
                assert server.lists == 1
                assert server.asked[-1]["resourceVersion"] == "101"

    run(scenario)


def test_half_a_line_is_never_taken_for_a_change() -> None:
    async def scenario() -> None:
        async with ApiServer() as server:
            await server.put(endpoint_slice("a", "10.0.0.1"))
            async with following(follower(server)) as heard:
                await heard.next(2)
                await server.cut_inside_a_line()
                await heard.slept(1)
                heard.wake()
                await server.watched(2)
                await heard.next(4)
                assert [said for said in heard.said if isinstance(said, list)] == [urls("10.0.0.1")] * 3
                assert server.lists == 1

    run(scenario)


def test_lines_that_come_in_small_pieces_are_read_whole() -> None:
    async def scenario() -> None:
        async with ApiServer() as server:
            server.chunk_bytes = 7
            async with following(follower(server)) as heard:
                await heard.next(2)
                await server.put(endpoint_slice("a", *(f"10.0.1.{number}" for number in range(50))))
                await heard.next(3)
                assert heard.said[2] == urls(*(f"10.0.1.{number}" for number in range(50)))

    run(scenario)


def test_a_bookmark_moves_the_version_and_nothing_else() -> None:
    async def scenario() -> None:
        async with ApiServer() as server:
            await server.put(endpoint_slice("a", "10.0.0.1"))
            async with following(follower(server)) as heard:
                await heard.next(2)
                await server.bookmark()
                await server.put(endpoint_slice("b", "10.0.0.2"))
                await heard.next(3)
                assert heard.said[2] == urls("10.0.0.1", "10.0.0.2")
                await server.bookmark()
                server.ends_watches = True
                await server.bookmark()
                await server.watched(2)
                assert int(server.asked[-1]["resourceVersion"]) >= 109
                assert server.lists == 1

    run(scenario)


def test_a_version_that_is_forgotten_is_listed_anew_at_once_whether_the_stream_says_so_or_the_answer() -> None:
    async def scenario() -> None:
        async with ApiServer() as server:
            await server.put(endpoint_slice("a", "10.0.0.1"))
            async with following(follower(server)) as heard:
                await heard.next(2)
                server.slices["a"] = endpoint_slice("a", "10.0.0.2")  # nobody is told: it was forgotten
                await server.forget()
                await server.watched(2)
                await heard.next(4)
                assert heard.said[2:] == [urls("10.0.0.2")] * 2
                assert heard.sleeps == []
                server.cut()
                await heard.slept(1)
                server.slices["a"] = endpoint_slice("a", "10.0.0.3")
                server.version += 1
                server.oldest = server.version
                heard.wake()
                await heard.slept(2)
                heard.wake()
                await heard.next(8)
                assert [said for said in heard.said[4:] if isinstance(said, list)] == [urls("10.0.0.3")] * 2
                assert server.lists == 3

    run(scenario)


def test_errors_are_told_with_what_the_server_says_and_pauses_grow_or_last_as_long_as_it_asks() -> None:
    async def scenario() -> None:
        async with ApiServer() as server:
            server.refuse = [(403, {}), (500, {}), (429, {"Retry-After": "17"})]
            steady: dict[str, Any] = {"clock": lambda: 0.0}
            async with following(follower(server, **steady)) as heard:
                for times in (1, 2, 3):
                    await heard.slept(times)
                    heard.wake()
                await heard.next(5)
                assert heard.said == [
                    "the API server answers 403: status 403",
                    "the API server answers 500: status 500",
                    "the API server answers 429: status 429",
                    [],
                    [],
                ]
                assert heard.sleeps[:3] == [1.0, 2.0, 17.0]
                await server.error(500, "etcd is gone")
                await heard.slept(4)
                assert heard.said[5] == "the API server answers 500: etcd is gone"

    run(scenario)


def test_a_server_that_ends_every_watch_at_once_is_not_stormed() -> None:
    async def scenario() -> None:
        async with ApiServer() as server:
            server.ends_watches = True
            steady: dict[str, Any] = {"clock": lambda: 0.0}
            async with following(follower(server, **steady)) as heard:
                for times in range(1, 5):
                    await heard.slept(times)
                    heard.wake()
                await heard.slept(5)
                assert heard.sleeps == [1.0] * 5
                assert len(server.asked) == 6

    run(scenario)


def test_without_credentials_or_with_wrong_ones_it_says_so() -> None:
    async def scenario() -> None:
        async with ApiServer() as server:
            async with following(follower(server, config=lambda: server.config("another"))) as heard:
                await heard.next(1)
                assert heard.said == ["the API server answers 401: status 401"]
            async with following(follower(server, config=lambda: None)) as heard:
                await heard.next(1)
                assert "no API server is configured" in str(heard.said[0])

    run(scenario)


def test_a_service_with_another_port_is_told_and_followed_on() -> None:
    async def scenario() -> None:
        async with ApiServer() as server:
            two = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}]
            await server.put(endpoint_slice("a", "10.0.0.1", ports=two))
            async with following(follower(server)) as heard:
                await heard.next(2)
                assert "it has http (8000), metrics (9000)" in str(heard.said[1])
                await server.put(endpoint_slice("a", "10.0.0.1"))
                await heard.next(3)
                assert heard.said[2] == urls("10.0.0.1")

    run(scenario)


# --- the endpoints alone ------------------------------------------------------------------------------------------


def endpoints(port: str | None, *slices: dict[str, Any]) -> list[str]:
    known = Endpoints(KubernetesSource(service="s", namespace=None, port=port, template=InstanceSpec(url="")))
    known.listed(msgspec.convert({"metadata": {}, "items": list(slices)}, EndpointSliceList))
    return [instance.url for instance in known.instances()]


def test_ports_are_found_by_name_or_number_in_each_slice() -> None:
    old = endpoint_slice("a", "10.0.0.1", ports=[{"name": "http", "port": 8000}, {"name": "m", "port": 9}])
    new = endpoint_slice("b", "10.0.0.2", ports=[{"name": "http", "port": 8001}])
    assert endpoints("http", old, new) == ["http://10.0.0.1:8000", "http://10.0.0.2:8001"]
    assert endpoints("9", old) == ["http://10.0.0.1:9"]
    assert endpoints(None, new) == ["http://10.0.0.2:8001"]
    with pytest.raises(PortUnclear, match="no port grpc; it has http"):
        endpoints("grpc", old)


def test_a_pod_with_addresses_of_both_families_counts_once_and_conditions_that_are_unknown_count_as_ready() -> None:
    four = endpoint_slice("a", endpoints=[{"addresses": ["10.0.0.1"], "conditions": {}}])
    six = endpoint_slice("b", endpoints=[{"addresses": ["fd00::1"]}], addressType="IPv6")
    assert endpoints(None, four, six) == ["http://10.0.0.1:8000"]
    assert endpoints(None, six) == ["http://[fd00::1]:8000"]
    assert endpoints(None, endpoint_slice("c", endpoints=None)) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "delete"]), st.sampled_from("abc"), st.sets(st.sampled_from("123"))),
        max_size=20,
    ),
    st.integers(0, 20),
)
def test_a_list_and_its_changes_say_the_same_as_a_list_later(changes: list[Any], listed_after: int) -> None:
    truth: dict[str, Any] = {}
    followed = Endpoints(SOURCE)
    for number, (kind, name, hosts) in enumerate(changes):
        if number == listed_after:
            followed.listed(msgspec.convert({"metadata": {}, "items": list(truth.values())}, EndpointSliceList))
        each = endpoint_slice(name, *(f"10.0.0.{host}" for host in sorted(hosts)))
        event = "DELETED" if kind == "delete" else "MODIFIED" if name in truth else "ADDED"
        truth.pop(name, None)
        if kind == "put":
            truth[name] = each
        followed.changed(WatchEvent(event, msgspec.Raw(msgspec.json.encode(each))))
    fresh = Endpoints(SOURCE)
    fresh.listed(msgspec.convert({"metadata": {}, "items": list(truth.values())}, EndpointSliceList))
    assert {each.url for each in followed.instances()} == {each.url for each in fresh.instances()}
