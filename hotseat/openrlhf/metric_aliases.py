"""OpenRLHF's names of metrics, beside ours, for trackers: dashboards that were made for it go on.

Only metrics that mean the same have one. OpenRLHF's `return` is a sum over each answer where ours is a mean over
tokens, its pass@k is the mean of best rewards where ours counts right answers, and `total_length` includes prompts:
they have no counterpart here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PAIRS = {
    "accuracy": "train/acc",
    "chosen_reward": "train/chosen_reward",
    "rejected_reward": "train/reject_reward",
    "learning_rate": "train/lr",
    "aux_loss": "train/aux_loss",
    "eval/accuracy": "eval/acc_mean",
}
NAMES: Mapping[str, Mapping[str, str]] = {
    "rl": {
        "loss": "train/policy_loss",
        "kl": "train/kl",
        "entropy": "train/entropy_loss",
        "reward": "train/reward",
        "length": "train/response_length",
        "truncated": "train/truncated",
        "learning_rate": "train/actor_lr",
        "value_loss": "train/critic_loss",
        "value": "train/values",
        "critic_learning_rate": "train/critic_lr",
    },
    "sft": {
        "loss": "train/gpt_loss",
        "learning_rate": "train/lr",
        "aux_loss": "train/aux_loss",
        "eval/loss": "eval/eval gpt_loss",
    },
    "rm": {**_PAIRS, "loss": "train/loss", "eval/loss": "eval/eval_loss"},
    "dpo": {**_PAIRS, "loss": "train/loss", "chosen_nll": "train/nll_loss", "eval/loss": "eval/eval_loss"},
}
_SOURCE = re.compile(r"eval/(.+)/reward")


def with_openrlhf_names(task: str, step: int, values: Mapping[str, Any], *, is_plain_loss: bool) -> dict[str, Any]:
    """Return the metrics of a step under our names and OpenRLHF's.

    is_plain_loss: the loss has no further terms, such as KL or entropy, which OpenRLHF leaves out of the number.
    """
    names = {ours: theirs for ours, theirs in NAMES[task].items() if ours in values}
    if not is_plain_loss:
        names = {ours: theirs for ours, theirs in names.items() if ours not in ("loss", "eval/loss", "value_loss")}
    more = {theirs: values[ours] for ours, theirs in names.items()}
    if task == "rl":  # the mean reward of a data set, which OpenRLHF calls pass1
        sources = {match[1]: values[name] for name in values if (match := _SOURCE.fullmatch(name))}
        more |= {f"eval/eval_{source}_pass1": reward for source, reward in sources.items()}
    axes = {name.split("/")[0] for name in more}
    return {**values, **more, **{f"{axis}/global_step": step for axis in sorted(axes)}}
