"""Moments between steps at which a script, or a command, may watch and steer a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotseat.loop.state.saving import Saver
    from hotseat.observe import LiveView


class Steering:
    """Answers to the loop's calls between steps, all of which come in the thread of the run. This one wants nothing."""

    def command(self) -> str | None:
        """Return how to resume the run, where `hotseat resume` cannot."""
        return None

    def view(self, title: str) -> LiveView | None:
        """Return what shows the run, where that is not a terminal or a file; None: the usual view."""
        return None

    def begin(self, run_dir: Path, saver: Saver, say: Callable[[str], object]) -> None:
        """Take note that the run's directory is open. saver: ends the run when it is asked to."""

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float]:
        """Take note of a step's metrics, before they are recorded; return further ones."""
        return {}


class EndsAfter(Steering):
    """Ends a run after a step, or after the first step for which `is_over` says so of its metrics."""

    def __init__(self, step: int, is_over: Callable[[Mapping[str, Any]], bool] = lambda metrics: False):
        self._step, self._is_over = step, is_over
        self._saver: Saver | None = None

    def begin(self, run_dir: Path, saver: Saver, say: Callable[[str], object]) -> None:
        self._saver = saver

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float]:
        if step >= self._step or self._is_over(metrics):
            assert self._saver is not None, "a step before the run has begun"
            self._saver.end_after_step()
        return {}
