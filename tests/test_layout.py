"""The library's public face."""

import subprocess
import sys


def test_importing_the_library_pulls_in_no_web_server_database_or_event_loop() -> None:
    code = (
        "import sys, fairshare; "
        "heavy = {'asyncio', 'uvloop', 'httptools', 'starlette', 'uvicorn', 'sqlalchemy', 'sqlite3', 'anyio', 'yaml'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
