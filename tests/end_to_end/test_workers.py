"""`fairshare serve --workers`: real processes that share a pool, while they are killed, stopped and replaced."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, started
from end_to_end.sharing import Site, clients_of, free_ports, load, owner, site, workers


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with started(lambda: EngineProcess("--max-num-seqs", "16", "--step-ms", "5")) as engine:
        yield engine


def serving(at: Site) -> "GatewayProcess":
    return GatewayProcess(at.config, workers=2)


def test_two_workers_keep_one_promise_and_are_shown_as_one_gateway(tmp_path: Path, engine: EngineProcess) -> None:
    here = site(tmp_path, engine)
    with started(lambda: serving(here)) as gateway:
        with (
            load([gateway.url], here.keys["search"], clients=12) as flood,
            load([gateway.url], here.keys["ads"], clients=3) as modest,
        ):
            most = 0
            deadline = time.monotonic() + 3.0
            while time.monotonic() < deadline:
                most = max(most, int(engine.gauge("vllm:num_requests_running")))
            shown = gateway.pool()
            both = [clients_of(pid, gateway.url) for pid in workers(gateway)]
        # C is 8 for both together; an owner within its share may go at once, above it.
        assert most <= 8 + 4
        assert shown["in_flight"] <= 8 + 4
        assert all(both), f"the operating system gave every connection to one worker: {both}"
        assert not flood.failures + modest.failures
        done = flood.completed + modest.completed
        assert gateway.metric("fairshare_requests_total{") == done
        eventually(lambda: gateway.pool()["in_flight"] == 0 and gateway.pool()["held"] == 0, "all counts are back at 0")
        assert gateway.metric("fairshare_owner") == 1
        assert gateway.metric("fairshare_degraded_requests_total") == 0
        here.config.write_text(here.config.read_text().replace("capacity: 8", "capacity: 6"))
        gateway.reload()
        eventually(lambda: gateway.pool()["capacity"] == 6, "the owner has the new capacity")
        assert gateway.team("search")["reserved"] == 3
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0


def test_of_a_worker_that_is_killed_only_its_own_requests_fail_and_the_promise_holds_again(
    tmp_path: Path, engine: EngineProcess
) -> None:
    here = site(tmp_path, engine, longest_request="1h")
    with started(lambda: serving(here)) as gateway:
        with load([gateway.url], here.keys["search"], clients=10) as flood:
            eventually(lambda: flood.completed > 10, "load")
            killed, epoch = owner(gateway), gateway.pool()["replication"]["epoch"]
            os.kill(killed, signal.SIGSTOP)  # so that it takes no other connection until it is dead
            on_it = clients_of(killed, gateway.url)
            killed_at = time.monotonic()
            os.kill(killed, signal.SIGKILL)

            def owned_again() -> bool:
                replication = gateway.pool()["replication"]
                return replication["role"] == "owner" and replication["epoch"] > epoch

            eventually(owned_again, "another owner")
            owned_after = time.monotonic() - killed_at
            eventually(lambda: gateway.metric("fairshare_workers") == 2, "another worker")
            before = flood.completed
            eventually(lambda: flood.completed > before + 10, "load after it")
        assert len(flood.failures) <= on_it, flood.failures
        assert all(at - killed_at < 2.0 for at, _ in flood.failures), flood.failures
        # A lease lasts 5 s; then the other takes it, reads what was saved, and hears of the others.
        assert owned_after < 8.0
        print(f"owned again after {owned_after:.1f} s; {len(flood.failures)} of {on_it} connections failed")
        assert gateway.metric("fairshare_worker_deaths_total") == 1
        with load([gateway.url], here.keys["ads"], clients=4) as owned:
            eventually(lambda: owned.completed > 8, "the other team's share")
        assert not owned.failures
        eventually(lambda: gateway.pool()["in_flight"] == 0, "all counts are back at 0")
        # The longest request would take far longer than this test.
        eventually(lambda: gateway.pool()["replication"]["phantom_slots"] == 0, "the dead worker's slots are free")


def test_workers_are_replaced_without_a_failed_request_and_without_degraded_time(
    tmp_path: Path, engine: EngineProcess
) -> None:
    # As one machine of several: its workers listen for peers on ports in a row.
    (tmp_path / "peers.key").write_text("0123456789abcdef" * 4)
    (tmp_path / "peers.key").chmod(0o600)
    listen = f"127.0.0.1:{free_ports(3)}"
    here = site(tmp_path, engine, more=f"replicas: {{listen: '{listen}', secret_file: peers.key, machines: 1}}")
    with started(lambda: serving(here)) as gateway:
        with (
            load([gateway.url], here.keys["search"], clients=6) as flood,
            load([gateway.url], here.keys["search"], clients=6, keep_alive=True) as kept,
            load([gateway.url], here.keys["ads"], clients=6, tokens=1, keep_alive=True) as short,
        ):
            eventually(lambda: min(flood.completed, kept.completed, short.completed) > 10, "load")
            old = workers(gateway)
            gateway.signal(signal.SIGUSR2)
            gateway.line(gateway.err, "Every worker was replaced")
            assert not set(old) & set(workers(gateway))
            before = kept.completed
            eventually(lambda: kept.completed > before + 10, "load after it")
        assert not flood.failures + kept.failures + short.failures
        assert gateway.metric("fairshare_degraded_requests_total") == 0
        assert gateway.metric("fairshare_worker_deaths_total") == 0
        # What the old ones had counted is not lost.
        done = flood.completed + kept.completed + short.completed
        assert gateway.metric("fairshare_requests_total{") == done
        assert gateway.pool()["replication"]["epoch"] > 1


@pytest.mark.replicas
def test_a_worker_that_hangs_is_replaced_all_the_same(tmp_path: Path, engine: EngineProcess) -> None:
    with started(lambda: serving(site(tmp_path, engine, more="limits: {drain: 1s}"))) as gateway:
        hangs, other = workers(gateway)
        os.kill(hangs, signal.SIGSTOP)

        def said() -> bool:
            return any(f"(process {hangs}) has not answered for" in each for each in gateway.pool()["findings"])

        eventually(said, "the status page says it")
        gateway.signal(signal.SIGUSR2)
        gateway.line(gateway.err, "Every worker was replaced")
        assert not {hangs, other} & set(workers(gateway))
        assert any(f"(process {hangs}) has not ended within 11 s and is killed" in line for line in gateway.err)
        eventually(lambda: gateway.metric("fairshare_workers") == 2, "both places are taken")
        eventually(lambda: not said(), "nobody hangs any more")


def test_what_a_gateway_left_that_was_killed_as_a_whole_is_removed_by_the_next(
    tmp_path: Path, engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = site(tmp_path, engine)
    with TemporaryDirectory(prefix="t-") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        with started(lambda: serving(here)) as gateway:
            (left,) = Path(temporary).iterdir()
            processes = [gateway.pid, *workers(gateway)]
            for pid in processes:
                os.kill(pid, signal.SIGSTOP)  # nobody cleans up after another
            for pid in processes:
                os.kill(pid, signal.SIGKILL)
        assert left.exists()
        with started(lambda: serving(here)) as again:
            assert not left.exists()
            again.signal(signal.SIGTERM)
            assert again.wait() == 0
        assert not list(Path(temporary).iterdir())


def test_the_first_workers_on_an_empty_folder_find_a_store_that_is_ready(tmp_path: Path, engine: EngineProcess) -> None:
    with started(lambda: serving(site(tmp_path, engine))) as gateway:
        assert gateway.pool()["replication"]["role"] == "owner"
        said = "".join(gateway.err)
    assert "database is locked" not in said
    assert "no such table" not in said


def test_workers_whose_parent_is_killed_end_and_leave_no_folder_behind(
    tmp_path: Path, engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest's own folder may be too long for Unix sockets.
    with TemporaryDirectory(prefix="t-") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        with started(lambda: serving(site(tmp_path, engine))) as gateway:
            assert len(list(Path(temporary).iterdir())) == 1
            killed, _ = workers(gateway)
            gateway.signal(signal.SIGKILL)
            os.kill(killed, signal.SIGKILL)  # the other one leaves nothing of it behind either
            eventually(lambda: not list(Path(temporary).iterdir()), "the folder is gone")
