"""The folder of a machine's workers, and what is left of it when everybody was killed."""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from fairshare.errors import OperatorError
from fairshare.gateway.seat import SECRET_FILE, Parent, WorkerSeat, machine_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_behind(temporary: Path) -> Path:
    """As parent and worker leave it that are killed at once."""
    machine = temporary / "fairshare-killed"
    worker = machine / "0-1"
    worker.mkdir(parents=True)
    for path in (machine / SECRET_FILE, worker / "peer.sock"):
        path.touch()
    return machine


def test_the_next_gateway_removes_what_one_that_was_killed_left(temporary: Path) -> None:
    left_behind(temporary)
    with machine_folder() as folder:
        assert list(temporary.iterdir()) == [folder]
        assert (folder / SECRET_FILE).stat().st_size == 32
        assert (folder / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert list(temporary.iterdir()) == []


def test_it_leaves_alone_what_a_living_gateway_has(temporary: Path) -> None:
    with machine_folder() as first, machine_folder() as second:
        assert sorted(temporary.iterdir()) == sorted((first, second))


def test_it_leaves_alone_what_a_worker_has_that_outlives_its_parent(temporary: Path) -> None:
    machine = left_behind(temporary)
    worker = os.open(machine / "0-1", os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(worker, fcntl.LOCK_EX)
    try:
        with machine_folder():
            assert (machine / "0-1").exists()
    finally:
        os.close(worker)


def test_it_leaves_alone_what_somebody_else_or_another_program_has(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = temporary / "fairshare-notes"
    another.mkdir()
    machine = left_behind(temporary)
    monkeypatch.setattr(os, "geteuid", lambda: machine.stat().st_uid + 1)
    with machine_folder():
        assert machine.exists()
        assert another.exists()


def test_a_worker_that_starts_when_everybody_else_is_gone_ends_with_a_sentence(temporary: Path) -> None:
    seat = WorkerSeat(
        index=0,
        workers=2,
        name="0-3",
        port=0,
        token="t",
        folder=str(temporary / "fairshare-gone" / "0-3"),
        listening=-1,
        life=-1,
    )
    with pytest.raises(OperatorError, match="the process that started this worker was killed"):
        Parent(seat, {})
