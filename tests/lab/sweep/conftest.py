"""A PostgreSQL server of our own, and storages to run the same tests on."""

import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


def find_postgresql() -> Path | None:
    """The folder of ``initdb`` and ``pg_ctl``; Debian keeps it off the path."""
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


class Server:
    """A server in a new folder, reached by a socket in that folder alone."""

    def __init__(self, bin_folder: Path) -> None:
        self.bin = bin_folder
        self.folder = Path(tempfile.mkdtemp(prefix="ocnopt-pg-"))
        self.user, self.prefix = getpass.getuser(), []
        if os.geteuid() == 0:  # the server refuses to run as root
            owner = next(pwd.getpwnam(n) for n in ("postgres", "nobody") if n in {u.pw_name for u in pwd.getpwall()})
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
            self.user = owner.pw_name
            ids = f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}"
            self.prefix = ["setpriv", *ids, "--clear-groups"]

    @property
    def url(self) -> str:
        return f"postgresql://{self.user}@/postgres?host={self.folder}"

    def run(self, program: str, *arguments: str) -> None:
        command: Sequence[str] = [*self.prefix, str(self.bin / program), "-D", str(self.folder / "data"), *arguments]
        log = self.folder.with_suffix(".log")
        with log.open("ab") as file:  # not a pipe: the server would keep it open
            status = subprocess.run(command, stdout=file, stderr=file, cwd="/", timeout=60).returncode
        assert status == 0, log.read_text()

    def start(self) -> None:
        self.run("pg_ctl", "start", "-w", "-o", f"-c listen_addresses='' -k {self.folder} -c fsync=off")

    def stop(self) -> None:
        self.run("pg_ctl", "stop", "-w", "-m", "immediate")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.with_suffix(".log").unlink(missing_ok=True)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    found = find_postgresql()
    if found is None:
        pytest.skip("PostgreSQL is not installed: there is no initdb")
    server = Server(found)
    try:
        server.run("initdb", "-A", "trust", "--no-sync", "-U", server.user)
        server.start()
        yield server
        server.stop()
    finally:
        server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "sweep.db")
    server: Server = request.getfixturevalue("postgresql")
    return server.url


@pytest.fixture
def study(tmp_path: Path) -> str:
    """Of this test alone, as tests share the server."""
    return tmp_path.name
