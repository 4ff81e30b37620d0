"""Whether engine and trainer agree, from numbers made by hand."""

import math

import pytest
import torch

from hotseat.algorithms.agreement import GapLimits, GapStatistics, gap_statistics, growth, judge, largest, limits_from

NO_FLOOR = GapStatistics(1e-9, 1e-9, 1e-9)


def test_statistics_of_ten_gaps_worked_by_hand():
    gaps = [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9, -9.0]
    found = gap_statistics(gaps)
    assert found.median == pytest.approx(0.5)
    assert found.p90 == pytest.approx(0.9)  # nine of ten are not larger
    assert found.mean == pytest.approx((2.5 - 11.0) / 10)
    assert found.mean_size == pytest.approx((2.5 + 11.0) / 10)


def test_one_wild_token_in_a_thousand_moves_neither_median_nor_p90():
    gaps = torch.full((1000,), 0.01)
    calm = gap_statistics(gaps)
    gaps[17] = 5.0
    wild = gap_statistics(gaps)
    assert (wild.median, wild.p90) == (calm.median, calm.p90)
    assert wild.mean == pytest.approx(0.01 + 4.99 / 1000)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_gap_that_is_not_finite_is_an_alarm(wrong):
    found = gap_statistics([0.0, 0.0, wrong])
    assert judge(found, [GapLimits(1.0, 1.0, 1.0, "")]).is_alarm


def test_limits_are_multiples_of_the_yardstick_and_never_below_the_floor():
    floor = GapStatistics(0.02, 0.03, 0.001)
    limits = limits_from(GapStatistics(0.01, 0.05, -0.004), 4, floor, "rounding")
    assert (limits.median, limits.p90, limits.mean) == pytest.approx((0.08, 0.2, 0.016))
    # The mean's yardstick is at least an eighth of the mean of |gap|.
    limits = limits_from(GapStatistics(0.04, 0.05, 0.0, mean_size=0.08), 4, floor, "rounding")
    assert limits.mean == pytest.approx(0.04)


def test_limits_grow_with_rounding_and_never_shrink():
    yardstick = GapStatistics(0.01, 0.02, 0.01)
    limits = limits_from(yardstick, 2, NO_FLOOR, "", GapStatistics(3.0, 0.5, 3.0))
    assert (limits.median, limits.p90, limits.mean) == pytest.approx((0.06, 0.04, 0.06))


def test_growth_is_of_what_is_above_the_floor():
    floor = GapStatistics(0.01, 0.01, 0.01)
    found = growth(GapStatistics(0.04, 0.002, -0.5), GapStatistics(0.02, 0.001, 0.001), floor)
    assert (found.median, found.p90, found.mean) == pytest.approx((2.0, 1.0, 2.0))


def test_the_verdict_names_the_statistic_that_is_furthest_beyond_its_limit():
    limits = [GapLimits(0.1, 0.4, 0.02, "wide"), GapLimits(0.2, 0.1, 0.5, "narrow")]
    verdict = judge(GapStatistics(0.05, 0.3, -0.01), limits)
    assert (verdict.statistic, verdict.value, verdict.limit, verdict.basis) == ("p90", 0.3, 0.1, "narrow")
    assert verdict.use == pytest.approx(3.0)
    assert verdict.is_alarm
    assert not judge(GapStatistics(0.05, 0.1, -0.01), limits).is_alarm


def test_a_mean_below_zero_counts_by_its_size():
    assert judge(GapStatistics(0.0, 0.0, -0.3), [GapLimits(1.0, 1.0, 0.2, "")]).statistic == "mean"
    assert largest([GapStatistics(0.1, 0.5, 0.2), GapStatistics(0.2, 0.4, -0.3)]) == GapStatistics(0.2, 0.5, -0.3)
