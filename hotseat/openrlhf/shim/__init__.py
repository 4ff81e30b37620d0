"""The directory that `hotseat openrlhf-path` prints: on PYTHONPATH, its package `openrlhf` has OpenRLHF's commands.

`openrlhf.cli` has the modules of `hotseat.cli`, so `python -m openrlhf.cli.train_sft` is `hotseat.cli.train_sft`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hotseat.shim_package import REFUSED, ShimPackage

DIRECTORY = Path(__file__).resolve().parent
SHIM = ShimPackage(
    "openrlhf", "OpenRLHF", DIRECTORY, "which runs OpenRLHF's commands on Hotseat", "hotseat.cli.COMMAND"
)

# OpenRLHF's commands that are not here, and what does their work.
INSTEAD = {
    "train_kto": "KTO is not part of Hotseat. For answers in pairs: `openrlhf.cli.train_dpo` (docs/preferences.md). For"
    " single answers that are good or bad: `openrlhf.cli.train_sft` on the good ones, or a reward model made of pairs"
    " and `openrlhf.cli.train_ppo_ray`",
    "train_kd": "learning from a teacher's distribution is part of RL here: `hotseat run` with algorithm.distill.coef"
    " and reference.model or reference.teachers (docs/algorithms.md); `openrlhf.cli.train_sft` learns from answers that"
    " a teacher wrote (`hotseat generate`)",
    "train_prm": "process reward models are not part of Hotseat. `openrlhf.cli.train_rm` trains a model that rewards"
    " whole answers (docs/reward-models.md); an environment can reward each turn (docs/agents.md)",
    "interactive_chat": "use `hotseat chat MODEL` (docs/tools.md)",
}


def refuse_command(name: str) -> None:
    """Exit where `python -m openrlhf.cli.NAME` runs a command that is not here, with what to use instead."""
    print(f"openrlhf.cli.{name}: {INSTEAD[name]}", file=sys.stderr)
    sys.exit(REFUSED)
