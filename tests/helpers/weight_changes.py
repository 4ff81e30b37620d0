"""Compares how two trainings changed the same weights."""

from collections.abc import Mapping

from torch import Tensor


def assert_changed_alike(
    before: Mapping[str, Tensor], one: Mapping[str, Tensor], other: Mapping[str, Tensor], share: float
) -> None:
    """Assert that for each weight the two results differ by at most `share` of the change, in norm.

    A bound for every single number would say less: where a gradient is near zero, Adam takes a whole step by its last
    bits, which differ between processors.
    """
    assert one.keys() == other.keys()
    for name in one:
        change = (one[name].double() - before[name].double()).norm()
        difference = (one[name].double() - other[name].double()).norm()
        assert change > 0, f"{name} has not changed"
        assert difference <= share * change, (
            f"{name}: differs by {difference / change:.1e} of its change, not {share:.0e}"
        )
