"""State on the device from which the next token of each slot is decoded and sampled: a row per slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotseat.algorithms.digest import signed
from hotseat.rollout.open_requests import EngineSequence
from hotseat.rollout.sampling import filtered, sample, uniforms
from hotseat.rollout.slot_cache import padded


class SlotRows:
    """Rows of slots. Those without a sequence decode token 0 at position 0, and the result is ignored."""

    def __init__(self, num_slots: int, max_length: int, has_shifts: bool, device: torch.device):
        rows = padded(num_slots)
        self._device = device
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # to be appended next
        self.positions = torch.zeros_like(self.tokens)  # of that token
        self.shifts = torch.zeros_like(self.tokens) if has_shifts else None  # see `SlotModel.decode`
        self._first = torch.zeros_like(self.tokens)  # position of the last prompt token
        self._last = torch.zeros_like(self.tokens)  # position of the last token that may be decoded
        self._temperatures = torch.ones(rows, device=device)
        self._is_greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self._uniforms = torch.zeros(rows, max_length, dtype=torch.float64, device=device)

    def fill(self, slots: Sequence[int], sequences: Sequence[EngineSequence], shifts: Sequence[int]) -> None:
        """Set the rows of sequences whose last prompt token is to be decoded next. shifts: used where there are any."""
        at, samplings = self.column(slots), [sequence.request.sampling for sequence in sequences]
        self.tokens[at] = self.column([s.prompt[-1] for s in sequences])
        self.positions[at] = self._first[at] = self.column([len(s.prompt) - 1 for s in sequences])
        self._last[at] = self.column([s.max_keys - 1 for s in sequences])
        if self.shifts is not None:
            self.shifts[at] = self.column(shifts)
        self._temperatures[at] = self.column([each.temperature or 1.0 for each in samplings], torch.float32)
        self._is_greedy[at] = self.column([s.is_greedy for s in sequences], torch.bool)
        num_steps = max(s.max_new_tokens for s in sequences)
        self._uniforms[at, :num_steps] = uniforms(self.column([signed(s.request.seed) for s in sequences]), num_steps)

    def sample(self, logits: Tensor, num_running: int, filters: Filters | None, has_greedy: bool) -> Tensor:
        """Sample a token of the first slots from logits, [rows, vocab], and take it as the next to be appended.

        Returns tokens and log-probs, [2, rows] float64, in which both are exact.
        """
        rows = len(logits)
        positions, temperatures = self.positions[:rows], self._temperatures[:rows]
        if filters is not None:
            logits = filters.apply(logits / temperatures[:, None])
            temperatures = torch.ones_like(temperatures)
        uniform = self._uniforms[:rows].gather(1, (positions - self._first[:rows])[:, None])[:, 0]
        tokens, log_probs = sample(logits, temperatures, uniform, self._is_greedy[:rows] if has_greedy else None)
        self.tokens[:num_running] = tokens[:num_running]
        # Sequences that end stay at their last position until the host has looked.
        torch.minimum(positions[:num_running] + 1, self._last[:num_running], out=positions[:num_running])
        return torch.stack([tokens.double(), log_probs.double()])

    def move(self, at: Tensor, to: Tensor) -> None:
        """Copy some rows over others: [count] int64 each."""
        for state in (*self._cleared(), self._temperatures, self._is_greedy, self._uniforms):
            state[to] = state[at]

    def clear(self, slots: Sequence[int]) -> None:
        """Reset slots to token 0 at position 0."""
        if slots:
            at = self.column(slots)
            for state in self._cleared():
                state[at] = 0

    def column(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _cleared(self) -> list[Tensor]:
        state = [self.tokens, self.positions, self._first, self._last]
        return state if self.shifts is None else [*state, self.shifts]


@dataclass(frozen=True)
class Filters:
    """Rows that sample from their most probable tokens alone: [filters] each."""

    rows: Tensor  # int64
    top_k: Tensor  # int64, 0: all
    top_p: Tensor  # float64

    @staticmethod
    def of(active: Sequence[tuple[int, EngineSequence]], device: torch.device) -> Filters | None:
        chosen = [(slot, s.request.sampling) for slot, s in active if s.is_filtered]
        if not chosen:
            return None
        return Filters(
            torch.tensor([slot for slot, _ in chosen], device=device),
            torch.tensor([sampling.top_k for _, sampling in chosen], device=device),
            torch.tensor([sampling.top_p for _, sampling in chosen], dtype=torch.float64, device=device),
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Set logits that are left out to -inf, in place: [rows, vocab]."""
        vocab_size = logits.shape[1]
        top_k = torch.where(self.top_k == 0, vocab_size, self.top_k).clamp_(max=vocab_size)
        logits[self.rows] = filtered(logits[self.rows], top_k, self.top_p)
        return logits
