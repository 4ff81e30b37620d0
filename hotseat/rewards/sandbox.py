"""Runs generated Python code in a sandbox: bubblewrap's namespaces, limits, and a watch over all of its processes.

The code sees the interpreter, the system's libraries and an empty folder in memory. It has no network, another user
than root, and nothing of this process's environment. Its memory and CPU time are summed over its processes from
outside; where control groups can be made, the kernel bounds the memory, too. With its first process everything ends
that it started, because they share a namespace of process ids.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from hotseat.errors import SandboxError, UserError
from hotseat.processes import Closed
from hotseat.rewards.sandbox_command import Interpreter, Runner, bubblewrap, find_interpreter, system_call_filter
from hotseat.rewards.sandbox_limits import LOOK_EVERY_S, MemoryGroup, MemoryGroups, ProcessWatch, below, find_parent

if TYPE_CHECKING:
    from hotseat.config.schema.reward_options import SandboxConfig

_INSIDE = Path(__file__).with_name("sandbox_inside.py")
_MAX_OPEN_FILES = 64
_PROBE = """
import os, sys
try:
    devices = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
except OSError:
    devices = []
print(os.getuid(), os.path.exists(sys.stdin.readline().strip()), [name for name in devices if name != "lo"])
"""
_TRIAL_BYTES = 64 * 2**20  # largest limit of a program that is to exceed it
_STARTED = b"hotseat: started\n"
_MAX_ERROR_BYTES = 4096
_FORBIDDEN = (
    "Operation not permitted", "Permission denied", "No permissions to create", "namespace failed",
    "No space left on device",  # user.max_user_namespaces is 0
)  # fmt: skip
# Waits until it is in its control group, and ends if its parent does. Its standard input is a pipe until then; $0 is
# the descriptor of the command's own: by its path, since shells need not take numbers of two digits.
_HELD = """read -r _ || exit 1; exec "$@" <"/proc/self/fd/$0\""""

Limit = Literal["time", "cpu", "memory", "processes", "output"]


@dataclass(frozen=True)
class SandboxSettings:
    """Limits of generated code. Memory and CPU time are of all its processes together.

    command: a runner instead of bubblewrap, with `{folder}` for the folder whose `main.py` it has to run.
    python: the interpreter of the code, with its packages; None: the one of this process, without packages.
    """

    command: tuple[str, ...] | None = None
    python: str | None = None
    timeout_s: float = 20.0
    max_cpu_s: float = 5.0
    max_memory_bytes: int = 512 * 2**20
    max_processes: int = 32
    max_output_bytes: int = 2**20
    max_concurrent: int | None = None

    @classmethod
    def of_config(cls, limits: SandboxConfig) -> SandboxSettings:
        values = dict(limits)
        values["command"] = None if limits.command is None else tuple(limits.command)
        values["max_memory_bytes"] = values.pop("max_memory_mib") * 2**20
        values["max_output_bytes"] = values.pop("max_output_kib") * 2**10
        return cls(**values)


@dataclass(frozen=True)
class SandboxRun:
    """How a run of generated code ended, and what it wrote to its standard output.

    end: `exited`, with `exit_code` (minus the signal that ended it); or the limit that ended it.
    """

    end: Literal["exited"] | Limit
    exit_code: int | None
    output: bytes

    @property
    def is_success(self) -> bool:
        return self.end == "exited" and self.exit_code == 0


class Sandbox:
    """Runs programs, any number of them at a time, each call in its caller's thread."""

    def __init__(self, settings: SandboxSettings):
        self._settings = settings
        self._is_closed = threading.Event()
        self._python: Interpreter | None = None
        self._lock = threading.Lock()
        self._memory: MemoryGroups | str | None = None  # a text: why there are no control groups; None: not known yet

    def probe(self) -> str:
        """Run a small program, and return how memory is bounded here, for the user.

        Raises `UserError` if the sandbox does not work on this machine, with the cause.
        """
        settings = self._settings
        try:
            if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
                raise SandboxError("this kernel does not list a process's children in /proc (CONFIG_PROC_CHILDREN)")
            with tempfile.NamedTemporaryFile() as outside:
                run = self.run(_PROBE, outside.name)
        except SandboxError as error:
            raise UserError(f"the sandbox for generated code does not work on {platform.node()}: {error}") from None
        text = run.output.decode(errors="replace").strip()
        user, _, rest = text.partition(" ")
        is_isolated = settings.command is not None or (user not in ("", "0") and rest == "False []")
        if not run.is_success or not text or not is_isolated:
            raise UserError(
                f"the sandbox for generated code does not work on {platform.node()}: its trial ended by {run.end} with"
                f" code {run.exit_code}; user, whether it sees files outside, network devices: {text or 'no output'}"
            )
        groups = self._memory_groups()
        if isinstance(groups, str):
            every = f"every {LOOK_EVERY_S * 1000:.0f} ms or more often"
            return f"sandbox: memory is summed over all processes of a program {every}, since {groups}"
        return (
            f"sandbox: the kernel bounds memory over all processes of a program, by control groups in {groups.parent}"
        )

    def run(self, program: str, stdin: str = "", call: str | None = None) -> SandboxRun:
        """Run a program, or evaluate an expression after it, whose value is then the output as JSON.

        Raises `SandboxError` if the program could not be run, and `Closed` after `close`.
        """
        groups = self._memory_groups()
        if isinstance(groups, str):
            return self._run(program, stdin, call, None)
        with groups.make(self._settings.max_memory_bytes) as group:
            return self._run(program, stdin, call, group)

    def _memory_groups(self) -> MemoryGroups | str:
        """Return what makes control groups; if they do not work, a text that says why. Tries once, by a program."""
        with self._lock:
            if self._memory is None:
                parent = find_parent()
                self._memory = parent if isinstance(parent, str) else self._tried(MemoryGroups(parent))
            return self._memory

    def _tried(self, groups: MemoryGroups) -> MemoryGroups | str:
        groups.remove_left()
        size = min(_TRIAL_BYTES, self._settings.max_memory_bytes // 2)
        program = f"block = bytearray({size}); block[::4096] = bytes([1]) * len(block[::4096])"
        try:
            with groups.make(size) as group:
                self._run(program, "", None, group)
                is_bounded = group.was_exceeded
        except SandboxError as error:
            return str(error)
        return groups if is_bounded else "a program that exceeded the limit of its control group was not ended"

    def _run(self, program: str, stdin: str, call: str | None, group: MemoryGroup | None) -> SandboxRun:
        with tempfile.TemporaryDirectory(prefix="hotseat-sandbox-") as name:
            folder = Path(name)
            runner = self._runner(folder)
            (folder / "main.py").write_bytes(_INSIDE.read_bytes())
            (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
            (folder / "task.json").write_text(
                json.dumps({"user": runner.inner_user, "limits": self._limits(), "call": call})
            )
            (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
            for path in (folder, *folder.iterdir()):
                path.chmod(0o755)  # the code's user is another one
            with (folder / "stdin").open("rb") as file:
                (folder / "stdin").unlink()
                return Running(runner, file, self._settings, self._is_closed, group).result()

    def close(self) -> None:
        self._is_closed.set()

    def _limits(self) -> dict[str, int]:
        """Return the limits of each process. The sums over processes are watched from outside."""
        settings = self._settings
        limits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": int(settings.max_cpu_s) + 1,
            "RLIMIT_DATA": settings.max_memory_bytes,
            "RLIMIT_FSIZE": settings.max_memory_bytes // 4,
            "RLIMIT_NOFILE": _MAX_OPEN_FILES,
        }
        if settings.command is None:  # in another runner, the user may have other processes
            limits["RLIMIT_NPROC"] = settings.max_processes
        return limits

    def _runner(self, folder: Path) -> Runner:
        settings = self._settings
        if settings.command is not None:
            return Runner(tuple(part.replace("{folder}", str(folder)) for part in settings.command))
        bwrap, machine = shutil.which("bwrap"), platform.machine()
        if bwrap is None:
            raise SandboxError(
                "bwrap is missing; install the package bubblewrap (apt-get install bubblewrap), or set"
                " reward.sandbox.command to another runner"
            )
        if system_call_filter(machine) is None:
            raise SandboxError(f"there is no filter of system calls for {machine}: set reward.sandbox.command")
        if self._python is None:
            self._python = find_interpreter(settings.python)
        return bubblewrap(bwrap, self._python, folder, settings.max_memory_bytes)


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Running:
    """One run: starts the runner, reads its output, watches its processes, and ends all of them."""

    _runner: Runner
    _stdin: IO[bytes]
    _settings: SandboxSettings
    _is_closed: threading.Event
    _group: MemoryGroup | None
    _gate: int = -1  # what the process waits for, if it has a group
    _output: bytearray = field(default_factory=bytearray)
    _errors: bytearray = field(default_factory=bytearray)
    _info: bytearray = field(default_factory=bytearray)

    def result(self) -> SandboxRun:
        deadline_s = time.monotonic() + self._settings.timeout_s
        with contextlib.ExitStack() as stack:
            process, info = self._start(stack)
            try:
                if self._group is not None and process.poll() is None:
                    # The process waits until it is in its control group.
                    self._group.add(process.pid)
                    with contextlib.suppress(BrokenPipeError):  # it has ended, and the watch sees it
                        os.write(self._gate, b"\n")
                end = self._watch(process, info, deadline_s)
            finally:
                self._end(process)
        if self._group is not None and self._group.was_exceeded:
            end = "memory"
        if not self._output.startswith(_STARTED):
            raise SandboxError(self._problem(process.returncode, end))
        return SandboxRun(end, process.returncode if end == "exited" else None, bytes(self._output[len(_STARTED) :]))

    def _start(self, stack: contextlib.ExitStack) -> tuple[subprocess.Popen[bytes], int | None]:
        command = list(self._runner.command)
        pass_fds: tuple[int, ...] = ()
        info = None
        more: dict[str, Any] = {}
        if self._runner.has_pipes:
            rules = system_call_filter(platform.machine())
            assert rules is not None
            readable, writable = os.pipe()  # the filter is smaller than a pipe's buffer
            os.write(writable, rules)
            os.close(writable)
            info, info_end = os.pipe()
            os.set_blocking(info, False)
            stack.callback(os.close, readable)
            stack.callback(os.close, info)
            pass_fds = (readable, info_end)
            command[1:1] = ["--seccomp", str(readable), "--info-fd", str(info_end)]
            if self._runner.outer_user is not None:
                more = {"user": self._runner.outer_user, "group": self._runner.outer_user, "extra_groups": ()}
        stdin: IO[bytes] | int = self._stdin
        if self._group is not None:
            stdin, self._gate = os.pipe()
            stack.callback(os.close, self._gate)
            pass_fds += (self._stdin.fileno(),)
            command = ["/bin/sh", "-c", _HELD, str(self._stdin.fileno()), *command]
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=pass_fds,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": os.environ.get("HOME", "/")},
                start_new_session=True,
                **more,
            )
        except OSError as error:
            if more and error.errno in (errno.EPERM, errno.EINVAL):
                raise SandboxError(_same_user(f"starting bwrap as another user failed: {error.strerror}")) from None
            raise SandboxError(f"{command[0]} cannot be started: {error}") from None
        finally:
            if info is not None:
                os.close(info_end)
            if isinstance(stdin, int):
                os.close(stdin)
        stack.enter_context(process)
        return process, info

    def _watch(
        self, process: subprocess.Popen[bytes], info: int | None, deadline_s: float
    ) -> Literal["exited"] | Limit:
        """Read what the processes write until they end, or pass a limit."""
        settings = self._settings
        # bwrap has one process inside; the kernel's own limit counts those of the user.
        max_processes = settings.max_processes + 2 if settings.command is None else None
        watch = ProcessWatch(settings.max_memory_bytes, settings.max_cpu_s, max_processes)
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector:
            for stream, target, limit in (
                (process.stdout.fileno(), self._output, settings.max_output_bytes + len(_STARTED)),
                (process.stderr.fileno(), self._errors, None),
                (info, self._info, _MAX_ERROR_BYTES),
            ):
                if stream is not None:
                    os.set_blocking(stream, False)
                    selector.register(stream, selectors.EVENT_READ, (target, limit))
            next_look_s = time.monotonic()
            while selector.get_map() or process.poll() is None:
                now_s = time.monotonic()
                if self._is_closed.is_set():
                    raise Closed
                if now_s >= deadline_s:
                    return "time"
                if now_s >= next_look_s:
                    exceeded = watch.look(process.pid)
                    if exceeded is not None:
                        return exceeded
                    next_look_s = time.monotonic() + watch.wait_s
                wait_s = max(0.0, min(next_look_s, deadline_s) - time.monotonic())
                if not selector.get_map():
                    wait_s = min(0.002, wait_s)  # it has closed its output, and may end at any time
                for key, _ in selector.select(wait_s):
                    target, limit = key.data
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        selector.unregister(key.fd)
                    target += part
                    if limit is None:
                        del target[: max(0, len(target) - _MAX_ERROR_BYTES)]
                    elif len(target) > limit:
                        return "output"
        return "exited"

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End everything that is left, and wait until it is gone.

        The end of the first process of a namespace ends all others, and bwrap, which waits for it, ends after them.
        """
        with contextlib.suppress(ValueError, KeyError):
            child = json.loads(bytes(self._info))["child-pid"]
            if process.poll() is None and child in below(process.pid):
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10.0)
        if process.poll() is None:
            pids = list(below(process.pid))
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            for pid in pids:  # a runner may have made other groups
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()

    def _problem(self, code: int | None, end: str) -> str:
        said = self._errors.decode(errors="replace").strip() or "nothing"
        name = os.path.basename(self._runner.command[0])
        if self._runner.has_pipes and "Unknown option" in said:
            return f"this bwrap is too old, it needs version 0.7 or later: it said {said}"
        if self._runner.has_pipes and "mount proc" in said:
            return (
                f"bwrap is installed, but this container hides parts of /proc and forbids a new one: it said {said}."
                " Start the container with --security-opt systempaths=unconfined (procMount: Unmasked in Kubernetes),"
                " or set reward.sandbox.command to another runner"
            )
        if self._runner.has_pipes and "main.py" in said and ("os.setgroups" in said or "os.setres" in said):
            return _same_user(f"it said {said}")
        if self._runner.has_pipes and "source path" in said and "Permission denied" in said:
            return (
                f"its user cannot read the interpreter: bwrap said {said}; set reward.sandbox.python to one that every"
                " user can read, such as /usr/bin/python3"
            )
        if self._runner.has_pipes and any(part in said for part in _FORBIDDEN):
            return (
                f"bwrap is installed, but user namespaces are forbidden here: it said {said}. On a machine of your own,"
                " set the kernel's settings user.max_user_namespaces above 0 and, where they exist,"
                " kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0; start a"
                " container with --security-opt seccomp=unconfined, or as root with --cap-add SYS_ADMIN; or set"
                " reward.sandbox.command to another runner"
            )
        how = f"exited with code {code}" if end == "exited" else f"was ended by its limit of {end}"
        return f"{name} {how} before it ran the code: it said {said}"


def _same_user(cause: str) -> str:
    return (
        f"generated code must not be root's, and root may not change its user and groups here: {cause}. In a container"
        " that has root alone (cat /proc/self/uid_map), give it a range of ids: entries in /etc/subuid and /etc/subgid"
        " for rootless podman, Apptainer without --fakeroot; elsewhere give it the capabilities SETUID and SETGID; or"
        " run hotseat as another user; or set reward.sandbox.command to another runner"
    )
