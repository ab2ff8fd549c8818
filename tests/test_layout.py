"""The library's public face."""

import subprocess
import sys


def test_importing_the_library_pulls_in_no_web_server_database_or_event_loop() -> None:
    """Nor anything else that is not Python's own; of that, nothing that serves, stores or waits."""
    code = (
        "import sys; before = set(sys.modules); import fairshare; "
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "heavy = {'asyncio', 'http', 'selectors', 'socket', 'sqlite3', 'ssl'}; "
        "print(sorted(roots - set(sys.stdlib_module_names) | roots & heavy))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['fairshare']"
