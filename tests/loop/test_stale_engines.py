"""An engine that goes on with old weights is found out; what it sampled with them is corrected for, if asked."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_cases import make_task, rl_yaml

from hotseat.algorithms.digest import tensor_digest
from hotseat.cluster import Cluster
from hotseat.config import loads
from hotseat.errors import WeightError
from hotseat.loop import settings
from hotseat.loop.experience import Share
from hotseat.loop.push import Canary, Proof, push_weights
from hotseat.loop.workers import ActorWorker, EngineWorker
from hotseat.types import Episode, Group, Prompt, SampleKey, ScoredEpisode, Segment
from hotseat.weights import Bucket, choose_lanes

pytestmark = pytest.mark.slow

CANARY = Canary(((3, 12, 4, 13), (5, 12, 6, 13)), temperature=1.0, tolerance=1e-3)


class Stale(EngineWorker):
    """Takes a push, says that it serves the new version, and keeps the old weights."""

    def begin_load(self, version: int) -> None:
        self._arrived: dict[str, int] = {}

    def take_bucket(self, bucket: Bucket) -> None:
        self._arrived |= {name: tensor_digest(tensor) for name, tensor in bucket}

    def finish_load(self, version: int, canary: Canary) -> Proof:
        self._engine._version = version  # type: ignore[attr-defined]
        return Proof(self._engine.digest(), self.score(canary))


class Blinded(Stale):
    """As well, with digests of what arrived, not of what is used."""

    def finish_load(self, version: int, canary: Canary) -> Proof:
        proof = super().finish_load(version, canary)
        return replace(proof, digests=proof.digests | self._arrived)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("new"), seed=1)


def push(old: Path, new: Path, engine: type) -> float | None:
    """From an actor with new weights to an engine with old ones; the gap of the canary."""
    config = loads(rl_yaml(new))
    told = settings.engine_settings(loads(rl_yaml(old)), (1,), old)
    with Cluster("local", num_devices=1) as cluster:
        options = settings.train_options(config, 1)
        actor = cluster.launch("actor", ActorWorker, args=(config.actor.model, options, "float32"))
        engines = cluster.launch("rollout", engine, args=(told,))
        return push_weights(actor, engines, 1, CANARY, choose_lanes([[0]], [[0]], is_cuda=False)).canary_gap


def test_an_engine_that_takes_its_weights_agrees(old, new):
    gap = push(old, new, EngineWorker)
    assert gap is not None
    assert gap < 1e-5


def test_the_digest_finds_an_engine_that_kept_its_weights_and_names_the_tensor(old, new):
    with pytest.raises(WeightError, match=r"engine 0 serves other values of model\.embed_tokens\.weight .*version 1"):
        push(old, new, Stale)


def test_where_digests_see_nothing_the_canary_does(old, new):
    with pytest.raises(WeightError, match=r"engine 0 and the trainer disagree on version 1: log-prob of token \d"):
        push(old, new, Blinded)


# --- what a stale engine sampled --------------------------------------------------------------------------------------


def groups_of(model: Path) -> list[Group]:
    """The same tokens whatever the model, with its log-probs: what its engine would have reported."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model / "model", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    groups = []
    for prompt in range(2):
        samples = []
        for index in range(4):
            tokens = torch.randint(2, 14, (10,), generator=generator)
            with torch.no_grad():
                log_probs = policy(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            mask = torch.arange(10) >= 4
            segment = Segment(
                token_ids=tokens,
                mask=mask,
                log_probs=torch.where(mask, torch.cat([torch.zeros(1), log_probs]), 0.0),
                versions=torch.where(mask, 0, -1).to(torch.int32),
            )
            reward = float(index % 2)
            samples.append(ScoredEpisode(Episode(SampleKey(0, prompt, index), (segment,), ""), reward, reward))
        groups.append(Group(Prompt(prompt, "", ()), tuple(samples)))
    return groups


def learned(new: Path, groups: list[Group], correction: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights after one update of the new policy, and what the update reports per token."""
    config = loads(rl_yaml(new, algorithm=f"{{correction: {correction}}}"))
    policy = settings.policy_settings(config, 1, 0.0)
    actor = ActorWorker(str(config.actor.model), settings.train_options(config, 1), "float32")
    try:
        actor.prepare([Share(tuple(groups), ((0,) * 4,) * 2)], 1, policy, [])
        [report] = actor.update(policy)
        found = {name: tensor.clone() for name, tensor in actor._backend.weights()}
        told = ("engine_gap", "corrected")
        means = {name: report.metrics[name] / report.num_sampled for name in told if name in report.metrics}
        return found, means
    finally:
        actor.close()


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_corrections_weigh_the_tokens_of_a_stale_engine_and_leave_those_of_a_fresh_one(old, new):
    fresh, stale = groups_of(new), groups_of(old)
    none = "{kind: none}"
    plain, facts = learned(new, fresh, none)
    assert facts["engine_gap"] < 1e-5
    # Without a correction nothing is learned from the engine's log-probs.
    ignored, facts = learned(new, stale, none)
    assert apart(plain, ignored) == 0.0
    assert facts["engine_gap"] > 0.01
    for kind in ("tis", "icepop", "seq-mask-tis"):
        corrected = f"{{kind: {kind}, low: 0.9, high: 1.1}}"
        same, facts = learned(new, fresh, corrected)
        assert apart(plain, same) < 1e-5, kind
        assert facts["corrected"] == 0.0, kind
        other, facts = learned(new, stale, corrected)
        assert apart(plain, other) > 1e-4, kind
        assert facts["corrected"] > 0.1, kind
