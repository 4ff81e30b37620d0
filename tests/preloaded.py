"""Python processes that start with torch and transformers loaded: a process that has imported them forks them off.

    with popen([sys.executable, "-m", "hotseat.cli.main", "run", path], env=env, stdout=PIPE) as process: ...
    done = run([sys.executable, "-c", code], capture_output=True, timeout=300)

Importing them takes longer than most tests of a process. Nothing of this project is imported before the fork: each
process reads the environment and the arguments that it was started with, and shows them to others, who find processes
by them. What starts, and what is loaded first, is not tested with processes like these. On machines with CUDA devices
they are ordinary processes: CUDA does not survive a fork, and libraries look for devices while they are imported.

A run on Ray has a template, from which its workers are forked: `fork_templates` has it forked off, too, as it is in
each `hotseat` that is started here.

The workers of pytest-xdist are forked off the same process, which imports for all of them (`conftest.py`): it is
started with `start_server`, and `preloaded.py -c CODE` becomes a process of it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO, Any, NoReturn

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
ADDRESS = "PRELOADED_ADDRESS"  # of the one that all workers of a test run share
FOR_WORKERS = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.varlen",
    "torch.utils.flop_counter",
    "accelerate",
    "aiohttp",  # datasets itself brings a library that starts a thread
    "hypothesis",
    "networkx",
    "openai",
    "peft",
    "pydantic.main",
    "rich.live",
    "rich.table",
    "safetensors.torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "trl",
)
LOADED = (*FOR_WORKERS, "torch.utils.tensorboard", "deepspeed")
PR_SET_PDEATHSIG = 1
# Of the process that forks others: forked processes write their own over its arguments and its environment.
SPACE = {"arguments": 1 << 13, "environment": 1 << 16}
_LENGTH = struct.Struct("!q")
_address = ""  # of the process that forked this one


# --- the side of the tests --------------------------------------------------------------------------------------------


class Process:
    """A process that was forked off. As much of `subprocess.Popen` as the tests use."""

    def __init__(self, argv: Sequence[str], connection: socket.socket, streams: list[IO[Any] | None]):
        self.args = list(argv)
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self._connection = connection
        answer, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
        if len(answer) < _LENGTH.size:
            raise RuntimeError("the process that forks others is gone")
        (self.pid,) = _LENGTH.unpack(answer)
        (self._pidfd,) = fds

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            answer = self._connection.recv(_LENGTH.size)
            if len(answer) < _LENGTH.size:
                raise RuntimeError("the process that forks others is gone")
            (self.returncode,) = _LENGTH.unpack(answer)
            self._connection.close()
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Read both streams to their ends, and wait for that of the process."""
        deadline = None if timeout is None else time.monotonic() + timeout
        texts: dict[int, Any] = {}

        def read(number: int, stream: IO[Any]) -> None:
            texts[number] = stream.read()

        readers = [
            threading.Thread(target=read, args=(number, stream), daemon=True)
            for number, stream in enumerate((self.stdout, self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return texts.get(0), texts.get(1)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def popen(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int = DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    text: bool = False,
    process_group: int | None = None,
) -> Process:
    """Start `python -m MODULE`, `python -c CODE` or `python [-P] FILE`, as `subprocess.Popen` does."""
    assert argv[0] == sys.executable, argv
    if has_devices():
        options = {"env": env, "cwd": cwd, "stdout": stdout, "stderr": stderr, "process_group": process_group}
        return subprocess.Popen(argv, stdin=stdin, text=text, **options)  # type: ignore[return-value]
    ends: list[IO[Any] | None] = [None, None, None]
    ours: list[int] = []

    def stream(number: int, wanted: int | IO[Any] | None) -> int:
        if wanted is None:
            return number
        if wanted == DEVNULL:
            ours.append(os.open(os.devnull, os.O_RDWR))
            return ours[-1]
        if wanted == STDOUT:
            return fds[1]
        if wanted == PIPE:
            read, write = os.pipe()
            own, given = (write, read) if number == 0 else (read, write)
            ours.append(given)
            ends[number] = os.fdopen(own, ("w" if number == 0 else "r") + ("" if text else "b"))
            return given
        assert not isinstance(wanted, int)
        return wanted.fileno()

    fds = [stream(0, stdin)]
    fds.append(stream(1, stdout))
    fds.append(stream(2, stderr))
    request = {
        "argv": [str(each) for each in argv[1:]],
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd or os.getcwd()),
        "process_group": process_group,
        "loaded": LOADED,
        "ends_with_server": False,
    }
    try:
        connection = _ask(_server_address(), request, fds)
        return Process(argv, connection, ends)
    finally:
        for fd in ours:
            os.close(fd)


def run(
    argv: Sequence[str], *, capture_output: bool = False, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Start a process and wait for its end, as `subprocess.run` does."""
    if capture_output:
        options |= {"stdout": PIPE, "stderr": PIPE}
    with popen(argv, **options) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.wait(), out, error)


def fork_templates(address: str = "") -> None:
    """Have the templates of workers that this process starts (`hotseat/cluster/on_ray/template.py`) forked off.

    Only those that load transformers: others are started as they are without tests. address: of what forks them.
    """
    from hotseat.cluster.on_ray import template

    global _address
    _address = address

    def start(argv: Sequence[str], **options: Any) -> Any:
        return (popen if "transformers" in argv else subprocess.Popen)(argv, **options)

    template.subprocess = SimpleNamespace(Popen=start, PIPE=PIPE, DEVNULL=DEVNULL)  # type: ignore[assignment]


def has_devices() -> bool:
    """Tell whether this machine has CUDA devices, so that processes are not forked off."""
    return Path("/dev/nvidiactl").exists()


def start_server() -> str:
    """Start the process that forks others, and return its address. It ends with this process."""
    directory = tempfile.mkdtemp(prefix="preloaded-")
    address = f"{directory}/socket"
    # Its libraries must not start threads: they would not survive a fork. Forked processes start theirs.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    env |= {"OPENBLAS_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PRELOADED_SPACE": " " * SPACE["environment"]}
    command = [sys.executable, __file__, "serve", address, " " * SPACE["arguments"]]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the process that forks others did not start: exit code {process.wait()}")
    owner = os.getpid()

    def end() -> None:
        if owner == os.getpid():
            process.kill()
            process.wait()
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(end)
    return address


def _server_address() -> str:
    """Return the address of the test run's server, or of this process's own, started when it is first asked for."""
    return _address or os.environ.get(ADDRESS) or _own_server(os.getpid())


@functools.cache
def _own_server(pid: int) -> str:
    return start_server()


def _ask(address: str, request: Mapping[str, Any], fds: Sequence[int]) -> socket.socket:
    """Send a request with the standard streams of the process to be."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    data = pickle.dumps(request)
    socket.send_fds(connection, [_LENGTH.pack(len(data))], fds)
    connection.sendall(data)
    return connection


def _be_a_worker(argv: Sequence[str]) -> int:
    """Have `python -c CODE` run in a forked process with this one's streams, and wait for its end."""
    request = {
        "argv": list(argv),
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "process_group": None,
        "loaded": FOR_WORKERS,
        "ends_with_server": True,  # what kills a worker that hangs kills this process, not that one
    }
    connection = _ask(os.environ[ADDRESS], request, [0, 1, 2])
    process = Process(argv, connection, [None, None, None])
    for fd in (0, 1):  # when the worker ends, so do its streams
        os.close(fd)
    return process.wait()


# --- the process that forks -------------------------------------------------------------------------------------------


def _serve(address: str) -> dict[str, Any]:
    """Fork a process per request, and tell who asked how it ended. Returns in the forked process, with the request.

    Ends when its standard input is closed, which happens at the latest with the end of the tests, and then removes its
    folder: whoever started it may have been killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the tests end in order, and this with them
    # One to the whole group ends the tests, and this with them. Blocked rather than ignored: a forked process gets it
    # even if it comes before the process is ready for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([0, listener, *running], [], [])
        if 0 in ready and not os.read(0, 1):
            shutil.rmtree(os.path.dirname(address), ignore_errors=True)
            sys.exit()
        for pidfd in [fd for fd in ready if fd in running]:
            pid, connection = running.pop(pidfd)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(OSError):  # who asked is gone
                connection.sendall(_LENGTH.pack(os.waitstatus_to_exitcode(status)))
            connection.close()
            os.close(pidfd)
        if listener in ready:
            connection, _ = listener.accept()
            request, fds = _read(connection)
            if request is None:
                connection.close()
                for fd in fds:
                    os.close(fd)
                continue
            _load(request["loaded"])
            pid = os.fork()
            if request["process_group"] is not None:
                # Here for who asked, there for what it does first: either may come first.
                with contextlib.suppress(OSError):
                    os.setpgid(pid, request["process_group"])
            if pid == 0:
                listener.close()
                for pidfd, (_, other) in running.items():
                    other.close()
                    os.close(pidfd)
                connection.close()
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                for fd in set(fds) - {0, 1, 2}:
                    os.close(fd)
                if request["ends_with_server"]:
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                return request
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = (pid, connection)
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [_LENGTH.pack(pid)], [pidfd])


def _load(names: Sequence[str]) -> None:
    missing = [name for name in names if name not in sys.modules and importlib.util.find_spec(name.partition(".")[0])]
    if not missing:
        return
    gc.disable()  # what is imported stays
    for name in missing:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # forked processes do not look through what they share with this one, until they end
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads, of which a fork would keep one"


def _read(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Read a request and its streams; None if whoever asked ended in the middle of it."""
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
    data = bytearray()
    while len(head) == _LENGTH.size and len(data) < _LENGTH.unpack(head)[0]:
        part = connection.recv(_LENGTH.unpack(head)[0] - len(data))
        if not part:
            return None, fds
        data += part
    return pickle.loads(data) if data else None, fds


def _become(request: dict[str, Any], path: list[str], address: str) -> None:
    """Make this process one that was started with these arguments, in this environment.

    address: of the process that forked it.
    """
    import numpy
    import torch

    env, argv = request["env"], request["argv"]
    os.environ.clear()
    os.environ.update(env)
    _show([sys.executable, *argv], env)
    os.chdir(request["cwd"])
    numpy.random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in its background ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if "OMP_NUM_THREADS" in env:  # libraries have read it when they were loaded
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.path[:] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *path]
    if argv[:2] == ["-m", "hotseat.cli.main"]:
        fork_templates(address)
    if argv[0] == "-P":
        sys.argv[:] = argv[1:]
        del sys.path[0]
        runpy.run_path(argv[1], run_name="__main__")
    elif argv[0] == "-m":
        sys.argv[:] = argv[1:]
        sys.path[0] = request["cwd"]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv[:] = ["-c", *argv[2:]]
        for name in ("__file__", "__cached__"):  # by which others would import this file
            sys.modules["__main__"].__dict__.pop(name, None)
        exec(compile(argv[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv[:] = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def _show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Show these arguments and this environment in /proc, where those of the process that forks others are."""
    own = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, environment = (range(int(own[at]), int(own[at + 1])) for at in (45, 47))
    assert len(environment) > SPACE["environment"], "the kernel does not say where the environment is"
    for where, words in ((arguments, argv), (environment, [f"{name}={value}" for name, value in env.items()])):
        text = b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)
        assert where is arguments or len(text) <= len(where), "no space for the environment"
        ctypes.memmove(where.start, text[: len(where) - 1].ljust(len(where), b"\0"), len(where))


def _end(code: Any) -> NoReturn:
    """End this process as Python does, but for taking all modules apart, which would take two seconds of a core.

    code: of `sys.exit`. Threads are waited for; what was registered for the end is called; output is written.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    status = code if isinstance(code, int) else int(code is not None)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120
    ctypes.CDLL(None).fflush(None)  # what libraries print
    os._exit(status & 255)


def _main() -> None:
    if sys.argv[1] == "serve":
        path = sys.path[1:]
        request = _serve(sys.argv[2])
        try:
            _become(request, path, sys.argv[2])
        except SystemExit as ended:
            _end(ended.code)
        except KeyboardInterrupt:
            gc.unfreeze()  # or libraries complain at the end about what was not freed
            raise
        except BaseException:
            sys.excepthook(*sys.exc_info())
            _end(1)
        _end(0)
    else:
        sys.exit(_be_a_worker([word for word in sys.argv[1:] if word not in ("-u", "-B")]))


if __name__ == "__main__":
    _main()
