"""A file that is replaced, broken, gone and back again."""

import json
import os
from pathlib import Path

import pytest

from fairshare.config import ConfigError, instances_in
from fairshare.gateway.discovery.watched_file import MAX_FILE_BYTES, FileFollower
from fairshare.gateway.options import FileSource, InstanceSpec
from gateway.discovery.hearing import Heard, following, run


def replace(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.rename(path)


def test_what_the_file_lists_is_told_when_it_changes_and_a_broken_file_is_told_once_with_its_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "engines.yaml"

    def follower(heard: Heard) -> FileFollower:
        return FileFollower(FileSource(path=path, template=InstanceSpec(url="")), parse=instances_in, sleep=heard.sleep)

    async def scenario() -> None:
        async with following(follower) as heard:
            looks = 1

            async def look() -> None:
                nonlocal looks
                await heard.slept(looks)
                looks += 1
                heard.wake()

            await look()
            await look()
            replace(path, "- http://one:8000\n")
            await look()
            await look()
            replace(path, "- http://one:8000\n- {url: 'http://two:8000', max_seqs: 3}\n")
            await look()
            await look()
            replace(path, json.dumps(["http://two:8000"]))
            await look()
            path.unlink()
            await look()
            replace(path, json.dumps(["http://two:8000"]))
            await look()
            await heard.slept(looks)
            assert heard.said == [
                "it cannot be read (No such file or directory)",
                ["http://one:8000"],
                f'{path}:2: [1].max_seqs: unknown key "max_seqs"; the nearest known one is "max_num_seqs"',
                ["http://two:8000"],
                "it cannot be read (No such file or directory)",
                ["http://two:8000"],
            ]

    run(scenario)


def test_a_folder_behind_a_link_that_is_turned_is_noticed_as_kubernetes_changes_a_config_map(tmp_path: Path) -> None:
    link = tmp_path / "engines.yaml"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / link.name).write_text(f"- http://{name}:8000\n")
        os.utime(tmp_path / name / link.name, (1000, 1000))
    (tmp_path / "..data").symlink_to("one")
    link.symlink_to(f"..data/{link.name}")

    def follower(heard: Heard) -> FileFollower:
        return FileFollower(FileSource(path=link, template=InstanceSpec(url="")), parse=instances_in, sleep=heard.sleep)

    async def scenario() -> None:
        async with following(follower) as heard:
            await heard.slept(1)
            (tmp_path / "new").symlink_to("two")
            (tmp_path / "new").rename(tmp_path / "..data")
            heard.wake()
            await heard.slept(2)
            assert heard.said == [["http://one:8000"], ["http://two:8000"]]

    run(scenario)


def test_a_file_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text("#" * (MAX_FILE_BYTES + 1))

    def follower(heard: Heard) -> FileFollower:
        return FileFollower(FileSource(path=path, template=InstanceSpec(url="")), parse=instances_in, sleep=heard.sleep)

    async def scenario() -> None:
        async with following(follower) as heard:
            await heard.slept(1)
            assert heard.said == [f"it cannot be read (it is longer than {MAX_FILE_BYTES} bytes)"]

    run(scenario)


def test_a_pipe_in_its_place_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    os.mkfifo(path)

    def follower(heard: Heard) -> FileFollower:
        return FileFollower(FileSource(path=path, template=InstanceSpec(url="")), parse=instances_in, sleep=heard.sleep)

    async def scenario() -> None:
        async with following(follower) as heard:
            await heard.slept(1)
            assert "is empty" in str(heard.said[0])

    run(scenario)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("url: http://one:8000", "must be a list of engines, found a mapping"),
        ("- http://one:8000\n- http://one:8000/\n", "http://one:8000 stands twice"),
        ("- ftp://one", "must be an engine's address"),
        ("- {max_num_seqs: 4}", '"url" is missing'),
        ("[http://one:8000", "not valid YAML"),
    ],
)
def test_a_list_that_cannot_be_used_says_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        instances_in(text.encode(), FileSource(path=Path("engines.yaml"), template=InstanceSpec(url="")))
    assert problem in str(error.value)


def test_what_a_list_does_not_say_comes_from_the_entry_that_names_it() -> None:
    source = FileSource(path=Path("e.yaml"), template=InstanceSpec(url="", api_key="secret", max_num_seqs=8))
    assert instances_in(b"- http://one\n- {url: 'http://two:81', max_num_seqs: 4}", source) == (
        InstanceSpec(url="http://one:80", api_key="secret", max_num_seqs=8),
        InstanceSpec(url="http://two:81", api_key="secret", max_num_seqs=4),
    )
    assert instances_in(b"[]", source) == ()
