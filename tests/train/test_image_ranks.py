"""Ranks that train a model which sees images, some with images and some without, do what one rank does."""

from pathlib import Path

import pytest
import torch

from . import fsdp_factory, image_scenarios, zero_factory
from .run_ranks import TIMEOUT_S, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 100)]


@pytest.mark.parametrize(
    ("factory", "stage"),
    [
        (fsdp_factory, 0),
        pytest.param(zero_factory, 2, marks=pytest.mark.long),
        pytest.param(zero_factory, 3, marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_two_ranks_train_as_one_does(factory, stage: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(zero_factory.STAGE, str(stage))
    results = run_ranks(2, factory.__name__, tmp_path / "ranks", suite=image_scenarios.__name__)
    for name, scenario in image_scenarios.SCENARIOS.items():
        alone = scenario(fsdp_factory.make, 0, 1, tmp_path)
        for of_rank in results:
            result = of_rank[name]
            assert isinstance(result, dict), result
            assert torch.allclose(result["reports"], alone["reports"], rtol=1e-4, atol=1e-6), name
            assert torch.allclose(result["log_probs"], alone["log_probs"], atol=2e-4), name
            for weight, value in alone["weights"].items():
                assert torch.allclose(result["weights"][weight], value, atol=2e-4), (name, weight)
