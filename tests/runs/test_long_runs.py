"""Runs of many steps: nothing grows."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environments import own_environment
from loop_cases import make_task, rl_yaml

from hotseat.observe import read_lines
from hotseat.processes.supervisor import end_marked, marked

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

MARK = "TEST_LONG_RUNS"
NUM_STEPS, SAMPLES_PER_STEP = 500, 20


def held_by(pid: int) -> tuple[int, int]:
    """(resident bytes, open files) of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def measure(mark: str, prefix: str) -> dict[str, int]:
    memory = files = 0
    for pid in marked(MARK, [mark]):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"ray::ObjectHost" in command or b"hotseat" in command:  # Ray's own daemons are not ours to judge
                held = held_by(pid)
                memory, files = memory + held[0], files + held[1]
        except OSError:
            continue
    return {"memory": memory, "files": files, "shared memory": len(list(Path("/dev/shm").glob(f"{prefix}*")))}


def test_nothing_grows_in_a_long_run(tmp_path):
    """Scenario 41: 10,000 samples in 500 steps; from step 50 on, less than 5% more of anything."""
    task = make_task(tmp_path)
    text = rl_yaml(
        task,
        cluster="{component_placement: {actor: 0, rollout: '@actor'}}",
        rollout="{batch_size: 5, samples_per_prompt: 4, max_new_tokens: 4, num_slots: 8}",
        data=f"{{path: {task}/prompts.jsonl, label_key: label, max_length: 16, max_samples: 5}}",
        train=f"{{dtype: fp32, batch_size: {SAMPLES_PER_STEP}, num_episodes: {NUM_STEPS}}}",
        checkpoint="{every: 25, keep_last: 1}",
    )
    (task / "run.yaml").write_text(text)
    mark = f"{os.getpid()}-growth"
    env = own_environment()
    driver = subprocess.Popen(
        [sys.executable, "-m", "hotseat.cli.main", "run", str(task / "run.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**env, MARK: mark},
    )
    metrics, found = task / "runs" / "run" / "metrics.jsonl", {}
    try:
        while driver.poll() is None:
            step = read_lines(metrics)[-1]["step"] if metrics.exists() and metrics.stat().st_size else 0
            if step >= 50:
                found.setdefault("early", measure(mark, "hotseat-"))
            if step >= NUM_STEPS - 10:
                found["late"] = measure(mark, "hotseat-")
            time.sleep(0.2)
        _, errors = driver.communicate(timeout=300)
        assert driver.returncode == 0, errors[-3000:]
    finally:
        end_marked(MARK, [mark])
        driver.wait(60)
    early, late = found["early"], found["late"]
    assert early["memory"] > 0
    assert late["memory"] < 1.05 * early["memory"], found
    assert late["files"] <= early["files"] + 5, found
    assert late["shared memory"] <= early["shared memory"], found
    assert sum(record.get("samples", 0) for record in read_lines(metrics)) == NUM_STEPS * SAMPLES_PER_STEP
