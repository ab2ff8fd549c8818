"""The image is built from the source distribution and what hadolint says of it. No container engine runs here."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
HADOLINT = Path(sys.executable).parent / "hadolint"


def instructions(text: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n\s*", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    pairs = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(name, rest) for name, rest in pairs]


def lint(text: str) -> list[str]:
    told = subprocess.run([HADOLINT, "--format", "json", "-"], input=text, capture_output=True, text=True, check=False)
    return [each["code"] for each in json.loads(told.stdout)]


def test_the_linter_finds_nothing_and_would_find_something() -> None:
    text = DOCKERFILE.read_text()
    assert lint(text) == []
    assert "DL3025" in lint(text.replace('ENTRYPOINT ["fairshare"]', "ENTRYPOINT fairshare"))


def test_it_runs_as_nobody_in_particular_in_exec_form_and_writes_nowhere_but_to_its_state() -> None:
    by_name = dict(instructions("FROM " + DOCKERFILE.read_text().rpartition("\nFROM ")[2]))
    assert by_name["USER"] == "10001:10001"
    assert json.loads(by_name["ENTRYPOINT"]) + json.loads(by_name["CMD"])[:1] == ["fairshare", "serve"]
    assert by_name["STOPSIGNAL"] == "SIGTERM"
    assert by_name["WORKDIR"] == by_name["VOLUME"] == "/var/lib/fairshare"
    command = json.loads(by_name["HEALTHCHECK"].partition("CMD ")[2])
    compile(command[2], "health check", "exec")
    assert "/healthz" in command[2]


def test_what_it_installs_is_pinned_by_hash_and_has_the_client_that_manifests_need() -> None:
    text = DOCKERFILE.read_text()
    (listed,) = re.findall(r"--require-hashes -r (\S+)", text)
    locked = (ROOT / listed).read_text()
    assert re.search(r"^lightkube==", locked, re.MULTILINE)
    assert re.search(r"^uvloop==", locked, re.MULTILINE)
