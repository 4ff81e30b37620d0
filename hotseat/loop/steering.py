"""What the loop asks of a script between steps. A run that a command started has `Steering()`, which wants nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotseat.loop.state.saving import Saver
    from hotseat.observe import LiveView


class Steering:
    """Moments of a run at which a script may watch and steer it. All of them come in the thread of the run."""

    def view(self, title: str) -> LiveView | None:
        """Return what shows the run, where that is not a terminal or a file; None: the usual view."""
        return None

    def begin(self, run_dir: Path, saver: Saver, say: Callable[[str], object]) -> None:
        """Take note that the run's directory is open. saver: ends the run when it is asked to."""

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float]:
        """Take note of a step's metrics, before they are recorded; return further ones."""
        return {}
