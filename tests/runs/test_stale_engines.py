"""An engine that goes on with old weights is found out; what it sampled with them is corrected for, if asked."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_cases import make_task, rl_yaml
from safetensors.torch import load_file, save_file

from hotseat.algorithms.digest import tensor_digest
from hotseat.cluster import Cluster
from hotseat.config import loads
from hotseat.errors import WeightError
from hotseat.loop.rl.canary import CanaryGuard, CanarySettings
from hotseat.loop.rl.sync import push_weights
from hotseat.loop.settings.rollout_settings import engine_settings
from hotseat.loop.settings.training_settings import policy_settings, train_options
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.experience import Share
from hotseat.loop.workers.model_workers import ActorWorker
from hotseat.loop.workers.weight_check import Canary, WeightCheck
from hotseat.model_source import ModelSource
from hotseat.types import Episode, Prompt, PromptGroup, SampleKey, ScoredEpisode, Segment
from hotseat.weights.bucket import Bucket
from hotseat.weights.transfer import Sender
from hotseat.weights.transports import choose_transports

pytestmark = pytest.mark.slow

Weights = dict[str, torch.Tensor]
Fault = Callable[[Weights], None]


class Sending(ActorWorker):
    """Sends something else than it holds, once it was told so."""

    def __init__(self, *args):
        super().__init__(*args)
        self._fault: Fault | None = None
        self._sender = Sender(self._stream)

    def inject(self, fault: Fault | None) -> None:
        self._fault = fault

    def _stream(self):
        weights = {name: tensor.detach().clone() for name, tensor in self._backend.weights(dtype=self._dtype)}
        if self._fault is not None:
            self._fault(weights)
        yield from weights.items()


class Blind(EngineWorker):
    """Has no digests."""

    def finish_load(self, version: int, canary: Canary | None) -> WeightCheck:
        proof = super().finish_load(version, canary)
        return replace(proof, undigested=frozenset(proof.digests))


class Stale(EngineWorker):
    """Takes a push, says that it serves the new version, and keeps the old weights."""

    def begin_load(self, version: int) -> None:
        self._arrived: dict[str, int] = {}

    def take_bucket(self, bucket: Bucket) -> None:
        self._arrived |= {name: tensor_digest(tensor) for name, tensor in bucket}

    def finish_load(self, version: int, canary: Canary | None) -> WeightCheck:
        self._engine._serving.version = version  # type: ignore[attr-defined]
        return WeightCheck(self._engine.digest(), None if canary is None else self.score_canary(canary))


class Blinded(Stale):
    """As well, with digests of what arrived, not of what is used."""

    def finish_load(self, version: int, canary: Canary | None) -> WeightCheck:
        proof = super().finish_load(version, canary)
        return replace(proof, digests=proof.digests | self._arrived)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("new"), seed=1)


class Pair:
    """An actor, an engine, and the guard between them."""

    def __init__(self, cluster: Cluster, actor_task: Path, engine_task: Path, engine: type, max_length: int = 16):
        length = f"data.max_length={max_length}"
        config = loads(rl_yaml(actor_task), [length])
        made = engine_settings(loads(rl_yaml(engine_task), [length]), (1,), engine_task)
        options = train_options(config, 1)
        self.actor = cluster.launch("actor", Sending, args=(config.actor.model, options, "float32"))
        self.engines = cluster.launch("rollout", engine, args=(made,))
        prompts = [Prompt(index, "", (3 + index, 12, 4, 13)) for index in range(4)]
        chosen = replace(CanarySettings.of(config, on_gpu=False), num_tokens=256)
        self.warnings: list[str] = []
        turn = lambda phase, role: nullcontext()  # noqa: E731
        self.guard = CanaryGuard(chosen, prompts, self.actor, self.engines, None, turn, self.warnings.append)
        self.version = 0

    def push(self) -> dict[str, float]:
        """A push, and what the canary says of it."""
        transports = choose_transports([[0]], [[0]], is_cuda=False)
        self.version += 1
        self.guard.check(push_weights(self.actor, self.engines, self.version, self.guard.canary, transports))
        if self.guard.canary is None:
            self.guard.start(self.version)
        return self.guard.metrics()


@pytest.fixture
def cluster():
    with Cluster("local", num_devices=1) as made:
        yield made


def test_an_engine_that_takes_its_weights_agrees(old, new, cluster):
    pair = Pair(cluster, new, old, EngineWorker)
    for _ in range(2):
        assert pair.push()["canary_gap"] < 1e-5
    assert pair.warnings == []


def test_the_digest_finds_an_engine_that_kept_its_weights_and_names_the_tensor(old, new, cluster):
    with pytest.raises(WeightError, match=r"engine 0 serves other values of model\.embed_tokens\.weight .*version 1"):
        Pair(cluster, new, old, Stale).push()


def test_where_digests_see_nothing_the_canary_does(old, new, cluster):
    with pytest.raises(WeightError, match=r"engine 0 and the trainer disagree on version 1: over 264 tokens"):
        Pair(cluster, new, old, Blinded).push()


# --- faults that only the canary can see ------------------------------------------------------------------------------


def swap_layers(weights: Weights) -> None:
    for name in [name for name in weights if ".layers.0." in name]:
        other = name.replace(".layers.0.", ".layers.1.")
        weights[name], weights[other] = weights[other], weights[name]


def halve_norm(weights: Weights) -> None:
    weights["model.layers.1.input_layernorm.weight"] /= 2


def lose_bias(weights: Weights) -> None:
    weights["model.layers.1.self_attn.q_proj.bias"].zero_()


def swap_experts(weights: Weights) -> None:
    name = next(name for name in weights if ".experts." in name and name.endswith("down_proj"))
    weights[name] = weights[name][[1, 0, 2, 3]]


def make_wild(directory: Path, architecture: str, **shape: float) -> Path:
    """A task whose model has large weights, and biases if it has any, so that every part of it matters."""
    task = make_task(directory, architecture=architecture, initializer_range=0.4, **shape)
    path = task / "model" / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(tensor.shape, generator=generator) if name.endswith(".bias") else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return task


@pytest.mark.parametrize(
    ("architecture", "fault", "named"),
    [
        ("Llama", swap_layers, r"model\.layers\.[01]\."),
        ("Llama", halve_norm, r"model\.layers\.1\.input_layernorm\.weight .*1 of"),
        ("Qwen2", lose_bias, r"model\.layers\.1\.self_attn\.q_proj\.bias .*1 of"),
        ("Mixtral", swap_experts, r"model\.layers\.0\..*experts\.down_proj .*1 of"),
    ],
)
def test_digests_name_a_fault_and_without_them_the_canary_sees_it(architecture, fault, named, tmp_path, cluster):
    experts = {"num_local_experts": 4} if architecture == "Mixtral" else {}
    task = make_wild(tmp_path, architecture, **experts)
    pair = Pair(cluster, task, task, Blind)
    assert pair.push()["canary_gap"] < 1e-5
    pair.push()
    pair.actor.call(Sending.inject, fault)
    with pytest.raises(WeightError, match=r"engine 0 and the trainer disagree on version 3.*Earlier pushes agreed"):
        pair.push()
    for group in (pair.actor, pair.engines):
        group.close()
    pair = Pair(cluster, task, task, Blind)
    pair.actor.call(Sending.inject, fault)
    with pytest.raises(WeightError, match=r"engine 0 and the trainer disagree on version 1.*confirmed on 264 other"):
        pair.push()
    for group in (pair.actor, pair.engines):
        group.close()
    pair = Pair(cluster, task, task, EngineWorker)
    pair.actor.call(Sending.inject, fault)
    with pytest.raises(WeightError, match=rf"engine 0 serves other values of {named}"):
        pair.push()


def test_wrong_positions_are_no_weights_and_the_canary_sees_them_at_the_first_push(tmp_path, cluster):
    task = make_wild(tmp_path / "right", "Llama", max_position_embeddings=256)
    shutil.copytree(task, tmp_path / "wrong")
    path = tmp_path / "wrong" / "model" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] *= 10
    path.write_text(json.dumps(config))
    with pytest.raises(WeightError, match=r"disagree on version 1.*positions, epsilon of norms"):
        Pair(cluster, task, tmp_path / "wrong", EngineWorker, max_length=160).push()


# --- what a stale engine sampled --------------------------------------------------------------------------------------


def groups_of(model: Path) -> list[PromptGroup]:
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
        groups.append(PromptGroup(Prompt(prompt, "", ()), tuple(samples)))
    return groups


def learned(new: Path, groups: list[PromptGroup], correction: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights after one update of the new policy, and what the update reports per token."""
    config = loads(rl_yaml(new, algorithm=f"{{correction: {correction}}}"))
    policy = policy_settings(config, 1, 0.0)
    actor = ActorWorker(ModelSource(str(config.actor.model)), train_options(config, 1), "float32")
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
