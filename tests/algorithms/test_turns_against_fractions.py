"""Advantages of turns against a walk over fractions: adjacent turns, KL, clips and steps of any length."""

import math
import random
from fractions import Fraction

import pytest
import torch
from algorithm_cases import make_layout

from hotseat.algorithms.advantages import compute_advantages
from hotseat.algorithms.time_steps import step_starts
from hotseat.registry.estimators import ESTIMATORS

GROUP_ESTIMATORS = [name for name, facts in ESTIMATORS.items() if facts.needs_group and not facts.compares_parts]


def draw_case(draw):
    """Episodes as masks, and of each its unbroken runs of sampled tokens and its turns, by flat positions."""
    episodes, runs, turns, position = [], [], [], 0
    for _ in range(draw.randint(4, 7)):
        segments, own_runs = [], []
        for _ in range(draw.randint(1, 3)):
            segment = []
            for _ in range(draw.randint(1, 2)):
                inserted, sampled = draw.randint(1 if segment else 0, 2), draw.randint(1, 4)
                begin = position + inserted
                own_runs.append(list(range(begin, begin + sampled)))
                segment += [0] * inserted + [1] * sampled
                position = begin + sampled
            segments.append(segment)
        episodes.append(segments)
        runs.append(own_runs)
        cuts = [(run, draw.randint(1, len(run))) for run in own_runs]
        turns.append([part for run, cut in cuts for part in (run[:cut], run[cut:]) if part])
    return episodes, runs, turns, position


def compared(estimator, values, own):
    mean = sum(values) / len(values)
    if estimator == "rloo":
        return float(own - (sum(values) - own) / (len(values) - 1))
    if estimator == "group_norm":
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return float(own - mean) / (math.sqrt(variance) + 1e-9)
    return float(own - mean)


def advantages_by_hand(estimator, credit, case, groups, rewards, rest, kl, clip, per_step):
    _, runs, turns, num_tokens = case
    advantages = [0.0] * num_tokens

    def clipped(value):
        return value if clip is None else min(max(value, clip[0]), clip[1])

    for at, own_turns in enumerate(turns):
        siblings = [other for other in range(len(turns)) if groups[other] == groups[at]]
        steps = [run[i : i + per_step] for run in runs[at] for i in range(0, len(run), per_step)]
        turn_of = {token: turn for turn, tokens in enumerate(own_turns) for token in tokens}
        ends = {tokens[-1] for tokens in own_turns}
        for number, step in enumerate(steps):
            first = 0 if credit == "sum" else turn_of[step[0]]
            last = turn_of[step[-1]] + 1 if credit == "own" else len(own_turns)
            is_to_end = last == len(own_turns)

            def window(other, first, last, is_to_end):
                return sum(rewards[other][first : None if is_to_end else last]) + is_to_end * rest[other]

            def against_siblings(first, last, is_to_end, at=at, siblings=siblings, window=window):
                values = [window(other, first, last, is_to_end) for other in siblings]
                return compared(estimator, values, window(at, first, last, is_to_end))

            if clip is None or estimator == "group_norm" or credit == "sum":
                value = clipped(against_siblings(first, last, is_to_end))
            else:  # each turn by itself, then what belongs to no turn of this episode
                value = sum(clipped(against_siblings(turn, turn + 1, False)) for turn in range(first, last))
                value += clipped(against_siblings(last, last, True)) if is_to_end else 0.0
            for later in steps[number:]:
                value -= 0.3 * sum(kl[token] for token in later)
                if credit == "own" and later[-1] in ends:
                    break
            for token in step:
                advantages[token] = value
    return advantages


@pytest.mark.parametrize("credit", ["to_go", "own", "sum"])
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_turns_that_nothing_separates_equal_a_walk_over_fractions(estimator, credit):
    draw = random.Random(f"{estimator} {credit}")
    for per_step in (1, 2, 4) * 4:
        case = episodes, _, turns, num_tokens = draw_case(draw)
        groups = [7, 2, 7, 2, *draw.choices([7, 2], k=3)][: len(episodes)]
        rewards = [[Fraction(draw.randint(-40, 40), 8) for _ in own] for own in turns]
        rest = [Fraction(draw.choice([0, 0, -8, 4]), 8) for _ in turns]
        kl, clip = [draw.gauss(0, 0.5) for _ in range(num_tokens)], draw.choice([None, (-1.5, 1.0)])
        layout = make_layout(episodes)
        found = compute_advantages(
            estimator,
            layout,
            torch.tensor([float(each) for each in rest], dtype=torch.float64),
            groups=torch.tensor(groups),
            turn_rewards=torch.tensor([float(each) for own in rewards for each in own], dtype=torch.float64),
            turns=torch.tensor([tokens[-1] for own in turns for tokens in own]),
            turn_credit=credit,
            kl=torch.tensor(kl, dtype=torch.float64),
            kl_coefficient=0.3,
            reward_clip=clip,
            over_batch=False,
            starts=step_starts(layout, per_step),
        )
        wanted = advantages_by_hand(estimator, credit, case, groups, rewards, rest, kl, clip, per_step)
        assert found.advantages.tolist() == pytest.approx(wanted, abs=1e-12)
