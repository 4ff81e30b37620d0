"""Runs generated Python code in a sandbox: bubblewrap's namespaces, limits, and a watch over all of its processes.

The code sees the interpreter, the system's libraries and an empty folder in memory. It has no network, another user
than root, and nothing of this process's environment. Its memory and CPU time are summed over its processes from
outside; where control groups can be made, the kernel bounds the memory, too. With its first process everything ends
that it started, because they share a namespace of process ids.
"""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
import threading
from pathlib import Path

from hotseat.errors import SandboxError, UserError
from hotseat.rewards.sandbox_command import Interpreter, Runner, bubblewrap, find_interpreter, system_call_filter
from hotseat.rewards.sandbox_groups import MemoryGroup, MemoryGroups, find_parent
from hotseat.rewards.sandbox_run import Run, Running, SandboxClosed, SandboxSettings
from hotseat.rewards.sandbox_watch import LOOK_EVERY_S

__all__ = ["Run", "Sandbox", "SandboxClosed", "SandboxSettings"]

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
            self._check_machine()
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

    def run(self, program: str, stdin: str = "", call: str | None = None) -> Run:
        """Run a program, or evaluate an expression after it, whose value is then the output as JSON.

        Raises `SandboxError` if the program could not be run, and `SandboxClosed` after `close`.
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

    def _run(self, program: str, stdin: str, call: str | None, group: MemoryGroup | None) -> Run:
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
        """End all running programs."""
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

    def _check_machine(self) -> None:
        if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
            raise SandboxError("this kernel does not list the children of a process in /proc (CONFIG_PROC_CHILDREN)")
        if self._settings.command is None:
            if shutil.which("bwrap") is None:
                raise SandboxError(
                    "bwrap is missing; install the package bubblewrap (apt-get install bubblewrap), or set"
                    " reward.sandbox.command to another runner"
                )
            if system_call_filter(platform.machine()) is None:
                raise SandboxError(
                    f"there is no filter of system calls for {platform.machine()}: set reward.sandbox.command"
                )

    def _runner(self, folder: Path) -> Runner:
        settings = self._settings
        if settings.command is not None:
            return Runner(tuple(part.replace("{folder}", str(folder)) for part in settings.command))
        if self._python is None:
            self._python = find_interpreter(settings.python)
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError("bwrap is missing")
        return bubblewrap(bwrap, self._python, folder, settings.max_memory_bytes)
