"""Advantages of episodes in simulators, against an implementation of its own in plain float64 numbers.

The other implementation walks over lists of chunks, backwards, and knows neither tensors nor flat layouts.
"""

import random
import statistics

import pytest
import torch

from hotseat.loop.workers.experience import AdvantageSettings, flatten, with_advantages
from hotseat.loop.workers.losses import ADVANTAGES, RETURNS
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

    def __init__(self, seed: int, num_groups: int, size: int, *, has_turn_rewards: bool, bootstraps: bool):
        draw = random.Random(seed)
        self.groups: list[PromptGroup] = []
        self.values: list[float] = []  # of every token, in flat order
        # Per episode: (chunks, value after its end); a chunk is (its reward, the values of its learned tokens).
        self.episodes: list[tuple[list[tuple[float, list[float]]], float]] = []
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
            chunks.append((draw.gauss(0, 1), values[context : context + taken * DIM]))
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
        rewards = tuple(reward for reward, _ in chunks)
        return ScoredEpisode(episode, sum(rewards), 0.0, {}, rewards if has_turn_rewards else ())


def settings(estimator: str, time_step: str) -> AdvantageSettings:
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
    )


def by_walking(world: World, time_step: str) -> tuple[list[float], list[float]]:
    """Return normalised advantages of learned tokens, and the returns at the beginnings of steps of time."""
    advantages: list[float] = []
    returns: list[float] = []
    for chunks, after in world.episodes:
        steps = []  # (reward, value, number of tokens)
        for reward, values in chunks:
            size = {"token": 1, "action": DIM, "chunk": len(values)}[time_step]
            starts = range(0, len(values), size)
            steps += [(reward if at == starts[-1] else 0.0, values[at], len(values[at : at + size])) for at in starts]
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
def test_ppo_of_episodes_in_simulators(time_step, seed):
    world = World(seed, 6, 1, has_turn_rewards=True, bootstraps=True)
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
        totals = [sum(reward for reward, _ in chunks) for chunks, _ in group]
        mean, deviation = statistics.fmean(totals), statistics.stdev(totals)
        for total, (chunks, _) in zip(totals, group, strict=True):
            num_tokens = sum(len(values) for _, values in chunks)
            expected += [(total - mean) / deviation] * num_tokens
    assert torch.allclose(found[batch.mask].double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-6)
