"""The table of causes, and the diagnosis of a run by it.

    RULES                a table, an entry for each cause: what it reads, when it fires, what helps
    diagnose(recorded)   how the run ended, and the causes that fire, the most likely first

Most rules need harm: healthy runs have stale samples, spikes and low entropy, too, and a solved task has groups that
are all alike. Values are compared with the same run's beginning, its noise and the range of its rewards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hotseat.observe.diagnosis import data_rules, policy_rules
from hotseat.observe.diagnosis.run_ending import GOALS, Ending, ending_of
from hotseat.observe.diagnosis.signs import OptionChange, Signs, entropy_metric
from hotseat.observe.recorded import Recorded
from hotseat.registry.lookup import Table


@dataclass(frozen=True)
class Rule:
    """A cause. explains: others that it brings about, so that they rank behind it if they begin no earlier."""

    name: str
    reads: str
    fires: str
    words: str
    cure: str
    find: Callable[[Recorded, Ending], Signs | None]
    explains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cause:
    rule: Rule
    signs: Signs
    follows: str | None = None  # name of the cause that brought it about

    @property
    def cure(self) -> tuple[OptionChange, ...]:
        """Return the options to change; none for a consequence, which ends with its origin."""
        return () if self.follows else self.signs.cure


RULES = Table[Rule](
    "rule",
    Rule(
        "failed-rewards",
        "ledger, `samples_failed`",
        "a tenth of the samples of a step failed",
        "rewards or agents fail",
        "`reward.function`: what its errors say",
        data_rules.failed_rewards,
    ),
    Rule(
        "constant-reward",
        "`reward_std`",
        "it is 0 in every step",
        "every answer has the same reward, so nothing is learned",
        "`reward.function`: one that tells answers apart",
        data_rules.constant_reward,
        ("groups-alike", "entropy-collapse"),
    ),
    Rule(
        "groups-alike",
        "`groups_alike`",
        "70% of groups or more to the end, and harm, or the run stalled",
        "the answers to a prompt have equal rewards, so that there is no signal",
        "`rollout.temperature` 1 if it is below 0.7; twice `rollout.samples_per_prompt`; other prompts",
        data_rules.groups_alike,
    ),
    Rule(
        "truncation",
        "`truncated`",
        "half of the answers or more to the end, and harm",
        "answers are cut off before they end",
        "`rollout.max_new_tokens` times 4",
        data_rules.truncation,
        ("groups-alike", "constant-reward"),
    ),
    Rule(
        "length-reward",
        "`length`, `reward`, `eval/...`, `truncated`",
        "length grows by half, most of the reward's rise follows, and held-out goals fall; or half of the answers"
        " are cut, and reward correlates with length by 0.8 over the steps",
        "the reward pays for length",
        "`reward.function`; `reward.overlong.buffer_length`",
        data_rules.length_reward,
        ("truncation", "reward-hack", "repeated-data", "groups-alike", "entropy-collapse", "kl-growth"),
    ),
    Rule(
        "reward-hack",
        "`reward`, `eval/...`",
        "reward rises while a held-out goal that is scored otherwise falls",
        "the policy found what the reward function pays for, and it is not the task",
        "`reward.function`: the score of the evaluation; `algorithm.kl.coef`",
        data_rules.reward_hack,
        ("groups-alike", "entropy-collapse", "kl-growth", "truncation"),
    ),
    Rule(
        "repeated-data",
        "ledger, `reward`, `eval/reward`",
        "after 3 passes or more, trained prompts have more reward than held-out ones by half of its range",
        "the prompts were repeated until the policy knew them by heart",
        "`train.num_episodes` as at its beginning; more prompts",
        data_rules.repeated_data,
        ("entropy-collapse", "groups-alike"),
    ),
    Rule(
        "dropped-data",
        "ledger, `groups_dropped`",
        "70% of samples are dropped, and harm or an error",
        "nearly all groups are dropped, so that prompts run out",
        "`algorithm.filtering.enabled` off, or wider bounds",
        data_rules.dropped_data,
    ),
    Rule(
        "not-finite",
        "`skipped_updates`, `loss`, `grad_norm`, `kl`",
        "a number is not finite, or one update in 20 is skipped",
        "gradients are not finite",
        "`train.dtype` bf16 instead of fp16; a tenth of `actor.optimizer.learning_rate`",
        policy_rules.not_finite,
        ("learning-rate", "groups-alike", "truncation", "entropy-collapse"),
    ),
    Rule(
        "engine-gap",
        "`engine_gap_use`, `canary_use`",
        "above 1 in a fifth of the steps",
        "engine and trainer compute different log-probs for the same weights",
        "`rollout.quantization` off, `rollout.engine` transformers, `algorithm.correction.kind` tis",
        policy_rules.engine_gap,
        ("learning-rate", "groups-alike", "truncation", "entropy-collapse", "kl-growth", "large-updates"),
    ),
    Rule(
        "staleness",
        "`engine_gap`, `staleness_max`",
        "0.5 nats per token between sampling and learning with a staleness of 2 or more, and harm",
        "samples are too old for the policy that learns from them",
        "`overlap.staleness` 1, `algorithm.correction.kind` tis, a third of the learning rate",
        policy_rules.staleness,
        ("learning-rate", "groups-alike", "truncation", "entropy-collapse", "kl-growth", "large-updates"),
    ),
    Rule(
        "kl-penalty",
        "`kl`, `kl_coefficient`, `length`, `group_reward_std`, `reward_std`",
        "in half of the steps the penalty of an answer is above the spread of rewards in its group, or in the step if"
        " groups have one sample, while `kl` is below the first entropy, and harm",
        "the KL penalty outweighs the reward",
        "`algorithm.kl.coef` at a tenth of that spread",
        policy_rules.kl_penalty,
        ("learning-rate", "groups-alike", "truncation", "kl-growth", "entropy-collapse"),
    ),
    Rule(
        "entropy-bonus",
        "`entropy`, `algorithm.entropy_coef`",
        "twice the first value to the end, and harm",
        "the entropy bonus outweighs the reward: answers become random",
        "a hundredth of `algorithm.entropy_coef`",
        policy_rules.entropy_bonus,
        ("learning-rate", "groups-alike", "truncation", "kl-growth"),
    ),
    Rule(
        "large-updates",
        "`clipped`",
        "a fifth of the tokens in most steps before the fall, with 8 optimizer steps for a rollout or more, and harm",
        "too much is learned from each rollout",
        "`train.max_epochs` 1, a larger `train.batch_size`, a third of the learning rate",
        policy_rules.large_updates,
        ("learning-rate", "groups-alike", "truncation", "kl-growth", "entropy-collapse"),
    ),
    Rule(
        "learning-rate",
        "`reward` with `length`, `truncated`, `entropy`, `grad_norm`, `policy_kl`, `kl`",
        "one of these jumps where the reward falls, or at the start of a run whose reward never rises",
        "the learning rate is too high: an update broke the policy",
        "a tenth of `actor.optimizer.learning_rate`",
        policy_rules.learning_rate,
        ("groups-alike", "truncation", "entropy-collapse", "kl-growth", "critic"),
    ),
    Rule(
        "kl-growth",
        "`kl`, `entropy`",
        "10 times the first values and above the entropy to the end, and harm",
        "the policy drifts away from the reference",
        "`algorithm.kl.coef` times 10, a third of the learning rate",
        policy_rules.kl_growth,
        ("entropy-collapse", "groups-alike", "truncation"),
    ),
    Rule(
        "entropy-collapse",
        "`entropy`, else -log p in samples",
        "a tenth of the first values to the end, and harm; or 30% of them, and the run stalled",
        "the policy became deterministic before it had solved the task",
        "`algorithm.entropy_coef`, `algorithm.clip_high` 0.28, a third of the learning rate",
        policy_rules.entropy_collapse,
        ("groups-alike",),
    ),
    Rule(
        "critic",
        "`explained_variance`, `value_loss`",
        "below 0 to the end, and harm",
        "the critic is worse than a constant",
        "`critic.warmup_steps`, 3 times `critic.optimizer.learning_rate`; a tenth or less of it, if it is 100 times the"
        " actor's or `value_loss` grew tenfold",
        policy_rules.critic,
    ),
)


def diagnose(recorded: Recorded) -> tuple[Ending, list[Cause]]:
    """Return how a run ended and the causes that fire, the most likely first.

    Causes are in the order in which they began, and at one step by strength; a cause that another brings about, which
    began before or about then, comes behind all that have no such origin.
    """
    ending = ending_of(recorded)
    # A consequence may pass its threshold first; where a run stalls, all goes slowly.
    slack = max(1, len(recorded.curve("reward").steps) // (2 if ending.kind == "stalled" else 10))
    fired = {rule.name: signs for rule in RULES.values() if (signs := rule.find(recorded, ending)) is not None}
    causes = []
    for name, signs in fired.items():
        origins = [
            other
            for other, its in fired.items()
            if name in RULES[other].explains and its.began <= signs.began + slack and not signs.is_setting
        ]
        causes.append(Cause(RULES[name], signs, min(origins, key=lambda other: fired[other].began, default=None)))
    return ending, sorted(causes, key=lambda each: (each.follows is not None, each.signs.began, -each.signs.strength))


def read_by_rules(recorded: Recorded) -> list[str]:
    """List the metrics that rules read, goals first, with the estimate of the entropy where that was not recorded."""
    read = [name for rule in RULES.values() for name in re.findall("`([a-z_]+)`", rule.reads)]
    return list(dict.fromkeys([*GOALS, *read, entropy_metric(recorded)]))


def render_table() -> str:
    """Render the rules as the table of docs/diagnosing.md."""
    rows = [f"| `{rule.name}` | {rule.reads} | {rule.fires} | {rule.cure} |" for rule in RULES.values()]
    return "\n".join(["| cause | read | fires if | cure |", "| --- | --- | --- | --- |", *rows])
