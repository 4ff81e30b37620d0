"""`preloaded`: processes that are forked off are as those that `subprocess` starts, but have torch loaded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import preloaded
import pytest

from hotseat.processes.supervisor import marked

pytestmark = pytest.mark.slow

SEEN = """
import json, os, sys
ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("hotseat", "ray"))
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("GREETING"), os.environ.get("LEFT"), ours]))
print("a complaint", file=sys.stderr)
sys.exit(3)
"""


def test_it_sees_arguments_folder_and_environment_as_any_other_process_does(tmp_path, monkeypatch):
    monkeypatch.setenv("LEFT", "not for it")
    (tmp_path / "seen.py").write_text(SEEN)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "GREETING": "hello"}
    for program in (["-c", SEEN], [str(tmp_path / "seen.py")], ["-m", "seen"]):
        options = {"env": env, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 240}
        ours, plain = (run([sys.executable, *program, "a", "b"], **options) for run in (preloaded.run, subprocess.run))
        assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
        assert ours.stdout == f'[["a", "b"], "{tmp_path}", "hello", null, []]\n'


def test_signals_reach_it_and_its_end_is_reported():
    code = "import time; print('up', flush=True); time.sleep(1000)"
    for number in (signal.SIGKILL, signal.SIGTERM):
        with preloaded.popen([sys.executable, "-c", code], stdout=preloaded.PIPE, text=True) as process:
            assert process.stdout.readline() == "up\n"
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
            process.send_signal(number)
            assert process.wait(240) == -number
        process.kill()  # of one that is gone: nothing happens


def test_it_may_lead_a_group_of_its_own():
    code = "import os; print(os.getpid() == os.getpgid(0))"
    for process_group, is_leader in ((None, False), (0, True)):
        done = preloaded.run(
            [sys.executable, "-c", code], process_group=process_group, capture_output=True, text=True, timeout=860
        )
        assert done.stdout == f"{is_leader}\n"


AT_THE_END = """
import atexit, sys, tempfile, threading

def last():
    threading.main_thread().join()
    print("a thread", flush=True)

threading.Thread(target=last).start()
atexit.register(print, "atexit")
print("kept for the end", end=" ")
if sys.argv[1] == "raise":
    raise ValueError("of the program")
if sys.argv[1] != "return":
    sys.exit({"words": "words", "none": None, "true": True}.get(sys.argv[1]) if sys.argv[1].isalpha() else 300)
"""


def test_it_ends_as_any_other_process_does():
    for ending in ("return", "300", "words", "none", "true", "raise"):
        command = [sys.executable, "-c", AT_THE_END, ending]
        options = {"capture_output": True, "text": True, "timeout": 860}
        ours, plain = (run(command, **options) for run in (preloaded.run, subprocess.run))
        assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
        assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_others_see_its_arguments_and_its_environment():
    """By which they find processes: tests, that nothing is left of a run, and those who end what is left."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-c", "print('up', flush=True); input()", "a", "b"]
    env = {**os.environ, "TEST_PRELOADED": mark}
    with preloaded.popen(command, env=env, stdin=preloaded.PIPE, stdout=preloaded.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        assert marked("TEST_PRELOADED", [mark]) == [process.pid]
        shown = [Path(f"/proc/{process.pid}/{file}").read_bytes() for file in ("cmdline", "environ")]
        assert shown[0].rstrip(b"\0").decode().split("\0") == command
        seen = dict(word.split("=", 1) for word in shown[1].rstrip(b"\0").decode().split("\0"))
        assert seen == env
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(860) == 0
    assert marked("TEST_PRELOADED", [mark]) == []


def test_what_takes_too_long_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        preloaded.run([sys.executable, "-c", "import time; time.sleep(1000)"], capture_output=True, timeout=0.5)


def test_the_process_that_forks_survives_who_hangs_up_and_leaves_no_folder(tmp_path):
    """It ends by itself when its standard input is closed, as it is when whoever started it is killed."""
    address = tmp_path / "folder" / "socket"
    address.parent.mkdir()
    command = [sys.executable, preloaded.__file__, "serve", str(address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        for number in (signal.SIGINT, signal.SIGTERM):  # of the terminal, and of who ends the whole group
            server.send_signal(number)
        for sent in (b"", b"\0\0", b"\0" * 7 + b"\x09" + b"half"):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(address))
                if sent:
                    socket.send_fds(client, [sent], [2])
                client.shutdown(socket.SHUT_WR)
                assert client.recv(1) == b""
        server.stdin.close()
        assert server.wait(240) == 0
    assert list(tmp_path.iterdir()) == []
