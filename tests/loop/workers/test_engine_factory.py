"""What engines are started with."""

import pytest

from hotseat.errors import RunError
from hotseat.loop.workers.engine_worker import make_engine
from hotseat.rollout import vllm_engine
from hotseat.rollout.kinds import EngineOptions, EngineSettings

NUM_SLOTS = 1 << 16  # so many that the cache is larger than the least it can be


class NotStarted(Exception):
    """Raised by the core that stands in for vLLM's."""


def options_of(task, monkeypatch, memory_share: float | None) -> vllm_engine.CoreOptions:
    """The options with which vLLM would be started in this process, which has no GPU."""
    given: list[vllm_engine.CoreOptions] = []

    def core(options, when_lost):
        given.append(options)
        raise NotStarted

    monkeypatch.setattr(vllm_engine, "Core", core)
    monkeypatch.setattr(vllm_engine, "log_to", lambda log: {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = EngineOptions(1, memory_share, prefix_caching=True, enforce_eager=True, logs=str(task))
    with pytest.raises(RunError):
        make_engine(
            EngineSettings(f"{task}/model", 16, NUM_SLOTS, (1,), "float32", 1, engine="vllm", options=options), 0
        )
    return given[0]


def test_on_a_cpu_the_cache_of_vllm_is_as_large_as_its_slots_need_whatever_its_share(task, monkeypatch):
    """A share would be one of the host's memory, which others use too.

    16 tokens in each slot: keys and values, 2 layers, 1 head of 8 numbers, 4 bytes each.
    """
    for share in (None, 0.95):
        options = options_of(task, monkeypatch, share)
        assert options.memory_share is None
        assert options.kv_cache_bytes == NUM_SLOTS * 16 * 2 * 2 * 8 * 4
