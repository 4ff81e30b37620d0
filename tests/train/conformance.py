"""What every training backend must do, as plain functions over a factory.

A factory is `make(model, options) -> Backend`. Each check takes one and a folder of its own, and raises where the
backend is wrong. `ONE_RANK` are the checks of a single process. `SCENARIOS` are run by every rank of a group of two,
and by one rank alone for comparison, `FOUR_RANKS` likewise; `run_ranks` starts the group.

Expected values come from a reference in this file: one segment at a time through the model of transformers, full
log_softmax, AdamW written out.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paused_runs import held
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from hotseat import faults
from hotseat.algorithms.distillation import Divergence, divergence_from_logits, divergence_from_top, top_log_probs
from hotseat.algorithms.policy_loss import gspo_loss
from hotseat.algorithms.routing import ROUTING, RoutingShape
from hotseat.errors import BatchError, DeviceMemoryError, NonFiniteError, RunError, UserError
from hotseat.faults import Fault
from hotseat.train.backend import PARTS, AdamW, Backend, Outputs, TrainOptions
from hotseat.train.divergence import Head as TeacherHead
from hotseat.train.packing import split_by_count, split_by_tokens, take
from hotseat.train.schedule import Schedule
from hotseat.types import MicroBatch

Make = Callable[[PreTrainedModel, TrainOptions], Backend]

VOCAB_SIZE = 97  # odd, so that rows do not divide over ranks
TOLERANCE = 1e-6

# A large eps makes the step depend on the size of the gradient: plain Adam would hide a factor.
OPTIONS = TrainOptions(
    optimizer=AdamW(betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1),
    schedule=Schedule(kind="cosine", peak=1e-3, num_warmup_steps=2, num_steps=10, min_ratio=0.1),
    max_grad_norm=0.5,
    timeout_s=120.0,
)


# --- model, data, loss ------------------------------------------------------------------------------------------------


def tiny_model(*, tied: bool = True, seed: int = 0, num_key_value_heads: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_dropout=0.1,  # must be switched off
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def some_segments(num_segments: int = 10, *, seed: int = 1, weight: float | None = None) -> MicroBatch:
    """Segments of 2 to 15 tokens; the first ones are context, and one sampled token in five is the environment's."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 16, (num_segments,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_tokens = int(offsets[-1])
    position = torch.arange(num_tokens) - torch.repeat_interleave(offsets[:-1], lengths)
    mask = (position >= 2) & (torch.rand(num_tokens, generator=generator) > 0.2)
    return MicroBatch(
        token_ids=torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator),
        offsets=offsets,
        mask=mask,
        weights=mask.float() * (1 / int(mask.sum()) if weight is None else weight),
        fields={
            "old_log_probs": -4.5 + 0.3 * torch.randn(num_tokens, generator=generator),
            "advantages": torch.randn(num_tokens, generator=generator),
        },
        sample_ids=tuple(f"sample-{index}" for index in range(num_segments)),
    )


def groups_of_four(num_segments: int = 12) -> MicroBatch:
    """Segments as above, of which four in a row begin with the same two tokens; all that follows was sampled."""
    whole = some_segments(num_segments)
    token_ids, mask = whole.token_ids.clone(), whole.mask.clone()
    for segment, begin in enumerate(whole.offsets[:-1].tolist()):
        first = int(whole.offsets[segment - segment % 4])
        token_ids[begin : begin + 2] = token_ids[first : first + 2]
        mask[begin + 2 : int(whole.offsets[segment + 1])] = True
    return replace(whole, token_ids=token_ids, mask=mask, weights=mask.float() / int(mask.sum()))


def some_choices(model_config: Any, batch: MicroBatch) -> MicroBatch:
    """Add experts at random, as an engine would record them: unknown ones for the last token of each segment."""
    shape, generator = RoutingShape.of(model_config), torch.Generator().manual_seed(5)
    scores = torch.rand(batch.num_tokens, shape.num_layers, shape.num_experts, generator=generator)
    routing = scores.topk(shape.num_chosen).indices.flatten(1).to(torch.uint8)
    routing[batch.offsets[1:] - 1] = 255
    return replace(batch, fields={**batch.fields, ROUTING: routing})


class ClippedLoss:
    """PPO's surrogate, with an entropy bonus if asked."""

    def __init__(self, entropy_coefficient: float = 0.0):
        self.entropy_coefficient = entropy_coefficient
        self.needs_entropy = entropy_coefficient > 0

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        ratio = (outputs.log_probs - batch.fields["old_log_probs"]).exp()
        advantages = batch.fields["advantages"]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        if self.needs_entropy:
            assert outputs.entropy is not None
            loss = loss - self.entropy_coefficient * outputs.entropy
        clipped = ((ratio - 1).abs() > 0.2) & batch.mask
        return (batch.weights * loss).sum(), {"clipped": clipped.sum(), "segments": float(batch.num_segments)}


class SequenceLoss:
    """GSPO: one ratio for all tokens of an episode."""

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        old, advantages = batch.fields["old_log_probs"], batch.fields["advantages"]
        found = gspo_loss(outputs.log_probs, old, advantages, batch.layout, eps_low=0.2, eps_high=0.2)
        return (batch.weights * found.loss).sum(), {"clipped": found.clipped.sum()}


@dataclass(frozen=True)
class TeacherLoss:
    """The surrogate above, and twice the divergence from a teacher."""

    divergence: Divergence
    needs_entropy: bool = False

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        assert outputs.divergence is not None
        surrogate, _ = ClippedLoss()(outputs, batch)
        apart = (batch.weights * outputs.divergence).sum()
        return surrogate + 2 * apart, {"divergence": outputs.divergence.detach().sum()}


# A teacher with another shape, whose head has rows of padding; and the two forms in which distributions travel.
TEACHER_VOCAB_SIZE = VOCAB_SIZE + 7
TEACHINGS = {
    "top_k": Divergence("jsd", temperature=1.3, beta=0.3, top_k=9, vocab_size=VOCAB_SIZE),
    "vocabulary": Divergence("reverse_kl", temperature=0.8, vocab_size=VOCAB_SIZE),
}


def tiny_teacher() -> LlamaForCausalLM:
    torch.manual_seed(7)
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=TEACHER_VOCAB_SIZE, initializer_range=0.3, **shape))


def head_of(teacher: LlamaForCausalLM) -> TeacherHead:
    return TeacherHead(teacher.lm_head.weight.detach().clone())


def taught(teacher: Backend, work: Sequence[MicroBatch], how: Divergence) -> list[MicroBatch]:
    """Micro-batches with what a teacher gave. All ranks together."""
    given = teacher.teach(work, 1.0, how)
    return [
        replace(batch, fields={**batch.fields, **{name: of for name, of in each.items() if name != "log_probs"}})
        for batch, each in zip(work, given, strict=True)
    ]


class ValueLoss:
    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        assert outputs.values is not None
        missed = (outputs.values - batch.fields["advantages"]).square()
        return (batch.weights * missed).sum(), {"clipped": (missed > 1).sum()}


# --- the reference ----------------------------------------------------------------------------------------------------


def plain_outputs(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> Outputs:
    """Log-probs and entropy under the mask, one segment at a time, from full logits."""
    log_probs, entropies = [], []
    for start, end in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
        token_ids = batch.token_ids[start:end]
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1] / temperature
        log_p = logits.log_softmax(-1)
        zero = logits.new_zeros(1)
        log_probs += [zero, log_p.gather(-1, token_ids[1:, None]).squeeze(-1)]
        entropies += [zero, -(log_p.exp() * log_p).sum(-1)]
    return Outputs(torch.cat(log_probs) * batch.mask, torch.cat(entropies) * batch.mask)


class PlainTraining:
    """AdamW with decay on matrices, clipping and the schedule, written out."""

    def __init__(self, model: PreTrainedModel, options: TrainOptions):
        assert options.optimizer is not None
        self.model = copy.deepcopy(model).eval()
        self.options, self.adam = options, options.optimizer
        self.step = 0
        self.weights = dict(self.model.named_parameters())
        self.first = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def update(self, batch: MicroBatch, loss: ClippedLoss, temperature: float) -> tuple[float, float]:
        """Loss and gradient norm."""
        self.model.zero_grad()
        total, _ = loss(plain_outputs(self.model, batch, temperature), batch)
        total.backward()
        gradients = {name: weight.grad for name, weight in self.weights.items()}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        scale = min(1.0, self.options.max_grad_norm / norm) if self.options.max_grad_norm else 1.0
        rate = self.options.schedule.learning_rate(self.step)
        self.step += 1
        (beta1, beta2), eps = self.adam.betas, self.adam.eps
        with torch.no_grad():
            for name, weight in self.weights.items():
                gradient = gradients[name] * scale
                if weight.ndim >= 2:
                    weight.mul_(1 - rate * self.adam.weight_decay)
                self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
                self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient**2
                mean = self.first[name] / (1 - beta1**self.step)
                root = (self.second[name] / (1 - beta2**self.step)).sqrt()
                weight -= rate * mean / (root + eps)
        return float(total.detach()), norm


def copy_weights(backend: Backend, **kwargs: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.weights(**kwargs)}


def outcome(backend: Backend, facts: Sequence[tuple[float, ...]], scores: Sequence[Tensor]) -> dict[str, Any]:
    """Return the weights that updates led to, with what they reported and scores after them. Closes the backend."""
    result = {
        "weights": copy_weights(backend),
        "reports": torch.tensor(facts, dtype=torch.float64),
        "log_probs": torch.cat([*scores]),
    }
    backend.close()
    return result


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        difference = (ours[name].double() - theirs[name].double()).abs().max()
        assert difference <= tolerance, f"{name}: off by {difference:.2e}, allowed {tolerance:.0e}"


def assert_identical(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), f"{name} differs"


# --- checks of one rank -----------------------------------------------------------------------------------------------


def log_probs_equal_a_plain_forward(make: Make, directory: Path) -> None:
    model = tiny_model(tied=False)
    batch = some_segments()
    for temperature in (1.0, 0.7):
        expected = plain_outputs(copy.deepcopy(model).eval(), batch, temperature).log_probs.detach()
        for layout in ("padded", "packed", "auto"):
            backend = make(copy.deepcopy(model), replace(OPTIONS, layout=layout))
            (found,) = backend.log_probs([batch], temperature)
            assert found.dtype == torch.float32
            assert not found.requires_grad
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            assert (found[~batch.mask] == 0).all()
            backend.close()


def the_first_token_of_a_segment_has_log_prob_zero(make: Make, directory: Path) -> None:
    batch = some_segments()
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    backend = make(tiny_model(), OPTIONS)
    (found,) = backend.log_probs([batch], 1.0)
    is_first = torch.zeros_like(batch.mask)
    is_first[batch.offsets[:-1]] = True
    assert (found[is_first] == 0).all()
    assert (found[~is_first] < 0).all()
    backend.close()


def updates_equal_adamw_written_out(make: Make, directory: Path) -> None:
    for entropy_coefficient, tied in ((0.0, True), (0.01, False)):
        model = tiny_model(tied=tied)
        reference = PlainTraining(model, OPTIONS)
        backend = make(model, OPTIONS)
        loss = ClippedLoss(entropy_coefficient)
        for step in range(5):
            batch = some_segments(seed=step)
            expected_loss, expected_norm = reference.update(batch, loss, 0.9)
            report = backend.update(split_by_count(batch, 4), loss, 0.9)
            assert report.loss == pytest.approx(expected_loss, abs=1e-6)
            assert report.grad_norm == pytest.approx(expected_norm, rel=1e-4)
            assert report.learning_rate == OPTIONS.schedule.learning_rate(step)
            assert (report.version, backend.version) == (step + 1, step + 1)
            assert (report.is_skipped, report.num_skipped) == (False, 0)
            assert (report.num_tokens, report.num_sampled) == (batch.num_tokens, int(batch.mask.sum()))
            assert report.metrics["segments"] == batch.num_segments
        assert_close(copy_weights(backend), {name: weight.detach() for name, weight in reference.weights.items()})
        backend.close()


def learning_from_a_teacher_equals_whole_logits(make: Make, directory: Path) -> None:
    """Log-probs, what a teacher gives, divergence, gradient and weights, against full logits of both models."""
    options = replace(OPTIONS, optimizer=None)
    for how in TEACHINGS.values():
        plain_teacher, model = tiny_teacher().eval(), tiny_model(tied=False)
        teacher = make(copy.deepcopy(plain_teacher), options)
        reference, backend = PlainTraining(model, OPTIONS), make(model, OPTIONS)
        backend.learn_from(head_of(plain_teacher) if how.top_k is None else None)
        for step in range(3):
            batch = some_segments(seed=step)
            (given,) = teacher.teach([batch], 0.6, how)
            torch.testing.assert_close(given["log_probs"], teacher.log_probs([batch], 0.6)[0])
            total, norm = reference.update(batch, PlainTeacherLoss(plain_teacher, reference.model, how), 0.9)
            report = backend.update(taught(teacher, split_by_count(batch, 4), how), TeacherLoss(how), 0.9)
            assert report.loss == pytest.approx(total, abs=1e-5)
            assert report.grad_norm == pytest.approx(norm, rel=1e-4)
        assert_close(copy_weights(backend), {name: weight.detach() for name, weight in reference.weights.items()}, 1e-5)
        backend.close()
        teacher.close()


class PlainTeacherLoss:
    """Computes what `TeacherLoss` does, from full logits, one segment at a time."""

    def __init__(self, teacher: PreTrainedModel, student: PreTrainedModel, how: Divergence):
        self.teacher, self.student, self.how = teacher, student, how

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        apart = []
        for start, end in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
            ids = batch.token_ids[start:end][None]
            logits = self.student(input_ids=ids, use_cache=False).logits[0, :-1]
            with torch.no_grad():
                theirs = self.teacher(input_ids=ids, use_cache=False).logits[0, :-1, :VOCAB_SIZE]
            if self.how.top_k is None:
                found = divergence_from_logits(logits, theirs, self.how)
            else:
                found = divergence_from_top(logits, *top_log_probs(theirs, self.how), self.how)
            apart += [logits.new_zeros(1), found]
        return TeacherLoss(self.how)(replace(outputs, divergence=torch.cat(apart) * batch.mask), batch)


def the_cut_into_micro_batches_does_not_matter(make: Make, directory: Path) -> None:
    whole = some_segments(12)
    cuts: list[Callable[[MicroBatch], list[MicroBatch]]] = [
        lambda batch: [batch],
        lambda batch: split_by_count(batch, 1),
        lambda batch: split_by_tokens(batch, 40),
        lambda batch: [take(batch, [3, 1, 2]), take(batch, [0]), take(batch, list(range(11, 3, -1)))],
    ]
    results, reports = [], []
    for cut in cuts:
        backend = make(tiny_model(), OPTIONS)
        for _ in range(3):
            report = backend.update(cut(whole), ClippedLoss(), 1.0)
        results.append(copy_weights(backend))
        reports.append(report)
        backend.close()
    for result, report in zip(results[1:], reports[1:], strict=True):
        assert_close(result, results[0])
        assert report.loss == pytest.approx(reports[0].loss, abs=1e-6)
        assert report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-5)
        assert report.metrics["clipped"] == reports[0].metrics["clipped"]


def packed_equals_padded(make: Make, directory: Path) -> None:
    assert_same_training(make, replace(OPTIONS, layout="padded"), replace(OPTIONS, layout="packed"))


def gradient_checkpointing_changes_nothing(make: Make, directory: Path) -> None:
    assert_same_training(make, OPTIONS, replace(OPTIONS, gradient_checkpointing=True))


def assert_same_training(make: Make, one: TrainOptions, other: TrainOptions) -> None:
    results = []
    for options in (one, other):
        backend = make(tiny_model(), options)
        for step in range(3):
            backend.update(split_by_count(some_segments(seed=step), 4), ClippedLoss(0.01), 1.0)
        results.append(copy_weights(backend))
        backend.close()
    assert_close(results[0], results[1])


def the_same_run_twice_is_bit_identical(make: Make, directory: Path) -> None:
    results = []
    for _ in range(2):
        backend = make(tiny_model(), OPTIONS)
        for step in range(3):
            backend.update(split_by_tokens(some_segments(seed=step), 40), ClippedLoss(), 1.0)
        results.append(copy_weights(backend))
        backend.close()
    assert_identical(results[0], results[1])


def clipping_bounds_the_gradient(make: Make, directory: Path) -> None:
    """With betas of 0 and a huge eps AdamW is plain descent, so the step shows the clipped gradient."""
    adam = AdamW(betas=(0.0, 0.0), eps=1e6, weight_decay=0.0)
    schedule = Schedule(peak=1e6)  # step = gradient · 1e6 / (|gradient| + 1e6): the gradient itself
    for limit in (0.01, 1e6, None):
        model = tiny_model()
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        options = TrainOptions(optimizer=adam, schedule=schedule, max_grad_norm=limit)
        backend = make(model, options)
        report = backend.update([some_segments()], ClippedLoss(), 1.0)
        after = copy_weights(backend)
        step = math.sqrt(sum(float((after[name] - before[name]).double().square().sum()) for name in before))
        assert report.grad_norm > 0.1
        assert step == pytest.approx(min(limit or math.inf, report.grad_norm), rel=1e-2)
        backend.close()


def offloaded_parts_come_back_bit_for_bit(make: Make, directory: Path) -> None:
    results = []
    for moves in (False, True):
        backend = make(tiny_model(), OPTIONS)
        for step in range(3):
            backend.update([some_segments(seed=step)], ClippedLoss(), 1.0)
            if moves:
                digest = backend.digest()
                away = backend.offload(PARTS)
                assert (away.num_bytes > 0) == bool(backend.movable)
                assert backend.offload(PARTS).num_bytes == 0  # they are offloaded already
                back = backend.onload(PARTS)
                assert back.num_bytes == away.num_bytes
                assert backend.digest() == digest
        results.append(copy_weights(backend))
        backend.close()
    assert_identical(results[0], results[1])


def an_offloaded_part_cannot_be_used(make: Make, directory: Path) -> None:
    backend = make(tiny_model(), OPTIONS)
    batch = some_segments()
    backend.offload(["optimizer"])
    backend.log_probs([batch], 1.0)
    with pytest.raises(RunError, match="update needs optimizer on the device"):
        backend.update([batch], ClippedLoss(), 1.0)
    backend.offload(["weights"])
    with pytest.raises(RunError, match="log_probs needs weights on the device"):
        backend.log_probs([batch], 1.0)
    backend.onload(PARTS)
    assert backend.update([batch], ClippedLoss(), 1.0).version == 1
    backend.close()


def saved_and_loaded_continues_bit_identically(make: Make, directory: Path) -> None:
    def train(backend: Backend, steps: Sequence[int]) -> None:
        for step in steps:
            backend.update(split_by_count(some_segments(seed=step), 4), ClippedLoss(), 1.0)

    backend = make(tiny_model(), OPTIONS)
    train(backend, range(2))
    random_before = torch.get_rng_state()
    backend.save(directory / "state")
    train(backend, range(2, 4))
    expected, expected_version = copy_weights(backend), backend.version
    backend.close()

    resumed = make(tiny_model(seed=7), OPTIONS)
    torch.manual_seed(99)
    train(resumed, [5])  # whatever it has learnt must be gone
    resumed.load(directory / "state")
    assert resumed.version == 2
    assert torch.equal(torch.get_rng_state(), random_before)
    train(resumed, range(2, 4))
    assert resumed.version == expected_version
    assert_identical(copy_weights(resumed), expected)
    resumed.close()


@contextmanager
def armed(directory: Path, fault: Fault) -> Iterator[None]:
    """This process will meet with a fault."""
    directory.mkdir()
    fault.arm(directory, "fault")
    before, faults._directory = faults._directory, directory
    try:
        yield
        assert not list(directory.glob("*.fault"))
    finally:
        faults._directory = before


def wait_until_written(backend: Backend) -> None:
    until = time.monotonic() + 30
    while not backend.is_written():
        assert time.monotonic() < until
        time.sleep(0.01)


def a_snapshot_that_cannot_be_written_says_why(make: Make, directory: Path) -> None:
    backend = make(tiny_model(), OPTIONS)
    assert backend.is_written()
    with armed(directory / "faults", Fault("save.during", "raise")):
        backend.snapshot(directory / "state")
        with pytest.raises(RunError, match="snapshot while the snapshot before is being written"):
            backend.snapshot(directory / "other")
        with pytest.raises(RunError, match="save while the snapshot before is being written"):
            backend.save(directory / "other")
        with pytest.raises(RunError, match="a fault at save.during"):
            wait_until_written(backend)
    backend.snapshot(directory / "again")
    wait_until_written(backend)
    backend.close()


def a_folder_without_state_is_refused(make: Make, directory: Path) -> None:
    backend = make(tiny_model(), OPTIONS)
    with pytest.raises(RunError, match="holds no state of a training backend"):
        backend.load(directory / "nothing")
    backend.close()


def an_export_loads_in_transformers(make: Make, directory: Path) -> None:
    batch = some_segments()
    for tied in (True, False):
        model = tiny_model(tied=tied)
        backend = make(copy.deepcopy(model), OPTIONS)
        backend.update([batch], ClippedLoss(), 1.0)
        backend.export(directory / f"model-{tied}")
        backend.export(directory / f"half-{tied}", dtype=torch.bfloat16)
        expected = copy_weights(backend)
        backend.close()
        assert not list((directory / f"model-{tied}").glob("*.bin"))
        exported = AutoModelForCausalLM.from_pretrained(directory / f"model-{tied}").eval()
        assert exported.dtype == torch.float32
        assert exported.config.tie_word_embeddings == tied
        assert_identical({name: weight.detach() for name, weight in exported.named_parameters()}, expected)
        trained = copy.deepcopy(model).eval()
        trained.load_state_dict(expected, strict=not tied)
        trained.tie_weights()
        token_ids = batch.token_ids[None, :12]
        assert torch.equal(exported(token_ids).logits, trained(token_ids).logits)
        half = AutoModelForCausalLM.from_pretrained(directory / f"half-{tied}", dtype="auto")
        assert half.dtype == torch.bfloat16
        assert_identical(
            {name: weight.detach() for name, weight in half.named_parameters()},
            {name: weight.bfloat16() for name, weight in expected.items()},
        )


def weights_have_their_hugging_face_names(make: Make, directory: Path) -> None:
    for tied in (True, False):
        model = tiny_model(tied=tied)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if tied:
            del expected["lm_head.weight"]
        backend = make(model, OPTIONS)
        assert_identical(copy_weights(backend), expected)
        assert_identical(copy_weights(backend, bucket_bytes=1000), expected)
        halves = copy_weights(backend, dtype=torch.bfloat16)
        assert_identical(halves, {name: tensor.bfloat16() for name, tensor in expected.items()})
        backend.close()


def the_digest_changes_if_and_only_if_a_weight_does(make: Make, directory: Path) -> None:
    model = tiny_model()
    backend = make(copy.deepcopy(model), OPTIONS)
    first = backend.digest()
    assert first.keys() == copy_weights(backend).keys()
    backend.log_probs([some_segments()], 1.0)
    assert backend.digest() == first
    assert backend.digest(dtype=torch.bfloat16) != first
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    changed = make(model, OPTIONS)
    different = {name for name, value in changed.digest().items() if value != first[name]}
    assert different == {"model.layers.1.mlp.up_proj.weight"}
    backend.update([some_segments()], ClippedLoss(), 1.0)
    assert all(value != first[name] for name, value in backend.digest().items())
    backend.close()
    changed.close()


def an_update_that_is_not_finite_changes_nothing(make: Make, directory: Path) -> None:
    """Scenario 32."""
    good = some_segments()
    bad_field = dict(good.fields)
    bad_field["advantages"] = good.fields["advantages"].clone()
    bad_field["advantages"][good.mask.nonzero()[0]] = math.nan
    bad = replace(good, fields=bad_field)
    culprit = int((good.offsets <= good.mask.nonzero()[0]).sum()) - 1

    backends = [make(tiny_model(), replace(OPTIONS, max_non_finite=2)) for _ in range(2)]
    for backend in backends:
        backend.update([good], ClippedLoss(), 1.0)
    before = backends[0].digest()
    report = backends[0].update(split_by_count(bad, 3), ClippedLoss(), 1.0)
    assert report.is_skipped
    assert not math.isfinite(report.loss)
    assert (report.num_skipped, report.version, backends[0].version) == (1, 1, 1)
    assert backends[0].digest() == before
    # The optimizer is untouched too: both go on alike.
    for backend in backends:
        report = backend.update([good], ClippedLoss(), 1.0)
        assert not report.is_skipped
    assert_identical(copy_weights(backends[0]), copy_weights(backends[1]))
    # The good one in between started the count anew.
    assert backends[0].update([bad], ClippedLoss(), 1.0).num_skipped == 2
    with pytest.raises(NonFiniteError, match=rf"2 updates in a row.*samples: sample-{culprit}\."):
        backends[0].update([bad], ClippedLoss(), 1.0)
    for backend in backends:
        backend.close()


def a_gradient_that_is_not_finite_is_skipped_too(make: Make, directory: Path) -> None:
    """Scenario 32."""

    class InfiniteSlope:
        """√(x − x) has value 0 and an infinite slope."""

        def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
            return (outputs.log_probs - outputs.log_probs.detach()).sqrt().sum(), {}

    backend = make(tiny_model(), replace(OPTIONS, max_non_finite=2))
    before = backend.digest()
    report = backend.update([some_segments(2)], InfiniteSlope(), 1.0)
    assert report.is_skipped
    assert report.loss == 0.0
    assert backend.digest() == before
    with pytest.raises(NonFiniteError, match="sample-0, sample-1"):
        backend.update([some_segments(2)], InfiniteSlope(), 1.0)
    backend.close()


def mistakes_are_explained(make: Make, directory: Path) -> None:
    backend = make(tiny_model(), OPTIONS)
    batch = some_segments(2)
    with pytest.raises(UserError, match="log-probs at temperature 0"):
        backend.log_probs([batch], 0.0)
    with pytest.raises(UserError, match="no part is called 'optimiser': choose among weights, gradients, optimizer"):
        backend.offload(["optimiser"])  # type: ignore[list-item]
    with pytest.raises(BatchError, match="without a micro-batch on any rank"):
        backend.update([], ClippedLoss(), 1.0)
    backend.close()
    with pytest.raises(RunError, match="of a backend that is closed"):
        backend.update([batch], ClippedLoss(), 1.0)
    backend.close()
    scorer = make(tiny_model(), replace(OPTIONS, optimizer=None))
    assert len(scorer.log_probs([batch], 1.0)) == 1
    with pytest.raises(RunError, match="loaded without an optimizer"):
        scorer.update([batch], ClippedLoss(), 1.0)
    scorer.close()


def a_token_off_the_mask_is_never_learnt_from(make: Make, directory: Path) -> None:
    """Not even where something careless stands in its fields."""
    batch = some_segments()
    spoilt = {name: values.masked_fill(~batch.mask, 7.0) for name, values in batch.fields.items()}
    results = []
    for fields in (batch.fields, spoilt):
        backend = make(tiny_model(), OPTIONS)
        backend.update([replace(batch, fields=fields)], ClippedLoss(), 1.0)
        results.append(copy_weights(backend))
        backend.close()
    assert_identical(results[0], results[1])


def micro_batches_without_a_token_to_learn_are_harmless(make: Make, directory: Path) -> None:
    batch = some_segments()
    silent = replace(batch, mask=torch.zeros_like(batch.mask), weights=torch.zeros_like(batch.weights))
    results = []
    for work in ([batch], [silent, batch, silent]):
        backend = make(tiny_model(), OPTIONS)
        backend.update(work, ClippedLoss(), 1.0)
        results.append(copy_weights(backend))
        backend.close()
    assert_close(results[0], results[1])


def an_empty_micro_batch_has_an_empty_result(make: Make, directory: Path) -> None:
    batch = some_segments(3)
    empty = take(batch, [])
    backend = make(tiny_model(), OPTIONS)
    found = backend.log_probs([empty, batch, empty], 1.0)
    assert [len(values) for values in found] == [0, batch.num_tokens, 0]
    assert torch.equal(found[1], backend.log_probs([batch], 1.0)[0])
    backend.close()


def a_loss_that_fails_leaves_nothing_behind(make: Make, directory: Path) -> None:
    """Where the backend goes on at all: one that cannot must say so."""

    class SecondFails(ClippedLoss):
        num_calls = 0

        def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
            self.num_calls += 1
            if self.num_calls == 2:
                raise ValueError("two")
            return super().__call__(outputs, batch)

    class WithoutGradient:
        def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
            return outputs.log_probs.detach().sum(), {}

    work = split_by_count(some_segments(), 4)
    backends = [make(tiny_model(), OPTIONS) for _ in range(2)]
    with pytest.raises(ValueError, match="two"):
        backends[0].update(work, SecondFails(), 1.0)
    with pytest.raises(RunError, match="the loss WithoutGradient has no gradient"):
        backends[0].update(work, WithoutGradient(), 1.0)
    for backend in backends:
        backend.update(work, ClippedLoss(), 1.0)
    assert_identical(copy_weights(backends[0]), copy_weights(backends[1]))
    for backend in backends:
        backend.close()


class Shortage:
    """A model that runs out of memory once: in its second layer, in the given forward or in the backward of it."""

    def __init__(self, model: PreTrainedModel, number: int, *, in_backward: bool = False):
        self.left, self.in_backward = number, in_backward
        model.model.layers[1].register_forward_pre_hook(self)

    def __call__(self, layer: Any, inputs: Any) -> None:
        self.left -= 1
        if self.left == 0 and self.in_backward:
            inputs[0].register_hook(self.fail)
        elif self.left == 0:
            self.fail()

    def fail(self, *gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")


SHORTAGES = [(1, False), (2, True), (3, True)]


def an_update_without_memory_is_made_again_in_smaller_pieces(
    make: Make, directory: Path, options: TrainOptions = OPTIONS
) -> None:
    """As if it had been cut that way from the first: gradients, counters and random numbers."""
    batches = [some_segments(seed=seed) for seed in range(3)]
    expected = make(tiny_model(), options)
    wanted = [expected.update(split_by_count(batch, 2), ClippedLoss(), 1.0) for batch in batches]
    weights, random = copy_weights(expected), torch.get_rng_state()
    expected.close()
    for number, in_backward in SHORTAGES:
        model = tiny_model()
        backend = make(model, options)
        reports = [backend.update(split_by_count(batches[0], 2), ClippedLoss(), 1.0)]
        shortage = Shortage(model, number, in_backward=in_backward)
        with pytest.raises(DeviceMemoryError, match=r"^CUDA out of memory. Tried to allocate 2 GiB.$") as caught:
            backend.update(split_by_count(batches[1], 4), ClippedLoss(), 1.0)
        assert caught.value.is_undone
        assert caught.value.index == number - 1
        assert caught.value.__context__ is None  # its frames would hold the activations
        assert shortage.left == 0
        reports += [backend.update(split_by_count(batch, 2), ClippedLoss(), 1.0) for batch in batches[1:]]
        assert reports == wanted
        assert_identical(copy_weights(backend), weights)
        assert torch.equal(torch.get_rng_state(), random)
        backend.close()


def sixteen_bit_updates_without_memory_are_made_again(make: Make, directory: Path) -> None:
    options = replace(OPTIONS, precision="bf16_master", gradient_checkpointing=False)
    an_update_without_memory_is_made_again_in_smaller_pieces(make, directory, options)


def scores_without_memory_are_made_again(make: Make, directory: Path) -> None:
    for options in (OPTIONS, replace(OPTIONS, precision="bf16_master")):
        model = tiny_model()
        backend = make(model, options)
        expected = backend.log_probs(split_by_count(some_segments(), 2), 1.0)
        Shortage(model, 2)
        with pytest.raises(DeviceMemoryError) as caught:
            backend.log_probs(split_by_count(some_segments(), 4), 1.0)
        assert (caught.value.is_undone, caught.value.index) == (True, 1)
        again = backend.log_probs(split_by_count(some_segments(), 2), 1.0)
        assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))
        backend.update(split_by_count(some_segments(), 4), ClippedLoss(), 1.0)
        backend.close()


def a_trial_changes_nothing(make: Make, directory: Path) -> None:
    """Whether it fits or not, of an update or of scoring."""
    batch = split_by_count(some_segments(), 4)
    expected = make(tiny_model(), OPTIONS)
    wanted = [expected.update(batch, ClippedLoss(), 1.0) for _ in range(2)]
    weights = copy_weights(expected)
    expected.close()
    model = tiny_model()
    backend = make(model, OPTIONS)
    random = torch.get_rng_state()
    assert backend.fits(100, 30, is_update=True, with_entropy=True)
    reports = [backend.update(batch, ClippedLoss(), 1.0)]
    backend.warm_up(30)
    assert backend.fits(29, 30, is_update=False)
    assert backend.version == 1
    for number, is_update in enumerate((True, False)):
        with armed(directory / f"faults {number}", Fault("trial.forward", "out-of-memory")):
            assert not backend.fits(100, 30, is_update=is_update)
    shortage = Shortage(model, 1, in_backward=True)
    assert not backend.fits(100, 30, is_update=True)
    assert shortage.left == 0
    assert backend.fits(50, 30, is_update=True)
    assert torch.equal(torch.get_rng_state(), random)
    reports.append(backend.update(batch, ClippedLoss(), 1.0))
    assert reports == wanted
    assert_identical(copy_weights(backend), weights)
    backend.close()


def a_checkpoint_of_another_model_is_refused(make: Make, directory: Path) -> None:
    small = make(tiny_model(), OPTIONS)
    small.save(directory / "state")
    small.close()
    config = tiny_model().config
    config.hidden_size, config.head_dim = 64, 16
    other = make(LlamaForCausalLM(config), OPTIONS)
    with pytest.raises(RunError, match=r"does not fit this model and optimizer: rank 0: Size mismatch"):
        other.load(directory / "state")
    other.close()


def a_model_that_is_only_scored_takes_weights(make: Make, _: Path) -> None:
    trained, scored = make(tiny_model(seed=1), OPTIONS), make(tiny_model(), replace(OPTIONS, optimizer=None))
    scored.log_probs([some_segments()], 1.0)
    sent = list(copy_weights(trained).items())
    for start in range(0, len(sent), 5):
        scored.take_weights(sent[start : start + 5])
    assert scored.digest() == trained.digest()
    assert torch.equal(scored.log_probs([some_segments()], 1.0)[0], trained.log_probs([some_segments()], 1.0)[0])
    with pytest.raises(RunError, match="what it has learned would be lost"):
        trained.take_weights([])
    trained.close()
    scored.close()


ONE_RANK: tuple[Callable[[Make, Path], None], ...] = (
    a_model_that_is_only_scored_takes_weights,
    log_probs_equal_a_plain_forward,
    the_first_token_of_a_segment_has_log_prob_zero,
    updates_equal_adamw_written_out,
    learning_from_a_teacher_equals_whole_logits,
    the_cut_into_micro_batches_does_not_matter,
    packed_equals_padded,
    gradient_checkpointing_changes_nothing,
    the_same_run_twice_is_bit_identical,
    clipping_bounds_the_gradient,
    offloaded_parts_come_back_bit_for_bit,
    an_offloaded_part_cannot_be_used,
    saved_and_loaded_continues_bit_identically,
    a_snapshot_that_cannot_be_written_says_why,
    a_folder_without_state_is_refused,
    an_export_loads_in_transformers,
    weights_have_their_hugging_face_names,
    the_digest_changes_if_and_only_if_a_weight_does,
    an_update_that_is_not_finite_changes_nothing,
    a_gradient_that_is_not_finite_is_skipped_too,
    mistakes_are_explained,
    a_token_off_the_mask_is_never_learnt_from,
    micro_batches_without_a_token_to_learn_are_harmless,
    an_empty_micro_batch_has_an_empty_result,
    a_loss_that_fails_leaves_nothing_behind,
    an_update_without_memory_is_made_again_in_smaller_pieces,
    sixteen_bit_updates_without_memory_are_made_again,
    scores_without_memory_are_made_again,
    a_trial_changes_nothing,
    a_checkpoint_of_another_model_is_refused,
)


# --- scenarios of several ranks ---------------------------------------------------------------------------------------
#
# Every rank of a group runs a scenario with its own share; a group of one runs it with all of it. What comes back must
# be the same on all ranks, and close to what the group of one gets.

Scenario = Callable[[Make, int, int, Path], Any]

# How many of four micro-batches each of two ranks gets.
SHARES = {"even": (2, 2), "uneven": (3, 1), "one_rank_is_empty": (4, 0), "the_first_rank_is_empty": (0, 4)}


def share_of(batches: list[MicroBatch], shares: tuple[int, int], rank: int, num_ranks: int) -> list[MicroBatch]:
    if num_ranks == 1:
        return batches
    first, _ = shares
    return batches[:first] if rank == 0 else batches[first:]


def _trains(
    shares: tuple[int, int], options: TrainOptions = OPTIONS, model: Callable[[], PreTrainedModel] = tiny_model
) -> Scenario:
    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        made = model()
        backend = make(made, options)
        reports = []
        for step in range(3):
            whole = some_segments(12, seed=step)
            work = split_by_count(some_choices(made.config, whole) if options.replays_routing else whole, 3)
            assert len(work) == 4
            reports.append(backend.update(share_of(work, shares, rank, num_ranks), ClippedLoss(0.01), 0.9))
        facts = [
            (report.loss, report.grad_norm, report.num_tokens, report.num_sampled, report.metrics["clipped"])
            for report in reports
        ]
        result = {"weights": copy_weights(backend, bucket_bytes=5000), "reports": torch.tensor(facts)}
        backend.close()
        return result

    return scenario


def learns(options: TrainOptions) -> Scenario:
    """Five updates from three micro-batches, and log-probs before and after: they differ by no more than roundings."""

    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        backend = make(tiny_model(tied=False), options)
        log_probs, losses = backend.log_probs([some_segments()], 1.0), []
        for step in range(5):
            work = split_by_count(some_segments(9, seed=step), 3)
            losses.append(backend.update(share_of(work, (2, 1), rank, num_ranks), ClippedLoss(), 1.0).loss)
        return learned(backend, losses, log_probs)

    return scenario


def learned(backend: Backend, losses: Sequence[float], log_probs: list[Tensor]) -> dict[str, Any]:
    """Close a backend that has learned, and return what ranks have to agree on. log_probs: from before it learned."""
    result = {
        "weights": copy_weights(backend),
        "reports": torch.tensor(losses, dtype=torch.float64),
        "log_probs": torch.cat([*log_probs, *backend.log_probs([some_segments()], 1.0)]),
    }
    backend.close()
    return result


def learns_from_a_teacher(options: TrainOptions, how: Divergence) -> Scenario:
    """Do as `learns` does, from a teacher that is sharded over the same ranks."""

    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        teacher_model = tiny_teacher()
        head = head_of(teacher_model)
        teacher = make(teacher_model, replace(options, optimizer=None, lora=None))
        backend = make(tiny_model(tied=False), options)
        backend.learn_from(head if how.top_k is None else None)
        log_probs, losses = backend.log_probs([some_segments()], 1.0), []
        for step in range(5):
            work = share_of(split_by_count(some_segments(9, seed=step), 3), (2, 1), rank, num_ranks)
            losses.append(backend.update(taught(teacher, work, how), TeacherLoss(how), 1.0).loss)
        result = learned(backend, losses, log_probs)
        teacher.close()
        return result

    return scenario


def _deals(counts: tuple[int, ...]) -> Scenario:
    """Ten micro-batches, so many to each rank."""

    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        backend = make(tiny_model(), OPTIONS)
        first = sum(counts[:rank])
        share = slice(first, first + counts[rank]) if num_ranks > 1 else slice(None)
        reports = []
        for step in range(2):
            work = split_by_count(some_segments(20, seed=step), 2)
            assert len(work) == 10
            report = backend.update(work[share], ClippedLoss(), 1.0)
            reports.append((report.loss, report.grad_norm, report.num_tokens))
        result = {"weights": copy_weights(backend), "reports": torch.tensor(reports)}
        backend.close()
        return result

    return scenario


def _scores(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """One rank has three micro-batches, the other none; each gets back its own."""
    backend = make(tiny_model(), OPTIONS)
    work = split_by_count(some_segments(9), 3) if rank == 0 else []
    found = backend.log_probs(work, 1.0)
    assert len(found) == len(work)
    # Scoring leaves nothing stale behind: after an update it sees the new weights.
    backend.update([some_segments(seed=3 + rank, weight=0.01)] if num_ranks > 1 else _both(), ClippedLoss(), 1.0)
    found += backend.log_probs(work, 1.0)
    backend.close()
    return {"log_probs": torch.cat(found) if rank == 0 else None}


def _both() -> list[MicroBatch]:
    return [some_segments(seed=3, weight=0.01), some_segments(seed=4, weight=0.01)]


def _skips_alike(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """What is not finite on the last rank stops all of them, and all name its sample."""
    batch = some_segments(4)
    if rank == num_ranks - 1:
        weights = batch.weights.clone()
        weights[batch.mask.nonzero()[0]] = math.inf
        batch = replace(batch, weights=weights, sample_ids=tuple(f"bad-{index}" for index in range(4)))
    backend = make(tiny_model(), replace(OPTIONS, max_non_finite=2))
    before = backend.digest()
    is_skipped = backend.update([batch], ClippedLoss(), 1.0).is_skipped
    message = ""
    try:
        backend.update([batch], ClippedLoss(), 1.0)
    except NonFiniteError as error:
        message = str(error)
    result = {"skipped": torch.tensor(is_skipped), "same": torch.tensor(backend.digest() == before)}
    backend.close()
    culprit = int((batch.offsets <= batch.mask.nonzero()[0]).sum()) - 1
    assert f"samples: bad-{culprit}." in message, message
    return result


def _digests(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Sharded or whole, the same bits have the same digest."""
    backend = make(tiny_model(tied=False), OPTIONS)
    result = {"digest": backend.digest(), "half": backend.digest(dtype=torch.bfloat16)}
    backend.close()
    return result


def _saves_and_loads(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    work = [some_segments(seed=rank)] if num_ranks > 1 else [some_segments(seed=0), some_segments(seed=1)]
    backend = make(tiny_model(), OPTIONS)
    backend.update(work, ClippedLoss(), 1.0)
    backend.save(directory / f"state-{num_ranks}")
    backend.export(directory / f"export-{num_ranks}")
    backend.update(work, ClippedLoss(), 1.0)
    uninterrupted = copy_weights(backend)
    backend.close()
    resumed = make(tiny_model(seed=5), OPTIONS)
    resumed.load(directory / f"state-{num_ranks}")
    saved = copy_weights(resumed)
    resumed.update(work, ClippedLoss(), 1.0)
    assert resumed.version == 2
    assert_identical(copy_weights(resumed), uninterrupted)
    resumed.close()
    return {"weights": saved}


def _snapshots(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """What is written while training goes on is, bit for bit, what `save` would have written."""
    work = [some_segments(seed=rank)] if num_ranks > 1 else [some_segments(seed=0), some_segments(seed=1)]
    backend = make(tiny_model(), OPTIONS)
    backend.update(work, ClippedLoss(), 1.0)
    backend.save(directory / f"saved-{num_ranks}")
    go_on = threading.Event()
    with held("save.during", lambda: go_on.wait(60)):
        backend.snapshot(directory / f"snapshot-{num_ranks}")
        torch.manual_seed(rank)
        backend.update(work, ClippedLoss(), 1.0)
        assert not backend.is_written()
        go_on.set()
        for _ in range(20):  # both groups of ranks are at work
            backend.update(work, ClippedLoss(), 1.0)
        wait_until_written(backend)
    backend.close()
    found = []
    for name in ("saved", "snapshot"):
        resumed = make(tiny_model(seed=5), OPTIONS)
        resumed.load(directory / f"{name}-{num_ranks}")
        assert resumed.version == 1
        weights, random = copy_weights(resumed), torch.get_rng_state()
        resumed.update(work, ClippedLoss(), 1.0)  # the optimizer came back too
        found.append((weights, copy_weights(resumed), random))
        resumed.close()
    (weights, later, random), (weights_behind, later_behind, random_behind) = found
    assert_identical(weights_behind, weights)
    assert_identical(later_behind, later)
    assert torch.equal(random_behind, random)
    return {"weights": weights_behind}


def save_alone(make: Make, directory: Path) -> None:
    """What one rank saves, for a group to load."""
    backend = make(tiny_model(), OPTIONS)
    backend.update([some_segments(seed=0), some_segments(seed=1)], ClippedLoss(), 1.0)
    backend.save(directory / "alone")
    backend.close()


def _loads_what_one_rank_saved(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    if num_ranks == 1:
        save_alone(make, directory)
    backend = make(tiny_model(seed=5), OPTIONS)
    backend.load(directory / "alone")
    work = [some_segments(seed=2 + rank)] if num_ranks > 1 else [some_segments(seed=2), some_segments(seed=3)]
    assert backend.update(work, ClippedLoss(), 1.0).version == 2
    result = {"weights": copy_weights(backend)}
    backend.close()
    return result


def _shares_sequences(model: Callable[[], PreTrainedModel], loss: Any, options: TrainOptions) -> Scenario:
    """All ranks have the same micro-batches, each a slice of their tokens, and together count them once."""

    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        made = model()
        backend = make(made, replace(options, sequence_parallel_size=num_ranks))
        facts, scores = [], []
        for step in range(5):
            whole = groups_of_four() if options.layout == "shared" else some_segments(12, seed=step)
            if options.replays_routing:
                whole = some_choices(made.config, whole)
            work = [take(whole, [0, 1]), take(whole, list(range(2, 11))), take(whole, [11])]
            report = backend.update(work, loss, 0.9)
            facts.append(
                (report.loss, report.grad_norm, report.num_tokens, report.num_sampled, report.metrics["clipped"])
            )
            scores += backend.log_probs(work, 0.9) if options.head == "policy" else backend.values(work)
        assert len(backend.gather_facts(rank, "count")) == 1
        assert backend.gather_facts(rank, "count", of_every_rank=True) == list(range(num_ranks))
        return outcome(backend, facts, scores)

    return scenario


def tiny_value_model() -> PreTrainedModel:
    config = tiny_model().config
    config.num_labels = 1
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def _tiny_mixture() -> PreTrainedModel:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            max_position_embeddings=64,
            initializer_range=0.2,
            router_jitter_noise=0.1,  # must be switched off
        )
    )


PACKED = replace(OPTIONS, layout="packed")


def _takes_weights(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    frozen = replace(OPTIONS, optimizer=None)
    source, scored = make(tiny_model(seed=1), frozen), make(tiny_model(), frozen)
    scored.take_weights(source.weights(bucket_bytes=5000))
    found = {
        "weights": copy_weights(scored),
        "digests": scored.digest(),
        "is_taken": scored.digest() == source.digest(),
    }
    source.close()
    scored.close()
    return found


SCENARIOS: dict[str, Scenario] = {
    "takes_weights": _takes_weights,
    "shares_sequences": _shares_sequences(tiny_model, ClippedLoss(0.01), PACKED),
    "shares_sequences_and_contexts": _shares_sequences(tiny_model, SequenceLoss(), replace(OPTIONS, layout="shared")),
    "shares_sequences_with_few_keys": _shares_sequences(
        lambda: tiny_model(num_key_value_heads=1), ClippedLoss(), replace(OPTIONS, gradient_checkpointing=True)
    ),
    "shares_sequences_of_a_value_model": _shares_sequences(
        tiny_value_model, ValueLoss(), replace(PACKED, head="value")
    ),
    "shares_sequences_of_experts": _shares_sequences(
        _tiny_mixture, ClippedLoss(), replace(OPTIONS, layout="shared", aux_loss_coefficient=0.1)
    ),
    "shares_sequences_and_replays": _shares_sequences(
        _tiny_mixture, ClippedLoss(), replace(PACKED, replays_routing=True)
    ),
    "replays": _trains((3, 1), replace(PACKED, replays_routing=True, gradient_checkpointing=True), model=_tiny_mixture),
    **{f"trains_{name}": _trains(shares) for name, shares in SHARES.items()},
    "trains_packed": _trains((3, 1), replace(OPTIONS, layout="packed")),
    "trains_checkpointed": _trains((1, 3), replace(OPTIONS, gradient_checkpointing=True)),
    "learns": learns(OPTIONS),
    "scores": _scores,
    "skips_alike": _skips_alike,
    "digests": _digests,
    "saves_and_loads": _saves_and_loads,
    "snapshots": _snapshots,
    "loads_what_one_rank_saved": _loads_what_one_rank_saved,
}

# Of four ranks.
FOUR_RANKS: dict[str, Scenario] = {
    "ten_on_four": _deals((3, 3, 2, 2)),
    "ten_on_three_of_four": _deals((5, 3, 0, 2)),
}


def weights_after_another_update(backend: Backend) -> dict[str, Tensor]:
    """Of one that has loaded a checkpoint: they tell whether the optimizer came along. It is closed."""
    backend.update([some_segments(seed=2)], ClippedLoss(), 1.0)
    weights = copy_weights(backend)
    backend.close()
    return weights


def assert_no_rank_failed(name: str, results: Sequence[Mapping[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert not isinstance(result[name], str), f"rank {rank}:\n{result[name]}"


def assert_group_agrees(alone: Any, group: Sequence[Any], tolerance: float = TOLERANCE) -> None:
    """One scenario's results: all ranks as one rank alone, exactly where nothing is rounded."""
    for rank, result in enumerate(group):
        for name, expected in alone.items():
            found = result[name]
            if found is None:
                continue
            if name == "weights":
                assert_close(found, expected, tolerance)
            elif name in ("reports", "log_probs"):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            else:
                assert found == expected, f"rank {rank}: {name}"
    for result in group[1:]:
        if "weights" in result:
            assert_identical(result["weights"], group[0]["weights"])
