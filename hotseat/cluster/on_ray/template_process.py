"""The template: a process that has loaded the libraries of workers, and forks a worker when Ray asks for one.

Loading torch and transformers takes seconds of a core. Here they are loaded once, for all processes of a run:

    python -P template_process.py SOCKET MODULE ... -- MODULE ...

The first modules are loaded at once. The others are Ray's, which reads the pid of its raylet and the job when it is
loaded: they are loaded for the first worker, in its environment, and serve workers of the same raylet and job.

A request (`forked.py`) waits until the first modules are loaded. A forked process has the environment, folder and
streams of the process that asked. It is refused, and then starts as an ordinary process, if its environment differs in
a variable that a library may have read while it was loaded, or if this process cannot be forked safely: it has
threads, or has opened a GPU. The template ends when its standard input is closed, so at the latest with its driver, and
its forks with it: one that it makes when the driver is gone already may come too late for the
supervisor (`processes/supervisor.py`). Module `template` starts it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

LENGTH = struct.Struct("!q")
STARTED, REFUSED = b"+", b"-"
GPU_FILES = "/dev/nvidia"  # begins the path of every file by which a GPU is used
# Gives memory of jemalloc, which pyarrow has, back to the system. jemalloc takes its locks before a fork, and has no
# such thread after it.
MEMORY_THREAD = "jemalloc_bg_thd"

# Variables that may differ from those of the template: nothing reads them while it is loaded, or it is set again here.
_OWN = ("RAY_", "HOTSEAT_SESSION", "HOTSEAT_WORKER", "HOTSEAT_SHM_PREFIX", "HOTSEAT_ACTIVITY", "MASTER_", "SPT_")
_OWN_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONPATH", "PYTHONUNBUFFERED", "_"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # scikit-learn sets them while it is loaded
}
_READ_ONCE = ("RAY_RAYLET_PID", "RAY_JOB_ID")  # by Ray, when it is loaded
_READ_BY_AGENTS = ("RAY_enable_pipe_based_agent_to_parent_health_check",)  # while they are loaded
_WORKER_SCRIPT = "setup_worker.py"  # of Ray: sets the environment of a worker, then becomes the worker
_SCRIPTS = (_WORKER_SCRIPT, "agent.py", "main.py")


class ForkRequest:
    """A process that asks for a fork: its command, environment, folder and streams."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        head, self.fds, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
        left, parts = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0, []
        while left > 0:
            part = connection.recv(left)
            if not part:
                break
            parts.append(part)
            left -= len(part)
        values: dict[str, Any] = json.loads(b"".join(parts) or b"{}")
        command = values.get("command", [])
        self.command: list[str] = command[1:] if command[:1] == ["-u"] else command
        self.env: dict[str, str] = values.get("env", {})
        self.cwd: str = values.get("cwd", "/")
        self.nice: int = values.get("nice", 0)

    @property
    def is_known(self) -> bool:
        """Tell whether it is complete, and for a program that can be run here."""
        return bool(self.command) and len(self.fds) == 3 and os.path.basename(self.command[0]) in _SCRIPTS

    @property
    def is_worker(self) -> bool:
        return os.path.basename(self.command[0]) == _WORKER_SCRIPT

    def refuse(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(REFUSED)
        self.close()

    def close(self) -> None:
        self.connection.close()
        for fd in self.fds:
            os.close(fd)


class ForkServer:
    """Takes requests and watches over the forks. `serve` returns in a forked process, with its request."""

    def __init__(self, address: str, for_workers: Sequence[str]):
        """Listen for requests. for_workers: modules to load in the environment of the first worker."""
        self._address = address
        self._for_workers = for_workers
        self._first_env: dict[str, str] | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(256)
        self._env = dict(os.environ)  # in which the modules were loaded
        self._forks: dict[int, tuple[int, ForkRequest]] = {}  # by handle

    def serve(self) -> ForkRequest:
        """Answer requests until standard input is closed. Returns in each forked process, with its request."""
        while True:
            askers = [request.connection.fileno() for _, request in self._forks.values()]
            listener = self._listener.fileno()
            ready, _, _ = select.select([0, listener, *self._forks, *askers], [], [])
            if 0 in ready and not os.read(0, 1):
                self._end_forks()
                self._remove_address()
                sys.exit()
            for handle in list(self._forks):
                self._watch(handle, ready)
            if listener in ready:
                request = ForkRequest(self._listener.accept()[0])
                if not request.is_known:
                    request.refuse()
                elif self._fork(request):
                    return request

    def _remove_address(self) -> None:
        """Remove the socket, and its folder if no other template has one there: the driver was killed."""
        with contextlib.suppress(OSError):
            os.unlink(self._address)
            os.rmdir(os.path.dirname(self._address))

    def _end_forks(self) -> None:
        for handle in self._forks:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def _watch(self, handle: int, ready: Sequence[int]) -> None:
        """Report the end of a fork, or end it if the process that asked for it was killed."""
        pid, request = self._forks[handle]
        if handle not in ready:
            if request.connection.fileno() not in ready:
                return
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            request.connection.sendall(LENGTH.pack(os.waitstatus_to_exitcode(status)))
        del self._forks[handle]
        request.close()
        os.close(handle)

    def _fork(self, request: ForkRequest) -> bool:
        """Fork a process for a request, and return True in it."""
        if not self._agrees(request) or not is_forkable():
            request.refuse()
            return False
        pid = os.fork()
        if pid == 0:
            self._listener.close()
            for handle, (_, other) in self._forks.items():
                os.close(handle)
                other.close()
            return True
        handle = os.pidfd_open(pid)
        self._forks[handle] = pid, request
        with contextlib.suppress(OSError):
            socket.send_fds(request.connection, [STARTED], [handle])
        for fd in request.fds:
            os.close(fd)
        request.fds = []
        return False

    def _agrees(self, request: ForkRequest) -> bool:
        """Tell whether a process of this environment may have what was loaded in that of the template."""
        env = request.env
        if request.is_worker:
            context = _context(request.command)[0]
            if set(context) - {"env_vars"} and not _is_plain(context):
                return False
            env = {**env, **context.get("env_vars", {})}
        if differing(self._env, env):
            return False
        if not request.is_worker:
            return all(env.get(name) == self._env.get(name) for name in _READ_BY_AGENTS)
        if self._first_env is None:
            self._first_env = env
            os.environ.update({name: value for name, value in env.items() if name.startswith("RAY_")})
            load(self._for_workers)
        return all(self._first_env.get(name) == env.get(name) for name in _READ_ONCE)


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> set[str]:
    """Return the variables that differ, without those that may."""
    names = {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)}
    return {name for name in names if not name.startswith(_OWN) and name not in _OWN_NAMES}


def is_forkable() -> bool:
    """Tell whether a fork of this process works, and can be marked and watched.

    It has one thread, and no GPU is open.
    """
    if resource.getrlimit(resource.RLIMIT_RTTIME)[1] != resource.RLIM_INFINITY:
        return False  # see `processes/supervisor.py`
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        return False  # the system forgets how forks have ended, of which askers wait to hear
    return num_threads() == 1 and not has_open(GPU_FILES)


def has_open(prefix: str) -> bool:
    """Tell whether this process has a file open whose path begins so."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(prefix):
                return True
    return False


def num_threads() -> int:
    """Count the threads of this process, those of libraries included, without those that a fork does not harm."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read().strip())
    return len(names) - names.count(MEMORY_THREAD)


def _context(command: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Read the command of a worker: what Ray sets up for it, and the script of the worker with its arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language", default="PYTHON")
    values, rest = parser.parse_known_args(list(command[1:]))
    context: dict[str, Any] = json.loads(values.serialized_runtime_env_context or "{}")
    if values.language != "PYTHON" or not rest or not rest[0].endswith(".py"):
        context["override_worker_entrypoint"] = values.language
    return context, rest


def _is_plain(context: Mapping[str, Any]) -> bool:
    """Tell whether Ray sets up nothing but environment variables."""
    is_ours = context.get("py_executable") in (None, sys.executable)
    return is_ours and not any(context.get(key) for key in ("command_prefix", "override_worker_entrypoint"))


def _become(request: ForkRequest, path: Sequence[str]) -> NoReturn:
    """Turn this process into the one that was asked for."""
    os.setpgid(0, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, request.nice)
    for number, fd in enumerate(request.fds):
        os.dup2(fd, number)
    request.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    command = request.command
    os.environ.clear()
    os.environ.update(request.env)
    if request.is_worker:
        context, command = _context(command)
        os.environ.update({key: os.path.expandvars(value) for key, value in context.get("env_vars", {}).items()})
    _mark()
    os.chdir(request.cwd)
    code: object = 0
    try:
        _reseed()
        sys.argv[:] = command
        own = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        sys.path[:] = [os.path.dirname(os.path.abspath(command[0])), *own, *path]
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.exit(code)  # type: ignore[arg-type]  # as the command passed it


def _mark() -> None:
    """Give this process the mark of its session, by which it is found and ended with its driver."""
    from hotseat.cluster.on_ray.library import refresh_settings
    from hotseat.processes import supervisor

    supervisor.mark_this_process(os.environ.get(supervisor.SESSION, ""), os.environ.get(supervisor.WORKER, ""))
    refresh_settings()


def _reseed() -> None:
    """Give this process a random state of its own, and its number of threads."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()
    set_threads(os.environ.get("OMP_NUM_THREADS"))  # on ARM torch does not keep what it read when it was loaded


def set_threads(number: str | None) -> None:
    """Give this process a number of threads of OpenMP; None: one for each core that it may use."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(number) if number else len(os.sched_getaffinity(0)))


def load(modules: Sequence[str]) -> None:
    """Import modules. One that cannot be imported raises again in the process that needs it, which reports that."""
    was_enabled = gc.isenabled()
    gc.disable()  # modules stay: looking through them would take a seventh of the time
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if was_enabled:
        gc.enable()


def _main(address: str, modules: Sequence[str], for_workers: Sequence[str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    path = [each for each in sys.path if each]
    server = ForkServer(address, for_workers)
    load(modules)
    gc.collect()
    gc.freeze()  # forks do not look through what they share with this process
    atexit.register(gc.unfreeze)
    _become(server.serve(), path)


if __name__ == "__main__":
    _split = sys.argv.index("--")
    _main(sys.argv[1], sys.argv[2:_split], sys.argv[_split + 1 :])
