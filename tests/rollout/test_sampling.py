"""From logits to tokens."""

from __future__ import annotations

import math

import pytest
import torch

from hotseat.rollout.sampling import filtered, sample, uniforms

MASK = (1 << 64) - 1


def slow_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_uniforms_are_splitmix64_keyed_by_the_seed() -> None:
    seeds = [0, 1, 2**63 - 1, -5]
    got = uniforms(torch.tensor(seeds), 6)
    for row, seed in enumerate(seeds):
        for step in range(6):
            bits = slow_mix((slow_mix(seed & MASK) + (step + 1) * 0x9E3779B97F4A7C15) & MASK)
            assert got[row, step].item() == (bits >> 12) / 2**52


def test_uniforms_depend_on_seed_and_step_alone() -> None:
    many = uniforms(torch.arange(100), 50)
    assert torch.equal(many[17:18, :9], uniforms(torch.tensor([17]), 9))
    assert len(set(many.flatten().tolist())) == 5000
    assert 0 <= many.min() < 0.001 < 0.999 < many.max() < 1
    # Means over seeds and over steps: a uniform has standard deviation 1 / sqrt(12).
    assert (many.mean(0) - 0.5).abs().max() < 5 / math.sqrt(12 * 100)
    assert (many.mean(1) - 0.5).abs().max() < 5 / math.sqrt(12 * 50)


def test_inverse_cdf_by_hand() -> None:
    logits = torch.tensor([[math.log(0.25), math.log(0.5), -math.inf, math.log(0.25)]])
    for uniform, token in ((0.0, 0), (0.24, 0), (0.26, 1), (0.74, 1), (0.76, 3), (1 - 2**-52, 3)):
        tokens, log_probs = sample(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64), None)
        assert tokens.tolist() == [token]
        assert log_probs.tolist() == pytest.approx([float(logits[0, token])])


def test_a_token_without_probability_is_never_taken() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]] * 2 + [[-math.inf, 0.0, 0.0]] * 2)
    extremes = torch.tensor([0.0, 1 - 2**-52] * 2, dtype=torch.float64)
    assert sample(logits, torch.ones(4), extremes, None)[0].tolist() == [0, 1, 1, 2]


def test_greedy_rows_take_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    tokens, log_probs = sample(logits, torch.ones(2), torch.tensor([0.0, 0.0]).double(), torch.tensor([True, False]))
    assert tokens.tolist() == [1, 0]
    assert log_probs.tolist() == pytest.approx(torch.log_softmax(logits[0], 0)[[1, 0]].tolist())


def test_rows_without_a_distribution_are_seen() -> None:
    logits = torch.tensor([[math.nan, 0.0], [0.0, 0.0], [math.inf, 0.0]])
    tokens, log_probs = sample(logits, torch.ones(3), torch.full((3,), 0.9).double(), None)
    assert [math.isfinite(x) for x in log_probs.tolist()] == [False, True, False]
    assert tokens.max() < 2


def test_top_k_and_top_p_by_hand() -> None:
    row = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    cases = [
        (4, 1.0, {0, 1, 2, 3}),
        (2, 1.0, {1, 3}),
        (4, 0.39, {1}),
        (4, 0.41, {1, 3}),
        (4, 0.75, {1, 2, 3}),
        (3, 0.5, {1, 3}),  # of the three that are left, 0.4 / 0.9 is not yet half
        (1, 0.01, {1}),
        (4, 0.001, {1}),
    ]
    top_k = torch.tensor([k for k, _, _ in cases])
    top_p = torch.tensor([p for _, p, _ in cases], dtype=torch.float64)
    kept = filtered(row.double().repeat(len(cases), 1), top_k, top_p)
    assert [set(r.isfinite().nonzero()[:, 0].tolist()) for r in kept] == [want for _, _, want in cases]


def test_ties_stay_in_top_k_and_fall_to_the_lower_id_in_top_p() -> None:
    row = torch.zeros(1, 4)
    assert filtered(row, torch.tensor([2]), torch.tensor([1.0]).double()).isfinite().sum() == 4
    assert filtered(row, torch.tensor([4]), torch.tensor([0.5]).double()).isfinite().tolist() == [
        [True, True, False, False]
    ]
