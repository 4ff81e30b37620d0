"""Corrections of off-policy samples: an entry for each kind, with the facts by which other code decides."""

from __future__ import annotations

from dataclasses import dataclass

from hotseat.registry.lookup import Table


@dataclass(frozen=True)
class CorrectionEntry:
    """Facts about a correction of the gap between the policy that sampled and the one that the trainer computes.

    function: "module:function" that bounds ρ, the ratio of each token: it takes ρ and the bounds `low` and `high`, and
    with `takes_episode_mean` the geometric mean of ρ over the token's episode, all [num_tokens]; None: no weights.
    """

    name: str  # of `algorithm.correction.kind`
    summary: str  # for the docs
    function: str | None = None
    takes_episode_mean: bool = False
    is_per_episode: bool = False  # ρ is the product over the episode, which has one weight
    replaces_ratio: bool = False  # the policy loss takes its ratio per episode to the engine's probabilities

    @property
    def weighs_tokens(self) -> bool:
        return self.function is not None and not self.is_per_episode


NO_CORRECTION = "none"
# Defaults where samples come from another policy than the trainer's: of most policy losses, and of those per episode.
OFF_POLICY_CORRECTION, OFF_POLICY_EPISODE_CORRECTION = "tis", "rollout-ratio"

CORRECTIONS = Table[CorrectionEntry](
    "correction",
    CorrectionEntry(NO_CORRECTION, "No correction."),
    CorrectionEntry("tis", "Clamp the ratio of each token.", "hotseat.algorithms.corrections:clamped"),
    CorrectionEntry("icepop", "Drop tokens whose ratio is out of bounds.", "hotseat.algorithms.corrections:dropped"),
    CorrectionEntry(
        "seq-mask-tis",
        "As tis, and drop episodes whose mean ratio is out of bounds.",
        "hotseat.algorithms.corrections:clamped_in_kept_episodes",
        takes_episode_mean=True,
    ),
    CorrectionEntry(
        "seq-tis", "Clamp the ratio of each episode.", "hotseat.algorithms.corrections:clamped", is_per_episode=True
    ),
    CorrectionEntry(
        "seq-icepop",
        "Drop episodes whose ratio is out of bounds.",
        "hotseat.algorithms.corrections:dropped",
        is_per_episode=True,
    ),
    CorrectionEntry(
        "rollout-ratio",
        "Take the policy loss's ratio of an episode to the engine's probabilities.",
        replaces_ratio=True,
    ),
)

correction_entry = CORRECTIONS.entry
