from __future__ import annotations

import pytest

from hotseat.errors import UserError
from hotseat.train.schedule import Schedule


def test_warm_up_then_linear() -> None:
    schedule = Schedule(kind="linear", peak=1.0, num_warmup_steps=3, num_steps=7, min_ratio=0.2)
    rates = [schedule.learning_rate(step) for step in range(9)]
    # A quarter, two, three; the peak; then down by 0.8 in 4 steps; then it stays.
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine() -> None:
    schedule = Schedule(kind="cosine", peak=2.0, num_steps=4, min_ratio=0.5)
    rates = [schedule.learning_rate(step) for step in range(6)]
    # (1 + cos πx) / 2 at x = 0, ¼, ½, ¾, 1 is 1, 0.853553, 0.5, 0.146447, 0.
    assert rates == pytest.approx([2.0, 1.853553, 1.5, 1.146447, 1.0, 1.0], abs=1e-6)


def test_constant_after_warm_up() -> None:
    schedule = Schedule(kind="constant", peak=3e-4, num_warmup_steps=1)
    assert [schedule.learning_rate(step) for step in (0, 1, 2, 10**6)] == pytest.approx([1.5e-4, 3e-4, 3e-4, 3e-4])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "step"}, "schedule 'step': choose one of constant, linear, cosine"),
        ({"peak": -1.0}, "learning rate -1.0"),
        ({"peak": float("nan")}, "learning rate nan"),
        ({"num_warmup_steps": -1}, "-1 warm-up steps"),
        ({"min_ratio": 1.5}, "between 0 and 1"),
        ({"kind": "cosine", "num_warmup_steps": 5, "num_steps": 5}, "over 5 steps with 5 of warm-up leaves none"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Schedule(**settings)  # type: ignore[arg-type]
