"""Advantages and losses of episodes in simulators, against an implementation of its own in plain float64 numbers.

The other implementation walks over lists of chunks, backwards, and knows neither tensors nor flat layouts.
"""

import math
import random
import statistics

import pytest
import torch

from hotseat.config import loads
from hotseat.loop.settings.rollout_settings import simulation_settings
from hotseat.loop.settings.training_settings import policy_settings
from hotseat.loop.workers.experience import (
    AdvantageSettings,
    flatten,
    totals_of,
    weighted,
    with_advantages,
    with_fields,
    without_truncated,
)
from hotseat.loop.workers.losses import (
    ADVANTAGES,
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    RETURNS,
    ROLLOUT_LOG_PROBS,
    PolicyObjective,
)
from hotseat.train.backend import Outputs
from hotseat.train.packing import take
from hotseat.types import Episode, Prompt, PromptGroup, SampleKey, ScoredEpisode, Segment

GAMMA, LAMBDA = 0.95, 0.9
DIM, CHUNK = 2, 3  # tokens of an action, actions of a chunk


def segment(num_context: int, num_sampled: int, num_learned: int) -> Segment:
    length = num_context + num_sampled
    mask = torch.zeros(length, dtype=torch.bool)
    mask[num_context : num_context + num_learned] = True
    return Segment(torch.arange(length), mask, torch.zeros(length), torch.zeros(length, dtype=torch.int32))


class World:
    """Random episodes as `Player` makes them, and the same facts as lists of numbers."""

    def __init__(
        self,
        seed: int,
        num_groups: int,
        size: int,
        *,
        has_turn_rewards: bool,
        bootstraps: bool,
        has_action_rewards: bool = False,
    ):
        self.has_action_rewards = has_action_rewards
        draw = random.Random(seed)
        self.groups: list[PromptGroup] = []
        self.values: list[float] = []  # of every token, in flat order
        # Per episode: (chunks, value after its end); a chunk is (rewards of its actions, values of its learned tokens).
        self.episodes: list[tuple[list[tuple[list[float], list[float]]], float]] = []
        for number in range(num_groups):
            samples = [
                self._episode(draw, SampleKey(0, number, sample), has_turn_rewards, bootstraps)
                for sample in range(size)
            ]
            prompt = Prompt(number, "task", (1,), f"0/{number}", "task")
            self.groups.append(PromptGroup(prompt, tuple(samples)))

    def _episode(self, draw: random.Random, key: SampleKey, has_turn_rewards: bool, bootstraps: bool) -> ScoredEpisode:
        segments, chunks, lengths = [], [], []
        num_chunks = draw.randint(1, 5)
        is_truncated = draw.random() < 0.5
        for at in range(num_chunks):
            taken = CHUNK if at < num_chunks - 1 else draw.randint(1, CHUNK)  # the last one may end early
            context = draw.randint(1, 6)
            segments.append(segment(context, CHUNK * DIM, taken * DIM))
            values = [draw.gauss(0, 1) for _ in range(context + CHUNK * DIM)]
            self.values += values
            last_reward = draw.gauss(0, 1)
            earlier = [draw.gauss(0, 1) if self.has_action_rewards else 0.0 for _ in range(taken - 1)]
            chunks.append(([*earlier, last_reward], values[context : context + taken * DIM]))
            lengths.append(taken * DIM)
        after = 0.0
        if bootstraps and is_truncated:
            last = segment(draw.randint(1, 6), 0, 0)
            segments.append(last)
            values = [draw.gauss(0, 1) for _ in last.token_ids]
            self.values += values
            after = values[-1]
        self.episodes.append((chunks, after))
        episode = Episode(
            key,
            tuple(segments),
            "",
            is_truncated=is_truncated,
            turn_lengths=tuple(lengths),
            action_length=DIM,
            has_bootstrap=bootstraps and is_truncated,
        )
        rewards = tuple(sum(of_actions) for of_actions, _ in chunks)
        if self.has_action_rewards:
            rewards = tuple(reward for of_actions, _ in chunks for reward in of_actions)
        return ScoredEpisode(episode, sum(rewards), 0.0, {}, rewards if has_turn_rewards else ())


def settings(
    estimator: str, time_step: str, ratio_step: str | None = None, distill_coefficient: float = 0.0
) -> AdvantageSettings:
    return AdvantageSettings(
        estimator=estimator,
        gamma=GAMMA if estimator == "gae" else 1.0,
        gae_lambda=LAMBDA if estimator == "gae" else 1.0,
        divide_by_std=True,
        reward_clip=None,
        kl_in_reward=0.0,
        kl_estimator="k1",
        overlong_buffer=0,
        overlong_factor=1.0,
        truncation_penalty=None,
        max_sampled=1000,
        time_step=time_step,
        ratio_step=ratio_step,
        distill_coefficient=distill_coefficient,
    )


def by_walking(world: World, time_step: str) -> tuple[list[float], list[float]]:
    """Return normalised advantages of learned tokens, and the returns at the beginnings of steps of time."""
    advantages: list[float] = []
    returns: list[float] = []
    for chunks, after in world.episodes:
        steps = []  # (reward, value, number of tokens)
        for rewards, values in chunks:
            size = {"token": 1, "action": DIM, "chunk": len(values)}[time_step]
            for at in range(0, len(values), size):
                # An action is rewarded at its last token.
                ended = [reward for place, reward in enumerate(rewards) if at < (place + 1) * DIM <= at + size]
                steps.append((sum(ended), values[at], len(values[at : at + size])))
        own: list[tuple[float, float, int]] = []
        following, carried = after, 0.0
        for reward, value, num_tokens in reversed(steps):
            carried = reward + GAMMA * following - value + GAMMA * LAMBDA * carried
            own.append((carried, carried + value, num_tokens))
            following = value
        for advantage, target, num_tokens in reversed(own):
            advantages += [advantage] * num_tokens
            returns.append(target)
    mean, deviation = statistics.fmean(advantages), statistics.pstdev(advantages)
    return [(advantage - mean) / deviation for advantage in advantages], returns


@pytest.mark.parametrize("time_step", ["token", "action", "chunk"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("has_action_rewards", [False, True])
def test_ppo_of_episodes_in_simulators(time_step, seed, has_action_rewards):
    world = World(seed, 6, 1, has_turn_rewards=True, bootstraps=True, has_action_rewards=has_action_rewards)
    batch = flatten(world.groups)
    values = torch.tensor(world.values, dtype=torch.float32)
    learned = with_advantages(world.groups, batch, settings("gae", time_step), lambda own: own, values)
    advantages, returns = by_walking(world, time_step)
    found = learned.fields[ADVANTAGES][batch.mask].double()
    assert torch.allclose(found, torch.tensor(advantages, dtype=torch.float64), rtol=0, atol=2e-6)
    # With steps of several tokens the return stands at the first of them, and the critic learns nothing elsewhere.
    targets = learned.fields[RETURNS][batch.mask].double()
    targets = targets[targets != 0]
    assert torch.allclose(targets, torch.tensor(returns, dtype=torch.float64), rtol=0, atol=2e-6)
    assert not learned.fields[ADVANTAGES][~batch.mask].any()


def test_grpo_of_episodes_in_simulators():
    world = World(2, 4, 3, has_turn_rewards=False, bootstraps=False)
    batch = flatten(world.groups)
    found = with_advantages(world.groups, batch, settings("group_norm", "token"), lambda own: own).fields[ADVANTAGES]
    expected: list[float] = []
    for at in range(0, len(world.episodes), 3):
        group = world.episodes[at : at + 3]
        totals = [sum(sum(rewards) for rewards, _ in chunks) for chunks, _ in group]
        mean, deviation = statistics.fmean(totals), statistics.stdev(totals)
        for total, (chunks, _) in zip(totals, group, strict=True):
            num_tokens = sum(len(values) for _, values in chunks)
            expected += [(total - mean) / deviation] * num_tokens
    assert torch.allclose(found[batch.mask].double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-6)


# ----------------------------------------------------------------------------- ratios of other steps than those of time

LOW, HIGH, DUAL = 0.2, 0.3, 1.5  # clips
CORRECTION = (0.8, 1.3)  # bounds
KL, ENTROPY = 0.1, 0.01  # coefficients
PAIRS = [("token", "token"), *(("action", step) for step in ("token", "action"))]
PAIRS += [("chunk", step) for step in ("token", "action", "chunk")]


def objective(correction: str | None) -> PolicyObjective:
    return PolicyObjective(
        policy_loss="ppo",
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=DUAL,
        correction=correction,
        correction_low=CORRECTION[0],
        correction_high=CORRECTION[1],
        kl_estimator="k2",
        kl_coefficient=KL,
        entropy_coefficient=ENTROPY,
    )


class Loop:
    """Loss of a step, its gradient and its counts, by loops over the tokens that share a ratio."""

    def __init__(
        self,
        episodes: list[list[list[int]]],
        ratio_step: str,
        numbers: dict[str, list[float]],
        advantages: dict[int, float],
        weights: dict[int, float],
        correction: str | None,
    ):
        """episodes: per chunk, the flat positions of its tokens. advantages, weights: of tokens, by position."""
        self.loss, self.num_clipped, self.num_corrected = 0.0, 0, 0
        self.slopes = [0.0] * len(numbers["new"])
        new, old, engine, reference, entropy = (
            numbers[name] for name in ("new", "old", "engine", "reference", "entropy")
        )
        for chunk in (chunk for chunks in episodes for chunk in chunks):
            size = {"token": 1, "action": DIM, "chunk": len(chunk)}[ratio_step]
            for at in range(0, len(chunk), size):
                shared = chunk[at : at + size]
                ratio, gap = 1.0, 1.0
                for t in shared:
                    ratio *= math.exp(new[t] - old[t])
                    gap *= math.exp(old[t] - engine[t])
                weight = 1.0
                if correction == "tis":
                    weight = min(max(gap, CORRECTION[0]), CORRECTION[1])
                elif correction == "icepop":
                    weight = gap if CORRECTION[0] <= gap <= CORRECTION[1] else 0.0
                is_corrected = correction is not None and weight != gap
                for t in shared:
                    advantage = advantages[t]
                    free, held = ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage
                    gain = min(free, held)
                    has_gradient = free <= held
                    if advantage < 0 and gain < DUAL * advantage:
                        gain, has_gradient = DUAL * advantage, False
                    distance = new[t] - reference[t]
                    self.loss += weights[t] * (-weight * gain + KL * distance**2 / 2 - ENTROPY * entropy[t])
                    self.slopes[t] += weights[t] * KL * distance
                    for other in shared if has_gradient else []:
                        self.slopes[other] -= weights[t] * weight * ratio * advantage
                    self.num_clipped += held < free
                    self.num_corrected += is_corrected


def positions(world: World, batch) -> list[list[list[int]]]:
    """Return the flat positions of the learned tokens of each chunk, per episode."""
    sampled = iter(batch.mask.nonzero().squeeze(1).tolist())
    return [[[next(sampled) for _ in values] for _, values in chunks] for chunks, _ in world.episodes]


def numbers_of(num_tokens: int, seed: int) -> dict[str, list[float]]:
    draw = random.Random(seed)
    old = [draw.gauss(-1, 0.3) for _ in range(num_tokens)]
    return {
        "old": old,
        "new": [value + draw.gauss(0, 0.25) for value in old],
        "engine": [value + draw.gauss(0, 0.15) for value in old],
        "reference": [value + draw.gauss(0, 0.3) for value in old],
        "entropy": [draw.random() for _ in range(num_tokens)],
    }


def losses_of(batch, numbers: dict[str, list[float]], correction: str | None):
    """Return the terms of our loss, and its gradient."""
    log_probs = torch.tensor(numbers["new"], dtype=torch.float64, requires_grad=True)
    outputs = Outputs(log_probs=log_probs, entropy=torch.tensor(numbers["entropy"], dtype=torch.float64))
    terms = objective(correction).terms(outputs, batch)
    terms.loss.backward()
    return terms, log_probs.grad


@pytest.mark.parametrize("correction", [None, "tis", "icepop"])
@pytest.mark.parametrize(("time_step", "ratio_step"), PAIRS)
def test_the_loss_of_ratios_by_one_step_and_gae_by_another(time_step, ratio_step, correction):
    world = World(3, 6, 1, has_turn_rewards=True, bootstraps=True)
    batch = flatten(world.groups)
    numbers = numbers_of(batch.layout.num_tokens, 4)
    fields = {OLD_LOG_PROBS: "old", ROLLOUT_LOG_PROBS: "engine", REFERENCE_LOG_PROBS: "reference"}
    batch = with_fields(batch, {key: torch.tensor(numbers[name], dtype=torch.float64) for key, name in fields.items()})
    values = torch.tensor(world.values, dtype=torch.float32)
    batch = with_advantages(world.groups, batch, settings("gae", time_step, ratio_step), lambda own: own, values)
    episodes = positions(world, batch)
    tokens = [token for chunks in episodes for chunk in chunks for token in chunk]
    advantages = dict(zip(tokens, by_walking(world, time_step)[0], strict=True))
    for aggregation in ("token_mean", "sequence_mean"):
        weights = {token: 1 / len(tokens) for token in tokens}
        if aggregation == "sequence_mean":
            sizes = [sum(map(len, chunks)) for chunks in episodes]
            weights = {
                token: 1 / (len(episodes) * size)
                for chunks, size in zip(episodes, sizes, strict=True)
                for chunk in chunks
                for token in chunk
            }
        expected = Loop(episodes, ratio_step, numbers, advantages, weights, correction)
        whole = weighted(batch, aggregation, totals_of([batch])[0])
        terms, gradient = losses_of(whole, numbers, correction)
        assert terms.loss.item() == pytest.approx(expected.loss, abs=2e-6)
        assert torch.allclose(gradient, torch.tensor(expected.slopes, dtype=torch.float64), rtol=0, atol=2e-6)
        assert int(terms.metrics["clipped"]) == expected.num_clipped > 0
        assert int(terms.metrics.get("corrected", 0)) == expected.num_corrected
        assert (expected.num_corrected > 0) == (correction is not None)
        # The loss of parts is that of the whole: micro-batches may be cut between episodes.
        names = list(dict.fromkeys(whole.sample_ids))
        halves = [names[:2], names[2:]]
        parts = [[at for at, name in enumerate(whole.sample_ids) if name in half] for half in halves]
        starts = whole.offsets.tolist()
        total = 0.0
        for part in parts:
            places = [t for at in part for t in range(starts[at], starts[at + 1])]
            own = {name: [column[t] for t in places] for name, column in numbers.items()}
            total += losses_of(take(whole, part), own, correction)[0].loss.item()
        assert total == pytest.approx(expected.loss, abs=2e-6)


@pytest.mark.parametrize("ratio_step", ["token", "action", "chunk"])
def test_episodes_compared_with_their_group_have_ratios_of_any_step_and_truncated_ones_are_masked(ratio_step):
    world = World(5, 4, 3, has_turn_rewards=False, bootstraps=False)
    batch = flatten(world.groups)
    numbers = numbers_of(batch.layout.num_tokens, 6)
    fields = {OLD_LOG_PROBS: "old", ROLLOUT_LOG_PROBS: "engine", REFERENCE_LOG_PROBS: "reference"}
    batch = with_fields(batch, {key: torch.tensor(numbers[name], dtype=torch.float64) for key, name in fields.items()})
    batch = with_advantages(world.groups, batch, settings("group_norm", "chunk", ratio_step), lambda own: own)
    episodes = positions(world, batch)
    samples = [sample for group in world.groups for sample in group.samples]
    kept = [not sample.episode.is_truncated for sample in samples]
    totals = [sample.reward for sample in samples]
    advantages = {}
    for at, chunks in enumerate(episodes):
        group = totals[at // 3 * 3 : at // 3 * 3 + 3]
        for token in (token for chunk in chunks for token in chunk):
            advantages[token] = (totals[at] - statistics.fmean(group)) / statistics.stdev(group)
    learned = [chunks for chunks, is_kept in zip(episodes, kept, strict=True) if is_kept]
    assert 0 < len(learned) < len(episodes)
    num_tokens = sum(len(chunk) for chunks in learned for chunk in chunks)
    weights = {token: 1 / num_tokens for chunks in learned for chunk in chunks for token in chunk}
    expected = Loop(learned, ratio_step, numbers, advantages, weights, "tis")
    batch = without_truncated(world.groups, batch)
    terms, gradient = losses_of(weighted(batch, "token_mean", totals_of([batch])[0]), numbers, "tis")
    assert terms.loss.item() == pytest.approx(expected.loss, abs=2e-6)
    assert torch.allclose(gradient, torch.tensor(expected.slopes, dtype=torch.float64), rtol=0, atol=2e-6)
    assert int(terms.metrics["clipped"]) == expected.num_clipped
    assert int(terms.metrics["corrected"]) == expected.num_corrected


@pytest.mark.parametrize("ratio_step", ["token", "action", "chunk"])
def test_tokens_that_share_a_ratio_share_what_a_teacher_adds(ratio_step):
    world = World(7, 2, 2, has_turn_rewards=False, bootstraps=False)
    batch = flatten(world.groups)
    numbers = numbers_of(batch.layout.num_tokens, 8)
    fields = {OLD_LOG_PROBS: "old", REFERENCE_LOG_PROBS: "reference"}
    batch = with_fields(batch, {key: torch.tensor(numbers[name], dtype=torch.float64) for key, name in fields.items()})
    plain, taught = (
        with_advantages(world.groups, batch, settings("group_norm", "chunk", ratio_step, coefficient), lambda own: own)
        for coefficient in (0.0, 0.5)
    )
    added = (taught.fields[ADVANTAGES] - plain.fields[ADVANTAGES]).tolist()
    for chunk in (chunk for chunks in positions(world, batch) for chunk in chunks):
        size = {"token": 1, "action": DIM, "chunk": len(chunk)}[ratio_step]
        for at in range(0, len(chunk), size):
            shared = chunk[at : at + size]
            mean = statistics.fmean(numbers["reference"][t] - numbers["old"][t] for t in shared)
            assert [added[t] for t in shared] == pytest.approx([0.5 * mean] * len(shared), abs=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        ("{}", ("token", "token")),
        ("{time_step: chunk}", ("chunk", "chunk")),
        ("{time_step: chunk, ratio_step: action}", ("chunk", "action")),
        ("{time_step: chunk, ratio_step: token, policy_loss: cispo}", ("chunk", "token")),
    ],
)
def test_the_ratio_has_the_step_of_time_unless_it_is_set(algorithm, steps):
    advantages = policy_settings(loads(f"env: {{path: babyai}}\nalgorithm: {algorithm}"), 1, 0.0).advantages
    assert (advantages.time_step, advantages.ratio_step) == steps


@pytest.mark.parametrize(
    ("algorithm", "has_action_rewards"),
    [
        ("{estimator: gae}", True),
        ("{estimator: reinforce, time_step: action}", True),
        ("{estimator: gae, time_step: chunk}", False),
        ("{estimator: gae, time_step: chunk, ratio_step: token}", False),
    ],
)
def test_actions_are_rewarded_by_themselves_unless_the_step_of_time_is_a_chunk(algorithm, has_action_rewards):
    made = simulation_settings(loads(f"env: {{path: babyai}}\nalgorithm: {algorithm}"))
    assert made.has_turn_rewards
    assert made.has_action_rewards == has_action_rewards
