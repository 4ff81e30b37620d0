"""The session: what marks all processes and files of one cluster as its own, so that none outlives it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable

from hotseat.cluster import activity
from hotseat.cluster.environment import restore_environment
from hotseat.errors import RunError
from hotseat.processes import supervisor
from hotseat.processes.kept_driver import tell

# Longer paths than this do not leave room for Ray's socket names: a socket's path has at most 107 characters.
_MAX_DIRECTORY = 40


class Session:
    """Marks of a cluster's processes, its temporary directory on this node, and the guard that cleans up after it.

    id: nested with "/" where a worker of another session made the cluster. shm_prefix: of shared-memory segments.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(6)
        outer = os.environ.get(supervisor.SESSION)
        self.id = f"{outer}/{self.name}" if outer else self.name
        self.shm_prefix = f"hotseat-{self.name}-"
        self.directory = _make_directory()
        remains: supervisor.Remains = {
            "mark": (supervisor.SESSION, self.name),
            "shm_prefix": self.shm_prefix,
            "folders": [self.directory],
        }
        self.guard = supervisor.start_supervisor(remains)
        tell(remains=remains)
        self._env_before = {name: os.environ.get(name) for name in (supervisor.SHM_PREFIX, activity.DIRECTORY)}
        os.environ[supervisor.SHM_PREFIX] = self.shm_prefix
        os.environ[activity.DIRECTORY] = activity_folder(self.directory)

    def directory_on(self, node: int) -> str:
        """Return the directory of the session on a node other than the driver's."""
        return f"{self.directory}-{node}"

    def env(self) -> dict[str, str]:
        """Return the variables that every process of the session gets."""
        return {
            supervisor.SESSION: self.id,
            supervisor.SHM_PREFIX: self.shm_prefix,
            "PYTHONPATH": python_path(),
        }

    def close(self, killed: Iterable[int]) -> None:
        """Remove the files of the session, and the segments of processes that were killed; dismiss the guard."""
        supervisor.remove_segments(self.shm_prefix, killed)
        shutil.rmtree(self.directory, ignore_errors=True)
        restore_environment(self._env_before)
        supervisor.dismiss_supervisor(self.guard)


def activity_folder(directory: str) -> str:
    """Return the folder of a session's directory in which the processes of a node write what they are doing."""
    return os.path.join(directory, "activity")


def _make_directory() -> str:
    """Make a temporary directory, only for us, with a path short enough for sockets."""
    for base in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        if len(base) <= _MAX_DIRECTORY and os.path.isdir(base):
            with contextlib.suppress(OSError):
                return tempfile.mkdtemp(prefix="hotseat-", dir=base)
    raise RunError(f"no directory for temporary files with a path of at most {_MAX_DIRECTORY} characters; set TMPDIR")


def python_path() -> str:
    """List the import paths of this process beyond installed packages, for its workers."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    paths = (path or os.getcwd() for path in sys.path)
    own = [path for path in paths if os.path.isdir(path) and not os.path.realpath(path).startswith(tuple(installed))]
    return os.pathsep.join(dict.fromkeys(own))
