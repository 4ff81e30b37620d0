"""Log-probs and entropy of given tokens from hidden states, without the tokens x vocabulary matrix.

With z = (W·h + b) / temperature, for the token y:

    log p(y) = z_y − logsumexp(z)                 ∂ log p(y) / ∂z_j = [j = y] − p_j
    H        = logsumexp(z) − Σ_j p_j · z_j       ∂ H / ∂z_j        = −p_j · (log p_j + H)

Rows are taken in chunks. Forward and backward hold one chunk of logits at a time; backward computes it again, except
when all rows were one chunk, which forward then keeps.

Logits are float32 where hidden states and weights are 16-bit too (see `hotseat.algorithms.head`): rounded to 16 bits
they would add much to a log-prob's error. Capped ones (Gemma 2) are rounded before the cap all the same. Their gradient
is rounded to the type of the hidden states, for the products that take it further: that is an error of 1/512 at most in
each element, without a sign, in sums over the vocabulary or over rows whose results are 16-bit as well; the gradients
of all layers below have the same.

Operation by operation a chunk of logits is gone over many times: 28 bytes for each of its elements in forward, 50 in
backward. With a compiler no copy is made: `_score` reads the logits once or twice, `_gradient` reads them once and
writes half as much. With what the product writes that is 8 or 12 bytes, and 10.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hotseat.algorithms.head import project

# Elements of one chunk of logits, 4 bytes each. On a CPU a chunk should stay in the cache, on a GPU it should be large
# enough to fill it. At the peak of a backward there are 14 bytes for each: logits, log-probs and gradient, the last
# also in 16 bits. The planner counts on it (LOGITS_CHUNK_ELEMENTS in `hotseat.placement.memory_terms`).
_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}
# Without copies there are 6 bytes: twice as many take less memory, and the gradient of the weight is added up half as
# often.
_COMPILED_CHUNK_ELEMENTS = 2**28

Compiler = str | Callable[..., Any]


class _Chunking(NamedTuple):
    """How log-probs are computed, chunk by chunk."""

    temperature: float
    with_entropy: bool
    rows: int  # of a chunk
    compiler: Compiler | None


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    with_entropy: bool = False,
    chunk_rows: int | None = None,
    compiler: Compiler | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-prob of each row's target, and the entropy of its distribution if asked.

    `compiler` is the backend that torch.compile gets for what is done with logits; None: operation by operation.
    `cap`: logits are cap · tanh(logit / cap) before the temperature (Gemma 2); operation by operation.

    hidden [num_rows, hidden_size], weight [vocab_size, hidden_size], targets [num_rows] int64 -> [num_rows] each, in
    float32 (float64 for float64 input), with gradients for hidden, weight and bias.
    """
    device = hidden.device.type
    is_large = compiler is not None and device != "cpu"
    num_elements = _COMPILED_CHUNK_ELEMENTS if is_large else _CHUNK_ELEMENTS.get(device, 2**27)
    chunking = _Chunking(temperature, with_entropy, chunk_rows or max(1, num_elements // weight.shape[0]), compiler)
    if cap is not None:
        log_probs, entropy = _capped(hidden, weight, bias, targets, chunking, cap)
    elif torch.compiler.is_compiling():
        # Part of a whole model that is being compiled: to the compiler one operation, however many chunks it takes.
        _, log_probs, entropy = torch.ops.hotseat.log_probs(
            hidden, weight, bias, targets, *chunking[:3], compiler is not None
        )
    else:
        log_probs, entropy = _ChunkedLogProbs.apply(hidden, weight, bias, targets, chunking)
    return log_probs, entropy if with_entropy else None


def _capped(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunking: _Chunking, cap: float
) -> tuple[Tensor, Tensor]:
    """Compute what `token_log_probs` does, with capped logits.

    Each chunk of logits is computed again by the backward, unless it is the only one.
    """
    temperature, with_entropy, rows, _ = chunking

    def score(hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = (cap * torch.tanh(logits / cap) / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else log_p.new_empty(0)
        return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy

    is_kept = hidden.shape[0] <= rows or not torch.is_grad_enabled() or torch.compiler.is_compiling()
    parts = [
        score(*chunk, weight, bias) if is_kept else checkpoint(score, *chunk, weight, bias, use_reentrant=False)
        for chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    log_probs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    return log_probs, entropy


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunking: _Chunking
    ) -> tuple[Tensor, Tensor]:
        log_normalizer, log_probs, entropy, logits = _score_chunks(hidden, weight, bias, targets, chunking)
        needs_gradient = any(ctx.needs_input_grad[:3])
        kept = logits if needs_gradient and hidden.shape[0] <= chunking.rows else None
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, entropy, kept)
        ctx.chunking = chunking
        if not chunking.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (grad_log_probs, grad_entropy)
        needs = ctx.needs_input_grad[:3]
        return *_differentiate_chunks(gradients, ctx.saved_tensors, needs, ctx.chunking), None, None


def _score_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunking: _Chunking
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute log-normalizer, log-prob and entropy (empty unless asked), [num_rows] each; and the last logits."""
    temperature, with_entropy, rows, compiler = chunking
    num_rows = hidden.shape[0]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    log_normalizer = hidden.new_empty(num_rows, dtype=dtype)
    log_probs = hidden.new_empty(num_rows, dtype=dtype)
    entropy = hidden.new_empty(num_rows if with_entropy else 0, dtype=dtype)
    logits = None
    for start in range(0, num_rows, rows):
        part = slice(start, start + rows)
        if compiler is not None:
            logits = project(hidden[part], weight, bias)
            scores = _compiled(_score, compiler)(*_any_rows(logits, targets[part]), temperature, with_entropy)
            log_normalizer[part], log_probs[part] = scores[:2]
            if with_entropy:
                entropy[part] = scores[2]
            continue
        logits = _logits(hidden[part], weight, bias, temperature)
        log_normalizer[part] = logits.logsumexp(-1)
        log_probs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - log_normalizer[part]
        if with_entropy:
            probs = (logits - log_normalizer[part, None]).exp_()
            entropy[part] = log_normalizer[part] - probs.mul_(logits).sum(-1)
    return log_normalizer, log_probs, entropy, logits


def _differentiate_chunks(
    gradients: tuple[Tensor, Tensor | None],
    saved: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None],
    needs: Sequence[bool],
    chunking: _Chunking,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute gradients of hidden, weight and bias, as far as they need one, from those of log-probs and entropy.

    saved: these three, targets, log-normalizer, entropy, and the logits that were kept, if any.
    """
    grad_log_probs, grad_entropy = gradients
    hidden, weight, bias, targets, log_normalizer, entropy, kept = saved
    needs_hidden, needs_weight, needs_bias = needs
    temperature, _, rows, compiler = chunking
    num_rows = hidden.shape[0]
    grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
    # Sums over chunks are kept in float32: a bfloat16 sum would lose what later chunks add.
    grad_weight = torch.zeros_like(weight, dtype=log_normalizer.dtype) if needs_weight else None
    grad_bias = torch.zeros_like(bias, dtype=log_normalizer.dtype) if needs_bias and bias is not None else None
    for start in range(0, num_rows, rows):
        part = slice(start, start + rows)
        more = None
        if grad_entropy is not None and entropy.shape[0] > 0:
            more = entropy[part], grad_entropy[part]
        if compiler is not None:
            logits = project(hidden[part], weight, bias) if kept is None else kept
            padded_rows = _any_rows(logits, targets[part], log_normalizer[part], grad_log_probs[part])
            more_rows = (None, None) if more is None else _any_rows(*more)
            grad = _compiled(_gradient, compiler)(*padded_rows, *more_rows, temperature, hidden.dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        else:
            logits = _logits(hidden[part], weight, bias, temperature) if kept is None else kept
            log_p = logits - log_normalizer[part, None]
            grad = log_p.exp()
            if more is not None:
                log_p.add_(more[0][:, None]).mul_(more[1][:, None])
                log_p.add_(grad_log_probs[part, None])
                grad.mul_(log_p).neg_()
            else:
                grad.mul_(-grad_log_probs[part, None])
            grad.scatter_add_(-1, targets[part, None], grad_log_probs[part, None])
            grad.div_(temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[part])
        if grad_weight is not None:
            if grad.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad.t(), hidden[part])
            else:
                grad_weight += grad.t() @ hidden[part]
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Compute logits divided by the temperature: [rows, vocab_size] in float32 (float64 for float64 input)."""
    return project(hidden, weight, bias).div_(temperature)


# --- for the compiler -------------------------------------------------------------------------------------------------


def _score(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute log-normalizer, log-prob and entropy, [rows] each. logits: [rows, vocab_size] before the temperature."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    largest = z.amax(-1, keepdim=True)
    # Written out, without the cases for infinities of `logsumexp`: what compilers know as the sums of a softmax.
    log_normalizer = largest.squeeze(-1) + (z - largest).exp().sum(-1).log()
    log_probs = z.gather(-1, targets[:, None]).squeeze(-1) - log_normalizer
    if not with_entropy:
        return log_normalizer, log_probs, None
    return log_normalizer, log_probs, log_normalizer - ((z - log_normalizer[:, None]).exp() * z).sum(-1)


def _gradient(
    logits: Tensor,
    targets: Tensor,
    log_normalizer: Tensor,
    grad_log_probs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the gradient of the logits before the temperature, in the hidden states' type: [rows, vocab_size]."""
    log_p = logits.to(log_normalizer.dtype) / temperature - log_normalizer[:, None]
    factor = grad_log_probs[:, None]
    if entropy is not None and grad_entropy is not None:
        factor = factor + (log_p + entropy[:, None]) * grad_entropy[:, None]
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    grad = torch.where(is_target, grad_log_probs[:, None], 0.0) - log_p.exp() * factor
    return (grad / temperature).to(dtype)


@functools.cache
def _compiled(function: Callable[..., Any], compiler: Compiler) -> Callable[..., Any]:
    return torch.compile(function, backend=compiler)


def _any_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Mark the number of rows as a symbol for the compiler; the size of the vocabulary stays a constant."""
    for tensor in tensors:
        maybe_mark_dynamic(tensor, 0)
    return tensors


# --- as operations of a larger graph, which keep no logits ------------------------------------------------------------


def _inner_compiler(is_compiled: bool) -> Compiler | None:
    """Return the compiler of an operation inside a larger graph; None while that graph is being compiled.

    Its compiler may run operations to measure them, and code compiled meanwhile would get in the way.
    """
    is_measured = torch._guards.TracingContext.try_get() is not None
    return "inductor" if is_compiled and not is_measured else None


@torch.library.custom_op("hotseat::log_probs", mutates_args=())
def _operation(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    rows: int,
    is_compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    chunking = _Chunking(temperature, with_entropy, rows, _inner_compiler(is_compiled))
    return _score_chunks(hidden, weight, bias, targets, chunking)[:3]


@_operation.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, _: float, with_entropy: bool, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    each = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
    return each, torch.empty_like(each), torch.empty_like(each) if with_entropy else each.new_empty(0)


@torch.library.custom_op("hotseat::log_probs_gradient", mutates_args=())
def _operation_gradient(
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    temperature: float,
    rows: int,
    is_compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_hidden, grad_weight, grad_bias = _differentiate_chunks(
        (grad_log_probs.contiguous(), None if grad_entropy is None else grad_entropy.contiguous()),
        (hidden, weight, bias, targets, log_normalizer, entropy, None),
        (True, True, bias is not None),
        _Chunking(temperature, grad_entropy is not None, rows, _inner_compiler(is_compiled)),
    )
    assert grad_hidden is not None
    assert grad_weight is not None
    return grad_hidden, grad_weight, hidden.new_empty(0) if grad_bias is None else grad_bias


@_operation_gradient.register_fake
def _(
    grad_log_probs: Tensor, grad_entropy: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = hidden.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(hidden), torch.empty_like(weight), grad_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, bias, targets, ctx.temperature, ctx.with_entropy, *ctx.rest = inputs
    log_normalizer, _, entropy = output
    ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, entropy)


def _differentiate(
    ctx: Any, grad_log_normalizer: Tensor | None, grad_log_probs: Tensor, grad_entropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    grad_hidden, grad_weight, grad_bias = torch.ops.hotseat.log_probs_gradient(
        grad_log_probs, grad_entropy if ctx.with_entropy else None, *ctx.saved_tensors, ctx.temperature, *ctx.rest
    )
    has_bias = ctx.saved_tensors[2] is not None
    return grad_hidden, grad_weight, grad_bias if has_bias else None, *[None] * 5


_operation.register_autograd(_differentiate, setup_context=_keep)
