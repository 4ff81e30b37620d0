"""Mixtures of experts through whole runs."""

import importlib.util
from pathlib import Path

import pytest
import transformers
from loop_cases import make_task, rl_yaml, sft_yaml

from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.loop.run import start
from hotseat.loop.workers.group_format import decode_group
from hotseat.observe import read_lines
from hotseat.rollout.vllm_kind import VllmKind

pytestmark = pytest.mark.slow

MIXTURES = {
    "MixtralConfig": {"num_local_experts": 4},
    "Qwen3MoeConfig": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}


def make_mixture(directory: Path, config: str, **changes: int) -> Path:
    """The usual task with a mixture of experts as its model."""
    shape = {"initializer_range": 0.3, **MIXTURES[config], **changes}
    return make_task(directory, architecture=config.removesuffix("Config"), **shape)


def run(text: str, *overrides: str) -> list[dict]:
    config = loads(text, overrides)
    start(config)
    return read_lines(Path(config.run_dir) / config.name / "metrics.jsonl")


@pytest.mark.parametrize("config", ["MixtralConfig", pytest.param("Qwen3MoeConfig", marks=pytest.mark.long)])
def test_mixtures_of_experts_learn_from_examples_and_by_reinforcement(config, tmp_path):
    task = make_mixture(tmp_path, config)
    records = run(sft_yaml(task), "algorithm.aux_loss_coef=0.01")
    assert records[-1]["loss"] < records[1]["loss"] - 0.2
    assert 1.5 < records[-1]["aux_loss"] < 4  # two experts of four per token: 2 if all have the same share, at most 4

    # Pushed to the engine under the names of its own weights: digests and canary agree.
    trained = f"actor.model={task}/runs/sft/model"
    records = run(rl_yaml(task), trained, "algorithm.aux_loss_coef=0.01", "train.num_episodes=2")
    assert [record["version"] for record in records[1:]] == [1.0, 2.0, 3.0, 4.0]
    assert all(record["canary_gap"] < 1e-4 and record["engine_gap"] < 1e-4 for record in records[1:])
    assert all(1.5 < record["aux_loss"] < 4 for record in records[1:])
    transformers.AutoModelForCausalLM.from_pretrained(task / "runs" / "run" / "model")


def test_experts_of_the_engine_are_replayed_whatever_the_order_of_work(tmp_path):
    """Recorded groups go through files and, with staleness, from host to actor; engine and trainer agree as before."""
    task = make_mixture(tmp_path, "Qwen3MoeConfig")
    overrides = ("rollout.routing_replay=true", "log.keep_rollouts=true")
    for index, more in enumerate(((), ("overlap.staleness=1", "overlap.in_flight=recompute"))):
        records = run(rl_yaml(task), f"name=run{index}", "train.num_episodes=2", *overrides, *more)
        assert all(record["canary_gap"] < 1e-4 for record in records[1:])
        assert more or all(record["engine_gap"] < 1e-4 for record in records[1:])  # else samples are of older weights
        [*kept] = (task / "runs" / f"run{index}").rglob("*.group")
        assert kept, "no groups are kept"
        for path in kept:
            group, _ = decode_group(path.read_bytes())
            for segment in (segment for sample in group.samples for segment in sample.episode.segments):
                ids = segment.routing.view(-1, 2, 2)
                assert ids[-1].eq(255).all(), "the last token was not processed"
                assert ids[:-1].lt(4).all()


@pytest.mark.parametrize(
    ("architecture", "overrides", "message"),
    [
        ("Llama", (), "rollout.routing_replay is set, and Llama is none of the mixtures of experts"),
        ("Mixtral", ("rollout.engine=vllm",), "vLLM returns the experts of tokens on GPUs alone"),
    ],
)
def test_routing_that_cannot_be_replayed_is_refused(architecture, overrides, message, tmp_path):
    task = make_task(tmp_path, architecture=architecture)
    engine = "{batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4}"
    with pytest.raises(UserError, match=message):
        run(rl_yaml(task, rollout=engine), "rollout.routing_replay=true", *overrides)


def test_vllm_returns_experts_only_with_its_cache_of_prefixes():
    problem = VllmKind().routing_problem(prefix_caching=False, is_cpu=False)
    assert problem == "vLLM keeps the experts of tokens with its cache of prefixes: set rollout.prefix_caching to true"
    assert VllmKind().routing_problem(prefix_caching=True, is_cpu=False) is None


def test_a_balancing_loss_without_experts_is_refused(tmp_path):
    with pytest.raises(UserError, match="a Llama is no mixture of experts"):
        run(sft_yaml(make_task(tmp_path)), "algorithm.aux_loss_coef=0.01")


@pytest.mark.parametrize("has_experts", [True, False])
def test_a_critic_balances_its_experts_if_it_has_any(tmp_path, has_experts):
    task = make_mixture(tmp_path / "mixture", "MixtralConfig")
    critic = task if has_experts else make_task(tmp_path / "dense")
    overrides = ("algorithm.aux_loss_coef=0.01", "algorithm.estimator=gae", f"critic.model={critic}/model")
    for record in run(rl_yaml(task), *overrides, "train.num_episodes=1")[1:]:
        assert 1.5 < record["aux_loss"] < 4
        assert ("critic_aux_loss" in record) == has_experts
        assert not has_experts or 1.5 < record["critic_aux_loss"] < 4


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("config", MIXTURES)
def test_mixtures_of_experts_in_fp8_are_refused(config, tmp_path):
    task = make_mixture(tmp_path, config)
    engine = "{engine: vllm, quantization: fp8, batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4}"
    with pytest.raises(UserError, match=r"rollout.quantization is fp8, and \w+ has experts, which it is not built for"):
        run(rl_yaml(task, rollout=engine), "train.dtype=bf16")


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("config", MIXTURES)
def test_mixtures_of_experts_are_pushed_to_vllm(config, tmp_path):
    """Digests of every weight and the canary agree, and samples are those of the weights that were pushed."""
    wide = {"hidden_size": 64, "head_dim": 32, "vocab_size": 14, "moe_intermediate_size": 32}
    task = make_mixture(tmp_path, config, **wide)
    engine = "{engine: vllm, batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4}"
    records = run(rl_yaml(task, rollout=engine), "algorithm.aux_loss_coef=0.01", "train.num_episodes=1")
    assert [record["version"] for record in records[1:]] == [1.0, 2.0]
    assert all(record["canary_gap"] < 1e-4 and record["engine_gap"] < 1e-4 for record in records[1:])
