"""A run that is ended from outside leaves nothing behind; one whose engine is killed goes on."""

import fcntl
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import preloaded
import pytest
from environments import hear_interrupts, own_environment
from loop_cases import make_task, rl_yaml
from paused_runs import wait_for
from safetensors.torch import load_file

from hotseat.cluster.on_ray.template import can_fork
from hotseat.config import loads
from hotseat.loop.run import start
from hotseat.observe import read_lines
from hotseat.processes.supervisor import WORKER, end_marked, marked, process_state

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

MARK = "TEST_ENDINGS"  # in the environment of everything that a run of these tests starts


HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"  # when a status begins and ends
STARTING = re.compile(rb"starting (Ray|processes)")


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def members_of_group(group: int) -> list[int]:
    """List the processes of a process group."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of_group) == group and state != "Z":
            members.append(int(path.parent.name))
    return members


def have_terminal() -> None:
    """Make standard input the terminal by which a child is interrupted."""
    hear_interrupts()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.long
@pytest.mark.skipif(not can_fork(), reason="no template on this machine")
def test_a_command_on_a_terminal_shows_its_status_and_ends_with_ctrl_c(tmp_path):
    task = make_task(tmp_path)
    placement = "{component_placement: {actor: 0, rollout: '@actor'}}"
    (task / "run.yaml").write_text(rl_yaml(task, cluster=placement, train="{dtype: fp32, batch_size: 16}"))
    mark, shown = f"{os.getpid()}-terminal", bytearray()
    terminal, of_driver = pty.openpty()

    def read() -> None:
        while True:
            try:
                shown.extend(os.read(terminal, 4096))
            except OSError:  # nobody has it open any more
                return

    driver = subprocess.Popen(
        [sys.executable, "-m", "hotseat.cli.main", "run", str(task / "run.yaml"), "train.num_episodes=10000"],
        stdin=of_driver,
        stdout=of_driver,
        stderr=of_driver,
        env={**own_environment(), MARK: mark, "TERM": "xterm", "COLUMNS": "100"},
        start_new_session=True,
        preexec_fn=have_terminal,
    )
    os.close(of_driver)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert wait_for(lambda: STARTING.search(shown), 300), shown.decode()
        os.write(terminal, b"\x03")
        assert driver.wait(600) == 130
        assert wait_for(lambda: not marked(MARK, [mark]), 60), marked(MARK, [mark])
        reader.join(60)
        text = shown.decode()
        assert "hotseat: stopped" in text
        assert "Traceback" not in text
        assert shown.count(HIDE_CURSOR) == shown.count(SHOW_CURSOR) == 1
    finally:
        end_marked(MARK, [mark])
        driver.wait(60)
        reader.join(60)
        os.close(terminal)


@pytest.mark.parametrize("ending", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_nothing_is_left_of_a_run_that_is(ending, tmp_path):
    task = make_task(tmp_path)
    placement = "{component_placement: {actor: 0, rollout: '@actor'}}"
    (task / "run.yaml").write_text(rl_yaml(task, cluster=placement, train="{dtype: fp32, batch_size: 16}"))
    mark = f"{os.getpid()}-{ending.name}"
    env = own_environment()
    command = [sys.executable, "-m", "hotseat.cli.main", "run", str(task / "run.yaml"), "train.num_episodes=10000"]
    pipes = {"stdout": preloaded.PIPE, "stderr": preloaded.PIPE, "text": True}
    driver = preloaded.popen(command, **pipes, env={**env, MARK: mark}, process_group=0)
    try:
        metrics = task / "runs" / "run" / "metrics.jsonl"
        assert wait_for(lambda: metrics.exists() and len(read_lines(metrics)) > 3, 300)
        # A terminal sends Ctrl-C to the whole group, and the step still needs all the other processes.
        assert members_of_group(driver.pid) == [driver.pid]
        processes = marked(MARK, [mark])
        assert len(processes) > 5  # the driver, Ray's own, actor, engine, agents, the reward function
        assert not can_fork() or any(b"template_process.py" in command_of(parent_of(pid)) for pid in processes)
        os.killpg(driver.pid, ending)
        out, errors = driver.communicate(timeout=600)
        if ending is signal.SIGINT:
            assert driver.returncode == 130
            assert "died" not in out + errors
            # Of an endless run, whose first checkpoint would have come after ten minutes.
            first, last, told = errors.strip().splitlines()[-3:]
            assert first.startswith("hotseat: Ctrl-C: this step is finished and saved, then the run ends; a second one")
            assert last == "hotseat: stopped"
            assert re.match(r"nothing is lost: the last checkpoint is of step \d+\. Resume with: hotseat resume ", told)
        within_s = 10 if ending is signal.SIGKILL else 60  # ten seconds are what docs/reliability.md says of a kill
        assert wait_for(lambda: not marked(MARK, [mark]), within_s), marked(MARK, [mark])
    finally:
        end_marked(MARK, [mark])
        driver.wait(60)


SLOW_REWARD = """
import time

def reward_func(queries, prompts, labels):
    time.sleep(0.05)
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""


def pids_of(role: str, mark: str) -> list[int]:
    """Worker processes of a role, of the run with this mark, and what they started."""
    pids = marked(MARK, [mark])
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids if process_state(pid) != "gone"]
    guards = [command for command in commands if any(word.endswith(b"/supervisor.py") for word in command)]
    session = json.loads(guards[0][-2])["mark"][1]
    numbers = itertools.product(range(4), range(1, 12), range(8))  # rank, launch, incarnation
    return marked(WORKER, [f"{session}:{role}:{rank}:{launch}.{again}" for rank, launch, again in numbers], pids)


@pytest.mark.long
@pytest.mark.parametrize(("num_engines", "moments"), [(2, [3]), (1, [3, 7, 11])], ids=["two", "one"])
def test_engines_that_are_killed_are_replaced_and_no_bit_changes(num_engines, moments, tmp_path):
    """Scenarios 1 and 2: kill -9 of an engine from outside, most likely in the middle of a rollout."""
    task = make_task(tmp_path)
    (task / "reward.py").write_text(SLOW_REWARD)
    common = ["train.num_episodes=16", "checkpoint.every=1000"]
    start(loads(rl_yaml(task, name="undisturbed"), common))
    placement = {1: "{actor: 0, rollout: '@actor'}", 2: "{actor: 0, rollout: 1-2}"}[num_engines]
    text = rl_yaml(task, name="disturbed", cluster=f"{{component_placement: {placement}}}")
    (task / "run.yaml").write_text(text)
    mark = f"{os.getpid()}-engines-{num_engines}"
    env = own_environment()
    command = [sys.executable, "-m", "hotseat.cli.main", "run", str(task / "run.yaml"), *common]
    driver = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**env, MARK: mark}
    )
    try:
        metrics = task / "runs" / "disturbed" / "metrics.jsonl"
        killed = set()
        for num_records in moments:
            assert wait_for(lambda n=num_records: metrics.exists() and len(read_lines(metrics)) >= n, 120)
            [victim, *_] = sorted(pids_of("rollout", mark))
            time.sleep(0.1)
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        out, errors = driver.communicate(timeout=600)
        assert driver.returncode == 0, errors[-3000:]
        assert len(killed) == len(moments)
        assert out.count("died and is replaced") == len(moments)
        undisturbed, disturbed = (
            load_file(task / "runs" / name / "model" / "model.safetensors") for name in ("undisturbed", "disturbed")
        )
        assert all((undisturbed[name] == disturbed[name]).all() for name in undisturbed)
        ledgers = [(task / "runs" / name / "ledger.jsonl").read_bytes() for name in ("undisturbed", "disturbed")]
        assert ledgers[0] == ledgers[1]
    finally:
        end_marked(MARK, [mark])
        driver.wait(60)
