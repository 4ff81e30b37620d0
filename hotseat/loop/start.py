"""Entry of a run: refuses at once what cannot start, shows progress, and only then loads heavy libraries."""

from __future__ import annotations

import os

from rich.console import Console

from hotseat.config import Config
from hotseat.loop.setup.refusals import refuse_at_once
from hotseat.loop.setup.reward_trial import try_rewards
from hotseat.observe import LiveView


def start(config: Config, launched: bool = False) -> dict[str, float]:
    """Run a config to its end, as `hotseat.loop.run.start` does."""
    refuse_at_once(config)
    with make_view(config, launched) as view:
        notes = try_rewards(config, view.stage)
        view.stage("loading torch and transformers")
        from hotseat.loop import run

        return run.start(config, launched, view, notes)


def make_view(config: Config, launched: bool) -> LiveView:
    """Make the live view of a run; of ranks that a launcher started, only the first shows anything."""
    is_shown = not launched or os.environ.get("RANK", "0") == "0"
    return LiveView(config.task, console=Console(quiet=not is_shown))
