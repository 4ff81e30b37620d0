"""Sampling of tokens from logits, each row for itself: nothing here depends on which rows share a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from hotseat.algorithms.digest import golden_counter, mix64
from hotseat.rollout.triton_kernels import triton_kernels


def uniforms(seeds: Tensor, num_steps: int) -> Tensor:
    """Draw uniforms in [0, 1), [rows] int64 -> [rows, num_steps] float64: entry (r, s) depends on seeds[r] and s alone.

    52 bits, so that a uniform times a total stays below the total in float64.
    """
    counter = torch.arange(num_steps, device=seeds.device, dtype=torch.int64)
    bits = mix64(golden_counter(mix64(seeds)[:, None], counter))
    return ((bits >> 12) & ((1 << 52) - 1)).to(torch.float64) * 2.0**-52


def filtered(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set logits [rows, vocab] to -inf where top-k, and then top-p among the rest, leave a token out.

    top_k: [rows] int64, keeps the k largest and what ties with the k-th. top_p: [rows] float64, keeps the fewest
    tokens, most probable first and lower id first among equals, that have at least this probability together.
    """
    ordered, token_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    kth = ordered.gather(1, (top_k - 1)[:, None])
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    mass = torch.softmax(ordered.double(), dim=-1).cumsum(-1)
    before = torch.cat([mass.new_zeros(mass.shape[0], 1), mass[:, :-1]], dim=1)
    is_out = (ordered == -torch.inf) | ((before >= top_p[:, None]) & (top_p < 1.0)[:, None])
    return logits.masked_fill(torch.zeros_like(is_out).scatter_(1, token_ids, is_out), -torch.inf)


def sample(logits: Tensor, temperatures: Tensor, uniform: Tensor, is_greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sample by the inverse CDF: [rows, vocab] float32 logits, [rows] uniforms -> tokens and log-probs, both [rows].

    temperatures: [rows], that divide the logits. is_greedy: [rows] bool, rows that take the most probable token
    instead; None where there are none. A row without a finite distribution gets a log-prob that is not finite.
    """
    kernels = triton_kernels(logits.device) if logits.is_cuda else None
    if kernels is not None:
        return kernels.sample(logits, temperatures, uniform, is_greedy)
    probs = torch.softmax(logits / temperatures[:, None], dim=-1)
    mass = probs.cumsum(-1, dtype=torch.float64)
    # The first token whose cumulated probability is above uniform * total.
    tokens = torch.searchsorted(mass, (uniform * mass[:, -1])[:, None], right=True).clamp_(max=logits.shape[1] - 1)
    if is_greedy is not None:
        tokens = torch.where(is_greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], probs.gather(1, tokens)[:, 0].log()
