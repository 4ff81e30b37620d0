"""Points at which tests inject faults."""

import pytest

from hotseat import faults
from hotseat.errors import RunError
from hotseat.faults import Fault


def test_a_point_that_is_ignored_is_not_reached_and_not_counted(tmp_path, monkeypatch):
    """The canary samples more tokens than a small run, and kills during a rollout must not all happen in it."""
    monkeypatch.setattr(faults, "_directory", tmp_path)
    monkeypatch.setattr(faults, "_seen", {})
    Fault("generation.during", "raise", skip=1).arm(tmp_path, "0")
    with faults.ignoring("generation.during"):
        for _ in range(3):
            faults.reach("generation.during")
    faults.reach("generation.during")
    with pytest.raises(RunError, match=r"a fault at generation\.during"):
        faults.reach("generation.during")
