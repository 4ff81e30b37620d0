"""The metrics of a run: every name in `metrics.jsonl`, and what it measures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from hotseat.registry.lookup import Table


@dataclass(frozen=True)
class MetricEntry:
    """A metric, or a family: a word in capital letters in its name stands for a name of the run, or for a number."""

    name: str
    heading: str  # of the part of the reference in which it stands
    summary: str

    def stands_for(self, name: str) -> bool:
        """Tell whether this entry describes the metric with this name."""
        pattern = re.sub(r"[A-Z]+", "[^/]+", re.escape(self.name))
        return re.fullmatch(pattern, name) is not None


_BY_HEADING = {
    "Every run": {
        "step": "the optimizer step (RL: the rollout) that the line is of; 0 is the evaluation before training",
        "loss": "the mean loss of the step's updates",
        "aux_loss": "the loss that balances a mixture's experts, as its model computes it",
        "grad_norm": "the norm of all gradients before they are clipped, a mean over the step's updates",
        "learning_rate": "of the step's last update",
        "skipped_updates": "updates so far that were skipped because their gradients were not finite",
        "tokens_per_s": "tokens of the step by its seconds: sampled ones in RL, learned ones elsewhere",
        "step_s": "seconds of the step, without an evaluation after it",
    },
    "Reward models and preferences": {
        "accuracy": "the share of pairs whose chosen answer has the higher reward",
        "chosen_reward": "the mean reward of chosen answers (preferences: the implicit one)",
        "rejected_reward": "the mean reward of rejected answers",
        "margin": "the mean of the chosen minus the rejected reward",
        "chosen_nll": "the mean negative log-likelihood of the tokens of chosen answers",
    },
    "RL: samples": {
        "reward": "the mean reward of the step's samples",
        "reward_std": "the standard deviation of their rewards",
        "group_reward_std": "the standard deviation within a group, a mean over groups: 0 teaches nothing",
        "groups_alike": "the share of groups all of whose rewards are equal",
        "length": "the mean number of sampled tokens of an answer",
        "length_max": "the largest number of sampled tokens of an answer",
        "truncated": "the share of answers that were cut at the limit of tokens",
        "samples": "samples of the step",
        "sampled_tokens": "tokens that the policy sampled for them",
        "samples_failed": "samples whose agent or reward failed; they are not learned from",
        "groups_dropped": "groups that were not learned from, by a filter or a component",
        "groups_given_up": "groups that were not waited for (`rollout.oversample`)",
        "length_given_up": "the mean length of those of their answers that had ended",
        "answers_cut": "how many of their answers had not ended",
        "success/TASK": "the share of episodes of a task that succeeded, where episodes say so",
        "turns/number": "the mean number of turns of an episode",
        "turns/policy_s": "seconds in the policy, a mean over turns",
        "turns/outside_s": "seconds outside the policy, in agent and environment, a mean over turns",
        "turns/policy_s/N": "seconds in the policy in the turn N",
        "turns/outside_s/N": "seconds outside the policy before the turn N",
        "turns/outside_s/end": "seconds outside the policy after the last turn",
        "extra/NAME": "the mean of a number that a reward function, grader, judge or agent returned",
        "components/NAME/groups": "groups that a custom component received",
        "components/NAME/dropped": "groups that it dropped",
        "components/NAME/KEY": "the mean of one of its metrics over groups",
    },
    "RL: the actor's updates": {
        "clipped": "the share of tokens whose probability ratio was clipped",
        "policy_kl": "the estimated KL divergence of the updated policy from the one that sampled",
        "kl": "the estimated KL divergence from the reference",
        "kl_coefficient": "the coefficient of that divergence, which `algorithm.kl.target` adapts",
        "entropy": "the mean entropy of the next token's distribution",
        "divergence": "the divergence from the teacher (`algorithm.distill`)",
        "corrected": "the share of tokens whose weight corrects for the engine's log-probs",
        "rejected": "the share of tokens that the correction left out",
        "learned_tokens": "tokens that had a gradient; the means above are over these",
    },
    "RL: the critic": {
        "value_loss": "the mean loss of the critic's updates",
        "value_clipped": "the share of tokens whose value was clipped",
        "value": "the mean value that the critic predicted before it learned from the rollout",
        "return": "the mean return that it learns to predict",
        "explained_variance": "1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 a constant",
        "critic_grad_norm": "as `grad_norm`",
        "critic_learning_rate": "as `learning_rate`",
        "critic_skipped_updates": "as `skipped_updates`",
        "critic_aux_loss": "as `aux_loss`",
    },
    "RL: engines beside the trainer": {
        "version": "the version of the weights after the step's push",
        "engine_gap": "the mean distance between log-probs of engine and trainer, over trained tokens",
        "engine_gap_mean": "the same with its sign, in the first update, as the next four",
        "engine_gap_median": "its median",
        "engine_gap_p90": "its 90th percentile",
        "engine_gap_p99": "its 99th percentile",
        "engine_gap_max": "its largest value",
        "engine_gap_use": "the largest of median, 90th percentile and mean as a share of the canary's limit",
        "canary_gap": "the mean distance of log-probs over the canary's tokens after the last push",
        "canary_gap_mean": "the same with its sign",
        "canary_gap_median": "its median",
        "canary_gap_p90": "its 90th percentile",
        "canary_use": "the largest of the three as a share of its limit; above 1 is an alarm",
        "canary_alarms": "alarms that new answers did not confirm",
        "engine_restarts": "engines that died or hung and were replaced",
        "host_restarts": "rollout hosts that died or hung and were replaced",
        "group_restarts": "restarts of all ranks of a model, since one died or hung",
        "sync/gb": "size of the last push, in GB of 1e9 bytes",
        "sync/transfer_ms": "milliseconds until every engine had loaded it",
        "sync/gb_per_s": "their quotient",
        "sync/proof_ms": "milliseconds for comparing digests",
    },
    "RL: sampling ahead of training": {
        "staleness": "the mean number of updates that the weights of the samples were behind",
        "staleness_max": "the largest such number",
        "groups_waiting": "groups that are complete and not learned from yet",
        "groups_in_flight": "groups that are sampled now",
        "groups_begun_again": "groups whose samples were begun again with newer weights",
        "requests_sent_again": "requests that were sent again after a push or a death",
        "engine_gap_lag_N": "`engine_gap` of tokens whose weights were N updates behind",
        "tokens_lag_N": "the number of those tokens",
        "time/wait": "seconds that the trainer waited for samples",
        "time/drain": "seconds until engines had stopped for the push",
    },
    "Evaluations": {
        "eval/reward": "the mean reward on held-out prompts",
        "eval/accuracy": "the share of rewards of 1 or more; in reward models and preferences, of pairs in order",
        "eval/pass@K": "an estimate of the probability that one of K answers has a reward of 1 or more",
        "eval/length": "the mean number of sampled tokens",
        "eval/length_median": "their median (`hotseat eval`)",
        "eval/length_max": "the largest (`hotseat eval`)",
        "eval/truncated": "the share of answers that were cut (`hotseat eval`)",
        "eval/failed": "samples that failed; the other numbers leave them out",
        "eval/success": "the share of episodes that succeeded",
        "eval/loss": "the loss on held-out rows",
        "eval/margin": "as `margin`",
        "eval/chosen_reward": "as `chosen_reward`",
        "eval/rejected_reward": "as `rejected_reward`",
        "eval/reward_mean": "the mean reward of a reward model on held-out answers",
        "eval/reward_std": "their standard deviation",
        "eval/SET/NAME": "any of these, of one of `eval.sets`, or of one of the data's sources",
        "eval/components/NAME/KEY": "metrics of a custom component with `evaluates: true`",
        "eval/SET/components/NAME/KEY": "the same, of one of `eval.sets`",
    },
    "Time, memory, machine": {
        "time/PHASE": "seconds of the step in a phase: rollout, prepare, update, sync, and a component's own",
        "time/offload": "seconds of hand-overs: parts that leave a device",
        "time/onload": "seconds of hand-overs: parts that return, as far as they do so after the last has left",
        "time/save": "seconds that the run waited for checkpoints since the step before",
        "time/driver_cpu": "seconds of the driver's own work",
        "handover/gib": "GiB of the parts that were handed over",
        "handover/gib_copied": "GiB of them that were copied, and not dropped",
        "memory/PHASE/ROLE": (
            "GiB of a role's processes: the peak during a phase on a GPU, the largest resident memory on a CPU"
        ),
        "memory/PHASE/device N": "peak memory in use on a GPU during a phase",
        "machine/cpu": "the share of the driver's machine's processors that worked during the step",
        "machine/memory": "the most GiB of host memory in use there, by this run or others",
        "machine/device N/busy": "the share of the time in which a GPU computed, as its driver samples it",
        "machine/device N/memory": "the most GiB in use on it",
        "upload/step": "the newest step whose checkpoint is at `checkpoint.path`, a URL",
        "upload/waiting_gib": "GiB of the upload under way that are not there yet",
        "upload/failures": "attempts to upload that have failed since the command began",
    },
}
METRIC_NAMES = Table[MetricEntry](
    "metric",
    *(
        MetricEntry(name, heading, summary)
        for heading, summaries in _BY_HEADING.items()
        for name, summary in summaries.items()
    ),
)
HEADINGS = tuple(_BY_HEADING)


@cache
def entry_of(name: str) -> MetricEntry | None:
    """Return what describes the metric with this name: its own entry, or that of its family; None if nothing does."""
    if name in METRIC_NAMES:
        return METRIC_NAMES[name]
    return next((entry for entry in METRIC_NAMES.values() if entry.stands_for(name)), None)
