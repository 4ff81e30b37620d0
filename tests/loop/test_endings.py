"""A run that is ended from outside leaves nothing behind: no worker, no reward process, nothing of Ray."""

import os
import signal
import subprocess
import sys
import time

import pytest
from loop_cases import make_task, rl_yaml

from hotseat.cluster._guard import end_marked, marked
from hotseat.observe import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

MARK = "TEST_ENDINGS"  # in the environment of everything that a run of these tests starts


def wait_for(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is(ending, tmp_path):
    task = make_task(tmp_path)
    placement = "{component_placement: {actor: 0, rollout: '@actor'}}"
    (task / "run.yaml").write_text(rl_yaml(task, cluster=placement, train="{dtype: fp32, batch_size: 16}"))
    mark = f"{os.getpid()}-{ending.name}"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "HOTSEAT_"))}
    command = [sys.executable, "-m", "hotseat.cli.main", "run", str(task / "run.yaml"), "train.num_episodes=10000"]
    driver = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**env, MARK: mark}
    )
    try:
        metrics = task / "runs" / "run" / "metrics.jsonl"
        assert wait_for(lambda: metrics.exists() and len(read_metrics(metrics)) > 3, 120)
        assert len(marked(MARK, [mark])) > 5  # the driver, Ray's own, actor, engine, agents, the reward function
        driver.send_signal(ending)
        _, errors = driver.communicate(timeout=30)
        if ending is signal.SIGINT:
            assert driver.returncode == 130
            assert errors.strip().splitlines()[-1] == "hotseat: stopped"
        assert wait_for(lambda: not marked(MARK, [mark]), 10), marked(MARK, [mark])
    finally:
        end_marked(MARK, [mark])
        driver.wait(10)
