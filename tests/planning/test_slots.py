"""Sequences that an engine decodes at a time, where the run chooses them."""

from __future__ import annotations

import pytest

from hotseat.config import Config, loads, to_saved
from hotseat.config.changes import changes_between
from hotseat.planning.config_plan import make_plan, with_engines_on
from hotseat.planning.role_specs import engine_slots
from hotseat.planning.slots import MAX_SLOTS, UNPRICED_SLOTS

SMALL = "{hidden_size: 896, num_hidden_layers: 24, num_attention_heads: 14, num_key_value_heads: 2,"
SMALL += " intermediate_size: 4864, vocab_size: 151936}"
LARGE = "{hidden_size: 4096, num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8,"
LARGE += " intermediate_size: 14336, vocab_size: 128256}"


def config_of(
    shape: str | None = SMALL, *, batch: int = 128, max_length: int = 1024, rollout: str = "", more: str = ""
) -> Config:
    given = "" if shape is None else f", shape: {shape}"
    return loads(
        f"task: rl\nactor: {{model: no/model{given}}}\ndata: {{path: x.jsonl, max_length: {max_length}}}\n"
        f"reward: {{function: r.py}}\nrollout: {{batch_size: {batch}, samples_per_prompt: 8{rollout}}}\n{more}"
    )


def slots(config: Config, inventory: str = "1x1xH200") -> int | None:
    return with_engines_on(config, inventory).rollout.num_slots


def test_on_a_gpu_there_are_as_many_as_a_step_has_samples_up_to_a_bound() -> None:
    assert slots(config_of(batch=16)) == 16 * 8
    assert slots(config_of(batch=17)) == 192  # in units of 64
    assert slots(config_of(batch=128)) == 1024
    assert slots(config_of(batch=512)) == MAX_SLOTS


def test_several_engines_share_a_step() -> None:
    placed = "cluster: {component_placement: {actor: 0-1}}\n"
    assert slots(config_of(batch=64, more=placed), "1x2xH200") == 256


def test_their_cache_takes_a_part_of_the_device() -> None:
    """A key and a value of 24 layers x 2 heads x 64 x 2 bytes take 12 KiB: 16,384 of them 0.1875 GiB."""
    long = config_of(max_length=16_384)
    chosen = slots(long)
    assert chosen == int(0.4 * 139.8 / 0.1875) // 64 * 64 == 256
    assert make_plan(long, "1x1xH200").verdict == "fits"


def test_there_are_no_more_than_the_plan_has_room_for() -> None:
    large = config_of(LARGE, more="train: {fp32_master: false, batch_size: 1024}\n", max_length=2048)
    count = slots(large)
    assert count is not None
    assert 64 <= count < 512  # 0.25 GiB each, beside weights, gradients and optimizer of 8B parameters


@pytest.mark.parametrize("number", [5, 2000])
def test_a_number_that_is_set_stays(number: int) -> None:
    assert slots(config_of(rollout=f", num_slots: {number}")) == number


def test_an_engine_that_sizes_its_own_batch_has_none() -> None:
    assert slots(config_of(rollout=", engine: vllm")) is None


def test_unknown_models_get_a_moderate_number() -> None:
    assert slots(config_of(None)) == UNPRICED_SLOTS


def test_on_cpus_the_number_is_always_the_same() -> None:
    config = config_of()
    assert engine_slots(config) == 64
    assert make_plan(config, are_devices_logical=True).verdict is not None
    assert config.rollout.num_slots is None


def test_what_the_run_chose_is_no_change_when_it_resumes() -> None:
    config = config_of()
    assert changes_between(to_saved(with_engines_on(config, "1x1xH200")), config) == []
