"""Losses of preferences: an entry for each, with what others need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from hotseat.registry.lookup import Table


@dataclass(frozen=True)
class PreferenceLossEntry:
    """Facts about the loss of a pair of answers.

    function: "module:function" that takes log-probs of the chosen and the rejected answer, then of both under the
    reference, then the lengths of both, as far as the facts say; and by name `beta` and its options.
    """

    name: str  # of `algorithm.dpo.loss`
    summary: str  # for the docs
    function: str
    has_reference: bool = False
    takes_lengths: bool = False
    options: frozenset[str] = frozenset()  # that not every loss has, by their names in `algorithm.dpo`


DEFAULT_PREFERENCE_LOSS = "dpo"

PREFERENCE_LOSSES = Table[PreferenceLossEntry](
    "loss of preferences",
    PreferenceLossEntry(
        "dpo",
        "Logistic loss of the margin between implicit rewards.",
        "hotseat.algorithms.supervised_loss:dpo_loss",
        has_reference=True,
        options=frozenset({"label_smoothing", "nll_coef"}),
    ),
    PreferenceLossEntry(
        "ipo",
        "Squared distance of that margin from a target.",
        "hotseat.algorithms.supervised_loss:ipo_loss",
        has_reference=True,
        options=frozenset({"length_normalised", "nll_coef"}),
    ),
    PreferenceLossEntry(
        "orpo",
        "Likelihood of the chosen answer and the odds ratio, without a reference.",
        "hotseat.algorithms.supervised_loss:orpo_loss",
        takes_lengths=True,
    ),
    PreferenceLossEntry(
        "simpo",
        "Margin of log-probs per token, without a reference.",
        "hotseat.algorithms.supervised_loss:simpo_loss",
        takes_lengths=True,
        options=frozenset({"gamma", "nll_coef"}),
    ),
)

preference_loss_entry = PREFERENCE_LOSSES.entry
