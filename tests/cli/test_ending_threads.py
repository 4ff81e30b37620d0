"""A command ends although threads of user code go on, and waits for those that end."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from hotseat.cli.ending import leave

def work():
    time.sleep({seconds})
    print("done", flush=True)

{begin}
leave(7)
"""
THREAD = "threading.Thread(target=work, name='of-an-agent').start()"
EXECUTOR = "threading.Thread(target=lambda: ThreadPoolExecutor(1).submit(work), daemon=True).start(); time.sleep(0.5)"


def run(seconds, begin):
    script = SCRIPT.format(seconds=seconds, begin=begin)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("begin", [THREAD, EXECUTOR])
def test_threads_that_do_not_end_do_not_keep_a_command(begin):
    ended = run(10_000, begin)
    assert ended.returncode == 7
    assert "threads of user code were still running at the end, and are left" in ended.stderr
    assert ended.stdout == ""


def test_threads_that_end_are_waited_for():
    ended = run(0.3, THREAD)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "done\n", "")
