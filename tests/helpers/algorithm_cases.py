"""Layouts and numbers for the tests of `hotseat.algorithms`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from hotseat.types import TokenLayout

NAN = float("nan")

quick = settings(max_examples=15, deadline=None)
few = settings(max_examples=8, deadline=None)  # for properties that are also parametrised
seeds = st.integers(0, 2**31)

_segment = st.lists(st.integers(0, 1), max_size=6)
_episode = st.lists(_segment, min_size=1, max_size=3)


def make_layout(episodes: Sequence[Sequence[Sequence[int]]]) -> TokenLayout:
    """One list per episode, in it one per segment, in it 1 for a sampled token and 0 for any other."""
    segments = [segment for episode in episodes for segment in episode]
    lengths = torch.tensor([0] + [len(segment) for segment in segments])
    return TokenLayout(
        mask=torch.tensor([bool(token) for segment in segments for token in segment], dtype=torch.bool),
        offsets=lengths.cumsum(0),
        segment_episode=torch.tensor(
            [number for number, episode in enumerate(episodes) for _ in episode], dtype=torch.int64
        ),
        num_episodes=len(episodes),
    )


def episode_lists(min_episodes: int = 1, max_episodes: int = 6) -> st.SearchStrategy[list[list[list[int]]]]:
    """Any shape: empty segments, episodes without a sampled token, several segments."""
    return st.lists(_episode, min_size=min_episodes, max_size=max_episodes)


def layouts(min_episodes: int = 1, max_episodes: int = 6) -> st.SearchStrategy[TokenLayout]:
    return episode_lists(min_episodes, max_episodes).map(make_layout)


def numbers(seed: int, *shape: int, scale: float = 1.0, grad: bool = False) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return values.requires_grad_(grad)


def assert_same_gradients(our_loss: Tensor, their_loss: Tensor, ours: Tensor, theirs: Tensor) -> None:
    """Compare two losses, and their gradients for `ours` and `theirs`."""
    assert_close(our_loss, their_loss)
    our_loss.backward()
    their_loss.backward()
    assert float(ours.grad.abs().sum()) > 0
    assert_close(ours.grad, theirs.grad)


def with_rubbish(values: Tensor, mask: Tensor) -> Tensor:
    """The same under the mask, NaN and infinities elsewhere."""
    rubbish = torch.tensor([NAN, torch.inf, -torch.inf], dtype=values.dtype).repeat(len(values) // 3 + 1)[: len(values)]
    return torch.where(mask, values.detach(), rubbish).requires_grad_(values.requires_grad)


def permuted(episodes: list[list[list[int]]], order: Sequence[int]) -> tuple[TokenLayout, Tensor]:
    """The layout with episodes in another order, and the index that brings flat tensors into it."""
    old = make_layout(episodes)
    tokens = [token for episode in order for token in torch.nonzero(old.token_episode == episode).flatten().tolist()]
    return make_layout([episodes[episode] for episode in order]), torch.tensor(tokens, dtype=torch.int64)


def some_order(seed: int, count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def pairs_of_groups(count: int) -> Tensor:
    """Ids of two groups for `count` >= 4 episodes, out of order: 5, 3, 5, 3, ..."""
    return torch.tensor([5, 3] * count)[:count]


def sampled_tokens(layout: TokenLayout, episode: int) -> list[int]:
    """Flat positions of the episode's sampled tokens, in order, by a plain loop."""
    masks, episodes = layout.mask.tolist(), layout.token_episode.tolist()
    return [token for token in range(layout.num_tokens) if masks[token] and episodes[token] == episode]


def assert_close(actual: Tensor, expected: Tensor | Sequence[float] | float, tolerance: float = 1e-12) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=tolerance, atol=tolerance)
