"""The way into a run: refuse at once what cannot start, show that it starts, and only then load heavy libraries."""

from __future__ import annotations

from hotseat.config import Config
from hotseat.loop.refusals import refuse_at_once


def start(config: Config, launched: bool = False) -> dict[str, float]:
    """Run a config to its end, as `hotseat.loop.run.start` does."""
    refuse_at_once(config)
    from hotseat.loop import run

    return run.start(config, launched)
