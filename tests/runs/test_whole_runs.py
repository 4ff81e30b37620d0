"""Runs of the whole loop that meet with something: a disk, data, a reward function, a straggler, a spike."""

import shutil
import subprocess
import sys

import pytest
from fault_cases import TWO_RANKS, Faulty, differences, make_faulty_task
from loop_cases import REWARD, make_task, rl_yaml, sft_yaml
from model_shells import NO_WEIGHTS
from stopped_runs import stopped_after_saving

from hotseat.cli.main import main
from hotseat.config import load, loads
from hotseat.errors import RewardError, RunError, UserError
from hotseat.faults import Fault
from hotseat.loop.rl.ledger import read_ledger
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

HAS_MOUNTS = bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-rm", "true"]).returncode


def warnings_of(task) -> list[dict]:
    events = read_lines(task / "runs" / "run" / "events.jsonl")
    return [event for event in events if event["kind"] == "warning"]


@pytest.mark.parametrize("place", ["prompts.jsonl", "prompts.jsonl/below", "/proc/nowhere"])
def test_a_place_for_checkpoints_that_cannot_be_written_is_refused_before_a_model_loads(task, place):
    """Scenario 19."""
    (task / "model" / "model.safetensors").write_bytes(NO_WEIGHTS)
    config = loads(rl_yaml(task), ["checkpoint.every=1", f"checkpoint.path={task / place}"])
    with pytest.raises(UserError, match="cannot be written: .*; set checkpoint.path to another place"):
        start(config)


@pytest.mark.long
@pytest.mark.skipif(not HAS_MOUNTS, reason="needs `unshare -rm`")
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.long])])
def test_a_disk_that_fills_up_under_the_trainers_hands_is_named(task, runtime):
    """Scenario 16: the check before the save passed, the write did not."""
    (task / "disk").mkdir()
    (task / "run.yaml").write_text(rl_yaml(task, cluster=f"{{runtime: {runtime}}}"))
    code = (
        "import sys; from hotseat.loop.state import checkpoints; checkpoints._SPARE_BYTES = -(1 << 40);"
        "from hotseat.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    run = f"{sys.executable} -c '{code}' run {task}/run.yaml checkpoint.every=1 checkpoint.path={task}/disk"
    script = f"mount -t tmpfs -o size=128k none {task}/disk; exec {run}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=860)
    assert done.returncode == 1
    assert f"hotseat: no room for the checkpoint of step 1 in {task}/disk: the disk was full after" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.skipif(not HAS_MOUNTS, reason="needs `unshare -rm`")
def test_without_shared_memory_a_run_uses_the_disk(tmp_path):
    """Scenario 18: weights of 2.5 MB, and 100 kB in /dev/shm: nothing ends by SIGBUS, and no bit changes."""
    task = make_task(tmp_path, hidden_size=256, intermediate_size=512)
    start(loads(rl_yaml(task, name="undisturbed")))
    (task / "run.yaml").write_text(rl_yaml(task, cluster="{component_placement: {actor: 0, rollout: 1}}"))
    fill = "mount -t tmpfs -o size=1m none /dev/shm; head -c 900k /dev/zero > /dev/shm/full"
    script = f"{fill}; exec {sys.executable} -m hotseat run {task}/run.yaml"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=860)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert differences(task / "runs" / "undisturbed", task / "runs" / "run") == []


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ranks_that_run_out_of_memory_end_the_run_and_it_resumes_with_smaller_micro_batches(tmp_path):
    """Scenario 50 with several training ranks, which cannot make an update again by themselves."""
    faulty = Faulty(make_faulty_task(tmp_path), num_passes=2, placement=TWO_RANKS, transport="gloo")
    path = faulty.task / "disturbed.yaml"
    path.write_text(path.read_text().replace("micro_batch_size: 2", "chosen_tokens_per_device: 40"))
    faulty.arm(Fault("update.backward", "out-of-memory", skip=3))
    code, _, errors = faulty.go()
    assert code == 1
    assert "out of device memory in an update with a micro-batch of" in errors
    kept = load(faulty.run_dir / "config.yaml").train.chosen_tokens_per_device
    assert 0 < kept < 40
    assert f"set train.chosen_tokens_per_device to {kept}" in errors
    code, out, errors = faulty.go()
    assert code == 0, errors
    assert f"train.chosen_tokens_per_device: 40 when the checkpoint was written, now {kept}" in out
    assert load(faulty.run_dir / "config.yaml").train.chosen_tokens_per_device == kept


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_changed_contents_of_the_data_are_refused(task, capsys, kind):
    """Scenario 24: the same path, the same number of rows. Nothing that was recorded is touched."""
    with stopped_after_saving():
        start(loads((rl_yaml if kind == "rl" else sft_yaml)(task, name="run"), ["checkpoint.every=1"]))
    metrics = (task / "runs" / "run" / "metrics.jsonl").read_bytes()
    file = task / ("prompts.jsonl" if kind == "rl" else "examples.jsonl")
    file.write_text(file.read_text().replace("1+2", "2+2"))
    assert main(["resume", str(task / "runs" / "run")]) == 2
    assert "their number is the same, their contents have changed" in capsys.readouterr().err
    assert (task / "runs" / "run" / "metrics.jsonl").read_bytes() == metrics


def test_a_reward_function_that_wants_ten_gib_is_bounded_in_a_run(task):
    """Scenario 31: on its first call; the second attempt answers."""
    wants = f"    import os\n    if not os.path.exists('{task}/seen'):\n        open('{task}/seen', 'w')\n"
    wants += "        held = bytearray(10 << 30)\n    return"
    (task / "reward.py").write_text(REWARD.replace("    return", wants))
    start(loads(rl_yaml(task, name="once")))
    (task / "reward.py").write_text(REWARD.replace("    return", "    held = bytearray(10 << 30)\n    return"))
    with pytest.raises(RewardError, match=r"MemoryError.*it may take 8 GiB: reward.max_memory_gib"):
        start(loads(rl_yaml(task, name="always"), ["reward.retries=0"]))


@pytest.mark.long
def test_a_step_that_teaches_nothing_is_warned_of_once(task):
    """Scenario 38."""
    (task / "reward.py").write_text("def reward_func(q, p, l):\n    return [1.0] * len(q)\n")
    start(loads(rl_yaml(task), ["train.num_episodes=2"]))
    [warning] = warnings_of(task)
    assert "step 1: in every group all rewards are equal, so nothing is learned" in warning["text"]


SPIKE = """
import os
def reward_func(queries, prompts, labels):
    with open("{task}/calls", "a") as file:
        file.write("x")
    rewards = [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
    if os.path.getsize("{task}/calls") == 41:  # the first group of step 11
        rewards[2] += 1e4
    return rewards
"""
SPIKED = ("reward.clip=null", "algorithm.estimator=dr_grpo", "train.num_episodes=8")


def test_an_update_out_of_the_ordinary_is_flagged_with_its_samples(task):
    """Scenario 33: the reward of one sample, and with it the loss, is ten thousand times what it should be."""
    (task / "reward.py").write_text(SPIKE.format(task=task))
    start(loads(rl_yaml(task), SPIKED))
    [warning] = warnings_of(task)
    assert "step 11: the gradient's norm is" in warning["text"]
    [entry, *_] = [entry for entry in read_ledger(task / "runs" / "run") if entry.step == 11]
    assert f"differ most from their siblings': {entry.epoch}/{entry.prompt}/2," in warning["text"]


@pytest.mark.long
def test_an_update_out_of_the_ordinary_ends_the_run_if_that_is_wanted(task):
    """Scenario 33: the other policy."""
    (task / "reward.py").write_text(SPIKE.format(task=task))
    with pytest.raises(RunError, match=r"step 11: the gradient's norm is .* train.on_spike=warn the run continues"):
        start(loads(rl_yaml(task), [*SPIKED, "train.on_spike=stop"]))


STRAGGLER = """
import asyncio
from hotseat.agents import Environment, Step

class Slow(Environment):
    async def reset(self, prompt, label):
        self.is_slow = prompt.startswith("3+4")
    async def step(self, action):
        await asyncio.sleep(1000 if self.is_slow else 0)
        return Step(reward=float(len(action) % 2), done=True)
"""


def test_an_episode_that_takes_for_ever_fails_alone_and_is_counted(task):
    """Scenario 42: the step is bounded, the sample is reported, nothing is dropped in silence."""
    (task / "agent.py").write_text(STRAGGLER)
    options = [f"agent.path={task}/agent.py", "agent.timeout_s=5", "reward.max_failed_fraction=0.5"]
    start(loads(rl_yaml(task, reward="", data=f"{{path: {task}/prompts.jsonl, max_length: 24}}"), options))
    failed = [entry for entry in read_ledger(task / "runs" / "run") if entry.state == "failed"]
    assert [entry.prompt for entry in failed] == [2] * 4  # all four samples of 3+4
    assert all("the agent took longer than 5 s" in entry.reason for entry in failed)
    records = read_lines(task / "runs" / "run" / "metrics.jsonl")
    assert sum(record.get("samples_failed", 0) for record in records) == 4
