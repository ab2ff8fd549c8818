"""What `make compiled` compiles can be compiled (`make test-compiled` does it, and runs the tests over it)."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_modules_that_are_compiled_hold_to_their_types_as_mypy_reads_them(tmp_path: Path) -> None:
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = configured["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
    paths = [path for pattern in patterns for path in (ROOT / "src").glob(pattern)]
    assert len(paths) > len(patterns)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", tmp_path, *paths],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
