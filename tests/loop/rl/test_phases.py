"""The phases of the reinforcement loop, with fakes of all worker groups: who is asked for what, in which order and in
whose lease, and what happens when one of them dies."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from phase_fakes import Case, FakeGroup, FakeJournal, facts_of, report, silent_alarms

from hotseat.algorithms.kl import AdaptiveKl, FixedKl
from hotseat.cluster.lease import DeviceMemory
from hotseat.config import loads, to_saved
from hotseat.config.schema.record_options import LogConfig
from hotseat.errors import DataError, RewardError, RunError, WeightError, WorkerError
from hotseat.loop.devices import held_memory
from hotseat.loop.devices.held_memory import DeviceWatch, Held
from hotseat.loop.rl import loop, meter
from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.ledger import Ledger, read_ledger
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.phases import PreparedBatch, Updates
from hotseat.loop.rl.recovery import HOST, MAX_DEATHS
from hotseat.loop.rl.rl_checkpoints import RlCheckpoints
from hotseat.loop.rl.rollout import evaluate, group_filter, repeated
from hotseat.loop.rl.sample_log import NUM_RECORDED, SampleLog
from hotseat.loop.rl.state import NONE_SERVED, MicroBatches, RlState
from hotseat.loop.state.checkpoints import Checkpoint
from hotseat.loop.workers.group_facts import EVALUATION
from hotseat.loop.workers.records import TokenRecord
from hotseat.loop.workers.rollout_host import RolloutHost
from hotseat.planning.config_plan import make_plan
from hotseat.weights.transports import TransportPlan

REWARD_MODEL = ("reward.function=null", "reward.model=none")
FILTERED = ("algorithm.filtering.enabled=true", "algorithm.filtering.low=0.0", "algorithm.filtering.high=1.0")


def order_of(case: Case, num: int) -> list[tuple[int, int]]:
    """The prompts that a run of this config begins with."""
    return RlState.initial(case.config, case.prompts).order.next(num)


def batch_of(*keys: tuple[int, int], num_samples: int = 4) -> Collected:
    facts = tuple(facts_of(key, [float(sample) for sample in range(num_samples)]) for key in keys)
    return Collected(facts, len(facts), (), 0)


def half_too_high(key: tuple[int, int]) -> list[float]:
    """Prompts with an even number score too high; the others get 0.5 on average."""
    return [1.0] * 4 if key[1] % 2 == 0 else [0.0, 1.0, 0.0, 1.0]


# --- rollout ----------------------------------------------------------------------------------------------------------


def test_a_step_is_sampled_in_the_order_of_the_prompts_in_one_lease():
    case = Case()
    first, second = case.stream.take(1), case.stream.take(2)
    expected = order_of(case, 8)
    assert case.jobs() == [expected[:4], expected[4:]]
    assert [facts.key for facts in first.groups + second.groups] == expected
    assert case.taken() == ["guard.ask", "lease rollout/rollout", "agents.collect", "end rollout/rollout"] * 2
    [job, *_] = case.hosts.calls[0].args[0][0]
    assert job.num_samples == 4
    assert job.prompt == case.prompts[job.prompt.index]


def test_samples_are_taken_as_the_config_says():
    case = Case("rollout.temperature=0.7", "rollout.top_k=5", "eval.temperature=0.1", num_eval_prompts=1)
    case.stream.take(1)
    case.evaluate()
    training, evaluation = (call.args[0][1] for call in case.hosts.named("collect"))
    assert (training.max_new_tokens, training.temperature, training.top_k) == (4, 0.7, 5)
    assert (evaluation.max_new_tokens, evaluation.temperature, evaluation.top_k) == (4, 0.1, 0)


def test_dropped_groups_are_replaced_by_the_next_prompts_and_all_are_let_go_of():
    case = Case(*FILTERED, rewards=half_too_high, num_prompts=64)
    batch = case.stream.take(1)
    asked = [key for call in case.jobs() for key in call]
    assert asked == order_of(case, len(asked))
    assert [facts.key for facts in batch.groups] == [key for key in asked if key[1] % 2 == 1]
    assert [(facts.key, why) for facts, why in batch.dropped] == [
        (key, "score too high") for key in asked if key[1] % 2 == 0
    ]
    assert batch.num_generated == len(asked)
    assert set(case.host.held) == set(asked)
    case.stream.release(batch)
    assert case.host.held == {}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("algorithm.estimator=rloo",), (2, None, None)),
        (("algorithm.estimator=reinforce",), (1, None, None)),
        (("algorithm.estimator=gae",), (1, None, None)),
        # A user's own compares siblings, where prompts have several samples: one that is left alone would end the run.
        (("algorithm.estimator=mine.py:f", "rollout.samples_per_prompt=2"), (2, None, None)),
        (("algorithm.estimator=mine.py:f", "rollout.samples_per_prompt=1", "train.batch_size=4"), (1, None, None)),
        ((*FILTERED, "algorithm.filtering.high=0.8"), (2, 0.0, 0.8)),
    ],
)
def test_which_groups_a_step_may_learn_from(options, kept):
    keep = group_filter(Case(*options).config, [])
    assert (keep.min_samples, keep.low, keep.high) == kept


def test_a_host_that_dies_while_it_samples_is_asked_for_the_same_groups_again():
    """Also for those that it had sampled before, when the order had moved on: in the refill of a step."""
    whole, broken = (Case(*FILTERED, rewards=half_too_high, num_prompts=64) for _ in range(2))
    expected = whole.stream.take(1)
    assert len(whole.jobs()) > 1
    host = broken.host
    collect, num_calls = host.collect, iter(range(100))

    def collect_once(jobs, sampling, num_needed=None):
        if next(num_calls) == 1:
            broken.hosts.kill()
            raise WorkerError("agents rank 0 died")
        return collect(jobs, sampling)

    host.collect = collect_once
    assert broken.stream.take(1) == expected
    assert broken.jobs()[2:] == whole.jobs()
    assert broken.state.order.state() == whole.state.order.state()
    assert broken.stream.take(2) == whole.stream.take(2)
    assert broken.recovery.restarts[HOST] == 1


def test_a_batch_that_was_lost_before_it_was_used_is_sampled_again_and_the_next_is_not():
    case = Case()
    batch = case.stream.take(1)
    order = case.state.order.state()
    case.hosts.kill()
    used = []

    def use(found):
        used.append(found)
        case.hosts.call(RolloutHost.shares, [([facts.key for facts in found.groups], [], ())])
        return "used"

    again, value = case.stream.with_groups(batch, use)
    assert value == "used"
    assert again == batch
    assert case.jobs()[0] == case.jobs()[1]
    assert len(used) == 2  # once in vain
    assert case.state.order.state() == order
    case.stream.release(again)
    batch = case.stream.take(2)
    assert case.stream.with_groups(batch, lambda found: found.groups[0].key)[1] == order_of(case, 8)[4]
    assert len(case.jobs()) == 3


def test_a_batch_outlives_the_death_of_an_engine():
    """Groups lie in the hosts: only the call that failed is made again."""
    case = Case(engines=2)
    batch = case.stream.take(1)
    calls = []

    def use(found):
        calls.append(found)
        if len(calls) == 1:
            case.engines.kill(1)
            raise WorkerError("rollout rank 1 died")
        return "used"

    assert case.stream.with_groups(batch, use) == (batch, "used")
    assert len(case.jobs()) == 1
    assert "restart rollout 1" in case.log


def test_engines_without_weights_get_the_version_that_is_served_before_they_sample():
    case = Case()
    case.sync.run()
    case.sync.run()
    case.taken()
    case.scheduler.are_weights_there = False  # dropped to make room for a save
    case.stream.take(1)
    log = case.taken()
    assert log.index("lease sync/actor") < log.index("guard.ask") < log.index("lease rollout/rollout")
    assert [call.args[0][0] for call in case.engines.named("begin_load")] == [0, 1, 1]
    assert case.state.version == 1


def test_a_reward_model_scores_in_a_lease_of_its_own_each_rank_its_share():
    case = Case(*REWARD_MODEL, reward=2)
    batch = case.stream.take(1)
    assert case.taken() == [
        "guard.ask",
        "lease rollout/rollout",
        "agents.collect",
        "end rollout/rollout",
        "lease prepare/reward",
        "agents.to_score",
        "agents.to_score",
        "reward.rewards",
        "end prepare/reward",
        "agents.take_rewards",
    ]
    keys = order_of(case, 4)
    [scoring] = case.reward.calls
    assert [scoring.args[rank][0][0].value for rank in (0, 1)] == [keys[0::2], keys[1::2]]
    assert [facts.key for facts in batch.groups] == keys
    assert {facts.rewards for facts in batch.groups} == {(0.0, 1.0, 2.0, 3.0)}


def test_ranks_that_share_a_model_score_the_same_samples():
    parallel = ("train.backend=deepspeed", "train.deepspeed.tensor_parallel_size=2")
    case = Case(*REWARD_MODEL, *parallel, reward=4, actor=2)
    case.stream.take(1)
    [scoring] = case.reward.calls
    shares = [scoring.args[rank][0][0].value for rank in range(4)]
    keys = order_of(case, 4)
    assert shares == [keys[0::2], keys[0::2], keys[1::2], keys[1::2]]
    assert repeated(["a", "b"], 3) == ["a", "a", "a", "b", "b", "b"]


def test_an_evaluation_with_a_reward_of_its_own_asks_no_reward_model():
    case = Case(*REWARD_MODEL, "eval.reward=other.py", reward=1, num_eval_prompts=2)
    metrics = case.evaluate()
    assert case.reward.calls == []
    assert "lease prepare/reward" not in case.log
    assert "eval/accuracy" in metrics  # a function's rewards have a full reward
    case = Case(*REWARD_MODEL, reward=1, num_eval_prompts=2)
    assert case.evaluate().keys() == {"eval/reward", "eval/length"}  # a model's have none
    assert len(case.reward.calls) == 1


def test_an_evaluation_samples_its_own_prompts_and_leaves_the_order_alone():
    case = Case("eval.samples_per_prompt=2", num_eval_prompts=3, rewards=lambda key: [float(key[1] == 101)] * 4)
    before = case.state.order.state()
    metrics = case.evaluate()
    assert case.jobs() == [[(EVALUATION, 100), (EVALUATION, 101), (EVALUATION, 102)]]
    assert case.state.order.state() == before
    assert case.host.held == {}
    assert metrics == {
        "eval/reward": pytest.approx(1 / 3),
        "eval/accuracy": pytest.approx(1 / 3),
        "eval/pass@2": pytest.approx(1 / 3),
        "eval/length": 2.0,
    }
    assert case.evaluate() == metrics


def test_named_sets_are_measured_apart():
    right = {100: 4, 101: 1, 102: 0}
    case = Case(
        "eval.samples_per_prompt=4",
        num_eval_prompts=3,
        rewards=lambda key: [float(n < right[key[1]]) for n in range(4)],
    )
    alone = case.evaluate()
    metrics = evaluate(*case.evaluate.args, {"sums": range(101, 102), "more": range(102, 103)})
    assert {key: value for key, value in metrics.items() if not key.endswith("length")} == {
        "eval/reward": 1.0,
        "eval/accuracy": 1.0,
        "eval/pass@4": 1.0,
        "eval/pass@2": 1.0,
        "eval/sums/reward": 0.25,
        "eval/sums/accuracy": 0.25,
        "eval/sums/pass@4": 1.0,
        "eval/sums/pass@2": 0.5,
        "eval/more/reward": 0.0,
        "eval/more/accuracy": 0.0,
        "eval/more/pass@4": 0.0,
        "eval/more/pass@2": 0.0,
    }
    together = evaluate(*case.evaluate.args, {"all": range(100, 103)})
    assert {key: together[key] for key in alone} == alone
    assert together.keys() - alone.keys() == {key.replace("eval/", "eval/all/") for key in alone}


def test_an_evaluation_is_done_again_when_a_host_dies():
    case = Case(num_eval_prompts=2)
    case.hosts.deaths.append(("collect", 0))
    assert case.evaluate()["eval/reward"] > 0
    assert case.jobs()[0] == case.jobs()[1]


def test_a_step_that_stops_the_run_is_recorded_with_what_was_sampled():
    case = Case("reward.max_failed_fraction=0.2", rewards=lambda key: [None, 1.0, 0.0, 1.0])
    with pytest.raises(RewardError, match="4 of 16 samples have no reward"):
        case.stream.take(5)
    [(step, batch)] = case.samples.unfinished
    assert step == 5
    assert [facts.key for facts in batch.groups] == order_of(case, 4)
    assert batch.num_failed == 4


def test_rewards_that_leave_nothing_to_learn_end_the_run_with_the_reason():
    case = Case(*FILTERED, rewards=lambda key: [1.0] * 4)
    with pytest.raises(RunError, match=r"gave only 0 of the 4 groups of a step \(80 dropped: score too high\)"):
        case.stream.take(1)
    assert len(case.jobs()) == 20
    [(_, batch)] = case.samples.unfinished
    assert len(batch.dropped) == 80


def test_deaths_are_counted_from_one_released_batch_to_the_next():
    case = Case()
    for step in range(1, 4):
        for _ in range(MAX_DEATHS - 1):
            case.hosts.deaths.append(("collect", 0))
        case.stream.release(case.stream.take(step))
    case.hosts.deaths += [("collect", 0)] * (MAX_DEATHS + 1)
    with pytest.raises(WorkerError, match=f"died {MAX_DEATHS + 1} times"):
        case.stream.take(4)


def test_no_request_is_open_while_weights_are_pushed():
    case = Case()
    with case.stream.weight_update():
        assert case.log == []


# --- prepare ----------------------------------------------------------------------------------------------------------


def test_roles_compute_one_after_another_and_groups_are_let_go_of_at_the_end():
    case = Case("algorithm.estimator=gae", "algorithm.kl.coef=0.1", critic=1, reference=1)
    batch = case.stream.take(1)
    case.taken()
    prepared = case.prepare.run(batch, 1)
    assert case.taken() == [
        "samples.choose 1",
        "agents.shares",
        "lease prepare/reference",
        "reference.score",
        "end prepare/reference",
        "lease prepare/critic",
        "critic.values",
        "end prepare/critic",
        "lease prepare/actor",
        "actor.prepare",
        "end prepare/actor",
        "agents.forget",
    ]
    assert prepared == PreparedBatch(batch, 2)  # 16 samples, 8 to an optimizer step
    assert case.host.held == {}


TOGETHER = """flow=[{name: rollout, run: [rollout]}, {name: prepare, run: [reference, critic, actor]},
    {name: update, train: [critic, actor], order: in_turn}, {name: sync, push: [rollout]}]"""


def test_roles_of_one_step_of_the_plan_compute_at_the_same_time():
    gae = ("algorithm.estimator=gae", "algorithm.kl.coef=0.1", "train.max_epochs=2")
    case = Case(*gae, TOGETHER, actor=2, critic=1, reference=1)
    batch = case.stream.take(1)
    case.taken()
    case.prepare.run(batch, 1)
    assert [entry for entry in case.taken() if not entry.startswith(("agents", "samples"))] == [
        "lease prepare/reference",
        "reference.score",
        "critic.values",
        "actor.score",
        "actor.prepare",
        "end prepare/reference",
    ]
    [call] = case.actor.named("prepare")
    assert [ref.maker for ref in call.kwargs[1]["reference"]] == ["reference[0]"]
    assert [ref.maker for ref in call.kwargs[1]["critic"]] == ["critic[0]"]
    assert [ref.maker for ref in call.kwargs[1]["old"]] == ["actor[0]", "actor[1]"]


def test_a_reference_on_other_devices_computes_beside_the_actor():
    case = Case("algorithm.kl.coef=0.1", "cluster.component_placement={actor: 0, reference: 1}", reference=1)
    case.prepare.run(case.stream.take(1), 1)
    assert [entry for entry in case.log if entry.startswith("lease prepare")] == ["lease prepare/reference"]
    assert case.actor.named("prepare")


def test_an_actor_that_the_flow_names_first_still_prepares_last():
    flow = TOGETHER.replace("run: [reference, critic, actor]}", "run: [actor, reference, critic], order: in_turn}")
    case = Case("algorithm.estimator=gae", "algorithm.kl.coef=0.1", flow, critic=1, reference=1)
    case.prepare.run(case.stream.take(1), 1)
    leases = [entry for entry in case.log if entry.startswith("lease prepare")]
    assert leases == ["lease prepare/reference", "lease prepare/critic", "lease prepare/actor"]
    [call] = case.actor.named("prepare")
    assert [ref.maker for ref in call.kwargs[0]["reference"]] == ["reference[0]"]


def test_with_inference_the_actor_needs_no_device_to_prepare():
    placed = "cluster.component_placement={actor: 0, rollout: 0, inference: 1}"
    case = Case(placed, inference=2)
    case.prepare.run(case.stream.take(1), 1)
    leases = [entry for entry in case.log if entry.startswith("lease prepare")]
    assert leases == ["lease prepare/inference"]
    [call] = case.actor.named("prepare")
    assert [ref.maker for ref in call.kwargs[0]["old"]] == ["inference[0]", "inference[1]"]
    assert call.kwargs[0]["settings"].needs_old_log_probs


def test_each_rank_gets_its_groups_however_many_ranks_a_role_has():
    case = Case("algorithm.estimator=gae", "algorithm.kl.coef=0.1", actor=2, critic=4, reference=1)
    case.prepare.run(case.stream.take(1), 1)
    keys = order_of(case, 4)

    def shares(group, method):
        [call] = group.named(method)
        return [call.args[rank][0][0].value for rank in group.ranks]

    # Two groups of four samples are an optimizer step. Each rank has a part of each step.
    assert shares(case.actor, "prepare") == [(keys[0], keys[2]), (keys[1], keys[3])]
    assert shares(case.reference, "score") == [tuple(keys)]
    assert sorted(key for share in shares(case.critic, "values") for key in share) == sorted(keys)
    [call] = case.actor.named("prepare")
    for rank in (0, 1):
        given = call.kwargs[rank]
        assert given["num_steps"] == 2
        assert [ref.maker for ref in given["reference"]] == ["reference[0]"]
        assert [ref.maker for ref in given["critic"]] == [f"critic[{rank}]" for rank in range(4)]
        assert given["old"] == []
        assert given["record"] == case.samples.ids_in_training


def test_samples_say_in_which_optimizer_step_they_are():
    case = Case()
    case.prepare.run(case.stream.take(1), 1)
    [call] = case.hosts.named("shares")
    [[(_, steps, _)]] = call.args[0]
    assert steps == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]


def test_model_parallel_ranks_get_the_same_share_and_answer_once():
    parallel = ("train.backend=deepspeed", "train.deepspeed.tensor_parallel_size=2")
    case = Case("algorithm.kl.coef=0.1", *parallel, actor=4, reference=2)
    case.prepare.run(case.stream.take(1), 1)
    keys = order_of(case, 4)
    [call] = case.actor.named("prepare")
    shares = [call.args[rank][0][0].value for rank in range(4)]
    assert shares == [(keys[0], keys[2])] * 2 + [(keys[1], keys[3])] * 2
    assert [ref.maker for ref in call.kwargs[0]["reference"]] == ["reference[0]"]


def test_with_a_token_budget_ranks_are_even_in_tokens():
    """Groups of 40, 4, 4 and 4 tokens a sample: the long one is alone on its rank."""
    options = ("train={dtype: fp32, max_tokens_per_device: 64, batch_size: 16}",)
    for budget, expected in ((options, [1, 3]), (("train.batch_size=16",), [2, 2])):
        case = Case(*budget, actor=2)
        batch = case.stream.take(1)
        lengths = [40, 4, 4, 4]
        batch = replace(
            batch,
            groups=tuple(
                replace(facts, num_tokens=(length,) * 4) for facts, length in zip(batch.groups, lengths, strict=True)
            ),
        )
        case.prepare.run(batch, 1)
        [call] = case.actor.named("prepare")
        assert sorted(len(call.args[rank][0][0].value) for rank in (0, 1)) == expected


def test_a_host_that_dies_before_its_groups_are_handed_out_samples_them_again():
    whole, broken = Case(reference=1), Case(reference=1)
    expected = whole.prepare.run(whole.stream.take(1), 1)
    batch = broken.stream.take(1)
    broken.hosts.deaths.append(("shares", 0))
    prepared = broken.prepare.run(batch, 1)
    assert prepared == expected
    assert prepared.batch is broken.samples.chosen_from[-1]  # not the one that was lost
    assert broken.jobs() == [whole.jobs()[0]] * 2
    one, other = (case.actor.named("prepare")[0].args[0][0][0].value for case in (whole, broken))
    assert one == other
    assert len(broken.actor.named("prepare")) == 1
    # What is recorded is chosen from the batch that is learned from, when hosts hold it.
    assert len(broken.samples.chosen_from) == 2


# --- update -----------------------------------------------------------------------------------------------------------


def test_the_critic_learns_first_from_returns_that_the_actor_holds():
    case = Case("algorithm.estimator=gae", actor=2, critic=2)
    case.critic.workers[0].reports = [report(loss=1.0)]
    case.actor.workers[0].reports = [report(loss=2.0)]
    updates = case.update.run(PreparedBatch(batch_of((0, 0)), 2), 1)
    assert case.taken() == [
        "actor.returns",
        "lease update/critic",
        "critic.update",
        "end update/critic",
        "lease update/actor",
        "actor.update",
        "end update/actor",
    ]
    [call] = case.critic.named("update")
    for rank in (0, 1):
        returns, num_steps, _ = call.args[rank]
        assert [ref.value for ref in returns] == ["returns of rank 0", "returns of rank 1"]
        assert num_steps == 2
    assert updates == Updates([report(loss=2.0)], [report(loss=1.0)])  # of rank 0: they are equal on all


def test_returns_come_once_from_ranks_that_share_a_model():
    parallel = ("train.backend=deepspeed", "train.deepspeed.tensor_parallel_size=2")
    case = Case("algorithm.estimator=gae", *parallel, actor=4, critic=2)
    case.update.run(PreparedBatch(batch_of((0, 0)), 1), 1)
    [call] = case.critic.named("update")
    assert [ref.value for ref in call.args[0][0]] == ["returns of rank 0", "returns of rank 2"]


def test_while_the_critic_warms_up_the_actor_stands_still_and_so_does_the_kl_coefficient():
    case = Case(
        "algorithm.estimator=gae",
        "critic.warmup_steps=2",
        "algorithm.kl={coef: 0.1, target: 0.01, horizon: 1000}",
        critic=1,
        reference=1,
    )
    case.actor.workers[0].reports = [report(kl=5.0)]
    for step in (1, 2):
        updates = case.update.run(PreparedBatch(batch_of((0, 0)), 1), step)
        assert updates.actor == []
        assert len(updates.critic) == 1
        assert case.state.kl.coefficient == 0.1
    assert case.actor.named("update") == []
    assert "lease update/actor" not in case.log
    assert case.update.run(PreparedBatch(batch_of((0, 0)), 1), 3).actor != []
    assert case.state.kl.coefficient > 0.1


def test_without_a_critic_the_actor_learns_at_once_and_nobody_asks_for_returns():
    case = Case()
    assert case.update.run(PreparedBatch(batch_of((0, 0)), 1), 1).actor != []
    assert case.actor.named("returns") == []


def test_the_kl_coefficient_follows_the_mean_over_tokens_and_reaches_the_next_step():
    """Two optimizer steps: 1.0 over 10 tokens and 5.0 over 30 are 0.15 a token, 1.5 times the target, cut to 1.2.

    A step has 16 samples, the horizon is 160: the coefficient grows by 0.2 · 16/160, to 0.102.
    """
    case = Case("algorithm.kl={coef: 0.1, target: 0.1, horizon: 160}", reference=1)
    case.actor.workers[0].reports = [report(10, kl=1.0), report(30, kl=5.0)]
    case.update.run(PreparedBatch(batch_of((0, 0)), 2), 1)
    assert case.state.kl.coefficient == pytest.approx(0.102)
    [first] = case.actor.named("update")
    assert first.args[0][0].advantages.kl_in_reward == 0.1
    case.update.run(PreparedBatch(batch_of((0, 0)), 2), 2)
    assert case.actor.named("update")[1].args[0][0].advantages.kl_in_reward == pytest.approx(0.102)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "dr_grpo", "reinforce", "group_norm", "gae"])
def test_the_actor_learns_by_the_estimator_of_the_config(estimator):
    case = Case(f"algorithm.estimator={estimator}", "algorithm.entropy_coef=0.01", critic=int(estimator == "gae"))
    case.update.run(PreparedBatch(batch_of((0, 0)), 2), 1)
    [call] = case.actor.named("update")
    policy = call.args[0][0]
    assert policy.advantages.estimator == estimator
    assert policy.objective.entropy_coefficient == 0.01
    assert policy.needs_old_log_probs  # two optimizer steps: the second one's ratio is not one


@pytest.mark.parametrize("is_loss", [True, False])
def test_a_kl_penalty_is_in_the_loss_or_in_the_reward(is_loss):
    case = Case("algorithm.kl.coef=0.1", f"algorithm.kl.as_loss={str(is_loss).lower()}", reference=1)
    policy = case.settings.policy
    assert (policy.objective.kl_coefficient, policy.advantages.kl_in_reward) == ((0.1, 0.0) if is_loss else (0.0, 0.1))
    case.actor.workers[0].reports = [report(kl=5.0)]
    case.update.run(PreparedBatch(batch_of((0, 0)), 1), 1)
    assert case.state.kl == FixedKl(0.1)


def test_an_actor_that_measured_no_kl_leaves_the_coefficient():
    case = Case("algorithm.kl={coef: 0.1, target: 0.1, horizon: 160}", reference=1)
    case.update.run(PreparedBatch(batch_of((0, 0)), 1), 1)
    assert case.state.kl == AdaptiveKl(0.1, 0.1, 160)


# --- sync -------------------------------------------------------------------------------------------------------------


def test_versions_count_from_zero_and_the_canary_begins_with_the_first():
    case = Case(engines=2)
    assert case.state.version == NONE_SERVED
    assert [case.sync.run().version for _ in range(2)] == [0, 1]
    assert case.state.version == 1
    assert [entry for entry in case.log if entry.startswith("guard")] == [
        "guard.check",
        "guard.start 0",
        "guard.check",
    ]
    versions = [call.args for call in case.engines.named("begin_load")]
    assert versions == [{0: (0,), 1: (0,)}, {0: (1,), 1: (1,)}]


def test_a_push_is_one_lease_and_engines_are_known_to_have_weights_after_it():
    case = Case()
    case.sync.run()
    log = case.taken()
    assert log[0] == "lease sync/actor"
    held = log[1 : log.index("end sync/actor")]
    assert held[0] == "actor.begin_push"
    assert held[-1] == "rollout.finish_load"
    assert log[log.index("end sync/actor") + 1 :] == ["mark_weights_loaded rollout", "guard.check", "guard.start 0"]


def test_a_version_counts_only_when_its_push_has_succeeded():
    case = Case()
    case.sync.run()
    case.engines.workers[0].digest = 8
    with pytest.raises(WeightError, match="engine 0 serves other values of w .* after the push of version 1"):
        case.sync.run()
    assert case.state.version == 0
    assert case.log.count("mark_weights_loaded rollout") == 1
    case.engines.workers[0].digest = 7
    assert case.sync.run().version == 1


def test_an_engine_that_dies_during_a_push_gets_the_same_version_whole():
    case = Case(engines=2, transport=TransportPlan(("host", "host"), first_ranks=(0, 0), receivers=("engine 1",)))
    case.engines.deaths.append(("take_bucket", 1))
    assert case.sync.run().version == 0
    assert case.state.version == 0
    begun = [call.args[0] for call in case.actor.named("begin_push")]
    assert [version for version, _, _ in begun] == [0, 0]
    # Receivers of a broadcast meet anew when one of them was replaced.
    assert [receivers.generation for _, receivers, _ in begun] == [0, 1]
    assert case.log.count("guard.check") == 1


def test_adapters_go_alone_to_engines_that_have_the_weights_below_them():
    case = Case(engines=2, inference=1, adapters_alone=True)

    def forms() -> list[str]:
        pushed = [call.args[0][2] for call in case.actor.named("begin_push")]
        assert pushed[1::2] == ["merged"] * (len(pushed) // 2)  # to the inference role, which has no adapters
        return pushed[::2]

    case.sync.run()
    case.sync.run()
    case.sync.run()
    assert forms() == ["apart", "adapters", "adapters"]
    case.scheduler.are_weights_there = False  # they were dropped to make room
    case.pusher.restore_dropped_weights()
    case.sync.run()
    assert forms()[3:] == ["apart", "adapters"]
    case.restarts["engine"] += 1  # a new engine has never had any
    case.pusher.push_again()
    case.sync.run()
    assert forms()[5:] == ["apart", "adapters"]


def test_without_that_every_push_is_merged():
    case = Case()
    case.sync.run()
    case.sync.run()
    assert [call.args[0][2] for call in case.actor.named("begin_push")] == ["merged", "merged"]


def test_an_engine_that_dies_in_the_rollout_gets_the_version_that_is_served():
    case = Case(engines=2)
    case.sync.run()
    case.sync.run()

    def collect(jobs, sampling, num_needed=None, collect=case.host.collect):
        if len(case.hosts.named("collect")) == 1:
            case.engines.kill(1)
            raise WorkerError("rollout rank 1 died")
        return collect(jobs, sampling)

    case.host.collect = collect
    assert [facts.key for facts in case.stream.take(1).groups] == order_of(case, 4)
    assert case.state.version == 1
    loads_by_rank = [{rank: args[0] for rank, args in call.args.items()} for call in case.engines.named("begin_load")]
    assert loads_by_rank == [{0: 0, 1: 0}, {0: 1, 1: 1}, {1: 1}]
    log = case.taken()
    last_push = len(log) - 1 - log[::-1].index("lease sync/actor")
    last_lease = len(log) - 1 - log[::-1].index("lease rollout/rollout")
    assert log.index("restart rollout 1") < last_push < last_lease < log.index("rejoin [1]")
    assert log.index("rejoin [1]") < len(log) - 1 - log[::-1].index("agents.collect")
    assert not any(entry.startswith("reconnect") for entry in log)


def test_inference_gets_every_version_in_the_same_lease():
    case = Case(inference=2)
    case.sync.run()
    case.sync.run()
    assert [call.args[1][0] for call in case.inference.named("begin_load")] == [0, 1]
    assert case.log.count("lease sync/actor") == 2
    pushed, to_inference = case.guard.checked[-1]
    assert (pushed.version, to_inference.version) == (1, 1)
    case.inference.workers[1].digest = 8
    with pytest.raises(WeightError, match="inference rank 1 serves other values of w"):
        case.sync.run()
    assert case.state.version == 1


def test_weights_without_a_digest_are_announced_once():
    case = Case()
    engine = case.engines.workers[0]
    finish = engine.finish_load
    engine.finish_load = lambda *args: replace(finish(*args), undigested=frozenset({"b", "a"}))
    for _ in range(3):
        case.sync.run()
    [said] = case.said
    assert said.startswith("2 weights of the engines have no digest, such as a")


# --- time and memory --------------------------------------------------------------------------------------------------


def make_meter(case: Case, groups=None, devices=None) -> PhaseMeter:
    plan = make_plan(loads("cluster: {component_placement: {actor: 0, rollout: '@actor'}}"), "1x1")
    return PhaseMeter(case.scheduler, groups or {}, plan, devices or DeviceWatch([], lambda device: None))


def test_seconds_of_a_phase_add_up_and_a_step_begins_with_none(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(meter.time, "monotonic", lambda: clock[0])
    case = Case()
    measured = make_meter(case)

    def work(phase, role, seconds):
        with measured.lease(phase, role):
            clock[0] += seconds

    work("rollout", "rollout", 50.0)  # an evaluation, before the step
    measured.begin_step()
    work("rollout", "rollout", 3.0)
    work("prepare", "reference", 1.0)
    work("prepare", "actor", 2.0)
    clock[0] += 4.0
    metrics = measured.metrics()
    assert metrics["step_s"] == 10.0
    assert metrics["time/rollout"] == 3.0
    assert metrics["time/prepare"] == 3.0
    assert metrics["time/offload"] == 3.0  # three leases of a second each, without that of the evaluation
    assert "time/update" not in metrics
    measured.begin_step()
    assert "time/rollout" not in measured.metrics()


def test_work_that_fails_gives_its_lease_back():
    case = Case()
    with pytest.raises(RunError), case.meter.lease("update", "actor"):
        raise RunError("out of memory")
    assert case.log == ["lease update/actor", "end update/actor"]


def test_peaks_are_of_the_work_and_without_what_allocators_hold_unused(monkeypatch):
    """A device with 10 GiB in use, of which the actor's allocator holds 2 for nothing; 90 while parts were moved."""
    for module in (held_memory, meter):
        monkeypatch.setattr(module, "has_gpu", lambda: True)
    case, used = Case(), [90 << 30]

    class Holding:
        def __init__(self, rank: int):
            self.held_now = Held(6 << 30, 2 << 30)

        def held(self) -> Held:
            return self.held_now

    groups = {name: FakeGroup(name, Holding, 1, case.log) for name in ("actor", "rollout")}
    groups["rollout"].workers[0].held_now = Held(1 << 30, 0)
    devices = DeviceWatch([], lambda device: None)
    devices._devices, devices._measure = [0], lambda device: DeviceMemory(used[0])
    measured = make_meter(case, groups, devices)
    devices.peaks_gib()
    devices._look()  # while parts were moved
    used[0] = 10 << 30
    with measured.lease("update", "actor"):
        pass
    metrics = {name: value for name, value in measured.metrics().items() if name.startswith("memory")}
    assert metrics == {"memory/update/actor": 6.0, "memory/update/device 0": 8.0}


def test_the_memory_of_a_phase_is_that_of_its_highest_turn_in_this_step(monkeypatch):
    for module in (held_memory, meter):
        monkeypatch.setattr(module, "has_gpu", lambda: True)
    case, held = Case(), [Held(0, 0)]

    class Holding:
        def __init__(self, rank: int):
            pass

        def held(self) -> Held:
            return held[0]

    groups = {"actor": FakeGroup("actor", Holding, 1, case.log)}
    measured = make_meter(case, groups, DeviceWatch([], lambda device: None))
    for turns, highest in (((3, 7, 5), 7.0), ((4, 2), 4.0)):
        measured.begin_step()
        for gib in turns:
            held[0] = Held(gib << 30, 0)
            with measured.lease("prepare", "actor"):
                pass
        assert measured.metrics()["memory/prepare/actor"] == highest


# --- state ------------------------------------------------------------------------------------------------------------


def saved(case: Case) -> dict:
    """The state as a checkpoint has it, through JSON."""
    return json.loads(json.dumps({**case.state.save(), "config": to_saved(case.config)}))


def test_a_resumed_run_continues_order_coefficient_and_version():
    adaptive = "algorithm.kl={coef: 0.1, target: 0.1, horizon: 160}"
    whole, resumed = Case(adaptive, reference=1), Case(adaptive, reference=1)
    whole.sync.run()
    for step in (1, 2, 3):
        whole.stream.release(whole.stream.take(step))
        whole.actor.workers[0].reports = [report(kl=5.0)]
        whole.update.run(PreparedBatch(batch_of((0, 0)), 1), step)
        whole.sync.run()
    resumed.state.restore(saved(whole), resumed.config)
    assert resumed.state.kl == whole.state.kl
    assert resumed.state.kl.coefficient == pytest.approx(0.1 * 1.02**3)
    assert resumed.sync.run().version == whole.state.version == 3  # that version is served again
    assert resumed.stream.take(4) == whole.stream.take(4)


def test_a_changed_kl_coefficient_starts_anew_and_an_unchanged_one_continues():
    adaptive = "algorithm.kl={{coef: {}, target: {}, horizon: 160}}"
    case = Case(adaptive.format(0.1, 0.1), reference=1)
    case.state.kl = replace(case.state.kl, coefficient=0.3)
    other = Case(adaptive.format(0.2, 0.1), reference=1)
    other.state.restore(saved(case), other.config)
    assert other.state.kl == AdaptiveKl(0.2, 0.1, 160)
    target = Case(adaptive.format(0.1, 0.5), reference=1)
    target.state.restore(saved(case), target.config)
    assert target.state.kl == AdaptiveKl(0.3, 0.5, 160)


def test_other_prompts_are_not_resumed_with():
    case, other = Case(), Case(num_prompts=17)
    with pytest.raises(DataError, match="saved with num_prompts 16, and now it is 17"):
        other.state.restore(saved(case), other.config)


# --- samples that are recorded ----------------------------------------------------------------------------------------


class Recorded:
    """A sample log with a journal that keeps what it gets, and a ledger in a folder."""

    def __init__(self, directory: Path, case: Case, **log: int):
        self.case, self.directory, self.journal = case, directory, FakeJournal()
        self.samples = SampleLog(
            case.groups, Ledger(directory), silent_alarms(), case.state, self.journal, LogConfig(**log)
        )

    def steps(self, *steps: int) -> list[int]:
        """Which of these steps have samples recorded."""
        for step in steps:
            self.samples.choose(step, NOTHING_LEFT)
            self.samples.record(step, NOTHING_LEFT, {})
        return [step for step in steps if "engine_gap" in self.journal.by_step[step]]


NOTHING_LEFT = Collected((), 0, (), 0)


def test_samples_are_recorded_less_often_the_longer_a_run_is(tmp_path):
    """Every second step up to 400, every fourth up to 800, every eighth up to 1600: never more than 300 steps."""
    recorded = Recorded(tmp_path, Case(), samples_every=2, samples_per_step=4)
    assert NUM_RECORDED == 200
    assert recorded.steps(1, 2, 3, 4, 399, 400, 402, 404, 798, 800, 804, 808) == [1, 2, 4, 400, 404, 800, 808]


def test_no_sample_is_recorded_where_none_is_asked_for(tmp_path):
    case = Case()
    recorded = Recorded(tmp_path, case, samples_every=1, samples_per_step=0)
    assert recorded.steps(1, 2) == []
    assert case.log == []
    assert recorded.samples.ids_in_training == []


def test_a_sample_is_recorded_with_what_host_and_actor_know_of_it(tmp_path):
    case = Case(
        *FILTERED,
        "reward.max_failed_fraction=0.5",
        actor=2,
        rewards=lambda key: [1.0] * 4 if key[1] % 2 == 0 else [0.0, 1.0, None, 1.0],
    )
    recorded = Recorded(tmp_path, case, samples_every=1, samples_per_step=2)
    case.state.version = 3
    batch = case.stream.take(1)
    recorded.samples.choose(1, batch)
    ids = recorded.samples.ids_in_training
    assert len(ids) == 2
    assert all(int(name.split("/")[1]) % 2 == 1 for name in ids)  # of those that were not dropped
    case.stream.release(batch)  # what hosts know was fetched before
    # One sample each lies on the actor's ranks.
    for worker, name in zip(case.actor.workers, ids, strict=True):
        worker.tokens = {name: [TokenRecord([0.0, -1.25], [0.0, 2.0], ["", "learned"])]}
    case.state.version = 4  # pushed since
    recorded.samples.record(1, batch, {})
    trained = [line for line in recorded.journal.lines if line["state"] == "trained"]
    assert [f"{line['epoch']}/{line['prompt']}/{line['sample']}" for line in trained] == ids
    for line in trained:
        [segment] = line["segments"]
        assert segment["trainer_log_probs"] == [None, -1.25]
        assert segment["engine_log_probs"] == [None, -1.0]
        assert segment["fates"] == [None, "learned"]
    states = [line["state"] for line in recorded.journal.lines]
    assert states.count("dropped") == states.count("failed") == 2
    values = recorded.journal.by_step[1]
    assert values["engine_gap"] == [0.25, 0.25]
    assert len(values["reward"]) == len(values["length"]) == 12
    # Sampled by version 3; the push of this step's weights made it 4.
    assert {entry.version for entry in read_ledger(tmp_path)} == {3}
    assert {entry.state for entry in read_ledger(tmp_path)} == {"trained", "dropped", "failed"}


def test_between_recorded_steps_neither_hosts_nor_actor_are_asked(tmp_path):
    case = Case()
    recorded = Recorded(tmp_path, case, samples_every=5, samples_per_step=2)
    batch = case.stream.take(1)
    recorded.samples.choose(5, batch)
    assert recorded.samples.ids_in_training != []
    case.taken()
    recorded.samples.choose(6, batch)
    assert recorded.samples.ids_in_training == []
    recorded.samples.record(6, batch, {})
    assert case.log == []
    assert recorded.journal.lines == []
    assert len(recorded.journal.by_step[6]["reward"]) == 16
    assert len(list(read_ledger(tmp_path))) == 4


def test_samples_of_a_step_that_stops_the_run_were_sampled_by_the_version_that_is_served(tmp_path):
    recorded = Recorded(tmp_path, Case(), samples_per_step=2)
    recorded.case.state.version = 3
    facts = facts_of((0, 1), [1.0, None])
    recorded.samples.record_unfinished(7, Collected((facts,), 1, (), 1))
    assert [(entry.state, entry.step, entry.version) for entry in read_ledger(tmp_path)] == [
        ("dropped", 7, 3),
        ("failed", 7, 3),
    ]
    assert [(line["state"], line["step"]) for line in recorded.journal.lines] == [("failed", 7)]


# --- token budgets ----------------------------------------------------------------------------------------------------


def test_a_budget_that_ranks_lowered_is_used_and_kept_from_then_on():
    case = Case("train.micro_batch_size=auto", "train.chosen_tokens_per_device=64", actor=2)
    budgets = MicroBatches({"actor": case.actor}, case.settings, case.meter)
    kept = []
    budgets.keep_lowered(kept.append)
    assert kept == []
    case.actor.workers[1].lowered_budgets = {"train": 32}
    budgets.keep_lowered(kept.append)
    assert [config.train.chosen_tokens_per_device for config in kept] == [32]
    assert case.settings.policy.train.max_tokens == 32
    assert "actor ran out of device memory" in case.said[0]
    budgets.keep_lowered(kept.append)
    assert len(kept) == 1
    case.update.run(PreparedBatch(batch_of((0, 0)), 1), 1)
    assert case.actor.named("update")[0].args[0][0].train.max_tokens == 32


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_critic_and_actor_each_saved_in_its_own_lease(tmp_path):
    case = Case("algorithm.estimator=gae", critic=1, reference=1, actor=2)
    ledger_dir, path = tmp_path / "run", tmp_path / "checkpoint"
    ledger_dir.mkdir()
    path.mkdir()
    ledger = Ledger(ledger_dir)
    ledger.record(1, 0, batch_of((0, 5)))
    checkpoints = RlCheckpoints(
        case.groups,
        case.scheduler,
        case.state,
        case.guard,
        ledger,
        case.stream,
        case.settings,
    )
    source = checkpoints.source({"eval/reward": 0.5})
    source.write(path)
    assert case.taken() == [
        "lease update/critic",
        "critic.save",
        "end update/critic",
        "lease update/actor",
        "actor.save",
        "end update/actor",
    ]
    assert source.num_bytes() == 300
    state = json.loads(json.dumps(source.state()))
    assert state["evaluation"] == {"eval/reward": 0.5}
    assert state["num_ranks"] == 2
    ledger.record(2, 1, batch_of((0, 6)))

    resumed = Case("algorithm.estimator=gae", critic=1, reference=1, actor=2)
    again = RlCheckpoints(
        resumed.groups,
        resumed.scheduler,
        resumed.state,
        resumed.guard,
        ledger,
        resumed.stream,
        resumed.settings,
    )
    again.restore(Checkpoint(path, 1, {**state, "config": to_saved(case.config)}))
    assert [entry.prompt for entry in read_ledger(ledger_dir)] == [5]
    assert resumed.taken() == [
        "guard.restore {'canary': 'state'}",
        "lease update/critic",
        "critic.load",
        "end update/critic",
        "lease update/actor",
        "actor.load",
        "end update/actor",
    ]
    saved_to = [group.named("save")[0].args[0] for group in (case.critic, case.actor)]
    loaded_from = [group.named("load")[0].args[0] for group in (resumed.critic, resumed.actor)]
    assert saved_to == loaded_from
    assert saved_to[0] != saved_to[1]


# --- the loop ---------------------------------------------------------------------------------------------------------


class FakePhases:
    """Every object that `train_rl` drives: each records its name and what it was given."""

    def __init__(self, num_steps: int, eval_every: int | None = None):
        self.log: list[str] = []
        self.saved: list[tuple[int, dict]] = []
        self.evaluations = iter({"eval/reward": float(value)} for value in range(100))
        self.run = loop.RlRun(
            num_steps=num_steps,
            has_evaluation=True,
            eval_every=eval_every,
            stream=self,
            evaluate=self.evaluate,
            prepare=SimpleNamespace(run=lambda batch, step: self.note(f"prepare {batch} {step}", self)),
            update=SimpleNamespace(run=lambda prepared, step: self.note(f"update {step}", "updates")),
            sync=SimpleNamespace(run=lambda: self.note("push", "pushed")),
            meter=SimpleNamespace(begin_step=lambda: self.note("begin_step")),
            metrics=SimpleNamespace(of_step=lambda batch, updates, pushed: {"reward": 1.0}),
            micro_batches=SimpleNamespace(keep_lowered=lambda keep: self.note("keep_lowered")),
            samples=SimpleNamespace(record=lambda step, batch, metrics: self.note(f"record {batch} {step}")),
            checkpoints=SimpleNamespace(source=dict, restore=lambda found: self.note(f"restore {found.step}")),
            restarts=self,
        )
        self.batch = "batch"
        self.journal = SimpleNamespace(phase=lambda name: self.note(f"phase {name}"), step=self.journal_step)
        self.saver = SimpleNamespace(
            keep=None, metrics=lambda: {"saved": 1.0}, after_step=self.after_step, is_ending=False
        )

    def note(self, entry, value=None):
        self.log.append(entry)
        return value

    def metrics(self):
        return {}

    def take(self, step):
        return self.note(f"take {step}", f"batch{step}")

    @contextmanager
    def weight_update(self):
        self.note("weight_update")
        yield
        self.note("crossed")

    def evaluate(self):
        return self.note("evaluate", next(self.evaluations))

    def journal_step(self, step, metrics):
        self.note(f"step {step} {sorted(metrics)}")

    def after_step(self, step, source, measured, journal):
        self.saved.append((step, dict(source), measured))

    def train(self, checkpoint=None):
        return loop.train_rl(self.run, self.journal, self.saver, checkpoint)


def test_a_run_begins_with_a_push_and_an_evaluation_and_each_step_is_four_phases():
    fake = FakePhases(num_steps=1)
    assert fake.train() == {"eval/reward": 1.0}
    assert fake.log == [
        "phase sync",
        "push",
        "phase evaluate",
        "evaluate",
        "step 0 ['eval/reward']",
        "begin_step",
        "phase rollout",
        "take 1",
        "phase prepare",
        "prepare batch1 1",
        "phase update",
        "update 1",
        "keep_lowered",
        "phase sync",
        "weight_update",
        "push",
        "crossed",
        "phase evaluate",
        "evaluate",
        "step 1 ['eval/reward', 'reward', 'saved']",
        "record batch 1",
    ]


def test_a_run_without_prompts_to_evaluate_shows_no_evaluation():
    fake = FakePhases(num_steps=2, eval_every=1)
    fake.run = replace(fake.run, has_evaluation=False)
    assert fake.train() == {}
    assert not any("evaluate" in entry for entry in fake.log)
    assert "step 0 []" in fake.log


def test_a_resumed_run_restores_and_pushes_and_keeps_the_evaluation_of_its_checkpoint():
    fake = FakePhases(num_steps=3)
    fake.run = replace(fake.run, eval_every=10)
    checkpoint = Checkpoint(Path("none"), 2, {"evaluation": {"eval/reward": 0.25}})
    fake.train(checkpoint)
    assert fake.log[:3] == ["restore 2", "phase sync", "push"]
    assert [entry for entry in fake.log if entry.startswith(("take", "evaluate"))] == ["take 3", "evaluate"]
    done = FakePhases(num_steps=2)
    assert done.train(checkpoint) == {"eval/reward": 0.25}


def test_evaluations_are_made_now_and_then_and_at_the_end_and_only_new_ones_are_judged():
    fake = FakePhases(num_steps=5, eval_every=2)
    fake.train()
    steps = {step: (source, measured) for step, source, measured in fake.saved}
    assert [step for step, (_, measured) in steps.items() if measured] == [2, 4, 5]
    assert steps[1] == ({"eval/reward": 0.0}, {})  # a checkpoint holds the last one there is
    assert steps[3] == ({"eval/reward": 1.0}, {})
    assert steps[4] == ({"eval/reward": 2.0},) * 2
