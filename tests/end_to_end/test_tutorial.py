"""docs/tutorial.md, typed line by line by a machine."""

import csv
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)
"""Some thirty programs are started one after the other; a busy machine takes its time."""

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"

CURL = """#!{python}
import sys, urllib.request, urllib.error
url, headers, data, words = "", {{}}, None, iter(sys.argv[1:])
for word in words:
    if word == "-H":
        name, _, value = next(words).partition(": ")
        headers[name] = value
    elif word == "-d":
        data = next(words).encode()
    elif word != "-s":
        url = word
try:
    answer = urllib.request.urlopen(urllib.request.Request(url, data, headers))
except urllib.error.HTTPError as error:
    answer = error
sys.stdout.write(answer.read().decode())
"""
"""For machines without curl: as much of it as the tutorial uses."""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tutorial was typed; what its commands wrote is there."""
    folder = tmp_path_factory.mktemp("tutorial")
    script = "\n".join(re.findall(r"```sh\n(.*?)```", TUTORIAL.read_text("utf-8"), re.DOTALL))
    data_port, admin_port, engine_port = free_ports(3)
    for written, used in (("8080", data_port), ("8081", admin_port), ("9001", engine_port)):
        script = script.replace(written, str(used))
    script = script.replace("fairshare status", f"fairshare status --admin http://127.0.0.1:{admin_port}")
    tools = folder / "tools"
    tools.mkdir()
    (tools / "fairshare").write_text(f'#!/bin/sh\nexec {sys.executable} -m fairshare "$@"\n')
    if shutil.which("curl") is None:
        (tools / "curl").write_text(CURL.format(python=sys.executable))
    for tool in tools.iterdir():
        tool.chmod(0o755)
    process = subprocess.Popen(
        ["bash", "-c", f"set -eu -o pipefail; set -m\n{script}"],
        cwd=folder,
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "NO_PROXY": "*"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=360)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    (folder / "said.txt").write_text(said)
    assert process.returncode == 0, said
    return folder


def answered(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_a_budget_that_runs_out_refuses_and_an_increase_lets_in_again(folder: Path) -> None:
    refused = answered(folder, "refused.json")["error"]
    assert refused["code"] == "budget_exhausted"
    assert re.fullmatch(
        r"The budget \(per month, cost units\) of team 'ads' is 120, and \d+ is used\. Try again in \d+ s\.",
        refused["message"],
    )
    assert answered(folder, "served.json")["object"] == "chat.completion"
    assert "is over its soft budget" in (folder / "said.txt").read_text()


def test_a_revoked_key_is_refused(folder: Path) -> None:
    assert answered(folder, "revoked.json")["error"]["code"] == "invalid_api_key"


def test_the_report_adds_up_in_every_form_and_to_the_usage_of_the_pool(folder: Path) -> None:
    report = answered(folder, "month.json")
    requests = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    charged = math.fsum(each["cost_units"] for each in requests)
    assert charged > 0
    assert report["total"]["cost_units"] == pytest.approx(charged)
    assert report["total"]["requests"] == len(requests) == 10
    by_team = {row["team"]: row["cost_units"] for row in report["rows"]}
    assert {"search", "vision", "ads"} <= set(by_team)
    with (folder / "month.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert math.fsum(float(line["cost_units"]) for line in lines) == pytest.approx(charged)
    assert {line["tag"] for line in lines if line["team"] == "vision"} == {"nightly"}
    slurm = [line.split("|") for line in (folder / "slurm.txt").read_text().splitlines()[1:]]
    assert math.fsum(float(line[4]) for line in slurm if not line[2]) == pytest.approx(charged)


def test_no_key_is_in_anything_but_what_showed_it(folder: Path) -> None:
    keys = set(re.findall(r"fs-[A-Za-z0-9_-]{43}", (folder / "said.txt").read_text()))
    assert keys == set()  # the shell took them from where they were shown
    store = b"".join(path.read_bytes() for path in folder.glob("fairshare.sqlite3*"))
    assert b"who is there" not in store
    assert not re.search(rb"fs-[A-Za-z0-9_-]{43}", store)
