"""A command for several nodes, on two: a node is lost, the job ends with the reason, and another one resumes it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cut_commands import cut, make_materials
from ray_head import add_node, ray_head

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3000)]

NCCL = {"NCCL_IB_HCA": "mlx5_0", "NCCL_SOCKET_IFNAME": "ib0", "NCCL_IB_DISABLE": "0"}
DRIVER = Path(__file__).parents[1] / "helpers" / "driver_on_existing.py"


def job_of(made, head, *more: str) -> list[str]:
    at = next(index for index, word in enumerate(made.words) if word.startswith("--address="))
    return [*made.words[:at], f"--address={head.address}", *made.words[at + 1 :], *more]


def started(command: list[str], head) -> subprocess.Popen:
    return subprocess.Popen(
        command, cwd=head.folder, env=head.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def checkpoints(head) -> list[Path]:
    """Return the checkpoints that a job has made in Ray's copy of its working directory."""
    found = Path(head.env["RAY_TMPDIR"]).glob("session_2*/runtime_resources/working_dir_files/*/checkpoints/*/step-*")
    return sorted(found)


def kill_raylet(node: subprocess.Popen) -> None:
    [raylet] = [child for child in psutil.Process(node.pid).children(recursive=True) if child.name() == "raylet"]
    os.kill(raylet.pid, signal.SIGKILL)


def test_a_lost_node_ends_the_job_with_the_reason_and_another_job_resumes_it(tmp_path):
    """Scenario 13."""
    made = cut("ppo_eight_nodes", tmp_path, nodes=2, max_samples=16)
    make_materials(made, tmp_path)
    with ray_head(tmp_path, num_gpus=5, num_gpus_of_second=5, **NCCL) as head:
        job = started(job_of(made, head), head)
        while job.poll() is None and not checkpoints(head):
            time.sleep(0.2)
        assert job.poll() is None, job.stdout.read()[-6000:]
        kill_raylet(head.second)
        printed = job.communicate(timeout=1200)[0]
        assert job.returncode != 0
        assert "train_ppo_ray: Ray has lost node 1 (" in printed, printed[-6000:]
        with add_node(head, num_gpus=5):
            resumed = started(job_of(made, head, "--load_checkpoint"), head)
            printed = resumed.communicate(timeout=1200)[0]
            assert resumed.returncode == 0, printed[-6000:]
            steps = re.findall(r"^rl (\d)/4 ", printed, re.MULTILINE)
            assert steps in (["2", "3", "4"], ["3", "4"], ["4"]), printed[-6000:]  # it ran on until it saw the loss


def test_nccl_variables_reach_every_worker(tmp_path):
    """From a runtime environment they reach all; from the environment of `ray start`, the node's workers."""
    with ray_head(tmp_path, num_gpus=2, num_gpus_of_second=3, **NCCL) as head:
        runtime_env = {"env_vars": {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5_1"}}
        command = [
            *("ray", "job", "submit", f"--address={head.address}", f"--runtime-env-json={json.dumps(runtime_env)}"),
            *("--", sys.executable, str(DRIVER), "once"),
        ]
        printed = started(command, head).communicate(timeout=600)[0]
        facts = json.loads(next(line for line in printed.splitlines() if line.startswith('{"pid"')))
        assert len(facts["actor"] + facts["rollout"]) == 3
        on_loopback = {"NCCL_SOCKET_IFNAME": "lo"}
        for worker in facts["actor"] + facts["rollout"]:
            assert worker["nccl"] == NCCL | runtime_env["env_vars"] | on_loopback
