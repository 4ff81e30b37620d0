"""Divergences between the distributions of a policy and a teacher: an entry for each."""

from __future__ import annotations

from dataclasses import dataclass

from hotseat.registry.lookup import Table


@dataclass(frozen=True)
class DivergenceEntry:
    """Facts about a divergence of the next token's distribution under the policy, p, and under the teacher, q.

    function: "module:function" that takes log p and log q, [num_rows, num_classes] each, and with `has_beta` the `beta`
    by name. It returns a divergence per row.
    """

    name: str  # of `algorithm.distill.divergence`
    summary: str  # for the docs
    formula: str
    source: str
    function: str
    has_beta: bool = False


DEFAULT_DIVERGENCE = "reverse_kl"

DIVERGENCES = Table[DivergenceEntry](
    "divergence",
    DivergenceEntry(
        "reverse_kl",
        "The policy seeks the teacher's modes: it gives up what the teacher finds unlikely.",
        "KL(p ‖ q) = Σ p·(log p − log q)",
        "MiniLLM, Gu et al. 2024; on-policy: Agarwal et al. 2024",
        "hotseat.algorithms.distillation:reverse_kl",
    ),
    DivergenceEntry(
        "forward_kl",
        "The policy covers all of the teacher: what is likely for the teacher gets probability.",
        "KL(q ‖ p) = Σ q·(log q − log p)",
        "Hinton et al. 2015",
        "hotseat.algorithms.distillation:forward_kl",
    ),
    DivergenceEntry(
        "jsd",
        "Between the two: generalised Jensen-Shannon divergence, bounded.",
        "β·KL(q ‖ m) + (1 − β)·KL(p ‖ m), m = β·q + (1 − β)·p",
        "GKD, Agarwal et al. 2024, equation 1",
        "hotseat.algorithms.distillation:generalised_jsd",
        has_beta=True,
    ),
)

divergence_entry = DIVERGENCES.entry
