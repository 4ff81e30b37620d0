"""Failed runs that no rule explains: metrics that were looked at, and places to look next."""

from __future__ import annotations

from dataclasses import dataclass

from hotseat.observe.diagnosis.rules import Cause, read_by_rules
from hotseat.observe.diagnosis.run_ending import MIN_STEPS, Ending
from hotseat.observe.diagnosis.signs import OptionChange, slower
from hotseat.observe.recorded import Recorded


@dataclass(frozen=True)
class Unexplained:
    """looked_at, not_recorded: metrics. trials: settings that can do such harm, each for a short run of its own."""

    looked_at: tuple[str, ...]
    not_recorded: tuple[str, ...]
    step: int
    trials: tuple[OptionChange, ...]


def unexplained(recorded: Recorded, ending: Ending, causes: list[Cause]) -> Unexplained | None:
    """Return what was looked at in a run that failed for no known cause; None for any other, or a beginning."""
    if causes or not ending.is_poor or len(recorded.curve("reward").raw) < MIN_STEPS:
        return None
    read = read_by_rules(recorded)
    config = recorded.config
    trials = [slower(recorded, 10)]
    if ending.kind != "fell":
        trials.append(slower(recorded, 1 / 3))
    if config.algorithm.kl.coef:
        trials.insert(0, OptionChange("algorithm.kl.coef", config.algorithm.kl.coef, 0))
    if config.overlap.staleness:
        trials.append(OptionChange("overlap.staleness", config.overlap.staleness, 0))
    return Unexplained(
        tuple(name for name in read if recorded.curve(name)),
        tuple(name for name in read if not recorded.curve(name) and name != "surprise"),
        ending.began if ending.reward_began is None else ending.reward_began,
        tuple(trials),
    )
