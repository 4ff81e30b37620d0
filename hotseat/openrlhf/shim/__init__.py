"""The directory that `hotseat openrlhf-path` prints: on PYTHONPATH, its package `openrlhf` has OpenRLHF's commands.

`openrlhf.cli` has the modules of `hotseat.cli`, so `python -m openrlhf.cli.train_sft` is `hotseat.cli.train_sft`. A
process in which another OpenRLHF can be imported is refused: which of the two runs would depend on the order of paths.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
REFUSED = 2

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


def refuse_another_openrlhf() -> None:
    """Raise ImportError if another OpenRLHF can be imported; where `python -m` imports us, print that and exit."""
    place = find_another_openrlhf()
    if place is None:
        return
    message = (
        f"PYTHONPATH has {DIRECTORY}, which runs OpenRLHF's commands on Hotseat, but OpenRLHF itself can be imported"
        f" too, from {place}: uninstall it or use an environment without it, or take {DIRECTORY} out of PYTHONPATH to"
        " run OpenRLHF; `python -m hotseat.cli.COMMAND` runs Hotseat beside it"
    )
    if sys.argv[:1] == ["-m"]:  # what Python has there until it has found the module to run
        print(message, file=sys.stderr)
        sys.exit(REFUSED)
    raise ImportError(message, name="openrlhf")


def find_another_openrlhf() -> str | None:
    """Return the file or folder from which an OpenRLHF other than ours can be imported, or None if there is none."""
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec("openrlhf", [entry for entry in sys.path if not _is_ours(entry)])
        else:  # such as that of a package installed in editable mode
            spec = finder.find_spec("openrlhf", None)
        # A folder without __init__.py, such as the one that a user keeps scripts in, is not the package.
        if isinstance(spec, ModuleSpec) and spec.origin is not None:
            return spec.origin
    return None


def _is_ours(entry: str) -> bool:
    return Path(entry).resolve() == DIRECTORY
