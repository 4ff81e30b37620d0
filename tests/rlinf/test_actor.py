"""The actor in the place of RLinf's `FSDPActor`: its loss is that of PPO, and its state survives a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotseat.cluster import Cluster as HotseatCluster
from hotseat.errors import RunError, WorkerError
from hotseat.loop.workers.losses import ADVANTAGES
from hotseat.rlinf import Channel, Cluster, FSDPActor, NodePlacementStrategy, Worker
from hotseat.train.backend import LoraOptions

pytestmark = pytest.mark.slow

NO_MODEL = Path("unused")  # for actors that load none
ONE = NodePlacementStrategy([0])


def config(task, **actor):
    return {
        "actor": {
            "model": {"model_path": str(task / "model")},
            "optim": {"lr": 1e-2, "adam_beta2": 0.99},
            "global_batch_size": 4,
            "micro_batch_size": 3,
            **actor,
        },
        "algorithm": {"group_size": 2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3},
        "rollout": {"group_name": "samplers"},
    }


TRAJECTORIES = [
    {"input_ids": [3, 4, 5, 6], "loss_mask": [0, 0, 1, 1], "prev_logprobs": [0, 0, -2.5, -2.9], "rewards": 1.0},
    {"input_ids": [3, 4, 7], "loss_mask": [0, 0, 1], "prev_logprobs": [0, 0, -3.2], "rewards": 0.0},
    {"input_ids": [8, 9, 2, 2], "loss_mask": [0, 1, 1, 1], "prev_logprobs": [0, -2.0, -2.7, -2.8], "rewards": 0.5},
    {"input_ids": [8, 9], "loss_mask": [0, 1], "prev_logprobs": [0, -2.8], "rewards": 0.25},
]


def groups_of(trajectories):
    return [trajectories[at : at + 2] for at in range(0, len(trajectories), 2)]


def expected_loss(task, dual_clip=float("inf")) -> float:
    """PPO's loss in float64, token by token; a negative advantage is multiplied by `dual_clip` at the most."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task / "model").double()
    losses = []
    for index, each in enumerate(TRAJECTORIES):
        pair = [TRAJECTORIES[index - index % 2 + other]["rewards"] for other in (0, 1)]
        mean = sum(pair) / 2
        deviation = sum((reward - mean) ** 2 for reward in pair) ** 0.5  # of two, with n - 1
        advantage = (each["rewards"] - mean) / deviation
        logits = model(torch.tensor([each["input_ids"]])).logits[0]
        for at, is_sampled in enumerate(each["loss_mask"]):
            if is_sampled:
                log_prob = torch.log_softmax(logits[at - 1], -1)[each["input_ids"][at]].item()
                ratio = 2.718281828459045 ** (log_prob - each["prev_logprobs"][at])
                clipped = min(max(ratio, 0.9), 1.3)
                surrogate = min(ratio * advantage, clipped * advantage)
                losses.append(-(max(surrogate, dual_clip * advantage) if advantage < 0 else surrogate))
    return sum(losses) / len(losses)


class Sampler(Worker):
    def receive(self):
        return sorted(self.recv("actor", 0))


def test_the_loss_is_that_of_ppo_and_training_resumes_from_a_checkpoint(task, tmp_path):
    with HotseatCluster("local", num_devices=1) as machinery, Cluster(on=machinery) as cluster:
        actor = FSDPActor.create_group(config(task)).launch(cluster, name="actor", placement_strategy=ONE)
        sampler = Sampler.create_group().launch(cluster, name="samplers", placement_strategy=ONE)
        with pytest.raises(WorkerError, match=r"actor has no model yet: call init_worker\(\).wait\(\) first"):
            actor.save_checkpoint(str(tmp_path)).wait()
        actor.init_worker().wait()
        channel = Channel.create("Actor")

        def train():
            for group in groups_of(TRAJECTORIES):
                channel.put(group)
            return actor.run_training(channel).wait()[0]

        first = train()
        assert first["actor/loss"] == pytest.approx(expected_loss(task), rel=1e-4)
        assert (first["actor/num_tokens"], first["actor/version"], first["actor/lr"]) == (7, 1, 0.01)
        actor.save_checkpoint(str(tmp_path / "saved"), 1).wait()
        second = train()
        assert second["actor/loss"] < first["actor/loss"]
        actor.load_checkpoint(str(tmp_path / "saved")).wait()
        assert train() == second
        num_sent = actor.sync_model_to_rollout().wait()[0]
        assert len(sampler.receive().wait()[0]) == num_sent > 0
        for group in groups_of([{**TRAJECTORIES[0], "loss_mask": [1]}, *TRAJECTORIES[1:]]):
            channel.put(group)
        with pytest.raises(WorkerError, match="trajectory 0: 4 input_ids, 1 entries of loss_mask and 4 of"):
            actor.run_training(channel).wait()
        pair = FSDPActor.create_group(config(task, global_batch_size=3))
        with pytest.raises(WorkerError, match="actor.global_batch_size is 3, which 2 ranks cannot share evenly"):
            pair.launch(cluster, name="pair", placement_strategy=NodePlacementStrategy([0, 0]))
        nameless = FSDPActor.create_group(config(task, model={})).launch(cluster, name="x", placement_strategy=ONE)
        with pytest.raises(WorkerError, match="actor.model.model_path is not set"):
            nameless.init_worker().wait()
        odd = FSDPActor.create_group(config(task, model={"model_path": "m", "precision": "fp8"}))
        with pytest.raises(WorkerError, match="actor.model.precision is fp8: choose one of fp32, 32, bf16"):
            odd.launch(cluster, name="odd", placement_strategy=ONE).init_worker().wait()
        uneven = FSDPActor.create_group(config(task, global_batch_size=6))
        with pytest.raises(WorkerError, match="3 trajectories on each of 2 ranks, in groups of algorithm.group_size 2"):
            uneven.launch(cluster, name="uneven", placement_strategy=NodePlacementStrategy([0, 0]))


def test_clip_ratio_c_bounds_the_ratios_of_answers_with_a_negative_advantage(task):
    """The second answer's ratio is far above 1.2: log-probs of a tiny model are some -2.5, and -3.2 was sampled."""
    algorithm = config(task)["algorithm"] | {"clip_ratio_c": 1.2}
    with HotseatCluster("local", num_devices=1) as machinery, Cluster(on=machinery) as cluster:
        group = FSDPActor.create_group({**config(task), "algorithm": algorithm})
        actor = group.launch(cluster, name="actor", placement_strategy=ONE)
        actor.init_worker().wait()
        channel = Channel.create("Bounded")
        for each in groups_of(TRAJECTORIES):
            channel.put(each)
        loss = actor.run_training(channel).wait()[0]["actor/loss"]
    assert loss == pytest.approx(expected_loss(task, dual_clip=1.2), rel=1e-4)
    assert loss < expected_loss(task) - 1e-3  # some token is bounded


class Inspected(FSDPActor):
    def advantages(self):
        return [(each["rewards"], each["advantages"]) for each in self._trajectories]

    def clips(self):
        return self._objective().clip_low, self._objective().clip_high

    def options(self):
        return self._options(self._actor["model"])

    def drawn(self):
        return torch.rand(2).tolist()

    def lacks_weights(self):
        """Tell whether the model is offloaded: then its weights cannot be asked for."""
        try:
            self._backend.weights()
        except RunError as error:
            return "needs weights on the device: onload them first" in str(error)
        return False

    def normalised(self, trajectories):
        batch = self._normalised(self._batch(trajectories))
        return batch.fields[ADVANTAGES][batch.mask].tolist()


@pytest.fixture
def cluster():
    with HotseatCluster("local", num_devices=1) as machinery, Cluster(on=machinery) as cluster:
        yield cluster


def test_a_group_is_compared_within_itself_whichever_rank_takes_it(cluster):
    """Two producers, whose rewards have different scales, and two ranks."""
    pair = NodePlacementStrategy([0, 0])
    group = Inspected.create_group(config(NO_MODEL, global_batch_size=8))
    actor = group.launch(cluster, name="actor", placement_strategy=pair)
    channel = Channel.create("Groups")
    for number in range(2):
        for scale in (1.0, 1000.0):
            channel.put([{"rewards": scale * (1 + number)}, {"rewards": scale * (3 + number)}])
    actor.recv_rollout_trajectories(channel).wait()
    actor.compute_advantages_and_returns().wait()
    compared = dict(pair for rank in actor.advantages().wait() for pair in rank)
    # Of a pair, (r - mean) / deviation is 1 / sqrt(2) for the better one, whatever the scale.
    better = {3.0, 4.0, 3000.0, 4000.0}
    assert compared == {
        reward: pytest.approx(0.5**0.5 if reward in better else -(0.5**0.5), rel=1e-3)
        for reward in better | {1.0, 2.0, 1000.0, 2000.0}
    }
    for item, found in ((TRAJECTORIES[0], "a dict"), (TRAJECTORIES[:1], "a list of 1")):
        channel.put(item)
        with pytest.raises(WorkerError, match=f"channel 'Groups' has {found}: put whole groups into it"):
            actor.execute_on(0).recv_rollout_trajectories(channel).wait()


@pytest.mark.parametrize(
    ("path", "value", "fitting"),
    [
        ("algorithm.kl_beta", 0.1, "0, or leave it out"),
        ("algorithm.logprob_type", "chunk_level", "token_level, or leave it out"),
        ("algorithm.entropy_bonus", 0.01, "0, or leave it out"),
        ("algorithm.adv_type", "gae", "grpo, or leave it out"),
        ("algorithm.loss_agg_func", "seq-mean-token-sum", "token-mean, or leave it out"),
        ("actor.lr_sched.lr_decay_style", "cosine", "constant, or leave it out"),
        ("actor.lr_sched.lr_warmup_fraction", 0.1, "0, or leave it out"),
        ("actor.lr_sched.lr_warmup_iters", 5, "0, or leave it out"),
        ("algorithm.loss_type", "actor_critic", "actor or grpo, or leave it out"),
        ("algorithm.n_minibatches", 4, "1, or leave it out"),
        ("algorithm.use_reinpp_baseline", True, "False, or leave it out"),
        ("algorithm.reinpp_kl_beta", 0.1, "0, or leave it out"),
        ("actor.training_backend", "megatron", "fsdp or fsdp2, or leave it out"),
        ("actor.model.lora_path", "adapters", "null, or leave it out"),
    ],
)
def test_settings_that_the_actor_does_not_have_are_refused(cluster, path, value, fitting):
    changed = config(NO_MODEL)
    at = changed
    *sections, name = path.split(".")
    for each in sections:
        at = at.setdefault(each, {})
    at[name] = value
    with pytest.raises(WorkerError, match=f"{path} is {value}, which this actor does not have: set it to {fitting}"):
        FSDPActor.create_group(changed).launch(cluster, name="actor", placement_strategy=ONE)


def test_a_bound_for_bad_answers_that_is_no_bound_is_refused(cluster):
    bounded = with_settings(NO_MODEL, {"algorithm.clip_ratio_c": 0.8})
    with pytest.raises(WorkerError, match="algorithm.clip_ratio_c is 0.8: it bounds ratios of bad answers from above"):
        FSDPActor.create_group(bounded).launch(cluster, name="actor", placement_strategy=ONE)


@pytest.mark.parametrize(
    ("algorithm", "clips"),
    [
        ({"ratio_clip_eps": 0.1}, (0.1, 0.1)),
        ({"ratio_clip_eps": 0.1, "clip_ratio_high": 0.3}, (0.1, 0.3)),
        ({"ratio_clip_eps": None, "clip_ratio_low": 0.3, "clip_ratio_high": None}, (0.3, 0.2)),
        ({"kl_beta": 0.0, "adv_type": "grpo", "loss_agg_func": "token-mean", "clip_ratio_c": None}, (0.2, 0.2)),
    ],
)
def test_clip_ranges_that_are_unset_have_the_common_one(cluster, algorithm, clips):
    actor = Inspected.create_group({**config(NO_MODEL), "algorithm": algorithm})
    assert actor.launch(cluster, name="actor", placement_strategy=ONE).clips().wait() == [clips]


def with_settings(task, settings):
    """Return the config with more settings, by dotted keys."""
    changed = config(task)
    for path, value in settings.items():
        *sections, name = path.split(".")
        at = changed
        for each in sections:
            at = at.setdefault(each, {})
        at[name] = value
    return changed


def launched(cluster, task, name="actor", **settings):
    group = Inspected.create_group(with_settings(task, {key.replace("__", "."): v for key, v in settings.items()}))
    return group.launch(cluster, name=name, placement_strategy=ONE)


def test_an_offloaded_actor_has_its_model_only_while_it_works(cluster, task, tmp_path):
    channel = Channel.create("Actor")

    def works(actor, folder):
        """Train, save, train and load; return the metrics, and whether the model was away before and after each."""
        actor.init_worker().wait()
        away, metrics = actor.lacks_weights().wait(), []
        for keep in (actor.save_checkpoint, actor.load_checkpoint):
            for group in groups_of(TRAJECTORIES):
                channel.put(group)
            metrics += actor.run_training(channel).wait()
            away += actor.lacks_weights().wait()
            keep(str(tmp_path / folder)).wait()
            away += actor.lacks_weights().wait()
        sent = actor.sync_model_to_rollout().wait()[0]
        return metrics, sent, away + actor.lacks_weights().wait()

    offloaded = launched(cluster, task, actor__enable_offload=True)
    sampler = Sampler.create_group().launch(cluster, name="samplers", placement_strategy=ONE)
    metrics, num_sent, away = works(offloaded, "offloaded")
    assert all(away)
    assert len(sampler.receive().wait()[0]) == num_sent > 0
    resident = launched(cluster, task, "resident", actor__enable_offload=False)
    assert works(resident, "resident") == (metrics, num_sent, [False] * len(away))


def test_epochs_make_as_many_steps_on_the_same_trajectories(cluster, task):
    channel = Channel.create("Actor")

    def train(actor, times):
        actor.init_worker().wait()
        for _ in range(times):
            for group in groups_of(TRAJECTORIES):
                channel.put(group)
            [metrics] = actor.run_training(channel).wait()
        return metrics

    twice = train(launched(cluster, task, algorithm__update_epoch=2), 1)
    assert twice["actor/version"] == 2
    assert twice == train(launched(cluster, task, "other"), 2)


def test_adapters_recomputation_and_the_seed_are_taken(cluster, task):
    actor = launched(
        cluster,
        task,
        actor__model__is_lora=True,
        actor__model__lora_rank=4,
        actor__seed=7,
        algorithm__loss_type="actor",
    )
    [options] = actor.options().wait()
    assert options.lora == LoraOptions(4, alpha=4, seed=7)  # RLinf's adapters have alpha = rank
    assert not options.gradient_checkpointing
    actor.init_worker().wait()
    channel = Channel.create("Adapters")
    for _ in range(2):
        for group in groups_of(TRAJECTORIES):
            channel.put(group)
        [metrics] = actor.run_training(channel).wait()
    assert metrics["actor/version"] == 2
    assert metrics["actor/loss"] < expected_loss(task)  # adapters begin as nothing, and have learned by the second step
    for key in ("actor__gradient_checkpointing", "actor__fsdp_config__gradient_checkpointing"):
        [options] = launched(cluster, task, key, **{key: True}).options().wait()
        assert (options.gradient_checkpointing, options.lora) == (True, None)
    without_rank = launched(cluster, task, "rankless", actor__model__is_lora=True)
    with pytest.raises(WorkerError, match="actor.model.is_lora is true, and lora_rank is not set"):
        without_rank.init_worker().wait()
    draws = []
    for name in ("one", "two"):
        actor = launched(cluster, task, name, actor__seed=7)
        actor.init_worker().wait()
        draws += actor.drawn().wait()
    assert draws[0] == draws[1]


def test_advantages_are_normalised_over_the_batch_if_the_config_says_so(cluster, task):
    # Seven tokens with advantages 1, 1 | -1 | 2, 2, 2 | 0: mean 1, variance (0 + 0 + 4 + 1 + 1 + 1 + 1) / 7 = 8/7.
    advantages = (1.0, -1.0, 2.0, 0.0)
    trajectories = [{**each, "advantages": value} for each, value in zip(TRAJECTORIES, advantages, strict=True)]
    actor = launched(cluster, task, algorithm__normalize_advantages=True)
    actor.init_worker().wait()
    scale = (7 / 8) ** 0.5
    expected = [0.0, 0.0, -2 * scale, scale, scale, scale, -scale]
    assert actor.normalised(trajectories).wait()[0] == pytest.approx(expected, abs=1e-6)
    plain = launched(cluster, task, "plain", algorithm__normalize_advantages=False)
    assert plain.normalised(trajectories).wait()[0] == [1.0, 1.0, -1.0, 2.0, 2.0, 2.0, 0.0]


def test_settings_that_the_actor_does_not_read_are_logged_once(cluster, caplog):
    settings = {
        "actor.fsdp_config.forward_prefetch": True,
        "algorithm.huber_delta": 10.0,
        "actor.model.model_type": "x",
    }
    changed = with_settings(NO_MODEL, {**settings, "actor.fsdp_config.backward_prefetch": None})
    pair = NodePlacementStrategy([0, 0])
    FSDPActor.create_group(changed).launch(cluster, name="actor", placement_strategy=pair)
    lines = [record.getMessage() for record in caplog.records if "no effect here" in record.getMessage()]
    assert len(lines) == 1
    listed = "actor.fsdp_config.forward_prefetch, actor.model.model_type, algorithm.huber_delta"
    assert f"no effect here: {listed}, which this actor does not read" in lines[0]
