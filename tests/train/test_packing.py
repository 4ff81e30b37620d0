from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotseat.errors import BatchError
from hotseat.train.packing import balance, join, model_input, split_by_count, split_by_tokens, take, with_ends
from hotseat.types import MicroBatch


def segments(lengths: list[int], sample_ids: list[str] | None = None) -> MicroBatch:
    """Token ids 0, 1, 2, ... so that every token can be recognised."""
    num_tokens = sum(lengths)
    return MicroBatch(
        token_ids=torch.arange(num_tokens),
        offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        mask=torch.arange(num_tokens) % 2 == 0,
        weights=torch.arange(num_tokens) / 10,
        fields={"advantages": torch.arange(num_tokens) * 2.0, "rewards": torch.arange(len(lengths)) * 3.0},
        sample_ids=tuple(sample_ids or [f"s{index}" for index in range(len(lengths))]),
    )


def lengths_of(batch: MicroBatch) -> list[int]:
    return (batch.offsets[1:] - batch.offsets[:-1]).tolist()


def test_take_brings_every_value_of_its_segments() -> None:
    part = take(segments([2, 3, 1, 4]), [3, 1])
    assert part.token_ids.tolist() == [6, 7, 8, 9, 2, 3, 4]
    assert part.offsets.tolist() == [0, 4, 7]
    assert part.mask.tolist() == [True, False, True, False, True, False, True]
    assert part.weights.tolist() == pytest.approx([0.6, 0.7, 0.8, 0.9, 0.2, 0.3, 0.4])
    assert part.fields["advantages"].tolist() == [12, 14, 16, 18, 4, 6, 8]
    assert part.fields["rewards"].tolist() == [9, 3]
    assert part.sample_ids == ("s3", "s1")


def test_join_undoes_a_cut() -> None:
    whole = segments([2, 3, 1, 4])
    again = join([take(whole, [0, 1]), take(whole, [2]), take(whole, [3])])
    assert again.sample_ids == whole.sample_ids
    for name in ("token_ids", "offsets", "mask", "weights"):
        assert torch.equal(getattr(again, name), getattr(whole, name))
    assert all(torch.equal(again.fields[name], whole.fields[name]) for name in whole.fields)


def test_a_number_for_a_segment_stands_after_its_last_token() -> None:
    ended = with_ends(segments([2, 3]))
    assert ended.offsets.tolist() == [0, 3, 7]
    assert ended.mask.nonzero().squeeze(-1).tolist() == [2, 6]
    assert ended.token_ids[~ended.mask].tolist() == [0, 1, 2, 3, 4]
    wanted = model_input(ended, "packed")
    assert wanted.input_ids[0][wanted.rows].tolist() == [1, 4]  # the model has seen the last token of each


def test_segments_of_like_length_are_counted_off_together() -> None:
    parts = split_by_count(segments([1, 9, 2, 8, 3]), 2)
    assert sorted(sorted(lengths_of(part)) for part in parts) == [[1], [2, 3], [8, 9]]


def test_first_fit_decreasing_by_hand() -> None:
    # Budget 10. 7 opens a bin, 6 another; 4 joins 6, 3 joins 7: two bins, both full.
    parts = split_by_tokens(segments([3, 7, 4, 6]), 10)
    assert [part.sample_ids for part in parts] == [("s0", "s1"), ("s2", "s3")]


def test_micro_batches_are_evened_out_where_that_fits() -> None:
    # First fit leaves 9 and 1 of budget 9; two fives are as few.
    assert [part.num_tokens for part in split_by_tokens(segments([2] * 5), 9)] == [6, 4]


def test_filling_counts_if_asked() -> None:
    # 5 + 1 + 1 tokens are 7, but 3 rows of 5 are 15.
    assert len(split_by_tokens(segments([5, 1, 1]), 7)) == 1
    assert [lengths_of(part) for part in split_by_tokens(segments([5, 1, 1]), 7, padded=True)] == [[5], [1, 1]]


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    slack=st.integers(0, 30),
    padded=st.booleans(),
    episode_size=st.integers(1, 3),
)
def test_the_budget_holds_and_nothing_is_lost(lengths: list[int], slack: int, padded: bool, episode_size: int) -> None:
    batch = segments(lengths, [f"e{index // episode_size}" for index in range(len(lengths))])
    largest = max(
        len(part) * max(part) if padded else sum(part)
        for part in (lengths[start : start + episode_size] for start in range(0, len(lengths), episode_size))
    )
    parts = split_by_tokens(batch, largest + slack, padded=padded)
    for part in parts:
        filled = part.num_segments * max(lengths_of(part)) if padded else part.num_tokens
        assert filled <= largest + slack
    assert sorted(token for part in parts for token in part.token_ids.tolist()) == list(range(sum(lengths)))
    homes = Counter(sample_id for part in parts for sample_id in set(part.sample_ids))
    assert set(homes.values()) == {1}, "an episode was cut"
    assert [part.sample_ids for part in split_by_tokens(batch, largest + slack, padded=padded)] == [
        part.sample_ids for part in parts
    ]


@given(lengths=st.lists(st.integers(1, 50), max_size=30), num_ranks=st.integers(1, 5))
def test_ranks_get_about_as_much_each(lengths: list[int], num_ranks: int) -> None:
    if not lengths:
        return
    parts = balance(lengths, num_ranks)
    assert len(parts) == num_ranks
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    loads = [sum(lengths[place] for place in part) for part in parts]
    assert max(loads) - min(loads) <= max(lengths)
    assert sum(not part for part in parts) == max(0, num_ranks - len(lengths))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BatchError, match="sample s1 has 7 tokens, a micro-batch at most 5: raise the token budget"):
        split_by_tokens(segments([2, 7]), 5)
    with pytest.raises(BatchError, match="an episode .* of 2 segments does not fit micro-batches of 1"):
        split_by_count(segments([2, 2], ["e", "e"]), 1)
    with pytest.raises(BatchError, match="0 segments per micro-batch"):
        split_by_count(segments([2]), 0)


def test_model_input_by_hand() -> None:
    batch = replace(segments([3, 2]), mask=torch.tensor([True, True, False, True, True]))
    # Wanted are token 1 (after token 0) and token 4 (after token 3): first tokens have nothing before them.
    # The last token of a segment is not given to the model: nothing comes after it.
    padded = model_input(batch, "padded")
    assert padded.input_ids.tolist() == [[0, 1], [3, 0]]
    assert padded.rows.tolist() == [0, 2]
    assert padded.tokens.tolist() == padded.targets.tolist() == [1, 4]
    assert padded.blocks is None
    packed = model_input(batch, "packed")
    assert packed.input_ids.tolist() == [[0, 1, 3]]
    assert packed.position_ids is not None
    assert packed.position_ids.tolist() == [[0, 1, 0]]
    assert packed.rows.tolist() == [0, 2]


def with_contexts(*segments: tuple[list[int], list[int]]) -> MicroBatch:
    """Of context and sampled tokens each."""
    tokens = [token for context, sampled in segments for token in (*context, *sampled)]
    mask = [flag for context, sampled in segments for flag in [False] * len(context) + [True] * len(sampled)]
    ends = torch.tensor([len(context) + len(sampled) for context, sampled in segments]).cumsum(0)
    return MicroBatch(
        token_ids=torch.tensor(tokens),
        offsets=torch.tensor([0, *ends.tolist()]),
        mask=torch.tensor(mask),
        weights=torch.tensor(mask).float(),
        sample_ids=tuple(f"s{index}" for index in range(len(segments))),
    )


def test_a_shared_context_stands_there_once() -> None:
    batch = with_contexts(([5, 6], [7, 8]), ([9], [3]), ([5, 6], [1, 2, 4]), ([5], [6]))
    shared = model_input(batch, "shared")
    # The context 5 6 of the third is that of the first; the 5 of the last is another context.
    assert shared.input_ids.tolist() == [[5, 6, 7, 9, 1, 2, 5]]
    assert shared.position_ids is not None
    assert shared.position_ids.tolist() == [[0, 1, 2, 0, 2, 3, 0]]
    assert shared.targets.tolist() == [7, 8, 3, 1, 2, 4, 6]
    assert shared.rows.tolist() == [1, 2, 3, 1, 4, 5, 6]
    assert model_input(batch, "packed").input_ids.tolist() == [[5, 6, 7, 9, 5, 6, 1, 2, 5]]


def test_a_segment_that_is_all_context_and_one_of_a_single_token_have_nothing_to_predict() -> None:
    batch = with_contexts(([5, 6], []), ([5, 6], [7]), ([], [4]))
    shared = model_input(batch, "shared")
    assert shared.targets.tolist() == [7]
    assert shared.input_ids[0, shared.rows].tolist() == [6]


def test_auto_shares_long_contexts() -> None:
    long, short = list(range(10)), [1]
    assert model_input(with_contexts(*[(long, short)] * 4), "auto").input_ids.shape == (1, 10)
    assert model_input(with_contexts(*[(short, long)] * 4), "auto").blocks is None  # hardly anything to share
    flash = model_input(with_contexts(*[(long, short)] * 4), "auto", has_flash=True)
    assert flash.blocks is not None
    assert flash.blocks.copies is not None
    assert flash.blocks.copies.tolist()[:40] == list(range(10)) * 4
    assert set(flash.blocks.copies.tolist()[40:]) == set(range(10, 16))  # fillers


@pytest.mark.parametrize("context", [0, 30])
def test_with_flash_few_numbers_of_rows_occur(context: int) -> None:
    rng = random.Random(context)
    rows, gathered = set(), set()
    for _ in range(40):
        shared = [rng.randrange(90) for _ in range(context)]
        made = with_contexts(*[(shared, [5] * rng.randint(3, 60)) for _ in range(rng.randint(60, 70))])
        inputs = model_input(made, "auto", has_flash=True)
        assert inputs.blocks is not None
        assert inputs.blocks.offsets is not None
        assert inputs.position_ids is not None
        num_rows = inputs.input_ids.shape[1]
        assert inputs.position_ids.shape == (1, num_rows)
        lengths = inputs.blocks.offsets.diff()
        assert int(lengths.max()) == inputs.blocks.longest
        assert int(lengths.min()) > 0
        assert int(lengths.sum()) == (num_rows if context == 0 else len(inputs.blocks.copies))
        rows.add(num_rows)
        gathered.add(int(lengths.sum()))
    assert max(len(rows), len(gathered)) <= 12


def test_auto_packs_where_padding_would_cost_more() -> None:
    assert model_input(segments([5, 5, 5]), "auto").blocks is None
    assert model_input(segments([5, 1, 1]), "auto").blocks is not None
    assert model_input(segments([5, 5, 5]), "auto", has_flash=True).blocks is not None


def test_episodes_follow_sample_ids() -> None:
    layout = segments([1, 2, 1, 1], ["a", "a", "b", "a"]).layout
    assert layout.segment_episode.tolist() == [0, 0, 1, 2]
    assert layout.num_episodes == 3
    assert layout.sampled_per_episode.tolist() == [2, 0, 1]


def seen(*images: str, lengths: Sequence[int]) -> MicroBatch:
    """Make segments of these lengths, each with the image of that name, or "": none."""
    return MicroBatch.from_segments(
        [torch.full((length,), 1 + index) for index, length in enumerate(lengths)],
        [torch.ones(length, dtype=torch.bool) for length in lengths],
        [f"s{index}" for index in range(len(lengths))],
        images=[(image,) if image else () for image in images],
    )


def test_segments_with_the_same_images_stay_together_where_they_are_cut_by_images() -> None:
    # Two groups whose answers have other lengths; their samples come in turn.
    batch = seen("a", "b", "a", "b", "a", "b", lengths=[9, 2, 3, 8, 5, 4])

    def images(pieces: list[MicroBatch]) -> list[list[str]]:
        return [[image for (image,) in piece.images] for piece in pieces]

    assert images(split_by_count(batch, 3)) == [["a", "b", "a"], ["b", "a", "b"]]  # by length: 9 8 5, 4 3 2
    assert images(split_by_count(batch, 3, by_images=True)) == [["a"] * 3, ["b"] * 3]
    # A group that does not fit whole goes on in the next one: no micro-batch has room left.
    assert images(split_by_count(batch, 4, by_images=True)) == [["a", "b", "a", "a"], ["b", "b"]]
    # 9 + 3 + 5 and 2 + 8 + 4 tokens.
    assert images(split_by_tokens(batch, 17, by_images=True)) == [["a"] * 3, ["b"] * 3]
    # 9 + 3, then 2 + 8, then what is left of both groups: 5 + 4.
    assert images(split_by_tokens(batch, 12, by_images=True)) == [["a", "a"], ["b", "b"], ["a", "b"]]
    every = split_by_tokens(batch, 12, by_images=True)
    assert sorted(name for piece in every for name in piece.sample_ids) == [f"s{index}" for index in range(6)]


def test_cutting_by_images_takes_no_more_micro_batches_than_needed() -> None:
    lengths = [6, 5, 4, 5, 6, 4]

    def cut(batch: MicroBatch, *, by_images: bool) -> list[list[int]]:
        return [sorted(piece.offsets.diff().tolist()) for piece in split_by_tokens(batch, 10, by_images=by_images)]

    # Images of their own: as without images. In order it would be 6, 5 + 4, 5, 6 + 4.
    apart = seen(*"abcdef", lengths=lengths)
    assert cut(apart, by_images=True) == cut(apart, by_images=False) == [[4, 6], [5, 5], [4, 6]]
    assert [piece.sample_ids for piece in split_by_count(apart, 2, by_images=True)] == [
        piece.sample_ids for piece in split_by_count(apart, 2)
    ]
    # None at all: they are no group either.
    without = seen(*[""] * 6, lengths=lengths)
    assert without.images == ()
    assert cut(without, by_images=True) == cut(without, by_images=False)
    assert [piece.sample_ids for piece in split_by_count(without, 2, by_images=True)] == [
        piece.sample_ids for piece in split_by_count(without, 2)
    ]
    # Two of an image and three of none: as a group of three, the latter would be 9 and 1 beside 5 and 5.
    mixed = seen("a", "a", "", "", "", lengths=[5, 5, 4, 5, 1])
    assert cut(mixed, by_images=True) == [[5, 5], [1, 4, 5]]
    # A group of 3 + 3, and three alone: in order it would be 3 + 3, 7 + 3, 4.
    groups = seen("a", "a", "b", "c", "d", lengths=[3, 3, 7, 3, 4])
    assert cut(groups, by_images=True) == [[3, 3, 4], [3, 7]]
    # Whole groups of 6 would take three; filled one after the other, 10 and 8 take two.
    halves = seen(*"aabbcc", lengths=[2, 4, 4, 2, 2, 4])
    assert [piece.num_tokens for piece in split_by_tokens(halves, 10, by_images=True)] == [10, 8]
