"""Sequences over several ranks: what fits, and groups beside each other."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotseat.errors import UnsupportedError, UserError
from hotseat.train.backend import TrainOptions
from hotseat.train.packing import model_input, split_by_tokens
from hotseat.train.sequence import SequenceGroup
from hotseat.types import MicroBatch

from . import fsdp_factory, sequence_scenarios
from .conformance import OPTIONS, assert_group_agrees, assert_no_rank_failed, groups_of_four, tiny_model
from .fsdp_factory import make
from .run_ranks import run_ranks
from .test_policy_models import small

OVER_TWO = replace(OPTIONS, layout="packed", sequence_parallel_size=2)


def group_of(size: int, rank: int) -> SequenceGroup:
    """Without anybody to meet."""
    group = SequenceGroup()
    group.size, group.rank = size, rank
    return group


@pytest.mark.parametrize("layout", ["packed", "shared", "auto"])
@pytest.mark.parametrize("size", [2, 3, 64])
def test_slices_are_equal_and_hold_every_wanted_token_once(layout, size):
    batch = groups_of_four()
    whole = model_input(batch, "shared" if layout == "auto" else layout)
    parts = [model_input(batch, layout, group=group_of(size, rank)) for rank in range(size)]
    length = -(-whole.input_ids.shape[1] // size)
    assert all(part.input_ids.shape == part.position_ids.shape == (1, length) for part in parts)
    joined = torch.cat([part.input_ids[0] for part in parts])
    assert torch.equal(joined[: whole.input_ids.shape[1]], whole.input_ids[0])
    assert torch.equal(torch.cat([part.tokens for part in parts]).sort()[0], whole.tokens)
    for part in parts:
        assert torch.equal(part.targets, batch.token_ids[part.tokens])
        assert ((part.rows >= 0) & (part.rows < length)).all()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20), size=st.integers(2, 5), slack=st.integers(0, 20))
def test_no_rank_gets_more_tokens_than_its_budget(lengths: list[int], size: int, slack: int) -> None:
    """A micro-batch may have `size` times the budget of one device."""
    budget = -(-max(lengths) // size) + slack
    starts = torch.tensor([0, *lengths]).cumsum(0)
    zeros = torch.zeros(int(starts[-1]))
    batch = MicroBatch(zeros.long(), starts, zeros == 0, zeros, {}, tuple(map(str, range(len(lengths)))))
    for part in split_by_tokens(batch, budget * size):
        for rank in range(size):
            assert model_input(part, "packed", group=group_of(size, rank)).input_ids.numel() <= budget


def test_heads_and_ranks_that_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"size is 2, and 1 rank cannot be divided into groups.* set it to 1, or"):
        make(tiny_model(), OVER_TWO)
    monkeypatch.setenv("WORLD_SIZE", "6")
    tiny_model().config.save_pretrained(tmp_path)  # no weights there: it is refused before they are looked for
    with pytest.raises(UserError, match="4 attention heads do not divide over 3 ranks: set it to 1, 2 or 4"):
        make(tmp_path, replace(OVER_TWO, sequence_parallel_size=3))  # type: ignore[arg-type]


def test_only_packed_sequences_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="only packed sequences can be cut over several ranks: set train.packing"):
        TrainOptions(layout="padded", sequence_parallel_size=2)
    monkeypatch.setattr("hotseat.train.policy_models.check_ranks", lambda *_: None)
    mamba = small("MambaConfig", state_size=4)
    with pytest.raises(UnsupportedError, match="MambaForCausalLM cannot run packed, and only packed sequences"):
        make(copy.deepcopy(mamba), replace(OVER_TWO, layout="auto"))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_groups_that_share_sequences_are_beside_each_other_as_one_rank(tmp_path: Path) -> None:
    results = run_ranks(4, fsdp_factory.__name__, tmp_path, timeout_s=500, suite=sequence_scenarios.__name__)
    for name, scenario in sequence_scenarios.SCENARIOS.items():
        assert_no_rank_failed(name, results)
        alone = scenario(make, 0, 1, tmp_path)
        assert_group_agrees(alone, [result[name] for result in results])
