import math

import pytest
import torch

from hotseat.algorithms.quantiles import NUM_BINS, count_sizes, quantile


def test_a_quantile_is_right_to_fifteen_percent() -> None:
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) ** 4
    counts = count_sizes(values).tolist()
    assert sum(counts) == 100_000
    for share in (0.5, 0.9, 0.99):
        exact = float(torch.quantile(values.double(), share))
        assert exact <= quantile(counts, share) <= exact * 1.16


def test_counts_of_parts_add_up_to_the_counts_of_the_whole() -> None:
    values = torch.rand(1000)
    assert torch.equal(count_sizes(values, values > 0.5), count_sizes(values[values > 0.5]))
    assert torch.equal(count_sizes(values[:300]) + count_sizes(values[300:]), count_sizes(values))


def test_what_is_tiny_zero_huge_or_no_number_is_counted_at_the_ends() -> None:
    counts = count_sizes(torch.tensor([0.0, 1e-9, 50.0, math.inf, math.nan]))
    assert counts[0] == 2
    assert counts[NUM_BINS - 1] == 3
    assert quantile(counts.tolist(), 0.4) == pytest.approx(1e-6)
    assert quantile(counts.tolist(), 0.99) == math.inf
    assert quantile([0.0] * NUM_BINS, 0.99) == 0.0
    assert count_sizes(torch.zeros(0)).sum() == 0
