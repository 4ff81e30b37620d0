"""Work that is undone where a block fails."""

import pytest

from hotseat.closing import on_failure


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration])
def test_what_failed_is_undone_and_the_error_is_raised_on(error):
    undone = []
    with pytest.raises(error), on_failure(lambda: undone.append(True)):
        raise error
    assert undone == [True]


def test_what_succeeded_stays():
    undone = []
    with on_failure(lambda: undone.append(True)):
        pass
    assert undone == []
