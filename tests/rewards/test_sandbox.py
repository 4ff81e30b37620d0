"""Generated code in the sandbox: attacks end, gain nothing and leave nothing; its own failures are told apart."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from hotseat.errors import SandboxError, UserError
from hotseat.failed import Failed
from hotseat.processes import Closed
from hotseat.rewards import Sandbox, SandboxSettings, sandbox_command
from hotseat.rewards import sandbox as sandbox_module
from hotseat.rewards.code import grade_code
from hotseat.rewards.sandbox import SandboxRun
from hotseat.rewards.sandbox_command import system_call_filter
from hotseat.rewards.sandbox_limits import MemoryGroup, MemoryGroups, ProcessWatch, below, find_parent, wait_s

TIGHT = SandboxSettings(
    timeout_s=300.0, max_cpu_s=30.0, max_memory_bytes=128 << 20, max_processes=12, max_output_bytes=1 << 16
)
SHORT = dataclasses.replace(TIGHT, max_cpu_s=0.5)  # for what only its use of processors ends
TESTS = json.dumps([{"input": "2 3\n", "output": "5\n"}, {"input": "10 -4\n", "output": "6"}])
CALLS = json.dumps([{"call": "add(2, 3)", "result": 5}, {"call": "add(0.1, 0.2)", "result": 0.3}])

WRITES_A_SUM = "a, b = map(int, input().split())\nprint(a + b)\n"
DEFINES_ADD = "print('noise')\ndef add(a, b):\n    return a + b\n"

# Name: (program, how it ends, its exit code where it exits).
ATTACKS = {
    "endless loop": ("while True: pass", "cpu", None),
    "10 GB": ("x = bytearray(10 << 30)", "exited", 1),
    "10 GB in a shared mapping": (
        "import mmap\nm = mmap.mmap(-1, 10 << 30)\nfor _ in range(10240): m.write(b'x' * (1 << 20))",
        "memory",
        None,
    ),
    "10 GB in many processes": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (60 << 20)\n"
        "        time.sleep(600)\ntime.sleep(600)",
        "memory",
        None,
    ),
    "10 GB outside of any process": ("import os\nos.memfd_create('x')", "exited", 1),
    "10 GB of files": (
        "for n in range(100):\n    with open(f'/tmp/{n}', 'wb') as f: f.write(b'x' * (10 << 20))",
        "exited",
        1,
    ),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "cpu", None),
    "1,000 processes": (
        "import os, time\nfor _ in range(1000):\n    if os.fork() == 0: time.sleep(600)",
        "exited",
        1,
    ),
    "a process left behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)",
        "exited",
        0,
    ),
    "flooded output": ("while True: print('x' * 1000)", "output", None),
    "flooded errors": ("import sys\nfor _ in range(2000): sys.stderr.write('x' * 1000)", "exited", 0),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', PORT), 5)", "exited", 1),
    "other sockets": ("import socket\nsocket.socket(40, socket.SOCK_STREAM)", "exited", 1),
    "new namespaces": ("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", "exited", 1),
    "becoming root": ("import os\nos.setuid(0)", "exited", 1),
    "raising limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))",
        "exited",
        1,
    ),
    "killing what is outside": (
        "import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(OUTSIDE, signal.SIGKILL)",
        "exited",
        1,
    ),
    "memory of another process": (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.process_vm_readv(1, None, 0, None, 0, 0) == 0, errno.errorcode[ctypes.get_errno()]",
        "exited",
        1,
    ),
    "a call of a later kernel": (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.syscall(470, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS",
        "exited",
        0,
    ),
    "a crash": ("import ctypes\nctypes.string_at(0)", "exited", 139),
}


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(TIGHT)
    try:
        made.probe()
    except UserError as error:
        pytest.skip(str(error))
    return made


def descendants() -> list[int]:
    """Return the processes below this one, except those of the test runner itself."""
    return list(below(os.getpid()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_and_leaves_nothing_running(sandbox, name, tmp_path):
    """Scenario 51."""
    program, end, code = ATTACKS[name]
    before = set(descendants())
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = program.replace("PORT", str(server.getsockname()[1])).replace("OUTSIDE", str(os.getpid()))
        run = (Sandbox(SHORT) if end == "cpu" else sandbox).run(program)
    assert run.end == end
    assert run.exit_code == code
    assert set(descendants()) <= before


@pytest.mark.slow
def test_files_outside_can_be_neither_read_nor_written_nor_deleted(sandbox, tmp_path, monkeypatch):
    """Scenario 51."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_rsa").write_text("secret")
    run_dir = tmp_path / "runs"
    run_dir.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("API_TOKEN", "secret")
    program = f"""
import json, os, shutil
for path in ({str(tmp_path)!r}, os.path.expanduser("~/.ssh"), {str(Path.home())!r} + "/.ssh", "/etc/passwd", "/home"):
    print(os.path.exists(path))
for action in (
    lambda: open({str(run_dir / "metrics.jsonl")!r}, "w"),
    lambda: os.remove({str(tmp_path / ".ssh" / "id_rsa")!r}),
    lambda: open("/program/main.py", "w"),
    lambda: open("/x", "w"),
    lambda: os.remove(os.__file__),
):
    try:
        action()
        print("done")
    except OSError:
        print("refused")
for folder in ("/program", os.path.dirname(json.__file__)):
    shutil.rmtree(folder, ignore_errors=True)
    print(len(os.listdir(folder)) > 0)
files = [name for name in os.listdir("/tmp") if not os.__file__.startswith("/tmp/" + name)]
print(os.environ.get("API_TOKEN"), "secret" in str(os.environ), files, os.getuid() == 0)
print([pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 10])
"""
    run = sandbox.run(program)
    assert run.is_success
    lines = run.output.decode().splitlines()
    assert lines == ["False"] * 5 + ["refused"] * 5 + ["True"] * 2 + ["None False [] False", "[]"]
    assert (tmp_path / ".ssh" / "id_rsa").read_text() == "secret"
    assert list(run_dir.iterdir()) == []


@pytest.mark.slow
def test_right_code_gets_one_and_wrong_code_zero(sandbox):
    assert grade_code(sandbox, WRITES_A_SUM, TESTS) == 1.0
    assert grade_code(sandbox, f"Here it is:\n```python\n{WRITES_A_SUM}```\nDone.", TESTS) == 1.0
    assert grade_code(sandbox, DEFINES_ADD, CALLS) == 1.0
    assert grade_code(sandbox, "print(5)", TESTS) == 0.0
    assert grade_code(sandbox, "print(5)", TESTS, partial=True) == 0.5
    assert grade_code(sandbox, "this is no Python", TESTS) == 0.0
    assert grade_code(Sandbox(SHORT), "while True: pass", TESTS) == 0.0


CHEATS = {
    "exit 0 early": "import os\nos._exit(0)",
    "exit before the call": "import sys\nsys.exit(0)",
    "everything is equal": (
        "class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()\ninput = lambda: '1 1'"
    ),
    "patch the harness": (
        "import json, os, sys\njson.dumps = lambda *_: 'true'\nsys.exit = os._exit\n"
        "import builtins\nbuiltins.eval = lambda *_: True\ndef add(a, b): return True"
    ),
    "write a result of its own": (
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'true')\n    except OSError: pass\nos._exit(0)"
    ),
    "look for the expected result": (
        "import glob, os, sys\nfor path in glob.glob('/program/*') + ['/proc/self/environ', '/proc/self/cmdline']:\n"
        "    print(open(path, errors='replace').read())\nfor k, v in os.environ.items(): print(v)\n"
        "print(sys.argv)\nimport gc\nfor o in gc.get_objects():\n    if isinstance(o, dict): print(str(o)[:2000])"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_cheating_gets_nothing(sandbox, name):
    """Scenario 51."""
    for label in (TESTS, CALLS):
        assert grade_code(sandbox, CHEATS[name], label, partial=True) == 0.0


@pytest.mark.slow
def test_the_expected_result_is_nowhere_in_the_sandbox(sandbox):
    secret = "expected-8c1f"
    label = json.dumps([{"input": "x", "output": secret}])
    search = """
import os
for top in set(os.listdir("/")) - {"usr", "lib", "lib64", "etc", "proc", "dev", "root"}:
    for folder, _, names in os.walk("/" + top):
        for name in names:
            print(open(os.path.join(folder, name), errors="replace").read())
for name in ("environ", "cmdline", "mountinfo"):
    try:
        print(open("/proc/self/" + name).read())
    except OSError:
        pass
print("searched")
"""
    assert grade_code(sandbox, search, label) == 0.0
    output = sandbox.run(search, "x").output
    assert output.endswith(b"searched\n")
    assert secret.encode() not in output


@pytest.mark.slow
def test_the_code_has_another_user_outside_too_and_closing_ends_it():
    closing = Sandbox(SandboxSettings(timeout_s=600.0, max_cpu_s=600.0))
    try:
        closing.probe()
    except UserError as error:
        pytest.skip(str(error))
    before = set(descendants())
    raised = []

    def run() -> None:
        try:
            closing.run("import time\ntime.sleep(600)")
        except Closed as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not (users := users_of_python(set(descendants()) - before)) or (0 in users and os.geteuid() == 0):
        time.sleep(0.01)  # until the interpreter has given up its rights, which it does before it runs the code
    closing.close()
    thread.join(60)
    assert len(raised) == 1
    assert set(descendants()) <= before


def users_of_python(pids: set[int]) -> set[int]:
    """Return the users of interpreters among processes, as this machine sees them."""
    users = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("python"):
                users.add(os.stat(f"/proc/{pid}/task").st_uid)
    return users


@pytest.mark.slow
def test_without_the_rights_of_root_a_user_namespace_does_the_same(monkeypatch):
    """Root without CAP_SYS_ADMIN, as in most containers; other users always run the sandbox in this way."""
    if os.geteuid() != 0 or not Path("/usr/bin/python3").exists():
        pytest.skip("needs root, and an interpreter that every user can read")
    monkeypatch.setattr(sandbox_command, "capabilities", lambda: 0)
    unprivileged = Sandbox(dataclasses.replace(TIGHT, python="/usr/bin/python3"))
    try:
        unprivileged.probe()
    except UserError as error:
        pytest.skip(str(error))
    assert grade_code(unprivileged, WRITES_A_SUM, TESTS) == 1.0
    for name in (
        "10 GB in many processes",
        "1,000 processes",
        "becoming root",
        "new namespaces",
        "a process left behind",
    ):
        program, end, code = ATTACKS[name]
        before = set(descendants())
        assert unprivileged.run(program) == SandboxRun(end, code, b"")
        assert set(descendants()) <= before


@pytest.mark.slow
def test_another_interpreter_brings_its_packages(sandbox):
    with_packages = Sandbox(SandboxSettings(python=sys.executable))
    with_packages.probe()
    assert with_packages.run("import yaml\nprint(yaml.safe_load('[1, 2]'))") == SandboxRun("exited", 0, b"[1, 2]\n")
    assert sandbox.run("import yaml").exit_code == 1


def made_interpreter(folder: Path, layout: str) -> Path:
    """Make an interpreter in a folder, in one of the layouts that people have."""
    base = Path(os.path.realpath(sys._base_executable))
    if layout == "behind a linked folder":
        (folder / "linked").symlink_to(base.parents[1])
        base = folder / "linked" / "bin" / base.name
    subprocess.run([base, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    if layout == "behind a shell script":
        (folder / "shim").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        (folder / "shim").chmod(0o755)
        return folder / "shim"
    if layout == "with linked packages":
        (folder / "more" / "site-packages").mkdir(parents=True)
        (folder / "more" / "site-packages" / "in_more.py").touch()
        (folder / "project").mkdir()
        [packages] = folder.glob("venv/lib/python*/site-packages")
        (packages / "all.pth").write_text(f"{folder}/more/site-packages\n{folder}/project\n")
    return python


LAYOUTS = ["alone", "behind a linked folder", "behind a shell script", "with linked packages"]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "layout"), [*(("/tmp", layout) for layout in LAYOUTS), ("/dev/shm", "alone")])
def test_an_interpreter_works_wherever_it_is(sandbox, place, layout):
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(os.path.realpath(name))
        folder.chmod(0o755)
        python = made_interpreter(folder, layout)
        program = (
            f"import json, os, sys\nassert sys.prefix == {str(folder / 'venv')!r}\n"
            f"print(os.path.exists({str(folder / 'project')!r}))\nimport in_more"
        )
        run = Sandbox(dataclasses.replace(TIGHT, python=str(python))).run(program)
    # The sandbox shows packages, and no project that happens to be importable.
    assert run == SandboxRun("exited", 0 if layout == "with linked packages" else 1, b"False\n")


def test_links_on_the_way_to_an_interpreter_stay_links(tmp_path):
    for name in ("real/bin", "real/lib64", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "real" / "bin" / "python3.11").touch()
    (tmp_path / "real" / "bin" / "python").symlink_to("python3.11")
    (tmp_path / "linked").symlink_to("real")
    (tmp_path / "elsewhere" / "python").symlink_to("../linked/bin/python")
    (tmp_path / "top").symlink_to(tmp_path / "elsewhere")
    links, ends = sandbox_command._resolved([f"{tmp_path}/top/python", f"{tmp_path}/linked/lib64"])
    assert links == {
        f"{tmp_path}/top": f"{tmp_path}/elsewhere",
        f"{tmp_path}/elsewhere/python": "../linked/bin/python",
        f"{tmp_path}/linked": "real",
        f"{tmp_path}/real/bin/python": "python3.11",
    }
    assert ends == [f"{tmp_path}/real/bin/python3.11", f"{tmp_path}/real/lib64"]
    # A folder that is shown as a whole shows what is in it.
    assert sandbox_command._resolved([f"{tmp_path}/linked/bin/python", f"{tmp_path}/real"]) == (
        {f"{tmp_path}/linked": "real"},
        [f"{tmp_path}/real"],
    )


def test_an_interpreter_needs_lib_and_lib64_of_its_base(tmp_path):
    for name in ("base/lib", "base/lib64"):
        (tmp_path / name).mkdir(parents=True)
    answer = json.dumps([f"{tmp_path}/venv/bin/python", f"{tmp_path}/venv", f"{tmp_path}/base", []])
    (tmp_path / "shim").write_text(f"#!/bin/sh\necho '{answer}'\n")
    (tmp_path / "shim").chmod(0o755)
    found = sandbox_command.find_interpreter(str(tmp_path / "shim"))
    assert found.command[0] == f"{tmp_path}/venv/bin/python"
    assert found.paths[1:] == (f"{tmp_path}/venv", f"{tmp_path}/base/lib", f"{tmp_path}/base/lib64")


RUNS_FOR_EVER = """
from hotseat.rewards import Sandbox, SandboxSettings
Sandbox(SandboxSettings(timeout_s=600.0, max_cpu_s=600.0)).run("import os, time\\nos.fork()\\ntime.sleep(600)")
"""


@pytest.mark.slow
def test_nothing_outlives_the_process_that_started_it(sandbox):
    """Scenario 51."""
    process = subprocess.Popen([sys.executable, "-c", RUNS_FOR_EVER])
    try:
        while len(pids := list(below(process.pid))) < 4:  # bwrap twice, the code twice
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    deadline_s = time.monotonic() + 60.0
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# --- without bubblewrap -----------------------------------------------------------------------------------------------


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a bwrap on the path that does what a script says."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin" / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")


def probe_error() -> str:
    with pytest.raises(UserError) as caught:
        Sandbox(SandboxSettings()).probe()
    return str(caught.value)


def test_missing_and_forbidden_are_told_apart(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    said = probe_error()
    assert "bwrap is installed, but user namespaces are forbidden here" in said
    assert "No permissions to create new namespace" in said
    assert "reward.sandbox.command" in said
    monkeypatch.setenv("PATH", str(tmp_path))
    said = probe_error()
    assert "bwrap is missing; install the package bubblewrap" in said
    assert "forbidden" not in said


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'bwrap: Unknown option --size' >&2; exit 1", "this bwrap is too old, it needs version 0.7 or later"),
        ('echo "bwrap: Can\'t find source path /x: Permission denied" >&2; exit 1', "set reward.sandbox.python"),
        (
            'echo "bwrap: Can\'t mount proc on /newroot/proc: Operation not permitted" >&2; exit 1',
            "this container hides parts of /proc",
        ),
        (
            "echo '  File \"/program/main.py\", line 23, in main' >&2; echo '    os.setgroups([])' >&2;"
            " echo 'PermissionError: [Errno 1] Operation not permitted' >&2; exit 1",
            "root may not change its user and groups here: it said File",
        ),
        ("echo boom >&2; exit 3", "bwrap exited with code 3 before it ran the code: it said boom"),
        (
            "echo 'hotseat: started'; echo '0 True [eth0]'",
            "user, whether it sees files outside, network devices: 0 True",
        ),
    ],
)
def test_a_sandbox_that_does_not_work_says_why(tmp_path, monkeypatch, script, said):
    fake(tmp_path, monkeypatch, script)
    assert said in probe_error()


PROBES = """
import sys, types
package = sys.modules["hotseat.rewards"] = types.ModuleType("hotseat.rewards")  # without torch, which takes seconds
package.__path__ = [sys.argv[1]]
from hotseat.rewards.sandbox import Sandbox, SandboxSettings
Sandbox(SandboxSettings()).probe()
"""


@pytest.mark.slow
def test_where_root_may_not_change_its_groups_the_error_says_what_to_do(sandbox):
    """In a user namespace that has root alone, as a container without a range of ids."""
    alone = ["unshare", "--user", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("this system allows no user namespaces")
    command = [*alone, sys.executable, "-c", PROBES, str(Path(sandbox_module.__file__).parent)]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert "root may not change its user and groups here" in said
    assert "/etc/subuid" in said
    assert "reward.sandbox.command" in said


def test_code_that_could_not_run_is_a_failed_sample(tmp_path, monkeypatch):
    """Scenario 52."""
    fake(tmp_path, monkeypatch, "exit 1")
    verdict = grade_code(Sandbox(SandboxSettings()), WRITES_A_SUM, TESTS)
    assert isinstance(verdict, Failed)
    assert verdict.reason.startswith("the sandbox failed: bwrap exited with code 1 before it ran the code")


def test_an_interpreter_that_is_none_is_named(tmp_path):
    with pytest.raises(SandboxError, match="reward.sandbox.python /no/python is no interpreter"):
        Sandbox(SandboxSettings(python="/no/python")).run("print(1)")


def test_another_runner_gets_the_folder(tmp_path):
    runner = tmp_path / "runner"
    runner.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$1"\n')
    runner.chmod(0o755)
    sandbox = Sandbox(SandboxSettings(command=(str(runner), "{folder}/main.py")))
    sandbox.probe()
    assert sandbox.run("print(input())", "hello") == SandboxRun("exited", 0, b"hello\n")
    missing = Sandbox(SandboxSettings(command=("/no/runner", "{folder}")))
    with pytest.raises(UserError, match="/no/runner cannot be started"):
        missing.probe()


@pytest.mark.slow
def test_another_runner_and_all_it_started_are_ended(tmp_path):
    runner = tmp_path / "runner"
    runner.write_text('#!/bin/sh\nsetsid sleep 600 &\necho "hotseat: started"\nwait\n')
    runner.chmod(0o755)
    before = set(descendants())
    run = Sandbox(SandboxSettings(command=(str(runner), "{folder}"), timeout_s=3.0)).run("print(1)")
    assert run.end == "time"
    assert set(descendants()) <= before


# --- control groups ---------------------------------------------------------------------------------------------------


class FakeGroups(MemoryGroups):
    """Groups in a plain folder, where files do nothing. events: the content of `memory.events` in each."""

    events = ""

    @contextlib.contextmanager
    def make(self, max_bytes):
        with super().make(max_bytes) as group:
            (group.path / "memory.events").write_text(self.events)
            yield group

    def _remove(self, path):
        self.written = {file.name: file.read_text() for file in path.iterdir()}
        shutil.rmtree(path)


def control_groups(folder: Path, own: str, given: dict[str, str]) -> Path | str:
    """find_parent on a machine with these groups, each with the controllers that it gives to its children."""
    for name, controllers in given.items():
        group = folder / "cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.subtree_control").write_text(controllers)
        (group / "cgroup.procs").write_text("")
    (folder / "own").write_text(own)
    mounts = f"24 1 0:22 / /proc rw - proc proc rw\n30 1 0:26 / {folder}/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
    (folder / "mounts").write_text(mounts)
    return find_parent(folder / "own", folder / "mounts")


def test_groups_are_made_below_the_nearest_ancestor_that_gives_memory_to_its_children(tmp_path):
    given = {"": "cpu memory pids", "user.slice": "memory pids", "user.slice/session": ""}
    assert control_groups(tmp_path, "0::/user.slice/session\n", given) == tmp_path / "cgroup" / "user.slice"
    given["user.slice"] = "pids"
    assert control_groups(tmp_path, "1:name=systemd:/\n0::/user.slice/session\n", given) == tmp_path / "cgroup"
    given[""] = "cpu pids"
    assert "gives the memory controller" in control_groups(tmp_path, "0::/user.slice/session\n", given)
    assert "is not visible here" in control_groups(tmp_path, "0::/../elsewhere\n", given)
    assert "no control groups of version 2" in control_groups(tmp_path, "4:memory:/somewhere\n", given)


def test_a_program_begins_in_its_group_and_a_limit_that_the_kernel_kept_is_one_of_memory(tmp_path):
    sandbox, groups = Sandbox(SandboxSettings(command=(sys.executable, "{folder}/main.py"))), FakeGroups(tmp_path)
    sandbox._memory = groups
    run = sandbox.run("import os; print(os.getpid(), input())", "hello")
    assert (run.end, run.exit_code) == ("exited", 0)
    assert run.output.decode().split() == [groups.written["cgroup.procs"], "hello"]  # the shell becomes the program
    assert groups.written["memory.max"] == str(512 * 2**20)
    assert groups.written["memory.oom.group"] == "1"
    groups.events = "low 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 1\n"
    assert sandbox.run("print(1)").end == "memory"
    assert list(tmp_path.iterdir()) == []


def test_groups_that_do_not_bound_memory_are_not_used(tmp_path, monkeypatch):
    """As here, where a plain folder stands for the groups: the program that takes too much is not ended."""
    monkeypatch.setattr("hotseat.rewards.sandbox.find_parent", lambda: tmp_path)
    monkeypatch.setattr("hotseat.rewards.sandbox.MemoryGroups", FakeGroups)
    sandbox = Sandbox(SandboxSettings(command=(sys.executable, "{folder}/main.py")))
    assert "since a program that exceeded the limit of its control group was not ended" in sandbox.probe()
    monkeypatch.setattr("hotseat.rewards.sandbox.find_parent", lambda: tmp_path / "gone")
    sandbox = Sandbox(SandboxSettings(command=(sys.executable, "{folder}/main.py")))
    assert "since no control group can be made in" in sandbox.probe()


def test_a_group_has_a_name_of_its_own_and_what_is_left_of_it_is_killed(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hotseat.rewards.sandbox_limits._REMOVED_WITHIN_S", 0.1)
    with MemoryGroups(tmp_path).make(100) as one, MemoryGroups(tmp_path).make(100) as other:
        (other.path / "cgroup.kill").touch()
    assert one.path != other.path
    assert (other.path / "cgroup.kill").read_text() == "1"
    assert not (one.path / "cgroup.kill").exists()  # as before Linux 5.14
    # Neither could be removed, since plain folders keep their files; what ran in them is valid all the same.
    assert [f"control group {path} cannot be removed" in caplog.text for path in (one.path, other.path)] == [True, True]


def test_empty_groups_of_processes_that_are_gone_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("hotseat.rewards.sandbox_limits._REMOVED_WITHIN_S", 0.1)
    groups, gone = MemoryGroups(tmp_path), subprocess.Popen(["true"])
    with groups.make(100) as group:
        own = group.path.name
    assert gone.wait() == 0
    left = tmp_path / own.replace(f"-{os.getpid()}-", f"-{gone.pid}-")
    elsewhere = tmp_path / left.name.replace("sandbox-", "sandbox-1")  # in another namespace it may still run
    for path in (left, elsewhere, full := left.with_name(f"{left.name}0")):
        path.mkdir()
    (full / "process").touch()
    groups.remove_left()
    assert set(tmp_path.iterdir()) == {tmp_path / own, elsewhere, full}


def test_a_program_that_waits_for_its_group_ends_with_its_host(tmp_path, monkeypatch):
    class KilledGroup(MemoryGroup):
        def add(self, pid):
            (tmp_path / "waiting").write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sandbox = Sandbox(SandboxSettings(command=(sys.executable, "{folder}/main.py")))
    host = os.fork()
    if host == 0:
        try:
            sandbox._run("print(1)", "", None, KilledGroup(tmp_path))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(host, 0)[1]) == -signal.SIGKILL
    waiting = int((tmp_path / "waiting").read_text())
    until_s = time.monotonic() + 30
    try:
        while (state := state_of(waiting)) not in ("", "Z"):  # who adopts it may leave it
            assert time.monotonic() < until_s, state
            time.sleep(0.005)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(waiting, signal.SIGKILL)


def state_of(pid: int) -> str:
    """The state of a process, "" if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


@pytest.mark.skipif(isinstance(find_parent(), str), reason="no control groups can be made here")
@pytest.mark.slow
def test_the_kernel_bounds_the_memory_of_all_processes_together():
    """The watch allows all that the program takes, so it is the kernel that ends it."""

    class Small(MemoryGroups):
        def make(self, max_bytes):
            return super().make(256 * 2**20)

    settings = SandboxSettings(max_memory_bytes=4 * 2**30)
    sandbox = Sandbox(settings)
    if "the kernel bounds memory" not in sandbox.probe():
        pytest.skip("no control groups can be made here")
    sandbox._memory = Small(sandbox._memory.parent)
    forks = "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        break\n"
    assert sandbox.run(f"{forks}block = b'x' * {100 * 2**20}\ntime.sleep(30)").end == "memory"


# --- the watch over memory --------------------------------------------------------------------------------------------


class FakeProcesses:
    """Processes with two threads, as the kernel shows them in files."""

    def __init__(self, folder: Path):
        self.folder = folder

    def set(self, pid: int, children: str = "", kib: int = 1000, counted_kib: int | None = None, faults: int = 0):
        """Write the files of a process. kib: the kernel's count; counted_kib: its share of pages, None: not shown."""
        folder = self.folder / str(pid)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "task" / str(pid)).mkdir(parents=True)
        (folder / "task" / str(pid) / "children").write_text(children)
        times = f"0 0 0 0 0 0 {faults} 0 0 0 5 5 0 0 20 0 2 0 1"  # from the parent's id on
        (folder / "stat").write_text(f"{pid} (python3 (x)) S {times}\n")
        counts = f"Name:\tpython3\nRssAnon:\t{kib - 1000} kB\nRssFile:\t9 kB\nRssShmem:\t1000 kB\n"
        (folder / "status").write_text(counts)
        if counted_kib is not None:
            (folder / "smaps_rollup").write_text(f"x\nPss: 7 kB\nPss_Anon:  {counted_kib} kB\nPss_Shmem:  0 kB\n")


def test_pages_are_counted_only_if_the_kernels_counts_allow_memory_above_its_limit(tmp_path):
    fake, watch = (
        FakeProcesses(tmp_path),
        ProcessWatch(TIGHT.max_memory_bytes, TIGHT.max_cpu_s, None, str(tmp_path)),
    )  # 131,072 KiB
    fake.set(1, "2 3", 1 << 30)  # outside of what is looked at
    fake.set(2, kib=40_000)  # pages that cannot be counted are not asked for
    fake.set(3, "4", kib=40_000)
    fake.set(4, kib=40_000)
    assert watch.look(1) is None
    assert watch._counted == 0
    # Forks share pages, of which each counts all: 400,000 KiB are 90,000.
    for pid in (2, 4):
        fake.set(pid, kib=160_000, counted_kib=40_000)
    fake.set(3, "4", kib=80_000, counted_kib=10_000)
    assert watch.look(1) is None
    assert watch._counted == 90_000 * 1024
    # From then on changes are added up: 20,000 KiB more, and 20 MB that page faults may have copied.
    for pid in (2, 3, 4):
        (tmp_path / str(pid) / "smaps_rollup").unlink()
    pages = 20 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    fake.set(2, kib=180_000, faults=pages)
    assert watch.look(1) is None
    assert watch._counted == 90_000 * 1024
    # At most 135,000 and probably as much: counted at once, and above the limit.
    fake.set(2, kib=205_000, counted_kib=85_000)
    fake.set(3, "4", kib=80_000, counted_kib=10_000)
    fake.set(4, kib=160_000, counted_kib=40_000)
    assert watch.look(1) == "memory"


def test_looks_become_more_frequent_as_memory_nears_its_limit():
    assert wait_s(1 << 30, 1, 0.0) == 0.02
    assert wait_s(64 << 20, 1, 0.0) == pytest.approx(1 / 128)  # at 8 GiB a second
    assert wait_s(8 << 20, 1, 0.0) == pytest.approx(1 / 1024)
    assert wait_s(64 << 20, 1000, 0.0) == pytest.approx(1 / 128 / os.cpu_count())
    assert wait_s(0, 1, 0.003) == pytest.approx(0.012)  # a fifth of the time goes into looking


# --- the filter -------------------------------------------------------------------------------------------------------


def test_the_filter_refuses_where_it_should():
    """The kernel's rules for filters, in short: run every number through the program."""
    for machine, audit, memfd, clone, socket_call, reading, writing in (
        ("x86_64", 0xC000003E, 319, 56, 41, 310, 311),
        ("aarch64", 0xC00000B7, 279, 220, 198, 270, 271),
    ):
        program = system_call_filter(machine)
        for number, argument, expected in (
            (memfd, 0, "refused"),
            (435, 0, "absent"),
            (clone, 0x10000000, "refused"),
            (clone, 0x003D0F00, "allowed"),
            (socket_call, 40, "refused"),
            (socket_call, 16, "refused"),
            (socket_call, 1, "allowed"),
            (socket_call, 2, "allowed"),
            (socket_call, 10, "allowed"),
            (reading, 0, "refused"),  # process_vm_readv
            (writing, 0, "refused"),
            (438, 0, "refused"),  # pidfd_getfd
            (428, 0, "refused"),  # open_tree
            (467, 0, "refused"),  # open_tree_attr
            (469, 0, "allowed"),
            (470, 0, "absent"),  # added by later kernels
            (1000, 0, "absent"),
            (0x40000000 + 1, 0, "absent"),
            (0xFFFFFFFF, 0, "absent"),
            (1, 0, "allowed"),
        ):
            assert outcome(program, audit, number, argument) == expected, (machine, number, argument)
        assert outcome(program, 0x40000003, 1, 0) == "killed"
    assert system_call_filter("riscv64") is None


def outcome(program: bytes, audit: int, number: int, argument: int) -> str:
    """Interpret the filter's program."""
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    values = {0: number, 4: audit, 16: argument}
    at = loaded = 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x06:
            errors = {0x00050000 | errno.EPERM: "refused", 0x00050000 | errno.ENOSYS: "absent"}
            return {0x7FFF0000: "allowed", **errors, 0x80000000: "killed"}[value]
        if code == 0x20:
            loaded = values[value]
        else:
            is_true = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += if_true if is_true else if_false
