"""From groups to the batches of optimizer steps."""

import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loop_cases import make_group, make_segment

from hotseat.algorithms.advantages import Moments
from hotseat.config import loads
from hotseat.errors import RewardError
from hotseat.loop.settings.training_settings import policy_settings
from hotseat.loop.workers.by_sample import by_sample
from hotseat.loop.workers.experience import (
    AdvantageSettings,
    Share,
    assign,
    cut_into_steps,
    flatten,
    parts_of,
    shaped_rewards,
    totals_of,
    weighted,
    with_advantages,
    with_fields,
    with_lags,
    without_truncated,
)
from hotseat.loop.workers.losses import ADVANTAGES, LAGS, OLD_LOG_PROBS, REFERENCE_LOG_PROBS, ROLLOUT_LOG_PROBS
from hotseat.types import MicroBatch


def settings(**changes) -> AdvantageSettings:
    values = {
        "estimator": "dr_grpo",
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "divide_by_std": True,
        "reward_clip": None,
        "kl_in_reward": 0.0,
        "kl_estimator": "k1",
        "overlong_buffer": 0,
        "overlong_factor": 1.0,
        "truncation_penalty": None,
        "max_sampled": 4,
    }
    return AdvantageSettings(**(values | changes))


def test_rewards_apart_are_those_that_samples_have_by_name():
    group = make_group(0, [1.0, 2.0])
    first, second = group.samples
    extras = {"a": 1.0, "b": 2.0, "other": 5.0}, {"b": 3.0}
    group = replace(group, samples=(replace(first, extra=extras[0]), replace(second, extra=extras[1])))
    parts = parts_of([group], {"a": 1.0, "b": 0.5}, is_needed=True)
    assert parts["b"].tolist() == [2, 3]
    assert parts["a"][0] == 1
    assert parts["a"][1].isnan()
    with pytest.raises(RewardError, match=r"sample 0/0/1 has none of the rewards a, only b: name in reward\.parts"):
        parts_of([group], ["a"], is_needed=True)
    assert parts_of([group], ["a"], is_needed=False)["a"].isnan().tolist() == [False, True]


def alone(moments):
    return moments


def test_samples_fill_optimizer_steps_in_order_whatever_the_number_of_ranks():
    # Four groups of three samples, six samples a step: two groups each.
    for num_ranks in (1, 2, 3):
        _, steps = assign([3, 3, 3, 3], 6, num_ranks)
        assert steps == [[0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]


def test_a_group_may_lie_across_two_optimizer_steps_and_stays_on_one_rank():
    ranks, steps = assign([4, 4, 4], 6, 2)
    assert steps == [[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]
    assert sorted(index for members in ranks for index in members) == [0, 1, 2]


def test_what_is_left_when_samples_failed_is_a_step_or_joins_the_last_one():
    _, steps = assign([3, 2, 3, 3], 6, 1)  # 11 samples: one full step and five more, as many as nearly fill another
    assert steps == [[0, 0, 0], [0, 0], [0, 1, 1], [1, 1, 1]]
    _, steps = assign([3, 2, 3], 6, 1)  # 8 samples: one full step and two more
    assert {step for group in steps for step in group} == {0}
    _, steps = assign([2, 1], 6, 1)
    assert steps == [[0, 0], [0]]


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_failed", range(13))
def test_failed_samples_make_no_step_empty_and_no_more_steps_than_the_schedule_has(num_failed, num_ranks, with_tokens):
    # 16 samples in groups of 4, of which the last ones failed; 4 optimizer steps, or as many as are left, rounded.
    sizes = [min(4, max(0, 16 - num_failed - first)) for first in (0, 4, 8, 12)]
    ranks, steps = assign(sizes, 4, num_ranks, [10 * size for size in sizes] if with_tokens else None)
    counts = Counter(step for group in steps for step in group)
    assert sorted(counts) == list(range([4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1][num_failed]))
    assert sum(counts.values()) == 16 - num_failed
    assert all(2 <= count < 6 for count in counts.values())
    # Every group with samples is on one rank; a rank may have no sample of a step.
    assert sorted(index for members in ranks for index in members) == [at for at, size in enumerate(sizes) if size]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=20), st.integers(1, 16), st.integers(1, 5))
def test_every_group_is_on_exactly_one_rank_and_every_step_is_used(sizes, per_step, num_ranks):
    ranks, steps = assign(sizes, per_step, num_ranks)
    assert sorted(index for members in ranks for index in members) == list(range(len(sizes)))
    used = {step for group in steps for step in group}
    assert used == set(range(max(used) + 1))
    assert [len(group) for group in steps] == sizes


def test_ranks_get_about_as_many_samples_each():
    ranks, _ = assign([8] * 32, 256, 4)
    assert [len(members) for members in ranks] == [8, 8, 8, 8]


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 99)), min_size=1, max_size=20),
    st.integers(1, 16),
    st.integers(1, 5),
)
def test_with_a_token_budget_ranks_get_about_as_many_tokens_in_every_step(groups, per_step, num_ranks):
    sizes, tokens = [size for size, _ in groups], [size * length for size, length in groups]
    ranks, steps = assign(sizes, per_step, num_ranks, tokens)
    assert sorted(index for members in ranks for index in members) == list(range(len(sizes)))
    assert steps == assign(sizes, per_step, num_ranks)[1]
    for step in {group[0] for group in steps}:
        begun = [index for index, group in enumerate(steps) if group[0] == step]
        loads = [sum(tokens[index] for index in members if index in begun) for members in ranks]
        assert max(loads) - min(loads) <= max(tokens[index] for index in begun)
    assert assign(sizes, per_step, 1, tokens)[0] == [list(range(len(sizes)))]


def test_long_groups_are_not_all_on_one_rank():
    # By count each rank has two groups, and the first nine tenths of the tokens.
    assert assign([2] * 4, 8, 2)[0] == [[0, 1], [2, 3]]
    assert assign([2] * 4, 8, 2, [50, 40, 5, 5])[0] == [[0], [1, 2, 3]]


def test_flat_tokens_keep_the_engines_log_probs_and_the_mask():
    batch = flatten([make_group(0, [1.0, 0.0]), make_group(1, [1.0])])
    assert batch.num_segments == 3
    assert batch.sample_ids == ("0/0/0", "0/0/1", "0/1/0")
    assert batch.mask.tolist() == [False, False, False, True, True] * 3
    assert batch.fields[ROLLOUT_LOG_PROBS].tolist() == [0.0, 0.0, 0.0, -1.0, -1.0] * 3


def test_no_groups_are_an_empty_batch():
    batch = flatten([])
    assert (batch.num_tokens, batch.num_segments) == (0, 0)
    assert cut_into_steps(batch, {}, 2) == [None, None]
    assert [total.num_sampled for total in totals_of([None])] == [0]


def test_advantages_compare_siblings():
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [3.0, 3.0])]
    batch = with_advantages(groups, flatten(groups), settings(), alone)
    # Group 0: mean 0.5, so 0.5 and -0.5 on the sampled tokens. Group 1: equal, so 0.
    sampled = batch.fields[ADVANTAGES][batch.mask]
    assert sampled.tolist() == [0.5, 0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0]


def test_kl_in_the_reward_needs_both_log_probs_and_lowers_the_advantage():
    groups = [make_group(0, [1.0, 1.0])]
    batch = flatten(groups)
    old = torch.where(batch.mask, -1.0, 0.0)
    reference = torch.where(batch.mask, -1.5, 0.0)
    batch = with_fields(batch, {OLD_LOG_PROBS: old, REFERENCE_LOG_PROBS: reference})
    batch = with_advantages(groups, batch, settings(kl_in_reward=0.1), alone)
    # k1 = 0.5 a token, so -0.05 a token; the first of two tokens carries both.
    assert batch.fields[ADVANTAGES][batch.mask].tolist() == pytest.approx([-0.1, -0.05, -0.1, -0.05])


def test_rewards_of_turns_land_on_their_own_tokens():
    """Two turns of one and two tokens: the first token is credited with both, the second turn with its own."""
    [group] = [make_group(0, [3.0, 1.0], sampled=3)]
    samples = tuple(
        replace(sample, episode=replace(sample.episode, turn_lengths=(1, 2)), turn_rewards=rewards)
        for sample, rewards in zip(group.samples, [(2.0, 1.0), (0.0, 1.0)], strict=True)
    )
    groups = [replace(group, samples=samples)]
    batch = with_advantages(groups, flatten(groups), settings(), alone)
    # Turn 1: 2 and 0, mean 1. Turn 2: 1 and 1, mean 1. So +1 and -1 before the first turn ends, 0 afterwards.
    assert batch.fields[ADVANTAGES][batch.mask].tolist() == [1.0, 0.0, 0.0, -1.0, 0.0, 0.0]


def with_turns(group, lengths, *rewards):
    """The group's samples with these turns and, where there are any, rewards of turns."""
    samples = tuple(
        replace(sample, episode=replace(sample.episode, turn_lengths=lengths), turn_rewards=turn_rewards)
        for sample, turn_rewards in zip(group.samples, rewards, strict=True)
    )
    return replace(group, samples=samples)


@pytest.mark.parametrize("estimator", ["dr_grpo", "group_norm", "rloo", "reinforce", "reinforce_baseline"])
def test_rewards_of_turns_count_alike_on_any_number_of_ranks(estimator):
    """The first group has rewards of turns, of the second only one sample has, of the third none."""
    groups = [
        with_turns(make_group(0, [3.0, 1.0], sampled=3), (1, 2), (2.0, 1.0), (0.0, 1.0)),
        with_turns(make_group(1, [3.0, 1.0], sampled=3), (1, 2), (2.0, 1.0), ()),
        make_group(2, [1.0, 0.0], sampled=2),
    ]
    used = settings(estimator=estimator)
    everyone = None

    def advantages(part, add_up):
        batch = with_advantages(part, flatten(part), used, add_up)
        return batch.fields[ADVANTAGES][batch.mask].tolist()

    def remember(moments):
        nonlocal everyone
        everyone = moments if everyone is None else everyone + moments
        return moments

    for part in (groups[:1], groups[1:]):
        advantages(part, remember)
    one_rank = advantages(groups, alone)
    two_ranks = advantages(groups[:1], lambda _: everyone) + advantages(groups[1:], lambda _: everyone)
    assert two_ranks == pytest.approx(one_rank)
    if estimator == "dr_grpo":
        # The first group turn by turn; the others by episodes: 3 and 1 around 2, 1 and 0 around 0.5.
        assert one_rank == [1.0, 0.0, 0.0, -1.0, 0.0, 0.0] + [1.0] * 3 + [-1.0] * 3 + [0.5, 0.5, -0.5, -0.5]


def test_turns_that_share_a_chunk_share_its_advantage():
    """Nothing is inserted between the two turns: their tokens are one chunk, with one ratio and so one advantage."""
    groups = [with_turns(make_group(0, [3.0, 1.0], sampled=3), (1, 2), (2.0, 1.0), (0.0, 1.0))]
    for credit in ("own", "to_go"):
        used = settings(turn_credit=credit, time_step="chunk")
        batch = with_advantages(groups, flatten(groups), used, alone)
        assert batch.fields[ADVANTAGES][batch.mask].tolist() == [1.0] * 3 + [-1.0] * 3
    batch = with_advantages(groups, flatten(groups), settings(turn_credit="own"), alone)
    assert batch.fields[ADVANTAGES][batch.mask].tolist() == [1.0, 0.0, 0.0, -1.0, 0.0, 0.0]


def groups_with_equal_rewards(draw: random.Random, num_groups: int):
    """Groups of four answers with one reward for all, divided among one to four turns in a random way."""
    groups = []
    for number in range(num_groups):
        reward = draw.choice([draw.gauss(0, 1), draw.randint(-20, 20) / 10])
        samples = []
        for sample in make_group(number, [reward] * 4, sampled=4).samples:
            count = draw.randint(1, 4)
            parts = [draw.gauss(0, 1) for _ in range(count - 1)]
            lengths = (*[1] * (count - 1), 5 - count)
            episode = replace(sample.episode, turn_lengths=lengths)
            samples.append(replace(sample, episode=episode, turn_rewards=(*parts, reward - sum(parts))))
        groups.append(replace(make_group(number, [reward]), samples=tuple(samples)))
    return groups


@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "user"])
def test_equal_rewards_have_exactly_no_advantage_however_turns_divide_them(estimator, tmp_path):
    if estimator == "user":
        file = tmp_path / "mine.py"
        file.write_text("from hotseat.algorithms.baselines import group_normalised as mine\n")
        estimator = f"{file}:mine"
    groups = groups_with_equal_rewards(random.Random(3), 100)
    batch = flatten(groups)
    found = with_advantages(groups, batch, settings(estimator=estimator, turn_credit="sum"), alone)
    assert not found.fields[ADVANTAGES].any()
    # Rewards to go differ after the first turn, but are all of them of the first turn's tokens.
    found = with_advantages(groups, batch, settings(estimator=estimator), lambda _: Moments(1, 0.0, 1.0))
    assert not found.fields[ADVANTAGES][batch.mask].reshape(-1, 4)[:, 0].any()


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo", "reinforce_baseline"])
def test_the_order_and_precision_in_which_turns_were_added_up_gives_no_advantage(estimator, precision):
    """Sums of 0.7 and of 0, by turns in any order, also where 0.1 + 0.2 - 0.3 is not 0."""
    sums = [[(0.1, 0.2, 0.4), (0.1, 0.4, 0.2), (0.2, 0.1, 0.4)], [(0.1, 0.2, -0.3), (-0.3, 0.2, 0.1), (0.0, 0.0, 0.0)]]
    groups = []
    for number, rows in enumerate(sums):
        rewards = [0.0] * len(rows)
        for at, row in enumerate(rows):
            total = torch.zeros((), dtype=precision)
            for reward in row:
                total += reward
            rewards[at] = float(total)
        assert len(set(rewards)) > 1
        groups.append(with_turns(make_group(number, rewards, sampled=3), (1, 1, 1), *rows))
    for credit in ("sum", "to_go"):
        used = settings(estimator=estimator, turn_credit=credit)
        found = with_advantages(groups, flatten(groups), used, lambda _: Moments(1, 0.0, 1.0))
        assert not found.fields[ADVANTAGES][found.mask].reshape(-1, 3)[:, 0].any()


def test_penalties_stay_on_the_last_turn_and_rounding_is_no_reward():
    """Turns of one and of two tokens; the second answer reaches the limit of its length."""
    group = make_group(0, [0.1 + 0.2, 0.3 + 0.2], sampled=3)
    longer = replace(make_group(0, [0.0], sampled=4).samples[0], reward=0.1 + 0.2)
    first, second = group.samples[0], replace(longer, episode=replace(longer.episode, key=group.samples[1].episode.key))
    samples = [(first, (0.1, 0.2), (1, 2)), (second, (0.1, 0.2), (1, 3))]
    samples = [
        replace(sample, turn_rewards=rewards, episode=replace(sample.episode, turn_lengths=lengths))
        for sample, rewards, lengths in samples
    ]
    groups = [replace(group, samples=tuple(samples))]
    used = settings(estimator="dr_grpo", turn_credit="own", overlong_buffer=1)
    batch = with_advantages(groups, flatten(groups), used, alone)
    # First turns are alike. In the last one the second answer has a penalty of 1 at its limit of 4 tokens.
    assert batch.fields[ADVANTAGES][batch.mask].tolist() == [0.0, 0.5, 0.5, 0.0, -0.5, -0.5, -0.5]
    # A reward that was added up in float32 differs from its turns' sum, and no advantage comes of that.
    samples = [
        replace(sample, reward=sample.reward + noise) for sample, noise in zip(samples, (3e-8, -2e-8), strict=True)
    ]
    groups = [replace(group, samples=tuple(samples))]
    batch = with_advantages(groups, flatten(groups), settings(estimator="group_norm", turn_credit="own"), alone)
    assert not batch.fields[ADVANTAGES].any()


def test_four_turns_within_the_limit_of_the_episode_are_not_overlong():
    """Four turns of 20 tokens: 80 sampled, of the 100 that five such turns may sample."""
    text = "rollout: {max_new_tokens: 20}\nagent: {path: a.py, max_steps: 5}\nreward: {overlong: {buffer_length: 20}}"
    used = policy_settings(loads(text), 1, 0.0).advantages
    groups = [with_turns(make_group(0, [1.0], sampled=80), (20,) * 4, ())]
    assert shaped_rewards(groups, flatten(groups), used).tolist() == [1.0]
    # Five turns reach the limit, four and a half are in the middle of the buffer.
    for sampled, reward in ((100, 0.0), (90, 0.5)):
        groups = [make_group(0, [1.0], sampled=sampled)]
        assert shaped_rewards(groups, flatten(groups), used).tolist() == [reward]


def test_the_constant_of_the_aggregation_is_the_limit_of_the_episode():
    text = "rollout: {max_new_tokens: 20}\nagent: {path: a.py, max_steps: 5}\nalgorithm: {estimator: dr_grpo}"
    used = policy_settings(loads(text), 1, 0.0)
    assert used.aggregation == "constant"
    batch = flatten([make_group(0, [1.0, 0.0], sampled=3)])
    [total] = totals_of([batch])
    weights = weighted(batch, used.aggregation, total, used.advantages.max_sampled).weights
    assert weights[batch.mask].tolist() == pytest.approx([1 / (2 * 100)] * 6)


def test_long_and_truncated_answers_are_charged():
    groups = [make_group(0, [1.0], sampled=3, truncated=True)]
    batch = flatten(groups)
    # Limit 4, buffer 2: three tokens are one over, half of the penalty.
    assert shaped_rewards(groups, batch, settings(overlong_buffer=2)).tolist() == [0.5]
    assert shaped_rewards(groups, batch, settings(truncation_penalty=0.25)).tolist() == [0.25]
    assert shaped_rewards(groups, batch, settings(truncation_penalty=-1.0)).tolist() == [-1.0]
    assert shaped_rewards(groups, batch, settings()).tolist() == [1.0]


def test_a_teacher_adds_its_log_ratio_to_the_advantages():
    groups = [make_group(0, [1.0, 0.0])]
    batch = flatten(groups)
    count = batch.num_tokens
    batch = with_fields(
        batch, {OLD_LOG_PROBS: torch.full((count,), -1.0), REFERENCE_LOG_PROBS: torch.full((count,), -3.0)}
    )
    found = with_advantages(groups, batch, settings(distill_coefficient=0.25), alone)
    # 0.5 and -0.5 of the rewards, and a quarter of -3 + 1
    assert found.fields[ADVANTAGES][batch.mask].tolist() == [0.0, 0.0, -1.0, -1.0]


def test_truncated_answers_count_in_the_baseline_and_not_in_the_loss():
    group = make_group(0, [1.0, 0.0, 0.5])
    cut = replace(group.samples[1], episode=replace(group.samples[1].episode, is_truncated=True))
    groups = [replace(group, samples=(group.samples[0], cut, group.samples[2]))]
    batch = without_truncated(groups, with_advantages(groups, flatten(groups), settings(), alone))
    assert batch.fields[ADVANTAGES][batch.mask].tolist() == [0.5, 0.5, 0.0, 0.0]
    [totals] = totals_of([batch])
    assert (totals.num_sampled, totals.num_episodes) == (4, 2)
    assert weighted(batch, "token_mean", totals).weights.sum() == 1
    assert without_truncated([], flatten([])).num_tokens == 0


def test_the_weights_of_a_step_add_up_to_one_over_all_ranks():
    groups = [make_group(0, [1.0, 0.0], sampled=3), make_group(1, [1.0, 0.0], sampled=1)]
    parts = [flatten(groups[:1]), flatten(groups[1:])]
    total = sum((totals_of([part])[0] for part in parts[1:]), start=totals_of([parts[0]])[0])
    assert total.num_sampled == 8
    weights = torch.cat([weighted(part, "token_mean", total, 4).weights for part in parts])
    assert float(weights.sum()) == pytest.approx(1.0)
    assert set(weights[weights > 0].tolist()) == {0.125}


def test_steps_hold_their_own_samples():
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [1.0, 0.0])]
    batch = flatten(groups)
    first, second = cut_into_steps(batch, {"0/0/0": 0, "0/0/1": 1, "0/1/0": 1, "0/1/1": 1}, 2)
    assert first.sample_ids == ("0/0/0",)
    assert second.sample_ids == ("0/0/1", "0/1/0", "0/1/1")


def test_a_segment_helper_masks_the_context():
    assert make_segment(2, 1).mask.tolist() == [False, False, True]


def test_a_share_arrives_as_it_was_sent_and_in_few_arrays():
    two_turns = make_group(1, [1.0, 0.0])
    episode = two_turns.samples[0].episode
    longer = replace(episode, segments=(make_segment(2, 3), make_segment(4, 1, start=9)), turn_lengths=(3, 1))
    two_turns = replace(two_turns, samples=(replace(two_turns.samples[0], episode=longer), two_turns.samples[1]))
    sent = Share((make_group(0, [0.5]), two_turns, make_group(2, [])), ((0,), (0, 1), ()), (1, 3, 4))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    found = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    assert len(buffers) == 4
    assert (found.steps, found.positions) == (sent.steps, sent.positions)
    assert [group.prompt for group in found.groups] == [group.prompt for group in sent.groups]
    for mine, theirs in zip(found.groups, sent.groups, strict=True):
        for got, expected in zip(mine.samples, theirs.samples, strict=True):
            assert replace(got.episode, segments=()) == replace(expected.episode, segments=())
            assert (got.reward, got.score) == (expected.reward, expected.score)
            for a, b in zip(got.episode.segments, expected.episode.segments, strict=True):
                for name in ("token_ids", "mask", "log_probs", "versions"):
                    assert getattr(a, name).equal(getattr(b, name))
                    assert getattr(a, name).dtype == getattr(b, name).dtype
    assert pickle.loads(pickle.dumps(Share((), ()))) == Share((), ())


def test_values_by_sample_are_pickled_once_each():
    """They are views of one tensor: each by itself would carry the bytes of all."""
    lengths, names = [3, 500, 1, 90], ["0/0/0", "0/0/0", "0/1/0", "0/2/0"]
    batch = MicroBatch.from_segments([torch.arange(length) for length in lengths], None, names)
    values = by_sample([batch], [torch.rand(sum(lengths))])
    pickled = pickle.dumps(values)
    assert len(pickled) < 4 * sum(lengths) + 1000
    again = pickle.loads(pickled)
    assert list(again) == ["0/0/0", "0/1/0", "0/2/0"]
    for name, segments in values.items():
        for one, other in zip(segments, again[name], strict=True):
            assert torch.equal(one, other)
    assert pickle.loads(pickle.dumps(by_sample([], []))) == {}


def test_the_lag_of_a_token_is_that_of_the_oldest_weights_in_its_context():
    """Also in the second segment, which begins anew, and with tokens of the environment in between."""
    first = make_segment(2, 4)
    second = make_segment(1, 2)
    versions = [torch.tensor([-1, -1, 5, 5, -1, 6]), torch.tensor([-1, 6, 7])]
    masks = [torch.tensor([False, False, True, True, False, True]), torch.tensor([False, True, True])]
    segments = tuple(
        replace(segment, versions=each.to(torch.int32), mask=mask)
        for segment, each, mask in zip((first, second), versions, masks, strict=True)
    )
    group = make_group(0, [1.0])
    sample = group.samples[0]
    group = replace(group, samples=(replace(sample, episode=replace(sample.episode, segments=segments)),))
    batch = with_lags([group], flatten([group]), version=7)
    assert batch.fields[LAGS].tolist() == [0, 0, 2, 2, 2, 2, 0, 1, 1]
