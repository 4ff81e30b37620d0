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
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from hotseat.errors import SandboxError, UserError
from hotseat.rewards.sandbox_groups import MemoryGroup, MemoryGroups, find_parent
from hotseat.rewards.seccomp import system_call_filter

_INSIDE = Path(__file__).with_name("sandbox_inside.py")
_STARTED = b"hotseat: started\n"
_LOOK_EVERY_S = 0.02  # longest interval of looks at the processes; shorter as their memory nears its limit
_GROWTH = 8 * 2**30  # bytes a second by which one thread can fill memory
_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_MAX_ERROR_BYTES = 4096
_MAX_OPEN_FILES = 64
_CAP_SYS_ADMIN = 21
_USERS = (0x70000000, 60000)  # first of the user ids for code that root starts; the second where ids end at 65535
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib64")
_FORBIDDEN = (
    "Operation not permitted",
    "Permission denied",
    "No permissions to create",
    "namespace failed",
    "No space left on device",  # user.max_user_namespaces is 0
)
_PROBE = """
import os, sys
try:
    devices = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
except OSError:
    devices = []
print(os.getuid(), os.path.exists(sys.stdin.readline().strip()), [name for name in devices if name != "lo"])
"""


# Waits until it is in its control group, and ends if its parent does. Its standard input is a pipe until then; $0 is
# the descriptor of the command's own: by its path, since shells need not take numbers of two digits.
_HELD = """read -r _ || exit 1; exec "$@" <"/proc/self/fd/$0\""""
_TRIAL_BYTES = 64 * 2**20  # largest limit of a program that is to exceed it


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


@dataclass(frozen=True)
class Run:
    """How a run of generated code ended, and what it wrote to its standard output.

    end: `exited`, with `exit_code` (minus the signal that ended it); or the limit that ended it.
    """

    end: Literal["exited", "time", "cpu", "memory", "processes", "output"]
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
        self._python: _Interpreter | None = None
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
            every = f"every {_LOOK_EVERY_S * 1000:.0f} ms or more often"
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
                return _Running(runner, file, self._settings, self._is_closed, group).result()

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

    def _runner(self, folder: Path) -> _Runner:
        settings = self._settings
        if settings.command is not None:
            return _Runner(tuple(part.replace("{folder}", str(folder)) for part in settings.command))
        if self._python is None:
            self._python = _interpreter(settings.python)
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError("bwrap is missing")
        return _bubblewrap(bwrap, self._python, folder, settings.max_memory_bytes)


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Interpreter:
    """The interpreter of generated code. paths: what it needs of the file system, apart from system libraries."""

    command: tuple[str, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class _Runner:
    """The command that runs a folder's `main.py`. has_pipes: it is bubblewrap, and takes a filter and gives its child.

    outer_user: the user to start it as; inner_user: the user that `main.py` becomes. None: no change.
    """

    command: tuple[str, ...]
    has_pipes: bool = False
    outer_user: int | None = None
    inner_user: int | None = None


def _interpreter(python: str | None) -> _Interpreter:
    if python is None:
        executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        return _Interpreter((executable, "-s", "-S", "-B"), (executable, *_libraries(sys.base_prefix)))
    ask = "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, sys.path]))"
    try:
        answer = subprocess.run([python, "-E", "-s", "-c", ask], capture_output=True, timeout=60, check=True, text=True)
        # The file that was named may be a script that starts the interpreter, as pyenv's are.
        executable, prefix, base, searched = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxError(f"reward.sandbox.python {python} is no interpreter: {error}") from None
    paths = (executable, *([prefix] if prefix != base else []), *_libraries(base))
    # Folders of packages that .pth files add. Others, such as a project's own, have no business in the sandbox.
    packages = [path for path in searched if os.path.basename(path) in ("site-packages", "dist-packages")]
    return _Interpreter((executable, "-s", "-B"), (*paths, *filter(os.path.isdir, packages)))


def _libraries(prefix: str) -> list[str]:
    return [path for name in ("lib", "lib64") if os.path.isdir(path := os.path.join(prefix, name))]


def _resolved(paths: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the links on the way to paths, with their targets, and where the paths lead; nothing inside another."""
    links: dict[str, str] = {}
    ends: list[str] = []
    for path in paths:
        at, left = "/", list(Path(path).parts[1:])
        while left:
            at = os.path.normpath(os.path.join(at, left.pop(0)))
            if os.path.islink(at):
                links[at] = os.readlink(at)
                left[:0] = [part for part in Path(links[at]).parts if part != "/"]
                at = "/" if os.path.isabs(links[at]) else os.path.dirname(at)
        ends.append(at)
    outer = [end for end in dict.fromkeys(ends) if not _is_inside(end, [other for other in ends if other != end])]
    return {link: target for link, target in links.items() if not _is_inside(link, outer)}, outer


def _is_inside(path: str, folders: Sequence[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _bubblewrap(bwrap: str, python: _Interpreter, folder: Path, max_file_bytes: int) -> _Runner:
    is_root = os.geteuid() == 0
    user = _free_user() if is_root else None
    # Root sets the sandbox up itself and leaves the user to `main.py`: bwrap can map only its own user into a new
    # namespace, and outside that would still be root.
    is_privileged = is_root and _has_capability(_CAP_SYS_ADMIN)
    options = [
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
    ]
    if is_privileged:
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    for name, value in (
        ("PATH", "/usr/bin"),
        ("HOME", "/tmp"),
        ("LANG", "C.UTF-8"),
        ("PYTHONUTF8", "1"),
        ("PYTHONHASHSEED", "0"),
        ("OMP_NUM_THREADS", "1"),
        ("OPENBLAS_NUM_THREADS", "1"),
    ):
        options += ["--setenv", name, value]
    options += ["--dir", "/usr", "--dir", "/etc"]
    for path in _SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    options += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    size = str(max_file_bytes // 4)
    options += [
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"),
        *("--perms", "1777", "--size", size, "--tmpfs", "/tmp", "--chdir", "/tmp"),
    ]
    # After /tmp and /dev/shm, which would hide an interpreter that is there.
    links, ends = _resolved(python.paths)
    shown = [("--symlink", target, link) for link, target in links.items()] + [("--ro-bind", end, end) for end in ends]
    for option, source, place in shown:
        if _is_inside(place, _SYSTEM):
            continue
        for parent in reversed(Path(place).parents[:-1]):  # bwrap itself would make them for root alone
            if not _is_inside(str(parent), _SYSTEM):
                options += ["--dir", str(parent)]
        options += [option, source, place]
    options += ["--ro-bind", str(folder), "/program", "--remount-ro", "/dev", "--remount-ro", "/"]
    return _Runner(
        (bwrap, *options, "--", *python.command, "/program/main.py"),
        has_pipes=True,
        outer_user=None if is_privileged else user,
        inner_user=user if is_privileged else None,
    )


def _free_user() -> int:
    """Return a user id that nobody else has: the number of processes is limited for each user."""
    mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first = _USERS[0] if any(start <= _USERS[0] < start + length for start, _, length in mapped) else _USERS[1]
    return first + threading.get_native_id() % (2**22 if first == _USERS[0] else 5000)


def _has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


# --- one run ----------------------------------------------------------------------------------------------------------


class _Running:
    """One run: starts the runner, reads its output, watches its processes, and ends all of them."""

    def __init__(
        self,
        runner: _Runner,
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
                if self._group is not None:
                    self._begin_in(self._group, process)
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

    def _begin_in(self, group: MemoryGroup, process: subprocess.Popen[bytes]) -> None:
        """Put the process, which waits, into its control group, and let it run the command."""
        if process.poll() is None:
            group.add(process.pid)
            with contextlib.suppress(BrokenPipeError):  # it has ended, and the watch sees it
                os.write(self._gate, b"\n")

    def _watch(
        self, process: subprocess.Popen[bytes], info: int | None, deadline_s: float
    ) -> Literal["exited", "time", "cpu", "memory", "processes", "output"]:
        """Read what the processes write until they end, or pass a limit."""
        settings = self._settings
        watch = _Watch(settings)
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
            while selector.get_map():
                now_s = time.monotonic()
                if self._is_closed.is_set():
                    raise SandboxClosed
                if now_s >= deadline_s:
                    return "time"
                if now_s >= next_look_s:
                    over = watch.look(process.pid)
                    if over is not None:
                        return over
                    next_look_s = time.monotonic() + watch.wait_s
                for key, _ in selector.select(max(0.0, min(next_look_s, deadline_s) - time.monotonic())):
                    target, limit = key.data
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        selector.unregister(key.fd)
                    target += part
                    if limit is None:
                        del target[: max(0, len(target) - _MAX_ERROR_BYTES)]
                    elif len(target) > limit:
                        return "output"
        while process.poll() is None:  # it has closed its output, and still runs
            if self._is_closed.is_set():
                raise SandboxClosed
            if time.monotonic() >= deadline_s:
                return "time"
            over = watch.look(process.pid)
            if over is not None:
                return over
            time.sleep(min(0.002, watch.wait_s))  # it may end at any time
        return "exited"

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End everything that is left, and wait until it is gone.

        The end of the first process of a namespace ends all others, and bwrap, which waits for it, ends after them.
        """
        with contextlib.suppress(ValueError, KeyError):
            child = json.loads(bytes(self._info))["child-pid"]
            if process.poll() is None and child in _children(process.pid):
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10.0)
        if process.poll() is None:
            below = list(_below(process.pid))
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            for pid in below:  # a runner may have made other groups
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


@dataclass(frozen=True)
class _Counts:
    """The kernel's counts of one process: bytes of its own memory and of memory to share, page faults, and threads."""

    anonymous: int
    shared: int
    faults: int
    num_threads: int
    cpu_s: float


class _Watch:
    """Looks at all processes of a program, and tells which limit they exceed together.

    The kernel's counts of a process are cheap to read, but a page that processes share is in the count of each. To
    count it once takes tens of milliseconds, in which memory grows. So pages are counted only if the limit can be
    exceeded, by the kernel's counts and how they changed since pages were counted last.
    """

    def __init__(self, settings: SandboxSettings, proc: str = "/proc"):
        self._settings = settings
        self._proc = proc
        self._counted = 0  # bytes of all processes, when pages were counted
        self._then: dict[int, _Counts] = {}  # of each process at that time
        self._next_count_s = 0.0
        self.wait_s = 0.0  # until the next look

    def look(self, root: int) -> Literal["cpu", "memory", "processes"] | None:
        """Look at the processes below `root`; return the limit that they exceed, None if they exceed none."""
        begun_s = time.monotonic()
        settings, limit = self._settings, self._settings.max_memory_bytes
        now: dict[int, _Counts] = {}
        for pid in _below(root, self._proc):
            with contextlib.suppress(OSError, ValueError, IndexError):
                now[pid] = _counts(pid, self._proc)
        # bwrap has one process inside; the kernel's own limit counts those of the user.
        if settings.command is None and len(now) > settings.max_processes + 2:
            return "processes"
        if sum(counts.cpu_s for counts in now.values()) > settings.max_cpu_s:
            return "cpu"
        most = self._most(now)
        look_s = time.monotonic() - begun_s
        # No more than half of the time goes into counting, unless the limit is probably exceeded.
        if most > limit and (begun_s >= self._next_count_s or self._likely(now) > limit):
            self._counted, self._then = self._count(now), now
            if self._counted > limit:
                return "memory"
            most = self._counted
            self._next_count_s = 2 * time.monotonic() - begun_s
        self.wait_s = _wait_s(limit - most, sum(counts.num_threads for counts in now.values()), look_s)
        return None

    def _likely(self, now: dict[int, _Counts]) -> int:
        """Return how much memory there probably is: new pages of a process belong to it alone."""
        grown = 0
        for pid, then in self._then.items():
            grown += now[pid].anonymous - then.anonymous if pid in now else -then.anonymous - then.shared
        return self._counted + grown

    def _most(self, now: dict[int, _Counts]) -> int:
        """Return how much memory there is at most: a page fault may have copied a page that was shared."""
        grown = 0
        for pid, counts in now.items():
            then = self._then.get(pid)
            if then is None:
                grown += counts.anonymous + counts.shared
            else:
                grown += max(0, counts.anonymous - then.anonymous) + max(0, counts.shared - then.shared)
                grown += (counts.faults - then.faults) * _PAGE
        return self._counted + grown

    def _count(self, pids: Iterable[int]) -> int:
        memory = 0
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                memory += _memory(pid, self._proc)
            if memory > self._settings.max_memory_bytes:
                break
        return memory


def _wait_s(headroom: int, num_threads: int, look_s: float) -> float:
    """Return how long to wait after a look: no longer than threads need to fill the headroom.

    No more than a fifth of the time goes into looking.
    """
    grown_s = max(0, headroom) / (_GROWTH * max(1, min(num_threads, os.cpu_count() or 1)))
    return max(min(grown_s, _LOOK_EVERY_S), 4 * look_s)


def _below(root: int, proc: str = "/proc") -> Iterator[int]:
    """Yield the ids of all processes below one. Orphans stay below the first process of their namespace."""
    waiting: list[int] = _children(root, proc)
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += _children(pid, proc)


def _children(pid: int, proc: str = "/proc") -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"{proc}/{pid}/task"):
            with contextlib.suppress(OSError):
                children += map(int, _read(f"{proc}/{pid}/task/{task}/children").split())
    return children


def _counts(pid: int, proc: str) -> _Counts:
    fields = _read(f"{proc}/{pid}/stat").rpartition(b")")[2].split()
    ticks = sum(map(int, fields[11:15]))  # its own, and of children that have ended
    status = _read(f"{proc}/{pid}/status")
    return _Counts(
        _bytes(status, b"RssAnon:"),
        _bytes(status, b"RssShmem:"),
        faults=int(fields[7]),
        num_threads=int(fields[17]),
        cpu_s=ticks / _TICKS,
    )


def _memory(pid: int, proc: str) -> int:
    """Return the bytes of a process's own memory; a page that n processes share counts as an n-th of itself."""
    try:
        pages = _read(f"{proc}/{pid}/smaps_rollup")
        return _bytes(pages, b"Pss_Anon:") + _bytes(pages, b"Pss_Shmem:")
    except PermissionError:
        status = _read(f"{proc}/{pid}/status")
        return _bytes(status, b"RssAnon:") + _bytes(status, b"RssShmem:")


def _bytes(text: bytes, name: bytes) -> int:
    """Return the number of bytes behind a name in a file of /proc; 0 for a process that has ended."""
    _, _, rest = text.partition(b"\n" + name)
    return int(rest.split(None, 1)[0]) * 1024 if rest else 0


def _read(path: str) -> bytes:
    """Read a file of /proc. Python's own files take several times as long, and there are some for each process."""
    file = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(file, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(file)
