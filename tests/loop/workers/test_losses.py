"""The objective of an update: its terms, put together."""

import math
from dataclasses import replace

import pytest
import torch

from hotseat.algorithms.corrections import WeightTotals
from hotseat.loop.workers.losses import (
    ADVANTAGES,
    CORRECTION_SCALES,
    LAGS,
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    ROLLOUT_LOG_PROBS,
    PolicyObjective,
)
from hotseat.loop.workers.objectives import SftObjective
from hotseat.train.backend import Outputs
from hotseat.train.packing import split_by_count
from hotseat.types import MicroBatch


def objective(**changes) -> PolicyObjective:
    values = {
        "policy_loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "correction": None,
        "correction_low": 0.5,
        "correction_high": 2.0,
        "kl_estimator": "k2",
        "kl_coefficient": 0.0,
        "entropy_coefficient": None,
    }
    return PolicyObjective(**(values | changes))


def batch(**fields) -> MicroBatch:
    given = {ADVANTAGES: [0.0, 1.0, -2.0], ROLLOUT_LOG_PROBS: [0.0, -1.0, -1.0]} | fields
    return MicroBatch(
        token_ids=torch.tensor([1, 2, 3]),
        offsets=torch.tensor([0, 3]),
        mask=torch.tensor([False, True, True]),
        weights=torch.tensor([0.0, 0.5, 0.5]),
        fields={name: torch.tensor(values) for name, values in given.items()},
        sample_ids=("s",),
    )


def outputs(*values: float, entropy=None) -> Outputs:
    return Outputs(torch.tensor(values, requires_grad=True), None if entropy is None else torch.tensor(entropy))


def test_without_old_log_probs_the_ratio_is_exactly_one_and_has_a_gradient():
    given = outputs(0.0, -1.0, -1.0)
    loss, metrics = objective()(given, batch())
    # -(1 x 1 + 1 x -2) / 2
    assert loss.item() == 0.5
    loss.backward()
    assert given.log_probs.grad.tolist() == [0.0, -0.5, 1.0]
    assert metrics["clipped"] == 0
    assert metrics["policy_kl"] == 0


def test_gaps_are_counted_by_the_lag_of_their_tokens():
    """Gaps of 0.5 and 0.25; the first token is not sampled, so it counts nowhere."""
    given = batch(**{LAGS: [0.0, 0.0, 2.0], OLD_LOG_PROBS: [9.0, -0.5, -1.25]})
    _, metrics = objective(max_lag=2)(outputs(0.0, -1.0, -1.0), given)
    assert metrics["engine_gap_lags"].tolist() == [0.5, 0.0, 0.25]
    assert metrics["tokens_lags"].tolist() == [1.0, 0.0, 1.0]
    _, metrics = objective()(outputs(0.0, -1.0, -1.0), given)
    assert "tokens_lags" not in metrics


def test_old_log_probs_clip_the_ratio():
    # Ratio e^0.5 of the first, above 1.2 with a positive advantage: held at 1.2. The second: ratio 1.
    loss, metrics = objective()(outputs(0.0, -0.5, -1.0), batch(**{OLD_LOG_PROBS: [0.0, -1.0, -1.0]}))
    assert loss.item() == pytest.approx((-1.2 + 2.0) / 2)
    assert metrics["clipped"] == 1


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    given = outputs(0.0, -0.5, -1.0)
    loss, metrics = objective(policy_loss="cispo")(given, batch(**{OLD_LOG_PROBS: [0.0, -1.0, -1.0]}))
    # Weights 1.2 (ratio e^0.5) and 1: -(1.2 x 1 x -0.5 + 1 x -2 x -1) / 2
    assert loss.item() == pytest.approx(-0.7)
    loss.backward()
    assert given.log_probs.grad.tolist() == pytest.approx([0.0, -0.6, 1.0])
    assert metrics["clipped"] == 1


def test_the_gap_to_the_engine_is_counted_and_corrected():
    # Trainer says -1 + log 4: the engine sampled it with a quarter of that; bounded at 2.
    old = [0.0, -1.0 + torch.log(torch.tensor(4.0)).item(), -1.0]
    loss, metrics = objective(correction="tis")(outputs(*old), batch(**{OLD_LOG_PROBS: old}))
    assert loss.item() == pytest.approx((-1.0 * 2 + 2.0) / 2)
    assert metrics["engine_gap"].item() == pytest.approx(1.3863, abs=1e-4)
    assert metrics["corrected"] == 1


def test_weights_are_normalised_and_answers_rejected_beside_them():
    old = [0.0, -1.0 + math.log(4), -1.0]
    fields = {OLD_LOG_PROBS: old, CORRECTION_SCALES: [0.5] * 3}
    assert objective(correction="tis").correction_totals(batch(**fields)) == WeightTotals(3.0, 2)
    loss, _ = objective(correction="tis")(outputs(*old), batch(**fields))
    assert loss.item() == pytest.approx((-1.0 * 2 + 2.0) / 2 * 0.5)
    # The geometric mean of the ratios 4 and 1 is 2.
    for high, expected, rejected in ((1.9, 0.0, 2), (2.1, (-1.0 + 2.0) / 2, 0)):
        strict = objective(rejection="k1", rejection_high=high)
        loss, metrics = strict(outputs(*old), batch(**{OLD_LOG_PROBS: old}))
        assert loss.item() == pytest.approx(expected)
        assert (metrics["rejected"], metrics["corrected"]) == (rejected, rejected)


def test_gspo_is_corrected_by_one_ratio_to_the_engine():
    """Log π − log π_rollout is 0.3 and −0.1 on the two tokens: the ratio is e^0.1 for both, and no weight besides."""
    given, corrected = outputs(0.0, -0.7, -1.1), objective(policy_loss="gspo", ratio_to="rollout")
    loss, metrics = corrected(given, batch(**{OLD_LOG_PROBS: [0.0, -0.6, -1.4]}))
    ratio = math.exp(0.1)
    assert loss.item() == pytest.approx((-ratio * 1.0 + ratio * 2.0) / 2)
    loss.backward()
    # The advantages are 1 and -2, so each token learns by its own (GSPO-token): -A * ratio / 2.
    assert given.log_probs.grad.tolist() == pytest.approx([0.0, -ratio / 2, ratio])
    assert metrics["policy_kl"].item() == pytest.approx(0.1 - 0.3)  # of the update alone: old to new
    assert "corrected" not in metrics


def test_gspos_ratio_to_the_engine_is_clipped():
    # A gap of 0.5 on both tokens: held at 1.2 where the advantage is positive.
    loss, metrics = objective(policy_loss="gspo", ratio_to="rollout")(outputs(0.0, -0.5, -0.5), batch())
    assert loss.item() == pytest.approx((-1.2 + math.exp(0.5) * 2) / 2)
    assert metrics["clipped"] == 1


def test_the_kl_to_the_reference_is_measured_and_charged_if_asked():
    given = {REFERENCE_LOG_PROBS: [9.0, -2.0, -1.0]}
    loss, metrics = objective()(outputs(0.0, -1.0, -1.0), batch(**given))
    assert loss.item() == 0.5
    assert metrics["kl"].item() == 0.5  # k2 of 1, and of 0
    loss, _ = objective(kl_coefficient=0.2)(outputs(0.0, -1.0, -1.0), batch(**given))
    assert loss.item() == pytest.approx(0.5 + 0.2 * 0.5 / 2)


def test_entropy_is_logged_at_coefficient_zero_and_rewarded_above():
    given = outputs(0.0, -1.0, -1.0, entropy=[7.0, 1.0, 3.0])
    loss, metrics = objective(entropy_coefficient=0.0)(given, batch())
    assert (loss.item(), metrics["entropy"].item()) == (0.5, 4.0)
    loss, _ = objective(entropy_coefficient=0.1)(given, batch())
    assert loss.item() == pytest.approx(0.5 - 0.1 * 4.0 / 2)
    assert objective(entropy_coefficient=0.0).needs_entropy
    assert not objective().needs_entropy


def test_examples_are_learned_token_by_token():
    loss, metrics = SftObjective().loss(outputs(0.0, -1.0, -3.0), batch())
    assert loss.item() == 2.0
    assert metrics["nll"].item() == 4.0


def three_samples(advantages: list[float], **fields) -> MicroBatch:
    """Of one context token and one sampled token, the second sample in two segments."""
    values = [value for advantage in advantages for value in (0.0, advantage)]
    return MicroBatch(
        token_ids=torch.arange(8),
        offsets=torch.tensor([0, 2, 4, 6, 8]),
        mask=torch.tensor([False, True] * 4),
        weights=torch.tensor([0.0, 0.25] * 4),
        fields={ADVANTAGES: torch.tensor(values), ROLLOUT_LOG_PROBS: torch.zeros(8)} | fields,
        sample_ids=("a", "b", "b", "c"),
    )


@pytest.mark.parametrize("correction", ["tis", "icepop", "seq-mask-tis", "seq-tis", "seq-icepop"])
def test_corrections_of_micro_batches_are_those_of_the_whole_step(correction):
    """The engine's gap of sample b is 1.5 and -1.3 in its two segments: 0.1 on average, which keeps all of it."""
    old = torch.tensor([0.0, 0.2, 0.0, 1.5, 0.0, -1.3, 0.0, 2.5])
    whole = three_samples([1.0, 2.0, -1.0, 0.5], **{OLD_LOG_PROBS: old})
    corrected = objective(correction=correction)
    pieces = split_by_count(whole, 2)
    assert sorted(piece.sample_ids for piece in pieces) == [("a",), ("b", "b"), ("c",)]

    def loss_and_changes(batch):
        terms = corrected.terms(Outputs(batch.fields[OLD_LOG_PROBS].clone().requires_grad_(), None), batch)
        return terms.loss.item(), int(terms.metrics["corrected"])

    parts = [loss_and_changes(piece) for piece in pieces]
    expected = loss_and_changes(whole)
    assert sum(loss for loss, _ in parts) == pytest.approx(expected[0])
    assert sum(changed for _, changed in parts) == expected[1]


def test_samples_without_an_advantage_have_no_gradient():
    assert objective().samples_with_gradient(three_samples([1.0, 0.0, 0.0, -1.0])) == [0, 3]
    assert objective().samples_with_gradient(three_samples([0.0, 0.0, 0.5, 0.0])) == [1, 2]
    assert objective().samples_with_gradient(three_samples([0.0] * 4)) == []
    assert objective().samples_with_gradient(three_samples([1.0, 0.0, 2.0, -1.0])) is None


def test_with_a_kl_or_entropy_term_every_sample_counts():
    nothing = three_samples([0.0] * 4)
    assert objective(entropy_coefficient=0.1).samples_with_gradient(nothing) is None
    assert objective(entropy_coefficient=0.0).samples_with_gradient(nothing) is None  # logged, of all samples
    compared = three_samples([0.0] * 4, **{REFERENCE_LOG_PROBS: torch.zeros(8)})
    assert objective().samples_with_gradient(compared) is None


def test_samples_without_a_token_to_learn_from_need_no_gradient_whatever_is_logged():
    samples = three_samples([1.0] * 4)
    masked = replace(samples, mask=samples.mask & (torch.arange(8) >= int(samples.offsets[1])))  # all but sample a
    for changes in ({}, {"entropy_coefficient": 0.1}):
        assert objective(**changes).samples_with_gradient(masked) == [1, 2, 3]
