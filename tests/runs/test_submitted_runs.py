"""`ray job submit ... -- hotseat run`: the command restarts its driver there, too."""

import subprocess
import sys

import pytest
from fault_cases import differences
from loop_cases import make_task, rl_yaml
from paused_runs import arm
from ray_head import ray_head

from hotseat.config import loads
from hotseat.faults import VARIABLE, Fault
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]


def test_a_submitted_run_restarts_its_driver_and_its_models(tmp_path):
    """Scenarios 8 and 12, on a cluster that was there before: it survives, and is used again."""
    task = make_task(tmp_path)
    options = {
        "checkpoint": "{every: 1, background: false}",
        "train": "{dtype: fp32, batch_size: 16, micro_batch_size: 8, num_episodes: 2}",
    }
    start(loads(rl_yaml(task, name="undisturbed", **options)))
    cluster = "{component_placement: {actor: 0, rollout: 1}}"
    (task / "run.yaml").write_text(rl_yaml(task, cluster=cluster, **options))
    arm(
        task / "faults",
        [Fault("update.middle", "kill", by="actor:0", skip=1), Fault("update.before", "kill", skip=3)],
    )
    with ray_head(tmp_path, num_gpus=2, **{VARIABLE: str(task / "faults")}) as head:
        command = [sys.executable, "-m", "hotseat", "run", str(task / "run.yaml")]
        done = subprocess.run(
            ["ray", "job", "submit", "--address", head.address, "--", *command],
            env=head.env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=1000,
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert not list((task / "faults").glob("*.fault"))
    assert "hotseat: its driver was ended by SIGKILL" in done.stdout
    restarts = [line for line in read_lines(task / "runs" / "run" / "events.jsonl") if line["kind"] == "restart"]
    assert len(restarts) == 2
    assert differences(task / "runs" / "undisturbed", task / "runs" / "run") == []
