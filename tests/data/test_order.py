import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotseat.data import Example, PromptOrder, SampledOrder, digest_of
from hotseat.errors import DataError
from hotseat.types import Prompt


def test_each_pass_is_a_permutation_and_the_tail_goes_before_the_next():
    order = PromptOrder(5, seed=3)
    taken = order.next(3) + order.next(3) + order.next(4) + order.next(10)
    assert [epoch for epoch, _ in taken] == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    passes = [[index for _, index in taken[at : at + 5]] for at in range(0, 20, 5)]
    assert all(sorted(one) == [0, 1, 2, 3, 4] for one in passes)
    assert len(set(map(tuple, passes))) > 1


def test_the_order_follows_the_seed():
    assert PromptOrder(100, 1).next(300) == PromptOrder(100, 1).next(300)
    assert PromptOrder(100, 1).next(100) != PromptOrder(100, 2).next(100)


def test_without_shuffling_each_pass_has_the_order_of_the_data():
    order = PromptOrder(3, seed=1, is_shuffled=False)
    assert order.next(4) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    resumed = order.at(order.state())
    assert resumed.next(3) == [(1, 1), (1, 2), (2, 0)]
    assert order.left_over(2) == [(1, 1), (1, 2)]


def test_the_order_is_that_of_philox_and_does_not_change_between_versions():
    for seed, epoch in ((42, 0), (42, 1), (7, 0)):
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=16).digest()
        stream = philox(int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"), 50)
        expected = sorted(range(50), key=lambda index: stream[index])
        order = PromptOrder(50, seed)
        order.next(50 * epoch)
        assert [index for _, index in order.next(50)] == expected


def philox(key0: int, key1: int, num: int) -> list[int]:
    """Philox4x64-10 of Salmon et al. 2011, from counter 1 on."""
    words, low = [], 2**64 - 1
    for counter in range(1, num // 4 + 2):
        block, one, other = [counter, 0, 0, 0], key0, key1
        for _ in range(10):
            left, right = block[0] * 0xD2E7470EE14C6C93, block[2] * 0xCA5A826395121157
            block = [(right >> 64) ^ block[1] ^ one, right & low, (left >> 64) ^ block[3] ^ other, left & low]
            one, other = (one + 0x9E3779B97F4A7C15) & low, (other + 0xBB67AE8584CAA73B) & low
        words += block
    return words[:num]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(0, 2**40), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 30))
def test_resumed_equals_uninterrupted(num_prompts, seed, before, after):
    order = PromptOrder(num_prompts, seed)
    for num in before:
        order.next(num)
    saved = json.loads(json.dumps(order.state()))
    resumed = PromptOrder(num_prompts, seed).at(saved)
    assert resumed.next(after) == order.next(after)
    assert resumed.state() == order.state()


def test_other_data_or_another_seed_is_refused():
    state = PromptOrder(5, seed=3).state()
    with pytest.raises(DataError, match="saved with num_prompts 5, and now it is 6"):
        PromptOrder(6, 3).at(state)
    with pytest.raises(DataError, match="saved with seed 3, and now it is 4"):
        PromptOrder(5, 4).at(state)


def test_other_contents_are_refused_though_their_number_is_the_same():
    """Scenario 24."""
    prompts = [Prompt(number, "q", (1, number), label=str(number)) for number in range(5)]
    state = json.loads(json.dumps(PromptOrder(5, 3, digest_of(prompts)).state()))
    same = PromptOrder(5, 3, digest_of(list(prompts))).at(state)
    assert same.state() == state
    for changed in ({"token_ids": (1, 9)}, {"token_ids": (1,)}, {"label": "9"}, {"label": None}):
        other = [*prompts[:4], replace(prompts[4], **changed)]
        with pytest.raises(DataError, match="5 prompts are not those .* contents have changed"):
            PromptOrder(5, 3, digest_of(other)).at(state)
    assert digest_of(prompts[::-1]) != digest_of(prompts)
    del state["digest"]  # of an earlier version
    assert PromptOrder(5, 3, "x").at(state).next(1) == PromptOrder(5, 3).next(1)


def test_labels_of_any_type_have_the_digests_that_their_texts_had_in_earlier_versions():
    def digest(label) -> str:
        return digest_of([Prompt(0, "q", (1, 2), label)])

    assert digest(4) == digest("4")
    assert digest({"a": ["é", None]}) == digest('{"a": ["é", null]}')
    assert digest("") == digest(None)
    assert len({digest(label) for label in ("", "x", 4, 5, [4])}) == 5


def test_examples_differ_by_tokens_and_by_what_is_learned():
    def examples(*mask: bool) -> list[Example]:
        return [Example(torch.tensor([1, 2, 3]), torch.tensor(mask), "file:1")]

    assert digest_of(examples(False, True, True)) == digest_of(examples(False, True, True))
    assert digest_of(examples(False, True, True)) != digest_of(examples(False, False, True))


def test_no_prompts():
    with pytest.raises(DataError, match="no prompts"):
        PromptOrder(0, 1)


def most_difficult(num, pass_rates, num_draws, rng):
    """New prompts first, then those with the lowest scores; ties by chance."""
    return np.lexsort((rng.random(len(pass_rates)), np.nan_to_num(pass_rates, nan=-1.0)))[:num]


def test_a_sampler_gets_scores_and_counts_each_choice_as_a_pass():
    order = SampledOrder(most_difficult, 4, seed=1)
    assert sorted(order.next(4)) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    order.record({0: 1.0, 1: 0.25, 2: 0.0, 3: 0.5})
    assert order.next(2) == [(1, 2), (1, 1)]
    order.record({2: 0.75, 1: 0.8})
    assert order.next(1) == [(1, 3)]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_restored_sampler_chooses_as_the_one_that_was_saved(at):
    def taken(order, steps):
        keys = []
        for step in steps:
            keys.append(order.next(3))
            order.record({index: (index * 7 + step) % 5 / 4 for _, index in keys[-1]})
        return keys

    whole, first = SampledOrder(most_difficult, 8, 5, "d"), SampledOrder(most_difficult, 8, 5, "d")
    before = taken(first, range(at))
    after = first.at(json.loads(json.dumps(first.state())))
    assert before + taken(after, range(at, 6)) == taken(whole, range(6))


def test_choices_that_are_no_prompts_are_refused():
    for chosen, message in (
        ([0], "returned 1 prompts: it has to return 2"),
        ([0, 9], "returned 9: positions are 0 to 2"),
        ([0, -1], "returned -1: positions are 0 to 2"),
        ([0.5, 1], r"returned \[0.5, 1\]: it has to return 2 whole numbers"),
        (None, "returned None: it has to return 2 whole numbers"),
    ):
        with pytest.raises(DataError, match=message):
            SampledOrder(lambda *_, chosen=chosen: chosen, 3, 0).next(2)
    with pytest.raises(DataError, match="no prompts to put in order"):
        SampledOrder(most_difficult, 0, 0)


def test_an_order_does_not_continue_one_of_the_other_kind():
    plain, sampled = PromptOrder(3, 0), SampledOrder(most_difficult, 3, 0)
    with pytest.raises(DataError, match="was saved without data.sampler"):
        sampled.at(plain.state())
    with pytest.raises(DataError, match="was saved with data.sampler"):
        plain.at(sampled.state())
    with pytest.raises(DataError, match="saved with seed 0, and now it is 1"):
        SampledOrder(most_difficult, 3, 1).at(sampled.state())


def test_prompts_that_were_not_taken_are_left_over():
    order = PromptOrder(5, seed=3)
    all_of_both = PromptOrder(5, seed=3).next(10)
    order.next(3)
    assert order.left_over(1) == all_of_both[3:5]
    assert order.left_over(2) == all_of_both[3:]
    assert order.next(4) == all_of_both[3:7]  # none of them was taken
    assert order.left_over(1) == []  # filtered prompts were replaced from the second pass
    sampled = SampledOrder(lambda num, *_: range(num), 5, seed=3)
    assert sampled.left_over(1) == []
