"""Ray itself dies under a run: the run ends within seconds, says so, leaves nothing behind, and can be resumed."""

import json
import os
import signal
from pathlib import Path

import pytest
from fault_cases import MARK, Faulty, differences, make_faulty_task, run_undisturbed
from paused_runs import wait_for

from hotseat.cli.main import main
from hotseat.faults import Fault
from hotseat.processes.supervisor import marked

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]


def daemon_of(run: Faulty, name: str) -> int:
    """The process of this run whose program has that name."""
    found = []
    for pid in marked(MARK, [run.mark]):
        try:
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            continue
        if program.endswith(f"/{name}".encode()):
            found.append(pid)
    [pid] = found
    return pid


def shm_prefix_of(run: Faulty) -> str:
    """How the shared memory of the run begins: its guard, which removes it, was told."""
    found = set()
    for pid in marked(MARK, [run.mark]):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(argument.endswith(b"/supervisor.py") for argument in arguments):
            found.add(json.loads(arguments[-2])["shm_prefix"])
    [prefix] = found
    return prefix


@pytest.mark.long
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_ray_is_killed_and_the_run_ends_with_what_was_saved(name, tmp_path):
    """Scenario 13: the driver waits for a slow update meanwhile, which nobody could ever answer."""
    task = make_faulty_task(tmp_path)
    undisturbed = run_undisturbed(task, num_passes=2)
    with Faulty(task, num_passes=2) as run:
        run.arm(Fault("update.micro-batch", "300", by="actor:0", skip=7))  # in the second step
        run.start()
        assert wait_for(lambda: list(run.faults.glob("*.happened")), 300)
        prefix = shm_prefix_of(run)
        os.kill(daemon_of(run, name), signal.SIGKILL)
        code, _, errors = run.finish(timeout_s=860)  # Ray by itself gives up after 20 s, with other words
        assert code == 1
        words = {"gcs_server": "GCS server", "raylet": "raylet"}[name]
        said = errors.strip().splitlines()
        assert said[-1] == f"resume after step 1: hotseat resume {run.run_dir}"
        assert said[-2].startswith(f"hotseat: Ray's {words} (pid ")
        assert "died: without it no process of this run can be reached" in said[-2]
        assert run.is_gone(within_s=60)
        assert not [segment for segment in os.listdir("/dev/shm") if segment.startswith(prefix)]
        # In this process, which is quicker and gives the same bits.
        assert main(["resume", str(run.run_dir), "cluster.runtime=local"]) == 0
        assert differences(undisturbed, run.run_dir) == []
