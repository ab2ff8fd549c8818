"""Two engines and a gateway, as a site would run them, for the tests that only read or use them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from end_to_end.processes import EngineProcess, GatewayProcess, keys_made, started

CONFIG = """
listen: 127.0.0.1:0
admin: 127.0.0.1:0
pools:
  - name: chat
    capacity: 8
    half_life: 0
    shares: {{search: 1/2, ads: 1/2}}
    models: {{small: tiny}}
    instances: [{engines}]
teams:
  - name: search
    keys: [{search}]
  - name: ads
    keys: [{ads}, {ads_batch}]
"""


@dataclass
class Site:
    engines: list[EngineProcess]
    gateway: GatewayProcess
    config: Path
    keys: dict[str, str]


@dataclass
class Written:
    """A configuration for two running engines."""

    engines: list[EngineProcess]
    config: Path
    keys: dict[str, str]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    keys: dict[str, str] = {}
    entries: dict[str, str] = {}
    for name, arguments in {
        "search": ["--team", "search"],
        "ads": ["--team", "ads"],
        "ads_batch": ["--team", "ads", "--class", "batch"],
    }.items():
        keys[name], entries[name] = keys_made(*arguments)
    options = ("--max-num-seqs", "8", "--step-ms", "4")
    with started(lambda: EngineProcess(*options)) as first, started(lambda: EngineProcess(*options)) as second:
        config = tmp_path_factory.mktemp("site") / "fairshare.yaml"
        config.write_text(CONFIG.format(engines=f"{first.url}, {second.url}", **entries))
        yield Written([first, second], config, keys)


@pytest.fixture(scope="module")
def site(written: Written) -> Iterator[Site]:
    with started(lambda: GatewayProcess(written.config)) as gateway:
        yield Site(written.engines, gateway, written.config, written.keys)
