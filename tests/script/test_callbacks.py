"""Callbacks that end a run by a metric. tests/script/test_live_run.py has them in whole runs."""

from types import SimpleNamespace

import pytest

from hotseat import EarlyStopping, StopAt


def ended(callback, values, name="eval/loss"):
    """Return the step at which a callback ends a run with these values; None if it does not."""
    run = SimpleNamespace(say=lambda text: None, finish=lambda: steps.append(step))
    steps: list[int] = []
    for step, value in enumerate(values):
        callback.on_step(run, step, {} if value is None else {name: value})
        if steps:
            return steps[0]
    return None


@pytest.mark.parametrize(
    ("mode", "values", "end"),
    [("max", [0.1, 0.5, 0.9], 2), ("max", [0.1, None, 0.7], None), ("min", [0.9, 0.8, 0.7], 1)],
)
def test_a_value_is_reached_from_below_or_from_above(mode, values, end):
    assert ended(StopAt("eval/loss", 0.8, mode), values) == end


@pytest.mark.parametrize(
    ("mode", "min_delta", "values", "end"),
    [
        ("max", 0.0, [0.1, 0.2, 0.2, 0.1], 3),
        ("max", 0.0, [0.1, 0.2, 0.1, 0.3, 0.2, 0.2], 5),
        ("max", 0.05, [0.1, 0.12, 0.14, 0.2], 2),  # each is compared with the best, not with the one before
        ("min", 0.0, [3.0, 2.0, 1.0, None, 2.0, 1.0], 5),
    ],
)
def test_values_without_a_new_best_are_counted(mode, min_delta, values, end):
    assert ended(EarlyStopping("eval/loss", 2, mode, min_delta), values) == end
