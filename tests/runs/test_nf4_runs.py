"""Runs that train adapters beside a base in NF4, which engines hold in the same bytes."""

import importlib.util
from pathlib import Path

import pytest
import torch
from loop_cases import dpo_yaml, make_task, rl_yaml, rm_yaml, sft_yaml
from peft import PeftModel
from safetensors.torch import load_file
from stopped_runs import stopped_after_saving
from transformers import AutoModelForCausalLM

from hotseat.algorithms.nf4 import nf4_layers, quantise_layers
from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.loop.run import start
from hotseat.loop.settings.rollout_settings import are_adapters_alone
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

QLORA = ("train.load_in_4bit=true", "train.lora.rank=4", "train.lora.alpha=16", "actor.optimizer.learning_rate=0.03")


@pytest.fixture
def task(tmp_path):
    # Embeddings are frozen: they must be large enough for the layers below to say something.
    return make_task(tmp_path, initializer_range=0.3, hidden_size=64, intermediate_size=128)


def run(task: Path, yaml: str, *overrides: str) -> list[dict]:
    config = loads(yaml, [*QLORA, *overrides])
    start(config)
    return read_lines(task / "runs" / config.name / "metrics.jsonl")


def of_base(task: Path) -> dict:
    """What 4 bits keep of the base's weights, by name."""
    base = AutoModelForCausalLM.from_pretrained(task / "model")
    quantise_layers(base)
    return {f"{name}.weight": layer.dequantised(torch.float32) for name, layer in nf4_layers(base).items()}


def test_a_policy_learns_and_engines_sample_from_the_same_bytes(task):
    records = run(task, rl_yaml(task), "train.num_episodes=4", "algorithm.kl.coef=0.001")
    first, last = (sum(record["reward"] for record in part) / 2 for part in (records[1:3], records[-2:]))
    assert last > first + 1
    # The reference has the same bytes: before the first update it is the policy.
    assert records[1]["kl"] == pytest.approx(0, abs=1e-6)
    assert records[-1]["kl"] > 0.01
    assert max(record["engine_gap"] for record in records[1:]) < 1e-5
    assert max(record["canary_gap"] for record in records[1:]) < 1e-5
    # Adapters of rank 4 alone: of q, o [64, 64], k, v [32, 64] and three of [128, 64], in two layers, 4 bytes each.
    num_factors = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert [record["sync/gb"] for record in records[1:]] == pytest.approx([4e-9 * num_factors] * 8)


def test_examples_are_learned_and_exported_merged_and_apart(task):
    records = run(task, sft_yaml(task))
    assert records[-1]["loss"] < records[1]["loss"] - 0.2
    directory = task / "runs" / "sft" / "model"
    merged = AutoModelForCausalLM.from_pretrained(directory)
    base, kept = AutoModelForCausalLM.from_pretrained(task / "model"), of_base(task)
    base.load_state_dict(kept, strict=False)
    adapted = PeftModel.from_pretrained(base, directory / "adapter")
    token_ids = torch.arange(12)[None]
    ours, theirs = (model.eval()(token_ids).logits.log_softmax(-1) for model in (merged, adapted))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("make_yaml", [rm_yaml, dpo_yaml])
def test_pairs_are_learned(task, make_yaml):
    records = run(task, make_yaml(task), "train.max_epochs=2")
    assert records[-1]["loss"] < records[1]["loss"] - 0.1


@pytest.mark.long
def test_a_run_resumes_from_its_adapters_and_the_digest_of_its_base(task):
    options = ("checkpoint.every=1", "train.max_epochs=1")
    run(task, sft_yaml(task, name="whole"), *options)
    with stopped_after_saving():
        run(task, sft_yaml(task, name="broken"), *options)
    assert main(["resume", str(task / "runs" / "broken")]) == 0
    whole, broken = (load_file(task / "runs" / name / "model" / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.long
def test_vllm_samples_from_the_same_bytes(task):
    rollout = "{engine: vllm, batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4}"
    records = run(task, rl_yaml(task, rollout=rollout), "train.num_episodes=2")
    assert [record["version"] for record in records[1:]] == [1.0, 2.0, 3.0, 4.0]
    assert max(record["engine_gap"] for record in records[1:]) < 1e-5
    assert max(record["canary_gap"] for record in records[1:]) < 1e-4


def test_adapters_that_vllm_cannot_apply_beside_four_bits_are_an_error(task):
    config = loads(rl_yaml(task, rollout="{engine: vllm}"), QLORA)
    assert are_adapters_alone(config, on_gpu=False)
    with pytest.raises(UserError, match="train.load_in_4bit: on a GPU vLLM applies adapters only to 16-bit"):
        are_adapters_alone(config, on_gpu=True)
