"""The gated delta rule by chunks and by tokens, against its definition, in float64."""

from __future__ import annotations

import pytest
import torch
from delta_nets import recurrence
from torch import Tensor

from hotseat.algorithms.delta_rule import Heads, _UnitInverse, over_chunks, step


def some_heads(*shape: int, seed: int = 0) -> Heads:
    """Keys and queries of length 1, decays from almost none to almost all."""
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*shape, *sizes, generator=generator, dtype=torch.float64)

    query, key = (torch.nn.functional.normalize(random(3, 5), dim=-1) for _ in range(2))
    heads = Heads(query, key, random(3, 4), -random(3).exp(), random(3).sigmoid())
    return Heads(*(tensor.requires_grad_() for tensor in heads))


@pytest.mark.parametrize("length", [8, 64])
def test_chunks_of_several_sequences_equal_the_recurrence(length: int) -> None:
    """Three sequences of 3, 3 and 1 chunks: outputs, last states and gradients."""
    tokens = some_heads(7, length)
    found, states = over_chunks(tokens, (3, 2, 2))
    upstream = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((found * upstream).sum() + states.square().sum(), tokens)

    places = ([0, 3, 5], [1, 4, 6], [2])  # of the chunks of each sequence
    wanted, last = torch.zeros_like(found), []
    for chunks in places:
        read, state = recurrence(*(tensor[chunks].flatten(0, 1) for tensor in tokens))
        wanted = wanted.index_put((torch.tensor(chunks),), read.unflatten(0, (len(chunks), length)))
        last.append(state)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(states, torch.stack(last), rtol=0, atol=1e-12)
    theirs = torch.autograd.grad((wanted * upstream).sum() + torch.stack(last).square().sum(), tokens)
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)


def test_a_token_without_decay_and_beta_leaves_the_state() -> None:
    tokens = some_heads(1, 16)
    ended = Heads(*tokens[:3], *(torch.where(torch.arange(16)[:, None] < 11, gate, 0.0) for gate in tokens[3:]))
    _, states = over_chunks(ended, (1,))
    _, expected = recurrence(*(tensor[0, :11] for tensor in tokens))
    torch.testing.assert_close(states[0], expected, rtol=0, atol=1e-13)


def test_a_step_appends_a_token() -> None:
    tokens = some_heads(2, 6)
    _, state = over_chunks(Heads(*(tensor[:, :5] for tensor in tokens)), (2,))
    state = state.detach().clone()
    read = step(Heads(*(tensor[:, 5].detach() for tensor in tokens)), state)
    for row in range(2):
        expected, last = recurrence(*(tensor[row] for tensor in tokens))
        torch.testing.assert_close(read[row], expected[5], rtol=0, atol=1e-13)
        torch.testing.assert_close(state[row], last, rtol=0, atol=1e-13)


def test_strong_decays_do_not_overflow() -> None:
    tokens = some_heads(1, 64)
    strong = Heads(*(tensor.float() for tensor in (*tokens[:3], tokens.decay * 0 - 200.0, tokens.beta)))
    found, states = over_chunks(strong, (1,))
    gradients = torch.autograd.grad(found.sum() + states.sum(), tokens)
    assert all(bool(tensor.isfinite().all()) for tensor in (found, states, *gradients))


@pytest.mark.parametrize("length", [1, 2, 5, 8, 16, 37, 64])
@pytest.mark.parametrize("kind", ["keys that differ", "the same key all the time"])
def test_the_inverse_and_its_gradient_are_those_of_a_triangular_solver(length: int, kind: str) -> None:
    """The same key gives the largest powers: 0.99 everywhere below the diagonal."""
    torch.manual_seed(0)
    key = torch.nn.functional.normalize(torch.randn(3, 2, length, 16), dim=-1)
    system = key @ key.mT if kind == "keys that differ" else torch.full((3, 2, length, length), 0.99)
    system.requires_grad_()
    exact = system.detach().double().requires_grad_()
    one = torch.eye(length, dtype=torch.float64).expand(exact.shape)
    expected = torch.linalg.solve_triangular(exact, one, upper=False, unitriangular=True)
    found = _UnitInverse.apply(system)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)
    weights = torch.randn(found.shape)
    (found * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    assert system.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(system.grad.double(), exact.grad.tril(-1), rtol=1e-4, atol=1e-4)


def test_a_sequence_goes_on_from_the_state_of_its_first_half() -> None:
    tokens = some_heads(4, 8)
    whole, last = over_chunks(tokens, (1, 1, 1, 1))
    first, state = over_chunks(Heads(*(each[:2] for each in tokens)), (1, 1))
    second, after = over_chunks(Heads(*(each[2:] for each in tokens)), (1, 1), state)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(after, last, rtol=0, atol=1e-12)
