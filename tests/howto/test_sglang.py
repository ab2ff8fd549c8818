"""docs/howto/sglang.md: its configuration, and what an SGLang server is sent with it."""

import hashlib
import json
from fractions import Fraction
from pathlib import Path

import pytest

from fairshare.config import ConfigError, parse
from fairshare.core.decisions import Instance, Mode
from fairshare.gateway.kinds import SglangFlags
from fairshare.gateway.options import EngineKind, InstanceSpec
from gateway.rig import Rig, run
from howto.pages import blocks

(PAGE,) = blocks("sglang.md", "yaml")


def filled(text: str) -> str:
    for team in ("search", "ads"):
        text = text.replace("<what fairshare keys new prints>", hashlib.sha256(team.encode()).hexdigest(), 1)
    return text


def test_the_configuration_on_the_page_is_valid() -> None:
    settings = parse(filled(PAGE), path=Path("fairshare.yaml"), environ={})
    (instance,) = settings.gateway.pools[0].instances
    assert instance.kind is EngineKind.SGLANG
    assert instance.sglang == SglangFlags(low_values_first=False, preemption_threshold=20)
    assert settings.warnings == ()


def test_sglangs_flags_belong_to_sglang() -> None:
    with pytest.raises(ConfigError, match="belongs to SGLang"):
        parse(filled(PAGE).replace("        kind: sglang\n", ""), path=Path("f.yaml"), environ={})


def test_an_sglang_server_gets_its_own_numbers_in_body_and_header() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.PASS, capacity=2, shares={"red": Fraction(1, 2)}) as rig:
            url = rig.engine.url
            spec = InstanceSpec(url=url, kind=EngineKind.SGLANG, sglang=SglangFlags(preemption_threshold=20))
            rig.driver.instance_changed("chat", spec, Instance(id=url, part_slots=2))
            owner = await rig.ask(key="fs-red")
            borrower = await rig.ask(key="fs-blue")
            assert [one.headers["x-fairshare-priority"] for one in (owner, borrower)] == ["0", "100"]
            for asked, wanted in zip(rig.engine.asked, (0, -(1 + 21 + 18)), strict=True):
                assert json.loads(asked.body)["priority"] == wanted
                assert asked.headers["x-override-priority"] == str(wanted)
                assert "x-vllm-priority" not in asked.headers

    run(main)
