"""Runs in the test's own process that end right after a checkpoint, as if they had died there."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Stop(Exception):
    """Raised by `stopped_after_saving`, to end a run."""


@contextmanager
def stopped_after_saving(num_checkpoints: int = 1) -> Iterator[None]:
    """Have the run in this context end right after so many checkpoints."""
    from hotseat.loop.state.saving import Saver

    save, saved = Saver.save, []

    def saving(self, *args, **named):
        saved.append(save(self, *args, **named))
        if len(saved) == num_checkpoints:
            raise Stop
        return saved[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "save", saving)
        with pytest.raises(Stop):
            yield
