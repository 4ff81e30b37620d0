"""Engines on each device, where the run chooses their number."""

from __future__ import annotations

import pytest

from hotseat.config import Config, loads, to_saved
from hotseat.config.changes import changes_between
from hotseat.planning.config_plan import make_plan, with_engines_on

SHAPES = {
    "135M": "{hidden_size: 576, num_hidden_layers: 30, num_attention_heads: 9, num_key_value_heads: 3,"
    " intermediate_size: 1536, vocab_size: 49152, tie_word_embeddings: true}",
    "1.5B": "{hidden_size: 1536, num_hidden_layers: 28, num_attention_heads: 12, num_key_value_heads: 2,"
    " intermediate_size: 8960, vocab_size: 151936, tie_word_embeddings: true}",
    "8B": "{hidden_size: 4096, num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8,"
    " intermediate_size: 14336, vocab_size: 128256}",
}


def config_of(model: str, rollout: str = "", more: str = "", batch: int = 128, max_length: int = 1024) -> Config:
    return loads(
        f"task: rl\nactor: {{model: no/model, shape: {SHAPES[model]}}}\n"
        f"data: {{path: x.jsonl, max_length: {max_length}}}\nreward: {{function: r.py}}\n"
        f"rollout: {{engine: vllm, batch_size: {batch}, samples_per_prompt: 8{rollout}}}\n{more}"
    )


def count(config: Config, inventory: str = "1x1xH200") -> int | None:
    return with_engines_on(config, inventory).rollout.num_engines


@pytest.mark.parametrize(("model", "engines"), [("135M", 3), ("1.5B", 2), ("8B", None)])
def test_small_models_get_several_engines_on_a_gpu_and_the_plan_fits(model: str, engines: int | None) -> None:
    config = config_of(model)
    assert count(config) == engines
    if engines is not None:
        made = make_plan(config, "1x1xH200")
        assert made.verdict == "fits"
        assert len(made.role("rollout").processes) == engines
        assert made.role("rollout").share == pytest.approx(0.9 / engines)


def test_each_of_several_devices_gets_as_many() -> None:
    placed = "cluster: {component_placement: {actor: 0-1}}\n"
    assert count(config_of("1.5B", more=placed), "1x2xH200") == 4


def test_there_are_no_more_than_have_sequences_to_work_on() -> None:
    assert count(config_of("135M", batch=16)) == 2  # 64 each
    assert count(config_of("135M", batch=15)) is None


@pytest.mark.parametrize(
    "rollout", [", num_engines: 1", ", memory_share: 0.5", ", tensor_parallel_size: 2", ", engine: transformers"]
)
def test_settings_of_the_user_stay(rollout: str) -> None:
    config = config_of("135M", rollout.replace(", engine: transformers", ""))
    if "engine: transformers" in rollout:
        config = loads(to_saved(config).replace("engine: vllm", "engine: transformers"))
    placed = config.with_options({"cluster.component_placement": {"actor": "0-1"}})
    assert with_engines_on(placed, "1x2xH200").rollout.num_engines == config.rollout.num_engines


def test_a_placement_that_says_how_many_stays() -> None:
    placed = "cluster: {component_placement: {actor: 0, rollout: '0:0-1'}}\n"
    assert count(config_of("135M", more=placed)) is None


def test_where_more_would_have_to_be_offloaded_there_is_one() -> None:
    """A GPU of 24 GiB holds weights, gradients and Adam of 1.5B parameters, and no second engine beside them."""
    long = config_of("1.5B", max_length=4096)
    assert count(long, "1x1x24GB") is None


def test_on_cpus_and_unknown_devices_there_is_one() -> None:
    config = config_of("135M")
    assert count(config, "1x1") is None
    assert len(make_plan(config, are_devices_logical=True).role("rollout").processes) == 1


def test_the_choice_is_no_change_when_the_run_resumes() -> None:
    config = config_of("135M")
    assert changes_between(to_saved(with_engines_on(config, "1x1xH200")), config) == []
