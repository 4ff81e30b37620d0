"""Rewards that are none, reward functions that crash, and updates that are not finite, in whole runs."""

import json
import math
from pathlib import Path

import pytest
import torch
from loop_cases import REWARD, make_task, rl_yaml
from safetensors.torch import load_file

from hotseat.config import loads
from hotseat.errors import NonFiniteError, RewardError, RunError, WorkerError
from hotseat.loop.rl.ledger import read_ledger
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow


PARTS = """
def sevens(queries, prompts, labels):
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]

def ones(queries, prompts, labels):
    return [float(query[len(prompt):].count("1")) for query, prompt in zip(queries, prompts)]

def many_ones(queries, prompts, labels):
    return [1000 * one for one in ones(queries, prompts, labels)]
"""


def flat_weights(path: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for value in load_file(path / "model.safetensors").values()])


@pytest.mark.long
def test_rewards_that_are_compared_apart_have_no_scales(task):
    """With a reward a thousand times as large, GDPO learns the same, and GRPO something else."""
    (task / "parts.py").write_text(PARTS)
    learned = {}
    for estimator in ("gdpo", "group_norm"):
        for ones in ("ones", "many_ones"):
            functions = [{"function": f"{task}/parts.py:{each}", "name": each[-4:]} for each in ("sevens", ones)]
            name = f"{estimator}-{ones}"
            reward = f"{{functions: {json.dumps(functions)}, clip: null}}"
            start(loads(rl_yaml(task, name=name, reward=reward, algorithm=f"{{estimator: {estimator}}}")))
            learned[name] = flat_weights(task / "runs" / name / "model")
            records = read_lines(task / "runs" / name / "metrics.jsonl")
            assert any(record.get("grad_norm", 0) > 0 for record in records)
    assert torch.allclose(learned["gdpo-ones"], learned["gdpo-many_ones"], atol=1e-5)
    assert not torch.allclose(learned["group_norm-ones"], learned["group_norm-many_ones"], atol=1e-3)


def run(task: Path, name: str, *overrides: str, reward: str | None = None) -> list[dict]:
    if reward is not None:
        (task / "reward.py").write_text(reward)
    start(loads(rl_yaml(task, name=name), overrides))
    return read_lines(task / "runs" / name / "metrics.jsonl")


def weights(path: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in load_file(path / "model.safetensors").items()}


def exported(task: Path, name: str) -> dict[str, bytes]:
    return weights(task / "runs" / name / "model")


# --- rewards ----------------------------------------------------------------------------------------------------------

ONE_IS_BAD = """
import math
def reward_func(queries, prompts, labels):
    rewards = [query[len(prompt):].count("7") + number for number, (query, prompt) in enumerate(zip(queries, prompts))]
    rewards[1] = {bad}
    return rewards
"""


def test_a_reward_that_is_no_number_is_in_no_baseline_and_no_loss(task):
    """Scenario 30: whatever is wrong with it, the others are learned from alike; a zero would be learned from too.

    What else is no number: `rewards/test_answers.py`.
    """
    options = ["reward.retries=0", "reward.max_failed_fraction=0.25"]
    ends = {}
    for name, bad in (
        ("nan", "math.nan"),
        ("huge", "1e300"),
        ("zero", "0.0"),
    ):
        records = run(task, name, *options, reward=ONE_IS_BAD.format(bad=bad))
        ends[name] = exported(task, name)
        if name == "zero":
            continue
        assert [(record["samples"], record["samples_failed"]) for record in records[1:]] == [(12, 4), (12, 4)]
        assert all(math.isfinite(record["loss"]) and record["reward"] >= 5 / 3 for record in records[1:])
        failed = [entry for entry in read_ledger(task / "runs" / name) if entry.state == "failed"]
        assert {key.sample for entry in failed for key in entry.keys} == {1}
    assert ends["nan"] == ends["huge"]
    assert ends["nan"] != ends["zero"]


def test_above_the_share_that_may_fail_the_run_stops(task):
    """Scenario 30."""
    with pytest.raises(
        RewardError, match=r"4 of 16 samples have no reward \(25.0%\), and reward.max_failed_fraction is"
    ):
        run(task, "strict", "reward.retries=0", "reward.max_failed_fraction=0.24", reward=ONE_IS_BAD.format(bad="None"))


MISBEHAVES_ONCE = """
import ctypes, os, time
def reward_func(queries, prompts, labels):
    seen = {mark!r} + labels[0]
    if not os.path.exists(seen):
        open(seen, "w").close()
        {fault}
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, bytes]:
    task = make_task(tmp_path_factory.mktemp("undisturbed"))
    run(task, "plain", "data.max_samples=4", reward=REWARD)
    return exported(task, "plain")


AT_ONCE = ("reward.timeout_s=60", "reward.retries=1")
AFTER_2_S = ("reward.timeout_s=2", "reward.retries=4")  # a loaded machine may take that long to answer, too


@pytest.mark.parametrize(
    ("fault", "limits"),
    [
        ("ctypes.string_at(0)", AT_ONCE),
        pytest.param("os._exit(3)", AT_ONCE, marks=pytest.mark.long),
        pytest.param("os.abort()", AT_ONCE, marks=pytest.mark.long),
        pytest.param("time.sleep(1000)", AFTER_2_S, marks=pytest.mark.long),
        pytest.param("while True: pass", AFTER_2_S, marks=pytest.mark.long),
        pytest.param("os.kill(os.getpid(), 9)", AT_ONCE, marks=pytest.mark.long),
    ],
)
def test_a_reward_function_that_crashes_or_hangs_is_started_again(undisturbed, task, fault, limits):
    """Scenario 31: on the first call for every prompt, and the run ends bit for bit as if nothing had happened."""
    limits = [*limits, "data.max_samples=4"]
    run(task, "disturbed", *limits, reward=MISBEHAVES_ONCE.format(mark=f"{task}/seen-", fault=fault))
    assert len(list(task.glob("seen-*"))) == 4
    assert exported(task, "disturbed") == undisturbed


# --- updates ----------------------------------------------------------------------------------------------------------

# Rewards that fit into 32 bits; the sum of what follows from them does not. Group after group, for so many calls.
OVERFLOWS = """
import os
def reward_func(queries, prompts, labels):
    with open({calls!r}, "a") as file: file.write("x")
    if os.path.getsize({calls!r}) <= {num}:
        return [3e38, -3e38, 3e38, -3e38]
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""
UNCLIPPED = ("reward.clip=null", "algorithm.estimator=dr_grpo")


def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(task):
    """Scenario 32: weights as before; the optimizer too, for what follows is what a run would do that begins there."""
    (task / "calls").touch()
    bad = OVERFLOWS.format(calls=str(task / "calls"), num=4)
    records = run(task, "first", *UNCLIPPED, "data.max_samples=4", reward=bad)
    assert len(records) == 2
    assert records[1]["skipped_updates"] == 1
    assert not math.isfinite(float(records[1]["loss"])) or not math.isfinite(float(records[1]["grad_norm"]))
    assert exported(task, "first") == weights(task / "model")
    # One bad step, then three good ones: the last is counted too, and it does learn.
    (task / "calls").write_text("")
    records = run(task, "more", *UNCLIPPED, "train.num_episodes=2", reward=bad)
    assert [record["skipped_updates"] for record in records[1:]] == [1, 1, 1, 1]
    assert exported(task, "more") != weights(task / "model")


def test_too_many_in_a_row_stop_the_run_and_name_the_samples(task):
    """Scenario 32."""
    bad = OVERFLOWS.format(calls=str(task / "calls"), num=1000)
    with pytest.raises((NonFiniteError, WorkerError), match=r"2 updates in a row were not finite .*samples: \d/\d/\d"):
        run(task, "stopped", *UNCLIPPED, "train.num_episodes=4", "train.max_skipped_steps=2", reward=bad)
    assert len(read_lines(task / "runs" / "stopped" / "metrics.jsonl")) == 2  # before training, and one step
    assert not (task / "runs" / "stopped" / "model").exists()


# --- groups that teach nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "estimator",
    [
        *("group_norm", "reinforce_baseline"),
        *(pytest.param(estimator, marks=pytest.mark.long) for estimator in ("rloo", "dr_grpo")),
    ],
)
def test_where_all_rewards_are_equal_nothing_is_learned_and_all_is_finite(task, estimator):
    """Scenario 38."""
    equal = "def reward_func(queries, prompts, labels):\n    return [0.7] * len(queries)\n"
    records = run(task, "equal", f"algorithm.estimator={estimator}", reward=equal)
    for record in records[1:]:
        assert (record["loss"], record["grad_norm"], record["groups_alike"]) == (0.0, 0.0, 1.0)
    assert exported(task, "equal") == weights(task / "model")


def test_where_all_rewards_are_equal_and_filtered_the_run_stops_after_so_many_prompts(task):
    """Scenario 38: with filtering there is no endless search for better ones."""
    equal = "def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n"
    with pytest.raises(RunError, match="80 prompts gave only 0 of the 4 groups of a step .*80 dropped: score too high"):
        run(task, "equal", "algorithm.filtering.enabled=true", reward=equal)


# --- short and long answers -------------------------------------------------------------------------------------------


def set_ends(model: Path, token_ids: list[int]) -> None:
    """Tokens that end an answer."""
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": token_ids}))


def test_answers_that_end_at_once_are_learned_from(task):
    """Scenario 37: any token ends the answer, so that each has only that one."""
    set_ends(task / "model", list(range(16)))
    records = run(task, "short")
    assert [(record["length"], record["truncated"]) for record in records[1:]] == [(1.0, 0.0)] * 2
    assert all(math.isfinite(record["loss"]) and record["learned_tokens"] > 0 for record in records[1:])


@pytest.mark.parametrize("penalty", ["null", "0.0", "-1.0"])
def test_answers_that_are_all_cut_are_learned_from_or_not_but_stay_finite(task, penalty):
    """Scenario 37: the token that ends an answer is none that the model has."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    tokenizer.add_tokens(["<more>", "<and more>"])
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    assert tokenizer.eos_token_id == 16
    tokenizer.save_pretrained(task / "model")
    set_ends(task / "model", [tokenizer.eos_token_id])
    records = run(task, "long", f"reward.truncation_penalty={penalty}")
    assert [(record["length"], record["truncated"]) for record in records[1:]] == [(4.0, 1.0)] * 2
    assert all(math.isfinite(record["loss"]) for record in records[1:])
    has_learned = exported(task, "long") != weights(task / "model")
    assert has_learned == (penalty == "null")  # otherwise every reward is the same
