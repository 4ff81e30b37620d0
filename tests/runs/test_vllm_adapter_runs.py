"""Runs that train adapters and sample with vLLM, which gets them alone."""

import importlib.util
import json
from pathlib import Path

import pytest
from loop_cases import make_task, rl_yaml

from hotseat.config import loads
from hotseat.errors import ConfigError, UserError
from hotseat.loop.run import start
from hotseat.loop.settings.rollout_settings import are_adapters_alone, engine_settings
from hotseat.observe import read_lines

ROLLOUT = "{engine: vllm, batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4}"
LORA = ("train.lora.rank=4", "train.lora.alpha=16")
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 14}


def settings(task: Path, *overrides: str):
    return loads(rl_yaml(task, rollout=ROLLOUT), [*LORA, *overrides])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.long
def test_a_run_pushes_adapters_alone_after_the_first_time(tmp_path):
    task = make_task(tmp_path, initializer_range=0.3, **SHAPE)
    overrides = ("actor.optimizer.learning_rate=0.03", "train.num_episodes=2", "rollout.lora_sync=adapter")
    config = settings(task, *overrides)
    start(config)
    records = read_lines(task / "runs" / "run" / "metrics.jsonl")
    assert [record["version"] for record in records[1:]] == [1.0, 2.0, 3.0, 4.0]
    # Digests agreed, and so do log-probs, although the policy moves.
    assert max(record["engine_gap"] for record in records[1:]) < 1e-5
    assert max(record["canary_gap"] for record in records[1:]) < 1e-4
    # Two layers of 64: q, o [64, 64], k, v [32, 64] and three of the MLP, with 4 x (in + out) numbers each; 4 bytes.
    width = json.loads((task / "model" / "config.json").read_text())["intermediate_size"]
    num_factors = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + width))
    assert [record["sync/gb"] for record in records[1:]] == pytest.approx([4e-9 * num_factors] * 4)


def test_adapters_go_alone_where_the_config_says_so(tmp_path):
    task = make_task(tmp_path, **SHAPE)
    assert are_adapters_alone(settings(task, "rollout.lora_sync=adapter"), on_gpu=False)
    assert are_adapters_alone(settings(task, "rollout.lora_sync=adapter", "train.dtype=bf16"), on_gpu=True)
    assert not are_adapters_alone(settings(task), on_gpu=False)
    assert not are_adapters_alone(loads(rl_yaml(task)), on_gpu=False)
    found = engine_settings(settings(task), (1,), tmp_path, adapters_alone=True).options
    assert found.adapter_rank == 4


def test_adapters_alone_that_vllm_cannot_apply_are_an_error(tmp_path):
    task = make_task(tmp_path, **SHAPE)
    with pytest.raises(UserError, match="rollout.lora_sync is adapter: on a GPU vLLM applies adapters only to 16-bit"):
        are_adapters_alone(settings(task, "rollout.lora_sync=adapter"), on_gpu=True)
    with pytest.raises(UserError, match="vLLM applies adapters of rank 512 or less, and train.lora.rank is 600"):
        are_adapters_alone(settings(task, "rollout.lora_sync=adapter", "train.lora.rank=600"), on_gpu=False)


def test_without_adapters_or_vllm_the_option_has_no_effect(tmp_path):
    task = make_task(tmp_path, **SHAPE)
    with pytest.raises(ConfigError, match="rollout.lora_sync: has no effect: rollout.engine is transformers"):
        loads(rl_yaml(task), [*LORA, "rollout.lora_sync=adapter"])
    with pytest.raises(ConfigError, match="rollout.lora_sync: has no effect: train.lora.rank is 0"):
        loads(rl_yaml(task, rollout=ROLLOUT), ["rollout.lora_sync=adapter"])
