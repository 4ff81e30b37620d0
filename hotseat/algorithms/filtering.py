"""DAPO's dynamic sampling: the decision which groups to keep. Asking for more prompts is the loop's part.

Yu et al., "DAPO", 2025, section 3.2: a prompt that every sample solves, or none, has no advantage. OpenRLHF's form: a
group is kept iff low < mean(scores) < high, both strict. It looks at the mean, not the variance: for scores in [0, 1].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hotseat.errors import UserError


def reason_to_drop(
    scores: Sequence[float], low: float | None, high: float | None, *, min_samples: int = 1
) -> str | None:
    """Return why a group is dropped, or None to keep it: low < mean(scores) < high and enough samples.

    `scores` are those of one group. Without bounds (None) their values do not matter. Set `min_samples` to 2 where the
    estimator needs siblings, so that a group whose other samples failed is dropped here and not refused later.
    """
    if low is not None and high is not None and not low < high:
        raise UserError(f"dynamic_filtering_reward_range is [{low}, {high}]: the first number must be below the second")
    if len(scores) < min_samples:
        return f"fewer than {min_samples} samples have a reward"
    if low is None or high is None:
        return None
    mean = statistics.fmean(scores)
    if math.isnan(mean):
        return "score not a number"
    if mean <= low:
        return "score too low"
    return "score too high" if mean >= high else None
