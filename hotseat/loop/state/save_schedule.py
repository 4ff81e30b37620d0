"""Schedule of the checkpoints that a run saves on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from hotseat.config import Config
from hotseat.loop.state.checkpoints import shown_bytes
from hotseat.observe import Journal

# Limits on checkpoints that are made by default: they take at most one part in _TIME_PARTS of a run's time, and one
# part in _DISK_PARTS of the free disk.
_TIME_PARTS, _DISK_PARTS = 20, 2


class SaveSchedule:
    """Decides after which steps checkpoints are made: by their number, by time, and at the end of the run.

    num_steps: those of the run.
    """

    def __init__(self, config: Config, num_steps: int | None, clock: Callable[[], float]):
        self._config = config
        self._num_steps = num_steps
        self._clock = clock
        self._saved_s = clock()  # time of the last save, or of the start
        self._cost_s = 0.0  # time for which the last save held up the run
        self._has_warned = False  # of a disk without room

    def change(self, config: Config) -> None:
        """Use from now on a config that the run has changed."""
        self._config = config

    @property
    def can_save(self) -> bool:
        return self._config.checkpoint.every is not None or self._config.checkpoint.minutes is not None

    def is_due(self, step: int) -> bool:
        """Tell whether a checkpoint is due after a step, by the step's number or by time."""
        return (
            self._config.checkpoint.every is not None and step % self._config.checkpoint.every == 0
        ) or self._is_late()

    def _is_late(self) -> bool:
        """Tell whether a checkpoint is due by time: the minutes have passed, and saving takes a small part of them."""
        if self._config.checkpoint.minutes is None:
            return False
        least_s = self._config.checkpoint.minutes * 60
        if self._config.checkpoint.every_minutes is None:
            least_s = max(least_s, _TIME_PARTS * self._cost_s)
        return self._clock() - self._saved_s >= least_s

    def is_end(self, step: int) -> bool:
        """Tell whether a step is the last one by the number of steps."""
        return step == self._num_steps

    def is_last(self, step: int, is_ending: bool) -> bool:
        """Tell whether a checkpoint is made because the run ends, so that it can be extended, or export its model."""
        return (
            (is_ending or self.is_end(step))
            and self.can_save
            and self._config.checkpoint.keep_final
            and self._config.checkpoint.save_state
        )

    def saved(self, started_s: float) -> float:
        """Take note of a save that ends now; return the seconds for which it held up the run."""
        self._saved_s = self._clock()
        self._cost_s = self._saved_s - started_s
        return self._cost_s

    def has_room(self, num_bytes: int, directory: Path, journal: Journal) -> bool:
        """Tell whether a checkpoint made by default leaves enough of the disk free; if not, it is due later.

        Warns the first time. directory: of checkpoints, which may not be there yet.
        """
        folder = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(folder).free
        if _DISK_PARTS * num_bytes <= free:
            return True
        if not self._has_warned:
            journal.say(
                f"no checkpoint is made: it takes {shown_bytes(num_bytes)}, and {shown_bytes(free)} are free; set"
                " checkpoint.path to a larger disk and checkpoint.every, or checkpoint.every_minutes to 0",
                kind="warning",
            )
        self._has_warned = True
        self._saved_s = self._clock()
        return False
