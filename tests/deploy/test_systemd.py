"""The unit is what systemd understands, and as closed as a network service can be."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairshare.gateway.options import Limits

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "fairshare.service"
HIGHEST_EXPOSURE = 15
"""Tenths; systemd calls below 2.0 "OK", and units are at 9.6 if nothing is said."""

_ANALYZE = shutil.which("systemd-analyze")


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it, or leaves the test out and says so; on CI that is an error."""
    if _ANALYZE is None:
        sentence = "there is no systemd-analyze; `make system-deps` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(sentence)
        pytest.skip(sentence)
    return subprocess.run([_ANALYZE, *arguments], capture_output=True, text=True, check=False)


def installed(folder: Path, text: str) -> str:
    """The unit as it would be where the programs are."""
    path = folder / "fairshare.service"
    path.write_text(text.replace("/opt/fairshare/bin/fairshare", str(Path(sys.executable).parent / "fairshare")))
    return str(path)


def values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_systemd_understands_every_line(tmp_path: Path) -> None:
    told = analyze("verify", "--man=no", installed(tmp_path, UNIT.read_text()))
    assert (told.returncode, [line for line in told.stderr.splitlines() if "fairshare.service" in line]) == (0, [])
    wrong = UNIT.read_text().replace("ProtectSystem=strict", "ProtectSystem=very")
    assert "Failed to parse" in analyze("verify", "--man=no", installed(tmp_path, wrong)).stderr


def test_its_exposure_stays_low(tmp_path: Path) -> None:
    unit = installed(tmp_path, UNIT.read_text())
    told = analyze("security", "--offline=true", f"--threshold={HIGHEST_EXPOSURE}", "--no-pager", unit)
    assert told.returncode == 0, told.stdout


def test_it_may_open_what_the_default_limits_need_and_has_time_to_drain() -> None:
    assert int(*values("LimitNOFILE")) > 2 * Limits().max_connections
    assert int(*values("TimeoutStopSec")) > Limits().drain_seconds
    assert values("ExecReload") == ["/bin/kill -HUP $MAINPID"]


def test_secrets_come_as_credentials_and_never_in_the_environment() -> None:
    assert all(
        value.count(":") == 1 and value.partition(":")[2].startswith("/etc/") for value in values("LoadCredential")
    )
    assert not values("Environment")
    assert not values("EnvironmentFile")
