"""A whole run whose engine keeps weights in FP8."""

import importlib.util
from pathlib import Path

import pytest
from loop_cases import make_task, rl_yaml

from hotseat.config import loads
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_a_run_samples_in_fp8_within_the_canarys_limits_and_corrects_for_them(tmp_path):
    task = make_task(tmp_path, hidden_size=64, head_dim=32, vocab_size=14, initializer_range=0.3)
    engine = "{engine: vllm, quantization: fp8, batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4}"
    config = loads(rl_yaml(task, rollout=engine), ["train.dtype=bf16", "train.num_episodes=1"])
    start(config)
    records = read_lines(Path(config.run_dir) / config.name / "metrics.jsonl")
    assert [record["version"] for record in records[1:]] == [1.0, 2.0]
    for record in records[1:]:
        assert record["canary_gap"] > 1e-3  # another policy, by a little
        assert record["canary_use"] < 1
        assert record["canary_alarms"] == 0
