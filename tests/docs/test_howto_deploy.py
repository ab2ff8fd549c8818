"""The how-to pages of installing and running fairshare: their configurations can be used, their commands exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from deploy.kustomized import build
from fairshare.cli import program
from fairshare.config import instances_in, parse
from fairshare.gateway.discovery.api import OPERATIONS
from fairshare.gateway.options import FileSource, InstanceSpec

ROOT = Path(__file__).parents[2]
PAGES = ["install", "systemd", "kubernetes", "elastic-fleets"]


def page(name: str) -> str:
    return (ROOT / "docs" / "howto" / f"{name}.md").read_text("utf-8")


def blocks(name: str, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page(name), re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


@pytest.mark.parametrize("name", PAGES)
def test_every_configuration_can_be_used(name: str, tmp_path: Path) -> None:
    for secret in ("admin.key", "postgres.password", "peers.secret"):
        (tmp_path / secret).write_text("0123456789abcdef" * 2)
        (tmp_path / secret).chmod(0o600)
    (tmp_path / "engines.yaml").write_text("[]")
    configurations = [text for text in blocks(name, "yaml") if re.search(r"^pools:", text, re.MULTILINE)]
    assert configurations
    for text in configurations:
        here = re.sub(r"/etc/fairshare-secrets|/run/credentials/fairshare.service", str(tmp_path), text)
        assert parse(here, path=tmp_path / "fairshare.yaml", environ={"POD_IP": "10.0.0.7"}).gateway.pools


def test_the_list_of_engines_and_the_rights_are_what_the_code_and_the_manifests_say() -> None:
    listed, rules = (text for text in blocks("elastic-fleets", "yaml") if "pools:" not in text)
    urls = [
        each.url for each in instances_in(listed.encode(), FileSource(path=Path("e"), template=InstanceSpec(url="")))
    ]
    assert urls == ["http://10.0.0.11:8000", "http://10.0.0.12:8000"]
    (role,) = [each for each in build(ROOT / "deploy" / "kubernetes" / "engines") if each["kind"] == "Role"]
    assert yaml.safe_load(rules)["rules"] == role["rules"]


@pytest.mark.parametrize("name", PAGES)
def test_every_command_make_target_and_file_exists(name: str) -> None:
    known = typer.main.get_command(program())
    commands: dict[str, Any] = getattr(known, "commands", {})
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for text in blocks(name, "sh") for line in text.splitlines()]
    assert lines
    for line in lines:
        for word in re.findall(r"(?:^|bin/)fairshare ([a-z-]+)", line):
            assert word in commands or word == "--version", line
        for target in re.findall(r"^make ([a-z-]+)", line):
            assert target in targets, line
    for path in re.findall(r"(?<![\w/.])((?:deploy|requirements)/[\w./-]+\w)", page(name)):
        assert (ROOT / path).exists(), path
    for command in re.findall(r"`fairshare ([a-z]+)", page(name)):
        assert command in commands, command


def test_the_paths_of_the_admin_port_exist() -> None:
    at, *_ = re.findall(r"^at=http://[^/]+(\S+)", page("elastic-fleets"), re.MULTILINE)
    used = {at + path for path in re.findall(r'^curl "\$at(\S*)"', page("elastic-fleets"), re.MULTILINE)}
    assert used == {operation.path.replace("{name}", "chat") for operation in OPERATIONS}


def test_what_the_pages_say_of_the_unit_and_the_manifests_is_so() -> None:
    unit = (ROOT / "deploy" / "systemd" / "fairshare.service").read_text()
    for setting in ("TimeoutStopSec=40", "LimitNOFILE=65536"):
        assert setting in unit
        assert setting.partition("=")[2] in page("systemd")
    kustomizations = {
        path.parent.relative_to(ROOT / "deploy" / "kubernetes")
        for path in (ROOT / "deploy").rglob("kustomization.yaml")
    }
    named = {Path(name) for name in re.findall(r"^\| `([\w/]+)` \|", page("kubernetes"), re.MULTILINE)}
    assert named == kustomizations
