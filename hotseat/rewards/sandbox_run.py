"""One run of generated code: its limits, the processes of its runner, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import selectors
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal

from hotseat.errors import SandboxError
from hotseat.rewards.sandbox_command import Runner, system_call_filter
from hotseat.rewards.sandbox_groups import MemoryGroup
from hotseat.rewards.sandbox_watch import ProcessWatch, below, children_of

if TYPE_CHECKING:
    from hotseat.config.schema import SandboxConfig

_STARTED = b"hotseat: started\n"
_MAX_ERROR_BYTES = 4096
_FORBIDDEN = (
    "Operation not permitted",
    "Permission denied",
    "No permissions to create",
    "namespace failed",
    "No space left on device",  # user.max_user_namespaces is 0
)
# Waits until it is in its control group, and ends if its parent does. Its standard input is a pipe until then; $0 is
# the descriptor of the command's own: by its path, since shells need not take numbers of two digits.
_HELD = """read -r _ || exit 1; exec "$@" <"/proc/self/fd/$0\""""

Limit = Literal["time", "cpu", "memory", "processes", "output"]


class SandboxClosed(Exception):
    """The owner does not want the result any more."""


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
        """Return the settings that the config has."""
        values = dict(limits)
        values["command"] = None if limits.command is None else tuple(limits.command)
        values["max_memory_bytes"] = values.pop("max_memory_mib") * 2**20
        values["max_output_bytes"] = values.pop("max_output_kib") * 2**10
        return cls(**values)


@dataclass(frozen=True)
class Run:
    """How a run of generated code ended, and what it wrote to its standard output.

    end: `exited`, with `exit_code` (minus the signal that ended it); or the limit that ended it.
    """

    end: Literal["exited"] | Limit
    exit_code: int | None
    output: bytes

    @property
    def is_success(self) -> bool:
        return self.end == "exited" and self.exit_code == 0


class Running:
    """One run: starts the runner, reads its output, watches its processes, and ends all of them."""

    def __init__(
        self,
        runner: Runner,
        stdin: IO[bytes],
        settings: SandboxSettings,
        is_closed: threading.Event,
        group: MemoryGroup | None,
    ):
        self._settings = settings
        self._group = group
        self._is_closed = is_closed
        self._runner = runner
        self._stdin = stdin
        self._gate = -1  # what the process waits for, if it has a group
        self._output = bytearray()
        self._errors = bytearray()
        self._info = bytearray()

    def result(self) -> Run:
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
        return Run(end, process.returncode if end == "exited" else None, bytes(self._output[len(_STARTED) :]))

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
                    raise SandboxClosed
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
            if process.poll() is None and child in children_of(process.pid):
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
        """Return why the program was not run."""
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
