"""What `make dist` built installs in a fresh environment, outside the checkout, and works there (`make test-dist`)."""

import os
import signal
import subprocess
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CONFIGURATION = """
listen: 127.0.0.1:0
admin: 127.0.0.1:0
store: sqlite:store.sqlite3
pools:
  - name: chat
    capacity_per_instance: 16
    shares: {search: 26/32, ads: 6/32}
    models: [my-model]
    instances: [{dns: "http://engines.example.internal:8000"}]
"""
WITH_KUBERNETES = CONFIGURATION.replace('dns: "http://engines.example.internal:8000"', "kubernetes: {service: v}")


def built(pattern: str) -> Path:
    (found,) = (ROOT / "dist").glob(pattern)
    return found


def in_wheel() -> set[str]:
    with zipfile.ZipFile(built("*.whl")) as wheel:
        return set(wheel.namelist())


def in_sdist() -> set[str]:
    with tarfile.open(built("*.tar.gz")) as sdist:
        return {name.partition("/")[2] for name in sdist.getnames()}


def run(*command: str | Path, folder: Path, seconds: float = 600) -> str:
    """Runs a program that knows nothing of the checkout; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def fresh(folder: Path, *wanted: str | Path) -> Path:
    """A new environment with this installed; returns where its programs are."""
    venv.create(folder / "venv", with_pip=True)
    bin_folder = folder / "venv" / "bin"
    run(bin_folder / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted, folder=folder)
    return bin_folder


def test_the_wheel_holds_the_whole_package_its_data_and_its_licence_and_nothing_else() -> None:
    here = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "fairshare").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    names = in_wheel()
    assert {name for name in names if ".dist-info/" not in name} == here
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    for data in ("dashboard/index.html", "storage/migrations/versions/m0001_first_tables.py", "py.typed"):
        assert f"fairshare/{data}" in names
    assert any(name.startswith("fairshare/simulator/data/") for name in names)


def test_the_source_distribution_holds_what_a_build_and_the_image_need_and_no_tests() -> None:
    names = in_sdist()
    assert {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "hatch_build.py",
        "requirements/image.txt",
    } <= names
    assert {f"src/{name}" for name in in_wheel() if ".dist-info/" not in name} <= names
    assert not [name for name in names if name.startswith(("tests", "bench", "scenarios", "docs", ".ci"))]


def test_the_installed_wheel_checks_a_configuration_and_shows_the_demo(tmp_path: Path) -> None:
    programs = fresh(tmp_path, built("*.whl"))
    fairshare = programs / "fairshare"
    where = run(programs / "python", "-c", "import fairshare; print(fairshare.__file__)", folder=tmp_path)
    assert where.startswith(str(tmp_path))
    version = built("*.whl").name.split("-")[1]
    assert run(fairshare, "--version", folder=tmp_path) == f"fairshare {version}\n"
    (tmp_path / "fairshare.yaml").write_text(CONFIGURATION)
    assert "can be used: 1 pool, 0 engines and 1 source of more" in run(fairshare, "check", folder=tmp_path)
    demo_command = [fairshare, "demo", "--port", "0", "--admin-port", "0"]
    with subprocess.Popen(demo_command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        told: list[str] = []
        for line in demo.stdout:
            told.append(line)
            if "waiting, answered" in line:
                break
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=30) == 0
    assert any("search works alone" in line for line in told)
    assert "waiting, answered" in told[-1]


def test_without_an_extra_what_needs_it_says_which_one(tmp_path: Path) -> None:
    programs = fresh(tmp_path, "--require-hashes", "-r", ROOT / "requirements" / "run.txt")
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-deps", built("*.whl"), folder=tmp_path)
    (tmp_path / "k.yaml").write_text(WITH_KUBERNETES)
    told = subprocess.run(
        [programs / "fairshare", "check", "-c", "k.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert told.returncode == 1
    assert "pip install 'fairshare[kubernetes]'" in told.stdout


def test_the_source_distribution_builds_and_installs_as_the_image_does(tmp_path: Path) -> None:
    with tarfile.open(built("*.tar.gz")) as sdist:
        sdist.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    programs = fresh(tmp_path, "--require-hashes", "-r", source / "requirements" / "image.txt")
    python = programs / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", source, folder=tmp_path)
    assert run(programs / "fairshare", "--version", folder=tmp_path).startswith("fairshare ")
    run(python, "-m", "pip", "check", folder=tmp_path)
    (tmp_path / "k.yaml").write_text(WITH_KUBERNETES)
    assert "can be used" in run(programs / "fairshare", "check", "-c", "k.yaml", folder=tmp_path)
