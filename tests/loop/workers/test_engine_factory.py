"""What engines are started with."""

from hotseat.model_source import ModelSource
from hotseat.rollout.kinds import EngineOptions, EngineSettings
from hotseat.rollout.vllm_versions import memory_arguments

NUM_SLOTS = 1 << 16  # so many that the cache is larger than the least it can be


def test_on_a_cpu_the_cache_of_vllm_is_as_large_as_its_slots_need_whatever_its_share(task):
    """A share would be one of the host's memory, which others use too.

    16 tokens in each slot: keys and values, 2 layers, 1 head of 8 numbers, 4 bytes each.
    """
    for share in (None, 0.95):
        options = EngineOptions(1, share, cache_gib=3.0)
        settings = EngineSettings(
            ModelSource(f"{task}/model"), 16, NUM_SLOTS, (1,), "float32", 1, engine="vllm", options=options
        )
        model_config = settings.model.config()
        on_cpu = memory_arguments(settings, model_config, is_cpu=True)
        assert on_cpu == {"kv_cache_memory_bytes": NUM_SLOTS * 16 * 2 * 2 * 8 * 4}
        on_gpu = memory_arguments(settings, model_config, is_cpu=False)
        assert on_gpu["gpu_memory_utilization"] == (share or settings.entry.memory_share)
        assert on_gpu["kv_cache_memory_bytes"] == 3 * 2**30
