"""Drivers as children of a process that outlives them: signals, the terminal, facts, deaths."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading

import pytest
from environments import hear_interrupts
from paused_runs import wait_for

from hotseat.processes.supervisor import process_state

pytestmark = pytest.mark.timeout(300)

# A command that writes what happens to it, a line each: its own process in the first line.
COMMAND = """
import os, signal, sys, time
from hotseat.processes.kept_driver import DriverKeeper, tell

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

keeper = DriverKeeper()
say("parent", os.getpid())
end = keeper.run()
if end is None:
    exec(sys.argv[1])
    sys.exit(0)
import json
say("end", json.dumps([end.code, dict(end.facts), keeper.stopped_by]))
"""
# Runs a command as a shell with job control does, in a group of its own in the foreground, and says when it is stopped.
SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
while not os.WIFEXITED(status := os.waitpid(pid, os.WUNTRACED)[1]):
    os.tcsetpgrp(0, os.getpid())
    os.write(1, b"stopped\\n")
    sys.stdin.readline()
    os.tcsetpgrp(0, pid)
    os.killpg(pid, signal.SIGCONT)
"""
# Says which signals came, until three did.
COUNTS = """
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: (got.append(number), say("got", signal.Signals(number).name)))
say("driver", os.getpid())
while len(got) < 3:
    time.sleep(0.01)
"""


class Command:
    def __init__(self, driver: str, terminal: int | None = None, shell: str | None = None):
        self.lines: list[str] = []
        own = {"stdin": terminal, "stdout": terminal, "stderr": terminal} if terminal is not None else {}
        self.process = subprocess.Popen(
            [sys.executable, *(["-c", shell] if shell else []), "-c", COMMAND, driver],
            **({"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE} | own),
            start_new_session=True,
            preexec_fn=hear_interrupts if terminal is None else have_terminal,
        )
        if terminal is None:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.decode().strip())

    def wait_for(self, start: str, number: int = 1) -> str:
        assert wait_for(lambda: len(self.found(start)) >= number, 120), self.lines
        return self.found(start)[number - 1]

    def found(self, start: str) -> list[str]:
        return [line for line in self.lines if line.startswith(start)]

    def pid(self, who: str) -> int:
        return int(self.wait_for(who).split()[1])

    def end(self) -> list:
        line = self.wait_for("end")
        self.process.wait(60)
        return json.loads(line.removeprefix("end "))


def have_terminal() -> None:
    import fcntl
    import termios

    hear_interrupts()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_signal_to_the_command_or_to_its_group_reaches_the_driver_once():
    command = Command(COUNTS)
    command.wait_for("driver")
    os.kill(command.process.pid, signal.SIGTERM)
    command.wait_for("got", 1)
    os.killpg(command.process.pid, signal.SIGINT)
    command.wait_for("got", 2)
    os.killpg(command.process.pid, signal.SIGTERM)
    assert command.end() == [0, {}, signal.SIGTERM]
    assert command.found("got") == ["got SIGTERM", "got SIGINT", "got SIGTERM"]


def test_a_driver_ends_with_its_parent_however_that_ends():
    command = Command(COUNTS)
    pid = command.pid("driver")
    command.process.kill()
    assert wait_for(lambda: process_state(pid) == "gone", 60)


@pytest.mark.parametrize(
    ("driver", "code"),
    [("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os._exit(3)", 3), ("sys.exit(4)", 4), ("os.abort()", -6)],
)
def test_how_a_driver_ended_is_known_with_what_it_had_told(driver, code):
    command = Command(f"tell(step=1, text='a' * 10000)\ntell(step=2)\n{driver}")
    ended, facts, stopped_by = command.end()
    assert (ended, facts["step"], stopped_by) == (code, 2, None)
    assert set(facts["text"]) == {"a"}


def test_a_driver_never_waits_for_a_parent_that_is_stopped():
    told = "for step in range(20000): tell(step=step)\nsay('told', 1)\nsys.stdin.read()\nwhile True: time.sleep(1)"
    command = Command(f"say('driver', os.getpid())\nos.kill(os.getppid(), signal.SIGSTOP)\n{told}")
    command.wait_for("told")
    os.kill(command.process.pid, signal.SIGCONT)
    os.kill(command.pid("driver"), signal.SIGKILL)
    assert command.end()[0] == -9


def test_what_a_driver_forks_tells_nothing():
    command = Command("if os.fork() == 0: tell(step=9); os._exit(0)\nos.wait()\ntell(step=1)")
    assert command.end()[:2] == [0, {"step": 1}]


# --- on a terminal ----------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal():
    ours, its = pty.openpty()
    yield ours, its
    os.close(ours)


def run_on(terminal, driver: str, shell: str | None = None) -> Command:
    ours, its = terminal
    command = Command(driver, its, shell)
    os.close(its)

    def read() -> None:
        text = b""
        while True:
            try:
                text += os.read(ours, 4096)
            except OSError:  # nobody has it open any more
                return
            command.lines[:] = text.decode().split("\r\n")

    threading.Thread(target=read, daemon=True).start()
    return command


def test_ctrl_c_reaches_the_driver_once(terminal):
    command = run_on(terminal, COUNTS)
    command.wait_for("driver")
    for number in (1, 2, 3):
        os.write(terminal[0], b"\x03")
        wait_for(lambda number=number: len([line for line in command.lines if "got SIGINT" in line]) == number, 60)
    assert command.end() == [0, {}, signal.SIGINT]
    assert sum("got SIGINT" in line for line in command.lines) == 3


def test_a_driver_that_reads_from_the_terminal_gets_it_and_gives_it_back(terminal):
    """As a debugger in a run with cluster.runtime=local does."""
    back = "say('line', sys.stdin.readline())\nsay('foreground', os.tcgetpgrp(0) == os.getpgrp())"
    command = run_on(terminal, back)
    command.wait_for("parent")
    os.write(terminal[0], b"next\n")
    assert command.wait_for("line") == "line next"
    assert command.wait_for("foreground") == "foreground True"
    assert command.end()[:2] == [0, {}]


def test_ctrl_z_stops_the_command_with_its_driver_and_both_continue(terminal):
    command = run_on(terminal, COUNTS, SHELL)
    driver, parent = command.pid("driver"), command.pid("parent")
    os.write(terminal[0], b"\x1a")
    assert wait_for(lambda: any(line.endswith("stopped") for line in command.lines), 60)
    for pid in (driver, parent):  # the terminal signals both, and the shell tells of one
        assert wait_for(lambda pid=pid: process_state(pid) == "stopped", 60)
    os.write(terminal[0], b"fg\n")
    for pid in (driver, parent):
        assert wait_for(lambda pid=pid: process_state(pid) == "running", 60)
    for number in (1, 2, 3):
        os.write(terminal[0], b"\x03")
        wait_for(lambda number=number: sum("got SIGINT" in line for line in command.lines) == number, 60)
    assert command.end()[0] == 0


def test_ctrl_z_of_a_driver_that_has_the_terminal_stops_the_command_too(terminal):
    command = run_on(terminal, "say('line', sys.stdin.readline())\nsay('line', sys.stdin.readline())", SHELL)
    command.wait_for("parent")
    os.write(terminal[0], b"next\n")
    assert command.wait_for("line") == "line next"
    os.write(terminal[0], b"\x1a")
    assert wait_for(lambda: any(line.endswith("stopped") for line in command.lines), 60)
    os.write(terminal[0], b"fg\n")
    os.write(terminal[0], b"last\n")
    assert command.wait_for("line", 2) == "line last"
    assert command.end()[0] == 0


def test_the_parent_imports_nothing_heavy():
    heavy = ("torch", "pydantic", "rich", "yaml")
    code = f"import sys, hotseat.cli.restarts; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# The first driver asks for a standby and dies; the second says what it is, and asks for one that is not needed.
STANDBY = """
import os, signal, sys, time
from hotseat.processes import kept_driver
from hotseat.processes.kept_driver import DriverKeeper, Restart, tell

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def prepare(facts):
    say("prepares", os.getpid(), facts["run"])
    if facts["run"] == sys.argv[1]:
        if sys.argv[2] == "late":
            os.read(ordered, 1)
        raise MemoryError
    say("prepared")
    return lambda: say("discarded", os.getpid())

class Keeper(DriverKeeper):
    def _started_standby(self, *order):
        standby = super()._started_standby(*order)
        os.write(order_end, b"x" if standby else b"")
        return standby

ordered, order_end = os.pipe()
keeper = Keeper(prepare)
say("parent", os.getpid())
for made in ([], [Restart(1.5, "it died")]):
    end = keeper.run(made, ["a", str(len(made))])
    if end is None:
        say("driver", os.getpid(), *keeper.arguments, len(kept_driver.restarts))
        tell(run=keeper.arguments[1], standby=True)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
    say("end", end.code, end.facts["run"])
keeper.close()
say("closed")
"""


@pytest.mark.parametrize("breaks", [None, "early", "late"])
def test_a_standby_is_the_next_driver_unless_it_has_died(breaks):
    """late: it fails once the driver has died already, and it was told to be the next one."""
    is_broken = breaks is not None
    command = [sys.executable, "-c", STANDBY, "0" if is_broken else "none", breaks or ""]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    lines = []

    def until(word: str) -> list[str]:
        while not lines or lines[-1][0] != word:
            lines.append(process.stdout.readline().split() or [word])
        return lines[-1]

    first = until("driver")
    assert first[2:] == ["a", "0", "0"]
    standby = until("prepares")
    assert standby[2] == "0"
    if breaks == "early":
        assert wait_for(lambda: process_state(int(standby[1])) == "gone", 60)
    elif breaks is None:
        until("prepared")
    process.stdin.write("\n")
    process.stdin.flush()
    second = until("driver")
    assert (second[1] == standby[1]) != is_broken
    assert second[2:] == ["a", "1", "1"]
    spare = until("prepares")
    until("prepared")
    assert spare[1:] == [spare[1], "1"]
    process.stdin.write("\n")
    process.stdin.flush()
    until("closed")
    assert process.wait(60) == 0
    ends = [line[1:] for line in lines if line[0] == "end"]
    assert ends == [["-9", "0"], ["-9", "1"]]
    assert ["discarded", spare[1]] in lines
    assert process_state(int(spare[1])) == "gone"


INTERRUPTED = """
import os, signal, sys
from hotseat.processes.kept_driver import DriverKeeper, tell

def prepare(facts):
    os.write(begun_end, b"x")
    os.read(ordered, 1)
    raise KeyboardInterrupt

class Keeper(DriverKeeper):
    def _started_standby(self, *order):
        standby = super()._started_standby(*order)
        os.write(order_end, b"x" if standby else b"")
        return standby

begun, begun_end = os.pipe()
ordered, order_end = os.pipe()
keeper = Keeper(prepare)
if keeper.run() is None:
    tell(standby=True)
    os.read(begun, 1)
    os.kill(os.getpid(), signal.SIGKILL)
print("ended", keeper.run().code)
"""


def test_a_standby_that_is_interrupted_before_it_begins_is_a_command_that_was_stopped():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ended 130\n", done.stderr
