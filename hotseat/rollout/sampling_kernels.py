# mypy: ignore-errors
"""Triton kernels that sample tokens by the inverse CDF: they read the logits once, and a block of each row twice."""

import torch
import triton
import triton.language as tl

_BLOCK = 2048  # tokens


@triton.jit
def _sum_kernel(logits, temperatures, highest, total, vocab_size, num_blocks, BLOCK: tl.constexpr):
    # 64 bits: logits may have more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    logit = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")) / temperature
    peak = tl.max(logit, axis=0)
    # Of a block without any probability nothing is summed: the difference of infinities is no number.
    mass = tl.sum(tl.where(logit == float("-inf"), 0.0, tl.exp(logit - peak)), axis=0)
    tl.store(highest + row * num_blocks + block, peak)
    tl.store(total + row * num_blocks + block, mass)


@triton.jit
def _choose_kernel(
    logits,
    temperatures,
    uniforms,
    is_greedy,
    highest,
    total,
    tokens,
    log_probs,
    vocab_size,
    num_blocks,
    HAS_GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    peaks = tl.load(highest + row * num_blocks + block, mask=is_block, other=float("-inf"))
    sums = tl.load(total + row * num_blocks + block, mask=is_block, other=0.0)
    peak = tl.max(peaks, axis=0)
    mass = tl.where(peaks == float("-inf"), 0.0, tl.exp(peaks - peak) * sums).to(tl.float64)
    upto = tl.cumsum(mass, axis=0)
    whole = tl.sum(mass, axis=0)
    target = tl.load(uniforms + row) * whole
    # A scan rounds in an order of its own, so its results may fall by a last bit: only blocks with probability count,
    # the last of them where a target is beyond all.
    last = tl.max(tl.where(mass > 0.0, block, 0), axis=0)
    chosen = tl.minimum(tl.min(tl.where((upto > target) & (mass > 0.0), block, BLOCKS), axis=0), last)
    before = tl.sum(tl.where(block < chosen, mass, 0.0), axis=0)
    if HAS_GREEDY:
        greedy = tl.load(is_greedy + row) != 0
        chosen = tl.where(greedy, tl.min(tl.where(peaks == peak, block, BLOCKS), axis=0), chosen)
    chosen = tl.minimum(chosen, num_blocks - 1)  # of a row without a distribution, too

    place = tl.arange(0, BLOCK)
    token = chosen * BLOCK + place
    is_token = token < vocab_size
    temperature = tl.load(temperatures + row)
    logit = tl.load(logits + row * vocab_size + token, mask=is_token, other=float("-inf")) / temperature
    within = tl.where(logit == float("-inf"), 0.0, tl.exp(logit - peak)).to(tl.float64)
    upto_token = tl.cumsum(within, axis=0)
    is_ahead = (upto_token > target - before) & (within > 0.0)
    last_token = tl.max(tl.where(within > 0.0, place, 0), axis=0)
    sampled = tl.minimum(tl.min(tl.where(is_ahead, place, BLOCK), axis=0), last_token)
    if HAS_GREEDY:
        sampled = tl.where(greedy, tl.min(tl.where(logit == peak, place, BLOCK), axis=0), sampled)
    offset = tl.minimum(sampled, tl.minimum(BLOCK, vocab_size - chosen * BLOCK) - 1)
    scaled = tl.sum(tl.where(place == offset, logit, 0.0), axis=0)
    tl.store(tokens + row, (chosen * BLOCK + offset).to(tl.int64))
    tl.store(log_probs + row, scaled - peak - tl.log(whole).to(tl.float32))


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor, is_greedy: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token per row: [rows, vocab] float32, [rows] float32, [rows] float64 -> two of [rows].

    The same as `hotseat.rollout.sampling.sample`, up to rounding.
    """
    rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    highest = logits.new_empty(rows, num_blocks)
    total = torch.empty_like(highest)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = logits.new_empty(rows)
    with torch.cuda.device_of(logits):
        _sum_kernel[(rows, num_blocks)](logits, temperatures, highest, total, vocab_size, num_blocks, BLOCK=_BLOCK)
        _choose_kernel[(rows,)](
            logits,
            temperatures,
            uniforms,
            logits if is_greedy is None else is_greedy,
            highest,
            total,
            tokens,
            log_probs,
            vocab_size,
            num_blocks,
            HAS_GREEDY=is_greedy is not None,
            BLOCK=_BLOCK,
            BLOCKS=triton.next_power_of_2(num_blocks),
        )
    return tokens, log_probs
