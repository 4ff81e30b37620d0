"""Engines and trainer with stretched positions: the log-probs of transformers with the same rope parameters."""

import importlib.util

import pytest
import torch
from loop_cases import make_task, rl_yaml, weights
from transformers import AutoConfig, AutoModelForCausalLM

from hotseat.config import loads
from hotseat.errors import UnsupportedError
from hotseat.loop.run import start
from hotseat.loop.workers.engine_worker import make_engine
from hotseat.model_source import ModelSource
from hotseat.observe import read_lines
from hotseat.rollout.kinds import EngineOptions, EngineSettings

pytestmark = pytest.mark.slow

YARN = {"rope_type": "yarn", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
has_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def source(task, scaling) -> ModelSource:
    return ModelSource(str(task / "model"), rope_scaling=tuple(sorted(scaling.items())))


def expected_log_probs(task, scaling, tokens: list[int]) -> list[float]:
    """Log-probs of a model whose config.json says it, as its users would write it."""
    config = AutoConfig.from_pretrained(task / "model")
    original = {} if scaling["rope_type"] == "linear" else {"original_max_position_embeddings": 32}
    config.rope_parameters = {"rope_theta": 10000.0, **original, **scaling}
    config.max_position_embeddings = 64
    model = AutoModelForCausalLM.from_pretrained(task / "model", config=config, dtype=torch.float32)
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)
    return [0.0, *(float(log_probs[t, token]) for t, token in enumerate(tokens[1:]))]


@pytest.mark.parametrize(
    ("engine", "scaling"),
    [
        ("transformers", YARN),
        ("transformers", LINEAR),
        ("transformers", LLAMA3),
        pytest.param("vllm", YARN, marks=[has_vllm, pytest.mark.long]),
        pytest.param("vllm", LINEAR, marks=[has_vllm, pytest.mark.long]),
        pytest.param("vllm", LLAMA3, marks=[has_vllm, pytest.mark.long]),
    ],
)
def test_an_engine_computes_what_transformers_does(engine, scaling, tmp_path):
    task = make_task(tmp_path, hidden_size=64)  # heads of a size that vLLM computes on CPUs
    tokens = [3 + (7 * at) % 11 for at in range(60)]
    plain = ModelSource(str(task / "model"))
    assert plain.config().max_position_embeddings == 32
    options = EngineOptions(logs=str(tmp_path / "logs"), cache_gib=1 / 16)
    settings = EngineSettings(source(task, scaling), 62, 4, (1,), "float32", 1, engine=engine, options=options)
    made = make_engine(settings, 0)
    try:
        [scores] = made.score([tokens])
    finally:
        made.close()
    assert scores == pytest.approx(expected_log_probs(task, scaling, tokens), abs=1e-4)


def test_a_run_learns_from_positions_that_the_checkpoint_does_not_have(task):
    keys = ["data.max_length=56", "rollout.max_new_tokens=48", f"actor.rope_scaling={YARN}", "train.num_episodes=1"]
    start(loads(rl_yaml(task), [*keys, "algorithm.kl.coef=0.01"]))
    exported = AutoConfig.from_pretrained(task / "runs" / "run" / "model")
    assert exported.max_position_embeddings == 64
    assert exported.rope_parameters == {"rope_theta": 10000.0, **YARN, "original_max_position_embeddings": 32}
    assert weights(task, "run")
    records = read_lines(task / "runs" / "run" / "metrics.jsonl")
    assert max(record.get("engine_gap_max", 0.0) for record in records) < 1e-3


def test_a_model_without_rotary_positions_is_refused_by_name(tmp_path):
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="actor.rope_scaling: GPT2 has no rotary positions"):
        ModelSource(str(tmp_path), rope_scaling=(("factor", 2.0), ("rope_type", "yarn"))).config()
