"""The same recorded batches train the same model, whatever backend, ranks, ZeRO stage and layout: invariant 2.

In fp32. What is compared is `conformance.learns`: losses of five updates, log-probs before and after, and the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from . import adapters, fsdp_factory, zero_factory
from .conformance import OPTIONS, TEACHINGS, assert_close, assert_identical, learns, learns_from_a_teacher
from .run_ranks import TIMEOUT_S, run_ranks

pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)

MATRIX = {
    f"{layout}_{what}": learns(replace(options, layout=layout))
    for layout in ("padded", "packed")
    for what, options in (("weights", OPTIONS), ("adapters", adapters.LORA))
} | {
    f"{layout}_{what}_{form}": learns_from_a_teacher(replace(options, layout=layout), how)
    for layout in ("padded", "packed")
    for what, options in (("weights", OPTIONS), ("adapters", adapters.LORA))
    for form, how in TEACHINGS.items()
}
# By backend and number of ranks: the factory and its ZeRO stage.
RUNS = {"fsdp_2": (fsdp_factory, None)} | {f"zero{stage}_2": (zero_factory, stage) for stage in range(4)}
ONE = "fsdp_1"  # what all of them must be close to
EVERY_DAY = "zero2_2"  # the others are long

Results = Callable[[str], dict[str, Any]]


def each(*runs: str) -> list[Any]:
    return [pytest.param(run, marks=pytest.mark.slow if run == EVERY_DAY else pytest.mark.long) for run in runs]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of a run, for each entry of the matrix."""

    @functools.cache
    def of(run: str) -> dict[str, Any]:
        directory = tmp_path_factory.mktemp(run)
        if run == ONE:
            return {name: scenario(fsdp_factory.make, 0, 1, directory) for name, scenario in MATRIX.items()}
        factory, stage = RUNS[run]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(zero_factory.STAGE, str(stage))
            ranks = run_ranks(2, factory.__name__, directory, suite=__name__, scenarios="MATRIX")
        for rank, result in enumerate(ranks):
            for name in MATRIX:
                assert not isinstance(result[name], str), f"rank {rank}:\n{result[name]}"
                assert_identical(result[name]["weights"], ranks[0][name]["weights"])
        return ranks[0]

    return of


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    torch.testing.assert_close(found["log_probs"], expected["log_probs"], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["reports"], expected["reports"], rtol=1e-5, atol=0)
    assert_close(found["weights"], expected["weights"], tolerance)


@pytest.mark.parametrize("run", each(*RUNS))
@pytest.mark.parametrize("name", MATRIX)
def test_every_run_is_as_one_rank_of_fsdp(run: str, name: str, results: Results) -> None:
    assert_same(results(run)[name], results(ONE)[name], 1e-5 if run == "fsdp_2" else 1e-4)


@pytest.mark.parametrize("run", each(ONE, *RUNS))
@pytest.mark.parametrize("what", [name.removeprefix("packed_") for name in MATRIX if name.startswith("packed_")])
def test_packed_is_as_padded(run: str, what: str, results: Results) -> None:
    assert_same(results(run)[f"packed_{what}"], results(run)[f"padded_{what}"], 1e-5)


def test_the_comparison_sees_a_step_that_is_a_thousandth_longer(tmp_path: Path) -> None:
    longer = replace(OPTIONS, schedule=replace(OPTIONS.schedule, peak=OPTIONS.schedule.peak * 1.001))
    found, expected = (learns(options)(fsdp_factory.make, 0, 1, tmp_path) for options in (longer, OPTIONS))
    with pytest.raises(AssertionError):
        assert_same(found, expected, 1e-4)
