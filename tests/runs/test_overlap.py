"""Rollout beside training: nothing is lost, doubled or too old, and in prompt order no bit depends on timing."""

import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from loop_cases import make_task, make_value_model, rl_yaml, same, weights
from stopped_runs import stopped_after_saving

from hotseat.config import loads
from hotseat.errors import RewardError, RunError
from hotseat.loop.rl.ledger import read_ledger
from hotseat.loop.run import start
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.group_facts import EVALUATION
from hotseat.observe import read_lines
from hotseat.rollout.open_requests import RequestTable
from hotseat.rollout.transformers_engine import TransformersEngine

pytestmark = pytest.mark.slow

BESIDE = "{runtime: local, inventory: 1x3, component_placement: {actor: 0, rollout: 1}}"
ON_RAY = "{component_placement: {actor: 0, rollout: 1}}"
FILTERED = "algorithm.filtering.enabled=true", "algorithm.filtering.low=0.0", "algorithm.filtering.high=1.0"
PASSES = ("train.num_episodes=4",)  # eight steps of four groups
# Each call takes another time, so that groups are finished in another order each time.
SLEEPS = """
import random, time

def reward_func(queries, prompts, labels):
    time.sleep(random.random() * 0.05)
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""
# The data have eight prompts.
FAILS_FROM_THE_SECOND_PASS = """
seen = set()

def reward_func(queries, prompts, labels):
    if prompts[0] in seen:
        raise ValueError("the second pass")
    seen.add(prompts[0])
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""


def run(task: Path, name: str, overlap: str, *overrides: str, **sections: str) -> list[dict]:
    sections = {"cluster": BESIDE} | sections
    start(loads(rl_yaml(task, name=name, overlap=overlap, **sections), [*PASSES, *overrides]))
    return steps(task, name)


def steps(task: Path, name: str) -> list[dict]:
    return [row for row in read_lines(task / "runs" / name / "metrics.jsonl") if row["step"] > 0]


def versions_of_samples(task: Path, name: str) -> list[set[int]]:
    """Return the versions that sampled each recorded sample."""
    return [
        {version for segment in sample["segments"] for version in segment["versions"] if version is not None}
        for sample in read_lines(task / "runs" / name / "samples.jsonl")
        if sample["state"] == "trained"
    ]


def long_answers(task: Path) -> dict[str, str]:
    """With two slots for sixteen long answers some are always open at a push."""
    return {
        "data": f"{{path: {task}/prompts.jsonl, label_key: label, max_length: 30}}",
        "rollout": "{batch_size: 4, samples_per_prompt: 4, max_new_tokens: 24, num_slots: 2}",
    }


@pytest.fixture
def _answers_open_at_first_push(monkeypatch):
    """An engine that has answered the prompts of a step, and begun others, waits for the first push."""
    num_answers, versions = Counter(), set()
    step, complete = TransformersEngine._step, RequestTable.complete

    def step_or_wait(self):
        versions.add(self._serving.version)
        has_begun = any(sequence is not None and sequence.token_ids for sequence in self._running)
        if has_begun and len(versions) == 1 and list(num_answers.values()).count(4) >= 4:
            time.sleep(0.001)  # and commands are obeyed between steps
        else:
            step(self)

    def count(self, done):
        names = (sequence.request.id for sequence, _ in done)
        num_answers.update(tuple(name.split("/")[:2]) for name in names if not name.startswith(f"{EVALUATION}/"))
        complete(self, done)

    monkeypatch.setattr(TransformersEngine, "_step", step_or_wait)
    monkeypatch.setattr(RequestTable, "complete", count)


def run_until_saved(task: Path, name: str, overlap: str, num_checkpoints: int, *overrides: str) -> None:
    """Run with a checkpoint after each step, and die after so many."""
    with stopped_after_saving(num_checkpoints):
        run(task, name, overlap, "checkpoint.every=1", *overrides)


def trained(task: Path, name: str) -> Counter:
    return Counter(key for entry in read_ledger(task / "runs" / name) for key in entry.keys if entry.state == "trained")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A task with a run `undisturbed` of staleness 2 and one `filtered` of staleness 1, for all tests."""
    task = make_task(tmp_path_factory.mktemp("undisturbed"))
    run(task, "undisturbed", "{staleness: 2}")
    run(task, "filtered", "{staleness: 1}", *FILTERED)
    return task


def test_a_batch_is_sampled_by_the_weights_of_s_versions_before(undisturbed):
    rows = steps(undisturbed, "undisturbed")
    assert [row["staleness"] for row in rows] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert [row["staleness_max"] for row in rows] == [0, 1, 2, 2, 2, 2, 2, 2]
    versions = {entry.step: entry.version for entry in read_ledger(undisturbed / "runs" / "undisturbed")}
    assert versions == {step: max(0, step - 3) for step in range(1, 9)}
    assert set(trained(undisturbed, "undisturbed").values()) == {1}
    assert len(trained(undisturbed, "undisturbed")) == 8 * 4 * 4


@pytest.mark.long
def test_a_shorter_queue_bounds_the_age_too(task):
    rows = run(task, "run", "{staleness: 3, queue: 0}")
    assert [row["staleness"] for row in rows] == [0, 1, 1, 1, 1, 1, 1, 1]


def test_in_prompt_order_weights_depend_neither_on_who_is_slow_nor_on_the_number_of_hosts(undisturbed, task):
    (task / "reward.py").write_text(SLEEPS)
    run(task, "uneven", "{staleness: 2}", "rollout.num_hosts=2")
    assert same(weights(undisturbed, "undisturbed"), weights(task, "uneven"))


@pytest.mark.long
@pytest.mark.ray
def test_on_ray_weights_are_those_of_one_process(task):
    """`make test` compares them in a run whose processes die, in `runs/test_overlap_kills.py`."""
    run(task, "local", "{staleness: 2}")
    (task / "reward.py").write_text(SLEEPS)
    run(task, "ray", "{staleness: 2}", cluster=ON_RAY)
    assert same(weights(task, "local"), weights(task, "ray"))


@pytest.mark.parametrize("num_checkpoints", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_resumed_run_has_the_groups_that_waited_and_ends_bit_for_bit(undisturbed, task, num_checkpoints):
    run_until_saved(task, "run", "{staleness: 2}", num_checkpoints)
    run(task, "run", "{staleness: 2}", "checkpoint.resume=true")
    assert same(weights(undisturbed, "undisturbed"), weights(task, "run"))
    assert trained(undisturbed, "undisturbed") == trained(task, "run")


@pytest.mark.parametrize(
    "in_flight", ["keep", *(pytest.param(name, marks=pytest.mark.long) for name in ("recompute", "restart"))]
)
def test_by_arrival_nothing_is_too_old_lost_or_doubled(task, in_flight):
    """And a host that is reconnected, as with `restart`, leaves no thread behind."""
    (task / "reward.py").write_text(SLEEPS)
    before = set(threading.enumerate())
    rows = run(task, "run", f"{{staleness: 2, order: arrival, in_flight: {in_flight}}}")
    assert max(row["staleness_max"] for row in rows) <= 2
    assert set(trained(task, "run").values()) == {1}
    assert len(trained(task, "run")) == 8 * 4 * 4
    assert_no_thread_collects(before)


def assert_no_thread_collects(before: set[threading.Thread]) -> None:
    """Raise if a thread that collects, and was not there before, does not end."""
    left = [thread for thread in threading.enumerate() if thread not in before and thread.name == "collecting"]
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)


@pytest.mark.parametrize("in_flight", ["keep", pytest.param("restart", marks=pytest.mark.long)])
def test_by_arrival_a_resumed_run_trains_every_sample_once(task, in_flight):
    overlap = f"{{staleness: 2, order: arrival, in_flight: {in_flight}}}"
    (task / "reward.py").write_text(SLEEPS)
    run_until_saved(task, "run", overlap, 3)
    run(task, "run", overlap, "checkpoint.every=1", "checkpoint.resume=true")
    assert len(trained(task, "run")) == 8 * 4 * 4
    assert set(trained(task, "run").values()) == {1}


@pytest.mark.usefixtures("_answers_open_at_first_push")
def test_requests_go_on_over_a_push_and_their_tokens_say_so(task):
    """The age of a sample is that of its oldest token. All samples of each step are recorded."""
    overlap = "{staleness: 2, order: arrival, in_flight: keep}"
    rows = run(task, "run", overlap, "log.samples_every=1", "log.samples_per_step=16", **long_answers(task))
    assert any(len(versions) > 1 for versions in versions_of_samples(task, "run"))
    ages: dict[int, list[int]] = {}
    newest: dict[int, list[int]] = {}
    for sample in read_lines(task / "runs" / "run" / "samples.jsonl"):
        versions = [each for segment in sample["segments"] for each in segment["versions"] if each is not None]
        ages.setdefault(sample["step"], []).append(sample["step"] - 1 - min(versions))
        newest.setdefault(sample["step"], []).append(sample["step"] - 1 - max(versions))
    assert [row["staleness_max"] for row in rows] == [max(ages[row["step"]]) for row in rows]
    assert [row["staleness"] for row in rows] == [sum(ages[row["step"]]) / 16 for row in rows]
    assert ages != newest
    for row in rows:  # what engine and trainer differ by without a change of weights, and how often there was one
        shares = [row.get(f"tokens_lag_{lag}", 0.0) for lag in range(3)]
        assert sum(shares) == pytest.approx(1)
        assert row.get("engine_gap_lag_0", 0.0) < 1e-4
    assert rows[0]["tokens_lag_0"] == 1
    assert max(row.get(f"engine_gap_lag_{lag}", 0.0) for row in rows for lag in (1, 2)) > 1e-3


SHARED = {
    "cluster": "{runtime: local}",
    "rollout": "{batch_size: 4, samples_per_prompt: 4, max_new_tokens: 10, num_slots: 8, enable_offload: true}",
}
CARRIED = "{staleness: 1, order: arrival, in_flight: recompute}"


@pytest.mark.usefixtures("_answers_open_at_first_push")
def test_on_shared_devices_open_answers_stand_still_and_go_on(task):
    sections = SHARED | {"eval": f"{{path: {task}/prompts.jsonl, every: 2}}"}
    rows = run(task, "run", CARRIED, "actor.enable_offload=true", "log.samples_every=1", **sections)
    assert max(row["staleness_max"] for row in rows) == 1
    assert rows[0]["groups_in_flight"] > 0
    assert len(trained(task, "run")) == 8 * 4 * 4
    assert set(trained(task, "run").values()) == {1}
    assert all("eval/reward" in row for row in rows if row["step"] % 2 == 0)
    assert any(len(versions) > 1 for versions in versions_of_samples(task, "run"))


AGENT = """
import asyncio

from hotseat.agents import Environment, Step


class Tool(Environment):
    def reset(self, prompt, label):
        self.turn = 0

    async def step(self, action):
        self.turn += 1
        await asyncio.sleep(0.02)
        return Step(feedback="+", reward=float(len(action) % 2), done=self.turn == 3)
"""


@pytest.mark.long
@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_agent_whose_turn_comes_while_its_engine_is_off_the_device_waits(task, staleness):
    (task / "agent.py").write_text(AGENT)
    overlap = f"{{staleness: {staleness}, order: arrival, in_flight: recompute}}"
    data = f"{{path: {task}/prompts.jsonl, label_key: label, max_length: 30}}"
    sections = SHARED | {"data": data, "reward": ""}
    rows = run(task, "run", overlap, f"agent.path={task}/agent.py", "rollout.max_new_tokens=4", **sections)
    assert len(rows) == 8
    assert sum(row["samples_failed"] for row in rows) == 0
    assert set(trained(task, "run").values()) == {1}


def test_on_shared_devices_a_resumed_run_trains_every_sample_once(task):
    """The checkpoint of step 3 has groups that were carried over; what follows it is done again."""
    shared = "actor.enable_offload=true", "checkpoint.every=3"
    run(task, "run", CARRIED, *shared, "train.num_episodes=2", **SHARED)
    rows = run(task, "run", CARRIED, *shared, "checkpoint.resume=true", **SHARED)
    assert len(rows) == 8
    assert len(trained(task, "run")) == 8 * 4 * 4
    assert set(trained(task, "run").values()) == {1}


@pytest.mark.long
@pytest.mark.ray
def test_on_ray_a_rollout_is_carried_over_and_resumed(task):
    sections = SHARED | {"cluster": "{component_placement: {actor: 0, rollout: '@actor'}}"}
    run(task, "run", CARRIED, "actor.enable_offload=true", "checkpoint.every=3", "train.num_episodes=2", **sections)
    rows = run(task, "run", CARRIED, "actor.enable_offload=true", "checkpoint.resume=true", **sections)
    assert len(rows) == 8
    assert len(trained(task, "run")) == 8 * 4 * 4
    assert set(trained(task, "run").values()) == {1}


def test_filtered_groups_are_replaced_and_weights_do_not_depend_on_timing(undisturbed, task):
    (task / "reward.py").write_text(SLEEPS)
    rows = run(task, "uneven", "{staleness: 1}", *FILTERED)
    assert sum(row["groups_dropped"] for row in rows) > 0
    assert all(row["samples"] == 16 for row in rows)
    assert same(weights(undisturbed, "filtered"), weights(task, "uneven"))


@pytest.mark.long
def test_a_reward_model_scores_what_was_sampled_ahead(task):
    make_value_model(task / "judge")
    reward = {"reward": f"{{model: {task}/judge}}", "cluster": BESIDE.replace("actor: 0", "'actor,reward': 0")}
    first = run(task, "first", "{staleness: 1}", **reward)
    run(task, "second", "{staleness: 1}", **reward)
    assert [row["staleness"] for row in first] == [0, 1, 1, 1, 1, 1, 1, 1]
    assert same(weights(task, "first"), weights(task, "second"))


@pytest.mark.long
def test_a_run_may_begin_to_overlap_but_not_stop_with_groups_sampled_ahead(task):
    run_until_saved(task, "run", "", 2)
    rows = run(task, "run", "{staleness: 1}", "checkpoint.resume=true", "checkpoint.allow_changes=[overlap.staleness]")
    assert [row.get("staleness") for row in rows] == [None, None, 0, 1, 1, 1, 1, 1]
    run_until_saved(task, "ahead", "{staleness: 1}", 2)
    with pytest.raises(RunError, match="groups that were sampled ahead of training, and overlap.staleness is 0 now"):
        run(task, "ahead", "", "checkpoint.resume=true", "checkpoint.allow_changes=[overlap.staleness]")


@pytest.mark.long
def test_a_run_that_failed_leaves_no_groups_to_the_next_of_its_name(task):
    reward = (task / "reward.py").read_text()
    (task / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    raise ValueError('no')\n")
    with pytest.raises(RewardError, match="ValueError: no"):
        run(task, "run", "{staleness: 1}")
    (task / "reward.py").write_text(reward)
    rows = run(task, "run", "{staleness: 1}")
    assert sum(row["samples_failed"] for row in rows) == 0
    assert list((task / "runs" / "run" / "spool").iterdir()) == []


@pytest.mark.long
@pytest.mark.usefixtures("_answers_open_at_first_push")
def test_requests_that_a_restart_drops_fail_no_sample(task, monkeypatch):
    """An engine takes a while to drop its requests, and those who wait for them hear of it before it is done."""

    def drop_requests(self, connected):
        self._engine.abort()
        until = time.monotonic() + 1.0
        while self._finished and time.monotonic() < until:
            time.sleep(0.01)
        with self._changed:
            self._finished.clear()

    monkeypatch.setattr(EngineWorker, "drop_requests", drop_requests)
    rows = run(task, "run", "{staleness: 2, order: arrival, in_flight: restart}", **long_answers(task))
    assert rows[-1]["groups_begun_again"] > 0
    assert sum(row["samples_failed"] for row in rows) == 0


@pytest.mark.long
def test_a_resumed_run_records_what_was_dropped_before_its_checkpoint(undisturbed, task):
    run_until_saved(task, "run", "{staleness: 1}", 3, *FILTERED)
    run(task, "run", "{staleness: 1}", "checkpoint.resume=true", *FILTERED)
    whole, resumed = (set(read_ledger(path)) for path in (undisturbed / "runs" / "filtered", task / "runs" / "run"))
    assert any(entry.state == "dropped" and entry.step == 4 for entry in whole)
    assert resumed == whole


@pytest.mark.long
@pytest.mark.parametrize("order", [pytest.param("prompt", marks=pytest.mark.long), "arrival"])
def test_groups_that_are_too_old_for_a_lowered_staleness_are_refused(task, order):
    run_until_saved(task, "run", f"{{staleness: 3, order: {order}}}", 4)
    lowered = "checkpoint.resume=true", "checkpoint.allow_changes=[overlap.staleness]"
    with pytest.raises(RunError, match="more or older ones than overlap.staleness 1 and rollout.batch_size 4 allow"):
        run(task, "run", f"{{staleness: 1, order: {order}}}", *lowered)
    rows = run(task, "run", f"{{staleness: 4, order: {order}}}", *lowered)
    assert max(row["staleness_max"] for row in rows) <= 4


@pytest.mark.long
def test_a_run_may_be_resumed_with_larger_batches(task):
    run_until_saved(task, "run", "{staleness: 1}", 2)
    sizes = "rollout.batch_size=8", "train.batch_size=32"
    allowed = "checkpoint.allow_changes=[rollout.batch_size,train.batch_size]"
    rows = run(task, "run", "{staleness: 1}", *sizes, "checkpoint.resume=true", allowed)
    assert [row["samples"] for row in rows] == [16, 16, 32, 32]
    assert set(trained(task, "run").values()) == {1}


def test_rewards_that_fail_while_a_push_waits_stop_the_run_and_are_in_the_ledger(task):
    """The first two batches have rewards. The third is sampled during the update with the second."""
    (task / "reward.py").write_text(FAILS_FROM_THE_SECOND_PASS)
    with pytest.raises(RewardError, match="the second pass"):
        run(task, "run", "{staleness: 1}", "reward.retries=0")
    fates = Counter((entry.step, entry.state) for entry in read_ledger(task / "runs" / "run"))
    assert fates[1, "trained"] == 4
    assert fates[3, "failed"] > 0
