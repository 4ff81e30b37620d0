"""Layers over several ranks: what fits, and groups against one rank of the other backend."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from hotseat.errors import UnsupportedError, UserError
from hotseat.train.backend import LoraOptions, ZeroOptions
from hotseat.train.tensor import check_cut, cut_layers
from hotseat.train.zero import ZeroBackend

from . import fsdp_factory, tensor_scenarios, zero_factory
from .conformance import (
    OPTIONS,
    assert_close,
    assert_group_agrees,
    assert_no_rank_failed,
    copy_weights,
    tiny_model,
    weights_after_another_update,
)
from .run_ranks import TIMEOUT_S, run_ranks

pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)

STAGES = [2, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1))]
OVER_TWO = replace(OPTIONS, zero=ZeroOptions(tensor_parallel_size=2))
SCENARIOS = [
    name if name in tensor_scenarios.FEW else pytest.param(name, marks=pytest.mark.long)
    for name in tensor_scenarios.TWO
]
Group = Callable[[int, str], tuple[Path, list[dict[str, Any]]]]


# --- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_parallel_size": 2}, "ranks share either layers or sequences; set one of the two to 1"),
        (
            {"lora": LoraOptions(rank=2)},
            "adapters beside layers that are cut are not built in: set train.lora.rank to 0",
        ),
        ({"compile": True}, "layers that are cut are not compiled: leave train.compile unset"),
        ({"liger_kernel": True}, "run without Liger's kernels: set train.liger_kernel to false"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"train.deepspeed.tensor_parallel_size is 2.*{message}"):
        ZeroBackend.check(replace(OVER_TWO, **settings))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.MixtralConfig(), "Mixtral is a mixture of experts, which are not cut: set it to 1"),
        (transformers.GPT2Config(), "the layers of GPT2 does not say how to cut them: set it to 1; ZeRO stage 3"),
        (transformers.Phi3Config(), "the layers of Phi3 asks for .*colwise_gather_output.*, which is not built in"),
    ],
)
def test_models_that_transformers_does_not_cut_so_are_refused(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_cut(2, config)
    check_cut(1, config)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "the model's 8 attention heads do not divide over 3 ranks: set it to 1 or 2"),
        (4, "the model's 2 key-value heads do not divide over 4 ranks: set it to 1 or 2"),
    ],
)
def test_heads_that_do_not_divide_are_refused(size: int, message: str) -> None:
    config = transformers.Qwen3Config(num_attention_heads=8, num_key_value_heads=2, intermediate_size=48)
    check_cut(2, config)
    with pytest.raises(UserError, match=message):
        check_cut(size, config)


def test_widths_that_do_not_divide_are_refused() -> None:
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=8, intermediate_size=44)
    with pytest.raises(UserError, match=r"44 columns between the halves of an MLP do not.* set it to 1, 2 or 4"):
        check_cut(8, config)


@pytest.mark.slow
def test_models_and_ranks_are_refused_before_weights_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_model(num_key_value_heads=1).config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"tensor_parallel_size is 2, and 1 rank cannot be divided.* set it to 1, or"):
        ZeroBackend(tmp_path, OVER_TWO)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="1 key-value heads do not divide over 2 ranks: set it to 1"):
        ZeroBackend(tmp_path, OVER_TWO)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_the_model_is_refused() -> None:
    class Nobody:
        size, rank, group = 2, 0, None

    model = tiny_model()
    model.config.base_model_tp_plan = {"blocks.*.first": "colwise", "blocks.*.second": "rowwise"}
    with pytest.raises(UnsupportedError, match=r"AutoTP found no blocks.\*.first to cut in LlamaForCausalLM"):
        cut_layers(model, Nobody())  # type: ignore[arg-type]


# --- two ranks, and four ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    """Two ranks of a stage, through scenarios of that name: their folder, and what they found."""

    @functools.cache
    def run(stage: int, scenarios: str) -> tuple[Path, list[dict[str, Any]]]:
        directory = tmp_path_factory.mktemp(f"stage-{stage}")
        for name in tensor_scenarios.CHECKS:
            (directory / name).mkdir()
        tensor_scenarios.LEARNS["goes_on"](fsdp_factory.make, 0, 1, directory)  # for the ranks to go on from
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(zero_factory.STAGE, str(stage))
            return directory, run_ranks(2, tensor_scenarios.__name__, directory, scenarios=scenarios)

    return run


@functools.cache
def alone(name: str) -> Any:
    """One rank of the other backend."""
    with tempfile.TemporaryDirectory() as directory:
        return tensor_scenarios.LEARNS[name](fsdp_factory.make, 0, 1, Path(directory))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_that_share_layers_are_as_one(name: str, stage: int, group: Group) -> None:
    _, results = group(stage, "FEW" if name in tensor_scenarios.FEW else "TWO")
    assert_no_rank_failed(name, results)
    if name in tensor_scenarios.LEARNS:
        assert_group_agrees(alone(name), [result[name] for result in results])


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_of_either_backend_goes_on_from_what_two_saved(stage: int, group: Group) -> None:
    directory, results = group(stage, "FEW")
    assert_no_rank_failed("goes_on", results)
    saved = results[0]["goes_on"]["weights"]
    zero = replace(OPTIONS, average_decay=0.5, zero=ZeroOptions(2))
    after = []
    for make, options in ((fsdp_factory.make, replace(zero, zero=None)), (zero_factory.make, zero)):
        for folder in ("saved-2", "snapshot-2", "saved-1"):
            backend = make(tensor_scenarios.qwen2(), options)
            backend.load(directory / folder)
            assert backend.version == 2
            tolerance = 0 if folder.endswith("2") else 1e-6
            weights = copy_weights(backend)
            assert_close(weights, {name: saved[name] for name in weights}, tolerance)
            with backend.averaged():
                average = copy_weights(backend)
            assert_close(average, {name: saved[f"average {name}"] for name in average}, tolerance)
            after.append(weights_after_another_update(backend))
    for weights in after[1:]:
        assert_close(weights, after[0])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [0, 2])
def test_two_groups_of_two_are_as_one_rank(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(zero_factory.STAGE, str(stage))
    results = run_ranks(4, tensor_scenarios.__name__, tmp_path, timeout_s=500, scenarios="FOUR")
    for name, scenario in tensor_scenarios.FOUR.items():
        assert_no_rank_failed(name, results)
        expected = scenario(fsdp_factory.make, 0, 1, tmp_path / name)
        assert_group_agrees(expected, [result[name] for result in results])
