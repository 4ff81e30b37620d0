"""Mixtures of experts in the shape of Qwen3-30B-A3B, cut in depth, through steps on a GPU."""

import pytest
import torch
from loop_cases import make_task, rl_yaml

from hotseat.config import loads
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = {
    "hidden_size": 2048,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 768,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_fused_experts_are_pushed_and_their_routing_is_replayed(engine, tmp_path):
    """Digests of every weight and the canary agree after each push; the engine's experts are those that are trained."""
    if engine == "vllm":
        pytest.importorskip("vllm")
    task = make_task(tmp_path, architecture="Qwen3Moe", **SHAPE)
    more = ", prefix_caching: true, memory_share: 0.3" if engine == "vllm" else ", num_slots: 16"
    rollout = f"{{engine: {engine}, batch_size: 4, samples_per_prompt: 4, routing_replay: true{more}}}"
    actor = f"{{model: {task}/model, optimizer: {{learning_rate: 1e-5, schedule: constant}}}}"
    config = loads(
        rl_yaml(task, rollout=rollout, actor=actor),
        ["train.dtype=bf16", "train.num_episodes=1", "rollout.max_new_tokens=8"],
    )
    start(config)
    records = read_lines(tmp_path / "runs" / "run" / "metrics.jsonl")[1:]
    assert [record["version"] for record in records] == [1.0, 2.0]
    for record in records:
        print({name: record[name] for name in ("engine_gap", "canary_gap", "canary_use") if name in record})
        assert record["engine_gap"] < 0.1
