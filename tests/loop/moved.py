"""Whether two trainings of the same weights went the same way."""

from collections.abc import Mapping

from torch import Tensor


def assert_moved_alike(
    before: Mapping[str, Tensor], one: Mapping[str, Tensor], other: Mapping[str, Tensor], share: float
) -> None:
    """Of each weight the way that one has and the other has not, as a share of the way itself.

    A bound for every single number would say less: where a gradient is near nothing Adam takes a whole step by its last
    bits, which are another processor's other ones.
    """
    assert one.keys() == other.keys()
    for name in one:
        way = (one[name].double() - before[name].double()).norm()
        off = (one[name].double() - other[name].double()).norm()
        assert way > 0, f"{name} has not moved"
        assert off <= share * way, f"{name}: off by {off / way:.1e} of its way, allowed {share:.0e}"
