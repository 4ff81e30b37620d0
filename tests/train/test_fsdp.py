"""The FSDP2 backend against the suite that every backend must pass, and what is its own."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from weight_changes import assert_changed_alike

from hotseat.errors import DeviceMemoryError, RunError, UserError
from hotseat.placement.role_names import Part
from hotseat.train.adamw import start_state
from hotseat.train.backend import LoraOptions, TrainOptions
from hotseat.train.fsdp import FSDPBackend, reset_sharding
from hotseat.train.offload import PartResidency
from hotseat.train.packing import split_by_count
from hotseat.train.ranks import Ranks
from hotseat.types import Moved

from . import adapters, conformance, fsdp_factory
from .conformance import OPTIONS, ClippedLoss, assert_identical, copy_weights, some_segments, tiny_model
from .run_ranks import ABSENT, TIMEOUT_S, run_ranks

NUM_RANKS = 2

pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)


@pytest.mark.slow
@pytest.mark.parametrize("check", conformance.ONE_RANK, ids=lambda check: check.__name__)
def test_one_rank(check: Any, tmp_path: Path) -> None:
    check(fsdp_factory.make, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("check", adapters.ONE_RANK, ids=lambda check: check.__name__)
def test_one_rank_with_adapters(check: Any, tmp_path: Path) -> None:
    check(fsdp_factory.make, tmp_path)


@pytest.mark.slow
def test_older_versions_of_torch_are_reset_by_hand() -> None:
    """From 2.13 on torch does it itself: an update that failed in the middle leaves the same nothing behind."""
    options, work = replace(OPTIONS, precision="bf16_master"), split_by_count(some_segments(), 4)
    models = [tiny_model() for _ in range(2)]
    backends = [FSDPBackend(model, options, copied_bytes=0, unit_bytes=0) for model in models]
    for number, in_backward in ((2, False), (3, True)):
        conformance.Shortage(models[0], number, in_backward=in_backward)
        backends[0]._abandon = lambda: reset_sharding(backends[0]._wrapped, by_hand=True)  # type: ignore[method-assign]
        with pytest.raises(DeviceMemoryError):
            backends[0].update(work, ClippedLoss(), 1.0)
        reports = [backend.update(work, ClippedLoss(), 1.0) for backend in backends]
        assert reports[0] == reports[1]
    assert_identical(copy_weights(backends[0]), copy_weights(backends[1]))
    for backend in backends:
        backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)], ids=["all", "adapters"])
def test_one_rank_with_copies_computes_the_bits_of_one_that_is_wrapped(lora: LoraOptions | None) -> None:
    options = replace(OPTIONS, precision="bf16_master", lora=lora)
    weights = []
    for copied_bytes in (0, 1 << 30):
        torch.manual_seed(0)
        backend = FSDPBackend(tiny_model(), options, copied_bytes=copied_bytes, unit_bytes=0)
        for _ in range(3):
            backend.update(split_by_count(some_segments(), 3), ClippedLoss(), 1.0)
        weights.append(copy_weights(backend))
        backend.close()
    assert_identical(*weights)


@pytest.mark.slow
def test_sharding_on_one_rank_leaves_no_second_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the optimizer's state is made: they would take its room on the device."""
    model = tiny_model()
    whole = [weakref.ref(weight) for weight in model.parameters()]
    left: list[Any] = []

    def start(*arguments: Any) -> None:
        left.extend(weight for weight in whole if weight() is not None)
        start_state(*arguments)

    monkeypatch.setattr("hotseat.train.fsdp.start_state", start)
    options = replace(OPTIONS, precision="bf16_master")
    FSDPBackend(model, options, copied_bytes=0, unit_bytes=0).close()
    assert left == []


@pytest.mark.slow
def test_one_rank_sums_gradients_in_32_bits() -> None:
    """As the planner prices them, though they are computed in 16 bits."""
    model = tiny_model()
    backend = fsdp_factory.make(model, replace(OPTIONS, precision="bf16_master"))
    held: list[tuple[int, int]] = []

    def loss(outputs: Any, batch: Any) -> Any:
        gradients = backend._gradients().tensors
        held.append((sum(gradient.numel() for gradient in gradients), sum(gradient.nbytes for gradient in gradients)))
        return ClippedLoss()(outputs, batch)

    backend.update(split_by_count(some_segments(), 2), loss, 1.0)
    count = sum(weight.numel() for weight in model.parameters())
    assert held[0] == (0, 0)
    assert held[1:] == [(count, 4 * count)] * (len(held) - 1)
    backend.close()


# --- two ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """All scenarios in one group of processes: starting one costs more than the scenarios."""
    directory = tmp_path_factory.mktemp("ranks")
    conformance.save_alone(fsdp_factory.make, directory)
    adapters.save_alone(fsdp_factory.make, directory)
    return directory, run_ranks(NUM_RANKS, fsdp_factory.__name__, directory)


@pytest.mark.slow
@pytest.mark.parametrize("name", fsdp_factory.SCENARIOS)
def test_two_ranks_are_as_one(name: str, group: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    _, results = group
    for rank, result in enumerate(results):
        assert not isinstance(result[name], str), f"rank {rank}:\n{result[name]}"
    alone = fsdp_factory.SCENARIOS[name](fsdp_factory.make, 0, 1, tmp_path)
    conformance.assert_group_agrees(alone, [result[name] for result in results])


@pytest.mark.slow
def test_one_rank_loads_what_two_saved_and_exported(group: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, results = group
    saved = results[0]["saves_and_loads"]["weights"]
    backend = fsdp_factory.make(tiny_model(seed=5), OPTIONS)
    backend.load(directory / "state-2")
    assert backend.version == 1
    assert_identical(copy_weights(backend), saved)
    backend.close()
    exported = AutoModelForCausalLM.from_pretrained(directory / "export-2")
    assert_identical({name: weight.detach() for name, weight in exported.named_parameters()}, saved)


@pytest.mark.slow
def test_an_absent_rank_becomes_an_error(group: tuple[Path, list[dict[str, Any]]]) -> None:
    message = group[1][0][ABSENT]
    assert "rank 0 of 2 could not agree on the number of micro-batches with the other ranks within 2 s" in message


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_sixteen_bit_compute_keeps_thirty_two_bit_weights(tmp_path: Path) -> None:
    batch = some_segments(4)
    options = replace(OPTIONS, precision="bf16_master")
    backend = fsdp_factory.make(tiny_model(), options)
    exact = fsdp_factory.make(tiny_model(), OPTIONS)
    assert_identical(copy_weights(backend), copy_weights(exact))
    (found,), (expected,) = backend.log_probs([batch], 1.0), exact.log_probs([batch], 1.0)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    for _ in range(2):
        report, exact_report = (each.update([batch, batch], ClippedLoss(), 1.0) for each in (backend, exact))
        assert report.grad_norm == pytest.approx(exact_report.grad_norm, rel=0.05)
    weights = copy_weights(backend)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert_changed_alike(dict(tiny_model().named_parameters()), copy_weights(exact), weights, 0.1)
    assert any((weight != weight.bfloat16()).any() for weight in weights.values())

    # What was gathered for scoring must not outlive the weights it was gathered from.
    backend.save(tmp_path / "state")
    saved = copy_weights(backend)
    (before,) = backend.log_probs([batch], 1.0)
    backend.update([batch], ClippedLoss(), 1.0)
    (changed,) = backend.log_probs([batch], 1.0)
    assert not torch.equal(changed, before)
    backend.load(tmp_path / "state")
    assert torch.equal(backend.log_probs([batch], 1.0)[0], before)
    assert_identical(copy_weights(backend), saved)
    with pytest.raises(IndexError):
        backend.log_probs([replace(batch, token_ids=batch.token_ids + 1000)], 1.0)
    backend.load(tmp_path / "state")
    assert torch.equal(backend.log_probs([batch], 1.0)[0], before)
    backend.close()
    exact.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_sixteen_bits_throughout() -> None:
    batch = some_segments(4)
    backend = fsdp_factory.make(tiny_model(), replace(OPTIONS, precision="bf16"))
    before = copy_weights(backend)
    assert not backend.update([batch], ClippedLoss(), 1.0).is_skipped
    after = copy_weights(backend)
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert any(not torch.equal(before[name], after[name]) for name in after)
    (found,) = backend.log_probs([batch], 1.0)
    assert found.dtype == torch.float32
    backend.close()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_model_that_is_only_scored_has_no_more_bits_than_it_is_computed_with() -> None:
    batch, options = some_segments(4), replace(OPTIONS, precision="bf16_master")
    trained, scored = (fsdp_factory.make(tiny_model(), each) for each in (options, replace(options, optimizer=None)))
    assert {weight.dtype for weight in copy_weights(trained).values()} == {torch.float32}
    assert {weight.dtype for weight in copy_weights(scored).values()} == {torch.bfloat16}
    assert torch.equal(scored.log_probs([batch], 1.0)[0], trained.log_probs([batch], 1.0)[0])
    trained.close()
    scored.close()


# --- its own ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_one_rank_needs_no_process_group(precision: Any) -> None:
    backend = fsdp_factory.make(tiny_model(), replace(OPTIONS, precision=precision))
    assert not dist.is_initialized()
    backend.close()


def test_a_group_lives_as_long_as_its_last_backend() -> None:
    first, second = (Ranks(torch.device("cpu"), 600.0, always_group=True) for _ in range(2))
    first.close()
    assert dist.is_initialized()
    assert second.gather("here", "a test") == ["here"]
    second.close()
    assert not dist.is_initialized()


def test_copies_to_compute_with_are_dropped_before_the_weights_leave_and_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    backend = fsdp_factory.make(model, replace(OPTIONS, precision="bf16_master"))
    before = backend.log_probs([some_segments(1)], 1.0)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {weight.dtype for _, weight in backend.weights()} == {torch.float32}
    leaves, sizes = PartResidency.offload, []

    def leave(*arguments: Any) -> Moved:
        sizes.append(sum(weight.untyped_storage().nbytes() for weight in model.parameters()))
        return leaves(*arguments)

    monkeypatch.setattr(PartResidency, "offload", leave)
    with pytest.raises(UserError, match="no part is called .bogus."):
        backend.offload([Part.WEIGHTS, "bogus"])
    assert sizes == []
    torch.testing.assert_close(backend.log_probs([some_segments(1)], 1.0), before, rtol=0, atol=0)
    left = [backend.offload([Part.WEIGHTS]).num_bytes for _ in range(2)]
    assert sizes == [0, 0]  # when weights leave, and free memory goes back to the device, copies are gone
    came = [backend.onload([Part.WEIGHTS]).num_bytes for _ in range(2)]
    assert left == came == [2 * sum(weight.numel() for weight in model.parameters()), 0]
    torch.testing.assert_close(backend.log_probs([some_segments(1)], 1.0), before, rtol=0, atol=0)
    backend.close()


def test_a_group_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    try:
        with pytest.raises(RunError, match="in a group of 1 ranks, and WORLD_SIZE says 2"):
            fsdp_factory.make(tiny_model(), OPTIONS)
    finally:
        dist.destroy_process_group()


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "backend.json").write_text(json.dumps({"backend": "deepspeed", "format": 3, "num_ranks": 1}))
    backend = fsdp_factory.make(tiny_model(), OPTIONS)
    with pytest.raises(RunError, match="saved in format 3, and this version reads format 2: resume with the version"):
        backend.load(tmp_path)
    backend.close()


def test_weights_are_refused_before_the_first_is_asked_for() -> None:
    backend = fsdp_factory.make(tiny_model(), OPTIONS)
    backend.offload(["weights"])
    with pytest.raises(RunError, match="weights needs weights on the device"):
        backend.weights()
    backend.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp8"}, "precision 'fp8': choose one of fp32, bf16_master, bf16, fp16"),
        ({"layout": "ragged"}, "layout 'ragged': choose one of auto, padded, packed"),
        ({"max_grad_norm": 0.0}, "clipped to norm 0.0: set it above 0, or to none"),
        ({"max_non_finite": 0}, "after 0 updates that are not finite"),
        ({"timeout_s": 0.0}, "ranks wait 0.0 s"),
        ({"lora": LoraOptions(0)}, "adapters of rank 0 with dropout 0.0: the rank must be 1 or more"),
        ({"lora": LoraOptions(4, dropout=1.0)}, "dropout 1.0: .* at least 0 and below 1"),
        ({"average_decay": 1.5}, "a moving average that keeps 1.5 of itself: set it to 0 to 1"),
    ],
)
def test_options_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainOptions(**settings)


def test_sixteen_bit_floats_need_the_other_backend() -> None:
    with pytest.raises(UserError, match="FSDP2 has no fp16.*set train.backend to deepspeed"):
        fsdp_factory.make(tiny_model(), replace(OPTIONS, precision="fp16"))


@pytest.mark.long
@pytest.mark.parametrize("name", conformance.FOUR_RANKS)
def test_four_ranks_are_as_one(name: str, four: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = conformance.FOUR_RANKS[name](fsdp_factory.make, 0, 1, tmp_path)
    conformance.assert_group_agrees(alone, [result[name] for result in four])


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("four")
    return run_ranks(4, fsdp_factory.__name__, directory, scenarios="FOUR_RANKS")


def test_it_is_loaded_from_a_folder(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    backend = FSDPBackend(tmp_path, OPTIONS)
    assert_identical(copy_weights(backend), {name: weight.detach() for name, weight in model.named_parameters()})
    backend.close()
