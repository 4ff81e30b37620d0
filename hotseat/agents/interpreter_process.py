"""An interpreter that has imported modules, and forks a process for each episode, which runs the user's script.

Run by the interpreter of `agent.command`, so it needs nothing but Python's own library:

    python interpreter_process.py FD

FD is a connected socket. The first message is a line of JSON: `script`, `modules`, and `kept`, the capabilities that
programs keep, as bits. The answer is a line with `problem`: why nothing can be forked here, or null. Each message after
it is a byte with three files: the program's standard input, its output, and a socket for this episode. From that comes
a line of JSON with `argv`, `env` and `cwd`; when everything that the program started has ended, its exit code goes back
as a number of four bytes, minus the signal that ended it. The other side ends an episode by closing its half of the
socket.

    this process ── monitor ──┬─ init, process 1 of a PID namespace with a /proc of its own
     no namespace             │   └─ the script
                              └─ when it ends, the system has ended everything in the namespace

The script runs as `__main__` with the arguments, environment, folder and files of a fresh process. Only what is
declared as `modules` was imported before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CODE = struct.Struct("!i")
_NEW_NAMESPACES = 0x00020000 | 0x20000000  # CLONE_NEWNS, CLONE_NEWPID
_NEW_USER = 0x10000000
_SLAVE, _ALL_BELOW = 1 << 19, 1 << 14  # MS_SLAVE, MS_REC
_PROC_FLAGS = 2 | 4 | 8  # MS_NOSUID, MS_NODEV, MS_NOEXEC
_DIE_WITH_PARENT, _DROP, _NO_NEW_PRIVILEGES, _AMBIENT, _RAISE = 1, 24, 38, 47, 2  # of prctl
_CAPABILITIES_3 = 0x20080522
_NUM_CAPABILITIES = 64
_FEW = 8  # processes that a program may see in a namespace of its own


class _Episode:
    """The program of one episode. handle: of its monitor."""

    def __init__(self, connection: socket.socket, pid: int, handle: int):
        self.connection, self.pid, self.handle = connection, pid, handle


class ForkingInterpreter:
    """Forks a process for each episode. `serve` returns in each of them, with what it is to run."""

    def __init__(self, control: socket.socket, kept: int):
        self._control, self._kept = control, kept
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._python = ctypes.PyDLL(None)  # keeps Python's lock during a call
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._episodes: dict[int, _Episode] = {}  # by handle

    def problem(self) -> str | None:
        """Return why no program can be run by a fork of this process; None if one can."""
        if len(os.listdir("/proc/self/task")) > 1:
            return "a module that it imports starts threads, which a fork does not have"
        monitor = os.fork()
        if monitor == 0:
            self._become_monitor(lambda: os._exit(7 if sum(map(str.isdigit, os.listdir("/proc"))) < _FEW else 1))
        if os.waitstatus_to_exitcode(os.waitpid(monitor, 0)[1]) != 7:
            return "no PID namespace can be made for a fork"
        return None

    def serve(self) -> dict[str, Any]:
        """Fork until the other side closes the connection; return in the processes of programs."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    asked = self._begin()
                    if asked is not None:
                        return asked
                elif isinstance(key.data, _Episode):
                    self._look_at(key.data, key.fileobj)

    def _begin(self) -> dict[str, Any] | None:
        first, files, _, _ = socket.recv_fds(self._control, 1, 3)
        if not first:
            for episode in self._episodes.values():
                os.kill(episode.pid, signal.SIGKILL)
            os._exit(0)
        connection = socket.socket(fileno=files[2])
        line = bytearray()
        while not line.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part:  # the episode has been cancelled
                break
            line += part
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until the monitor can handle it
        pid = self._fork() if line.endswith(b"\n") else None
        if pid == 0:
            for number, file in enumerate((files[0], files[1], files[1])):
                os.dup2(file, number)
            os.close(files[0])
            os.close(files[1])
            connection.close()
            self._close()
            program: list[dict[str, Any]] = []
            self._become_monitor(lambda: program.append(json.loads(line)))
            return program[0]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.close(files[0])
        os.close(files[1])
        if pid is None:
            connection.close()
            return None
        episode = _Episode(connection, pid, os.pidfd_open(pid))
        self._episodes[episode.handle] = episode
        self._selector.register(episode.handle, selectors.EVENT_READ, episode)
        self._selector.register(connection, selectors.EVENT_READ, episode)
        return None

    def _close(self) -> None:
        """Close what belongs to this process alone, in a fork of it."""
        self._selector.close()
        self._control.close()
        for episode in self._episodes.values():
            os.close(episode.handle)
            episode.connection.close()

    def _look_at(self, episode: _Episode, ready: object) -> None:
        if episode.handle not in self._episodes:
            return  # both were ready
        if ready is episode.connection:
            # Closed: the monitor ends the program, and then itself.
            self._selector.unregister(episode.connection)
            os.kill(episode.pid, signal.SIGTERM)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(episode.pid, 0)[1])
        self._selector.unregister(episode.handle)
        del self._episodes[episode.handle]
        os.close(episode.handle)
        if episode.connection in self._selector.get_map():
            self._selector.unregister(episode.connection)
        with contextlib.suppress(OSError):  # the other side may be gone
            episode.connection.sendall(_CODE.pack(128 - code if 128 < code <= 192 else code))
        episode.connection.close()

    def _become_monitor(self, begin: Callable[[], object]) -> None:
        """Call a function in a process of a new namespace, and return in it. Everywhere else this does not return."""
        try:
            os.setsid()
            is_root = os.geteuid() == 0
            user, group = os.geteuid(), os.getegid()
            self._call("unshare", _NEW_NAMESPACES | (0 if is_root else _NEW_USER))
            if not is_root:
                maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
                for name, text in maps.items():
                    with open(f"/proc/self/{name}", "w") as file:
                        file.write(text)
            own, other = os.pipe()
            init = self._fork()
            if init == 0:
                os.close(other)
                self._call("prctl", _DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
                if select.select([own], [], [], 0)[0]:  # its parent ended before that took effect
                    os._exit(1)
                os.close(own)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
                self._become_init(begin)
                return
            os.close(own)
            signal.signal(signal.SIGTERM, lambda *_: os.kill(init, signal.SIGKILL))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os._exit(_words(os.waitpid(init, 0)[1]))
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(126)

    def _become_init(self, begin: Callable[[], object]) -> None:
        self._call("mount", b"none", b"/", None, _SLAVE | _ALL_BELOW, None)
        self._call("mount", b"proc", b"/proc", b"proc", _PROC_FLAGS, None)
        self._drop_rights()
        script = os.fork()
        if script == 0:
            begin()
            return
        while True:
            pid, status = os.wait()
            if pid == script:
                os._exit(_words(status))

    def _drop_rights(self) -> None:
        for number in range(_NUM_CAPABILITIES):
            if not self._kept >> number & 1:
                self._libc.prctl(_DROP, number, 0, 0, 0)  # fails for numbers that the system does not know
        low, high = self._kept & 0xFFFFFFFF, self._kept >> 32
        self._call("capset", struct.pack("Ii", _CAPABILITIES_3, 0), struct.pack("6I", *3 * [low], *3 * [high]))
        for number in range(_NUM_CAPABILITIES):
            if self._kept >> number & 1:
                self._call("prctl", _AMBIENT, _RAISE, number, 0, 0)
        self._call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)

    def _fork(self) -> int:
        """Fork a process that forks a program later. What Python does in a fork, `os.fork` does there."""
        pid = int(self._python.fork())
        if pid < 0:
            raise OSError("a process cannot be forked")
        return pid

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._libc, name)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")


def _words(status: int) -> int:
    """Return an exit code in which a signal is added to 128."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _load(modules: Sequence[str]) -> None:
    with contextlib.suppress(ImportError):  # a Python without TLS
        _beside("environments/lazy_certificates.py")["install"]()
    for name in modules:
        with contextlib.suppress(Exception):  # it is raised again by the script that imports the module
            importlib.import_module(name)
    if "openai" in sys.modules:
        _beside("warm_client.py")["warm"]()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what a module printed is no program's output


def _beside(file: str) -> dict[str, Any]:
    """Run a file of this folder, and return what it defines."""
    return runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), file))


def _settle(asked: dict[str, Any]) -> None:
    """Give a fork what a fresh process has of its own."""
    os.environ.clear()
    os.environ.update(asked["env"], PWD=asked["cwd"])
    os.chdir(asked["cwd"])
    sys.argv[:] = asked["argv"]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = [sys.executable, *asked["argv"]]
    loaded: list[Any] = [sys.modules.get(name) for name in ("tempfile", "numpy", "torch")]
    tempfile, numpy, torch = loaded
    if tempfile is not None:
        tempfile.tempdir = None
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()


def _module_of(script: str) -> types.ModuleType:
    """Make the module in which a script runs as the main program."""
    from importlib.machinery import SourceFileLoader

    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=script, __loader__=SourceFileLoader("__main__", script), __builtins__=sys.modules["builtins"]
    )
    module.__dict__.update(__annotations__={}, __cached__=None)
    sys.modules["__main__"] = module
    return module


def _run(script: str) -> int:
    """Run a script as Python does, and return its exit code, or minus the signal by which it ends.

    What it raises is shown without the frames of this file.
    """
    module = _module_of(script)
    try:
        with open(script, "rb") as file:
            compiled = compile(file.read(), script, "exec", dont_inherit=True)
        exec(compiled, module.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = int(error.code or 0)
            return (code if code.bit_length() < 64 else -1) & 0xFF  # as Python and the system cut it
        _flush()
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        behind = error.__traceback__.tb_next if error.__traceback__ is not None else None
        _flush()
        sys.excepthook(type(error), error.with_traceback(behind), behind)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _flush() -> None:
    with contextlib.suppress(Exception):  # Python shows at the end that the output cannot be written
        sys.stdout.flush()


def _main() -> None:
    end = _beside("program_end.py")["ProgramEnd"]()
    control = socket.socket(fileno=int(sys.argv[1]))
    first = json.loads(control.makefile("rb").readline())
    script = first["script"]
    sys.path[0] = os.path.dirname(script)
    _load(first["modules"])
    gc.collect()
    end.share()
    gc.freeze()  # forks do not look through what they share with this process
    interpreter = ForkingInterpreter(control, first["kept"])
    problem = interpreter.problem()
    control.sendall(json.dumps({"problem": problem}).encode() + b"\n")
    if problem is not None:
        os._exit(0)
    asked = interpreter.serve()
    _settle(asked)
    end.code = _run(script)
    sys.exit(end.code)


if __name__ == "__main__":
    _main()
