"""Log-probs of given tokens, and the divergence from a teacher, from hidden states, chunk by chunk.

As in `logprobs`, rows are taken in chunks, whose logits forward and backward hold one at a time. Backward computes them
again, has autograd differentiate what was made of the chunk's logits, and adds up the gradient of the head in float32.

A teacher comes as its most likely tokens with their log-probs, or as its hidden states: with its head they are its
logits, chunk by chunk as well, so that no tokens x vocabulary matrix exists, or travels, on either side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotseat.algorithms.distillation import Divergence, divergence_from_logits, divergence_from_top, top_log_probs
from hotseat.algorithms.head import project
from hotseat.types import MicroBatch, to_device

# A fraction of the elements in a chunk of `logprobs`: there are so many more tensors of a chunk's size, the teacher's
# among them, and the planner counts on one sum (LOGITS_CHUNK_ELEMENTS in `hotseat.placement.memory_terms`).
_CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**25}


@dataclass(frozen=True)
class Head:
    """The head of a language model: what makes logits of hidden states."""

    weight: Tensor  # [vocab_size, hidden_size]
    bias: Tensor | None = None
    scale: float = 1.0  # of logits (Granite, Cohere)
    cap: float | None = None  # logits are cap · tanh(logit / cap) before the scale (Gemma 2)

    def to(self, device: torch.device) -> Head:
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute [num_rows, vocab_size] in float32 (float64 for float64 input)."""
        return self.finish(project(hidden, self.weight, self.bias))

    def finish(self, logits: Tensor) -> Tensor:
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits if self.scale == 1.0 else logits * self.scale


class TeacherRows(NamedTuple):
    """Teacher's distribution in each row, as far as it is known: its most likely tokens, or its hidden state."""

    ids: Tensor | None = None  # [num_rows, top_k]
    log_probs: Tensor | None = None  # [num_rows, num_classes], see `algorithms.distillation`
    hidden: Tensor | None = None  # [num_rows, hidden_size of the teacher]

    def of(self, rows: slice | Tensor) -> TeacherRows:
        """Return what is known of some rows."""
        return TeacherRows(*(None if each is None else each[rows] for each in self))


# Fields of a micro-batch with what a teacher gave, and outputs of that teacher: [num_tokens, ...] each.
TEACHER_FIELDS = tuple(f"teacher_{name}" for name in TeacherRows._fields)


@dataclass(frozen=True)
class Teaching:
    """Task of a forward with a teacher: a policy's compares with what the teacher gave, a teacher's gives it.

    rows: of the scored tokens, once a micro-batch is laid out for a policy. head: of a teacher that comes as hidden
    states.
    """

    how: Divergence
    gives: bool = False  # this is the teacher
    head: Head | None = None
    rows: TeacherRows = field(default_factory=TeacherRows)

    def of(self, fields: Mapping[str, Tensor], tokens: Tensor, device: torch.device | None) -> Teaching | None:
        """Return the same for these tokens of a micro-batch; None where no teacher gave anything, as in a filler."""
        if self.gives:
            return self
        rows = [fields[name][tokens] if name in fields else None for name in TEACHER_FIELDS]
        if all(each is None for each in rows):
            return None
        return replace(self, rows=TeacherRows(*(None if each is None else to_device(each, device) for each in rows)))

    def filler(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch that counts for nothing with made-up words of a teacher.

        Its forward has the outputs of those of other ranks: ZeRO 3 counts them, and ranks that differ do not meet.
        """
        if self.how.top_k is None:
            assert self.head is not None, "hidden states of a teacher whose head is not known"
            fields = {"teacher_hidden": torch.zeros(batch.num_tokens, self.head.weight.shape[1])}
        else:
            ids = torch.arange(self.how.top_k, dtype=torch.int32).expand(batch.num_tokens, -1)
            num_classes = self.how.top_k + (self.how.tail == "other")
            fields = {"teacher_ids": ids, "teacher_log_probs": torch.zeros(batch.num_tokens, num_classes)}
        return replace(batch, fields=fields)


class TargetScores(NamedTuple):
    """[num_rows] each."""

    log_probs: Tensor
    divergence: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True)
class _Work:
    """Settings of the work on each chunk of logits."""

    how: Divergence
    temperature: float
    with_entropy: bool
    rows: int
    finish: Any  # `Head.finish` of the policy's head
    teacher: Head | None

    def score(self, logits: Tensor, targets: Tensor, teacher: TeacherRows) -> tuple[Tensor, ...]:
        logits = self.finish(logits)
        log_p = (logits / self.temperature).log_softmax(-1)
        log_probs = log_p.gather(-1, targets[:, None]).squeeze(-1)
        if teacher.hidden is not None:
            assert self.teacher is not None, "hidden states of a teacher whose head is not known"
            with torch.no_grad():
                theirs = self.teacher.logits(teacher.hidden.to(self.teacher.weight.dtype))
            apart = divergence_from_logits(logits, theirs.to(logits.dtype), self.how)
        else:
            assert teacher.ids is not None
            assert teacher.log_probs is not None
            apart = divergence_from_top(logits, teacher.ids, teacher.log_probs, self.how)
        return (log_probs, apart, -(log_p.exp() * log_p).sum(-1)) if self.with_entropy else (log_probs, apart)


def scores_with_teacher(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    teacher: TeacherRows,
    how: Divergence,
    *,
    teacher_head: Head | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_rows: int | None = None,
) -> TargetScores:
    """Compute each target's log-prob at the temperature, the divergence from the teacher, and the entropy if asked for.

    hidden [num_rows, hidden_size], targets [num_rows] int64; with gradients for hidden, and for weight and bias of the
    head. teacher_head: of a teacher that comes as hidden states.
    """
    work = _Work(
        how, temperature, with_entropy, chunk_rows or _num_rows(head.weight, teacher), head.finish, teacher_head
    )
    return TargetScores(*_Chunked.apply(hidden, head.weight, head.bias, targets, work, *teacher))


def teacher_rows(hidden: Tensor, head: Head, how: Divergence, *, chunk_rows: int | None = None) -> TeacherRows:
    """Return what a policy learns from, of a teacher's hidden states [num_rows, hidden_size]. Without gradient."""
    if how.top_k is None:
        return TeacherRows(hidden=hidden)
    rows = chunk_rows or _num_rows(head.weight, TeacherRows())
    parts = [top_log_probs(head.logits(part), how) for part in hidden.split(rows)]
    ids, log_probs = (torch.cat(each) for each in zip(*parts, strict=True))
    return TeacherRows(ids, log_probs)


def _num_rows(weight: Tensor, teacher: TeacherRows) -> int:
    elements = _CHUNK_ELEMENTS.get(weight.device.type, _CHUNK_ELEMENTS["cuda"])
    return max(1, elements // weight.shape[0] // (2 if teacher.hidden is not None else 1))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, work: _Work, *teacher: Any
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, bias, targets, *teacher)
        ctx.work = work
        rows = TeacherRows(*teacher)
        parts = [
            work.score(project(hidden[part], weight, bias), targets[part], rows.of(part))
            for part in _parts(len(hidden), work.rows)
        ]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *teacher = ctx.saved_tensors
        work, rows, (needs_hidden, needs_weight, needs_bias) = ctx.work, TeacherRows(*teacher), ctx.needs_input_grad[:3]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # Sums over chunks are kept in float32: a bfloat16 sum would lose what later chunks add.
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias and bias is not None else None
        for part in _parts(len(hidden), work.rows):
            grad = _gradient(work, project(hidden[part], weight, bias), targets[part], rows.of(part), gradients, part)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * (2 + len(teacher)),
        )


def _gradient(
    work: _Work, logits: Tensor, targets: Tensor, teacher: TeacherRows, gradients: Sequence[Tensor], part: slice
) -> Tensor:
    """Differentiate the scores of one chunk by its logits: [rows, vocab_size]."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        scores = work.score(leaf, targets, teacher)
        (gradient_of_logits,) = torch.autograd.grad(scores, leaf, [gradient[part] for gradient in gradients])
    return gradient_of_logits


def _parts(num_rows: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, num_rows, rows)] or [slice(0, 0)]
