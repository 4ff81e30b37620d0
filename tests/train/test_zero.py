"""The DeepSpeed backend against the suite that every backend must pass, and what is its own."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from weight_changes import assert_changed_alike

from hotseat.errors import NonFiniteError, RunError, UnsupportedError, UserError
from hotseat.train.backend import PARTS, Precision, TrainOptions, ZeroOptions
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.make import make_backend
from hotseat.train.zero import ZeroBackend
from hotseat.train.zero_stages import Flattened, Scattered
from hotseat.types import MicroBatch

from . import adapters, conformance, fsdp_factory, zero_factory
from .conformance import OPTIONS, ClippedLoss, assert_close, assert_identical, copy_weights, some_segments, tiny_model
from .run_ranks import TIMEOUT_S, run_ranks

NUM_RANKS = 2

# DeepSpeed takes its time to start.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 100)]

STAGES = [2, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 3))]
Group = Callable[[int, str], tuple[Path, list[dict[str, Any]]]]


def export_average(backend: Any, directory: Path, dtype: torch.dtype | None = None) -> None:
    with backend.averaged():
        backend.export(directory, dtype=dtype)


def make(stage: int, **settings: Any) -> ZeroBackend:
    """A small model; `settings` of either kind of options."""
    zero = {name: value for name, value in settings.items() if name in ZeroOptions.__dataclass_fields__}
    others = {name: value for name, value in settings.items() if name not in zero}
    return zero_factory.make(tiny_model(), replace(OPTIONS, zero=ZeroOptions(stage, **zero), **others))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("check", conformance.ONE_RANK, ids=lambda check: check.__name__)
def test_one_rank(check: Any, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(zero_factory.STAGE, str(stage))
    check(zero_factory.make, tmp_path)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("check", adapters.ONE_RANK, ids=lambda check: check.__name__)
def test_one_rank_with_adapters(check: Any, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(zero_factory.STAGE, str(stage))
    check(zero_factory.make, tmp_path)


# --- two ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    """Of a stage, for a scenario: what its ranks found."""

    @functools.cache
    def run(stage: int, scenarios: str) -> tuple[Path, list[dict[str, Any]]]:
        directory = tmp_path_factory.mktemp(f"stage-{stage}")
        # By the other backend: the format is the same.
        conformance.save_alone(fsdp_factory.make, directory)
        adapters.save_alone(fsdp_factory.make, directory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(zero_factory.STAGE, str(stage))
            return directory, run_ranks(NUM_RANKS, zero_factory.__name__, directory, scenarios=scenarios)

    # With stage 2 most are in `make test`, and to start ranks again would cost as much as the scenarios.
    apart = {name: "PLAIN" if name in zero_factory.PLAIN else "ADAPTED" for name in zero_factory.ALL}
    of_stage_2 = {name: "SHORT" if name in zero_factory.SHORT else "LONG" for name in zero_factory.ALL}
    return lambda stage, name: run(stage, (of_stage_2 if stage == 2 else apart)[name])


def scenarios(names: Iterable[str]) -> list[Any]:
    """Each with each stage. Variants are long, and stages but the second."""
    return [
        pytest.param(stage, name, marks=[pytest.mark.long] if stage != 2 or name in zero_factory.VARIANTS else [])
        for stage in (0, 1, 2, 3)
        for name in names
    ]


@functools.cache
def alone(name: str) -> Any:
    """One rank of the other backend."""
    with tempfile.TemporaryDirectory() as directory:
        return zero_factory.ALL[name](fsdp_factory.make, 0, 1, Path(directory))


def assert_as_one_of_fsdp(name: str, results: list[dict[str, Any]]) -> None:
    conformance.assert_no_rank_failed(name, results)
    conformance.assert_group_agrees(alone(name), [result[name] for result in results])


@pytest.mark.parametrize(("stage", "name"), scenarios(zero_factory.PLAIN))
def test_two_ranks_are_as_one_of_fsdp(name: str, stage: int, group: Group) -> None:
    _, results = group(stage, name)
    assert_as_one_of_fsdp(name, results)


@pytest.mark.parametrize(("stage", "name"), scenarios(zero_factory.ADAPTED))
def test_two_ranks_with_adapters_are_as_one_of_fsdp(name: str, stage: int, group: Group) -> None:
    _, results = group(stage, name)
    assert_as_one_of_fsdp(name, results)


@pytest.mark.parametrize("stage", STAGES)
def test_other_stages_and_backends_load_adapters_that_two_saved(stage: int, group: Group, tmp_path: Path) -> None:
    directory, _ = group(stage, "goes_on_with_adapters")
    settings = {"lora": adapters.LORA.lora, "average_decay": adapters.BETA}
    others = [
        fsdp_factory.make(tiny_model(), replace(OPTIONS, **settings)),
        *(make(each, **settings) for each in (0, 2, 3)),
    ]
    loaded, after = [], []
    for index, backend in enumerate(others):
        backend.load(directory / "adapters-2")
        assert backend.version == 1
        export_average(backend, tmp_path / f"{index}")
        average = load_file(tmp_path / f"{index}" / "model.safetensors")
        loaded.append(copy_weights(backend) | {f"average of {name}": tensor for name, tensor in average.items()})
        backend.update([some_segments(seed=2)], ClippedLoss(), 1.0)  # the optimizer came along
        after.append(copy_weights(backend))
        backend.close()
    for index in range(1, len(others)):
        assert_identical(loaded[index], loaded[0])
        assert_close(after[index], after[0])


@pytest.mark.parametrize("stage", STAGES)
def test_other_numbers_of_ranks_stages_and_backends_load_what_two_saved(stage: int, group: Group) -> None:
    directory, results = group(stage, "saves_and_loads")
    saved = results[0]["saves_and_loads"]["weights"]
    others = [fsdp_factory.make(tiny_model(seed=5), OPTIONS), make(0), make(2), make(3)]
    after = []
    for backend in others:
        backend.load(directory / "state-2")
        assert backend.version == 1
        assert_identical(copy_weights(backend), saved)
        after.append(conformance.weights_after_another_update(backend))
    for weights in after[1:]:
        assert_close(weights, after[0])


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_ten_micro_batches_on_four_ranks(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(zero_factory.STAGE, str(stage))
    results = run_ranks(4, zero_factory.__name__, tmp_path, scenarios="FOUR_RANKS")
    for name, scenario in conformance.FOUR_RANKS.items():
        expected = scenario(fsdp_factory.make, 0, 1, tmp_path)
        conformance.assert_group_agrees(expected, [result[name] for result in results])


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1)), 2, 3])
def test_sixteen_bit_compute_keeps_thirty_two_bit_masters(stage: int, tmp_path: Path) -> None:
    batch = some_segments(4)
    backend = make(stage, precision="bf16_master")
    exact = fsdp_factory.make(tiny_model(), OPTIONS)
    assert_identical(copy_weights(backend), copy_weights(exact))  # not rounded when it was loaded
    (found,), (expected,) = backend.log_probs([batch], 1.0), exact.log_probs([batch], 1.0)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    for _ in range(2):
        report, exact_report = (each.update([batch, batch], ClippedLoss(), 1.0) for each in (backend, exact))
        assert report.grad_norm == pytest.approx(exact_report.grad_norm, rel=0.05)
    weights = copy_weights(backend)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert_changed_alike(dict(tiny_model().named_parameters()), copy_weights(exact), weights, 0.1)
    halves = copy_weights(backend, dtype=torch.bfloat16)
    assert_identical(halves, {name: weight.bfloat16() for name, weight in weights.items()})
    backend.save(tmp_path / "state")
    backend.update([batch], ClippedLoss(), 1.0)
    backend.load(tmp_path / "state")
    assert_identical(copy_weights(backend), weights)
    assert_identical(copy_weights(backend, dtype=torch.bfloat16), halves)
    for each in (backend, exact):
        each.close()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 2, 3])
def test_sixteen_bits_throughout(stage: int) -> None:
    batch = some_segments(4)
    backend = make(stage, precision="bf16")
    before = copy_weights(backend)
    assert not backend.update([batch], ClippedLoss(), 1.0).is_skipped
    after = copy_weights(backend)
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert {value.dtype for name, value in backend._stored().items() if "exp_avg" in name} == {torch.bfloat16}
    assert any(not torch.equal(before[name], after[name]) for name in after)
    backend.close()


class Steep(ClippedLoss):
    """A loss whose gradient is too large for fp16 times any scale above a limit."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def __call__(self, outputs: Any, batch: MicroBatch) -> tuple[Tensor, Any]:
        total, sums = super().__call__(outputs, batch)
        return total * self.factor, sums


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_lowers_the_loss_scale_and_is_no_samples_fault(stage: int, tmp_path: Path) -> None:
    batch = some_segments(4)
    backend = make(stage, precision="fp16", max_non_finite=2, max_grad_norm=None)
    exact = fsdp_factory.make(tiny_model(), replace(OPTIONS, max_grad_norm=None))
    before = backend.digest()
    reports = []
    while not reports or reports[-1].is_skipped:
        reports.append(backend.update([batch], Steep(100.0), 1.0))
        assert reports[-1].is_skipped == (backend.digest() == before)
        assert len(reports) < 20
    assert len(reports) > 3  # more than max_non_finite
    assert reports[-1].num_skipped == len(reports) - 1
    assert reports[-1].version == 1
    expected = exact.update([batch], Steep(100.0), 1.0)
    assert reports[-1].grad_norm == pytest.approx(expected.grad_norm, rel=0.02)
    assert_close(copy_weights(backend), copy_weights(exact), 1e-3)

    scale = backend._stage.scale()
    assert 1 < scale < 2**16
    backend.save(tmp_path / "state")
    other = make(stage, precision="fp16")
    other.load(tmp_path / "state")
    assert other._stage.scale() == scale
    other.close()
    # At the lowest scale it is the gradient itself that is not finite.
    backend._stage.scaler.cur_scale = 1
    backend.update([batch], Steep(1e20), 1.0)
    with pytest.raises(NonFiniteError, match="2 updates in a row"):
        backend.update([batch], Steep(1e20), 1.0)
    backend.close()
    exact.close()


# --- its own options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        *((2, settings) for settings in ({"adam_offload": True}, {"overlap_comm": True}, {"grad_accum_dtype": "fp32"})),
        (3, {"adam_offload": True}),
        pytest.param(3, {"overlap_comm": True}, marks=pytest.mark.long),
        pytest.param(3, {"grad_accum_dtype": "fp32"}, marks=pytest.mark.long),
    ],
)
def test_options_change_nothing_that_is_computed(stage: int, settings: dict[str, Any]) -> None:
    results = []
    for backend in (make(stage, **settings), fsdp_factory.make(tiny_model(), OPTIONS)):
        for step in range(3):
            backend.update([some_segments(seed=step), some_segments(seed=step + 7)], ClippedLoss(), 1.0)
        results.append(copy_weights(backend))
        backend.close()
    assert_close(results[0], results[1])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_sixteen_bits_are_summed_in_thirty_two_if_asked(stage: int) -> None:
    """Equal micro-batches: what is added to a sum in bf16 is rounded to a 256th of it."""
    work = [some_segments(2)] * 9
    norms = {}
    for dtype in (None, "fp32"):
        backend = make(stage, precision="bf16_master", grad_accum_dtype=dtype)
        once = backend.update(work[:1], ClippedLoss(), 1.0).grad_norm
        backend.close()
        backend = make(stage, precision="bf16_master", grad_accum_dtype=dtype)
        norms[dtype] = backend.update(work, ClippedLoss(), 1.0).grad_norm / once
        backend.close()
    assert norms["fp32"] == pytest.approx(9, rel=1e-4)
    assert norms[None] != pytest.approx(9, rel=1e-4)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("precision", ["bf16_master", "bf16"])
def test_one_rank_is_spared_the_third_stage_and_computes_the_same_bits(precision: Precision) -> None:
    options = replace(OPTIONS, precision=precision, backend="deepspeed", zero=ZeroOptions(3))
    results = []
    for backend in (ZeroBackend(tiny_model(), options), make_backend(tiny_model(), options)):
        assert isinstance(backend, ZeroBackend)
        for step in range(3):
            backend.update([some_segments(seed=step), some_segments(seed=step + 7)], ClippedLoss(), 1.0)
        results.append(copy_weights(backend) | {"log_probs": backend.log_probs([some_segments()], 1.0)[0]})
        assert isinstance(backend._stage, Flattened if len(results) == 2 else Scattered)
        backend.close()
    assert_identical(results[0], results[1])


def test_a_value_model_is_trained(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    batch = some_segments()

    def squares(outputs: Any, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        return (batch.weights * (outputs.values - batch.fields["advantages"]).square()).sum(), {}

    options = replace(OPTIONS, head="value")
    results = []
    for backend in (ZeroBackend(tmp_path, replace(options, zero=ZeroOptions(3))), FSDPBackend(tmp_path, options)):
        for _ in range(2):
            backend.update([batch], squares, 1.0)
        results.append(copy_weights(backend) | {"values": backend.values([batch])[0]})
        backend.close()
    assert "score.weight" in results[0]
    assert_close(results[0], results[1])


@pytest.mark.parametrize(
    ("stage", "compiled_by", "num_updates"),
    [
        # Its graphs are run by autograd as ever; those of a compiled backward are tested with FSDP.
        pytest.param(3, "eager", 1, marks=pytest.mark.long),
        pytest.param(2, "aot_eager", 2, marks=pytest.mark.long),
        pytest.param(3, "aot_eager", 2, marks=pytest.mark.long),
    ],
)
def test_compiled_layers_compute_the_same(
    stage: int, compiled_by: str, num_updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)  # models before may have had DeepSpeed's
    results, counts = [], []
    for zero, is_compiled in ((ZeroOptions(stage), True), (None, True), (None, False)):
        torch._dynamo.reset()
        kind = ZeroBackend if zero else FSDPBackend
        compiler = CompileCounterWithBackend(compiled_by)
        backend = kind(tiny_model(), replace(OPTIONS, zero=zero, compile=is_compiled), _compiler=compiler)
        for step in range(num_updates):
            backend.update([some_segments(seed=step)], ClippedLoss(), 1.0)
        results.append(copy_weights(backend))
        counts.append(compiler.frame_count)
        backend.close()
    assert_close(results[0], results[2])
    assert counts[0] == counts[1] > counts[2] == 0  # once for all layers


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_is_only_scored(stage: int) -> None:
    backend = make(stage, precision="bf16_master", optimizer=None)
    batch = some_segments(3)
    expected = tiny_model().eval()
    found = backend.log_probs([batch], 1.0)[0]
    theirs = conformance.plain_outputs(expected, batch, 1.0).log_probs.detach()
    torch.testing.assert_close(found, theirs, rtol=0.05, atol=0.1)
    rounded = {name: weight.detach().bfloat16() for name, weight in expected.named_parameters()}
    assert_identical(copy_weights(backend), rounded)
    backend.close()


class Moving(ZeroBackend):
    """Moves on a CPU what it would move on a device."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._residency.movable = frozenset(PARTS)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_offloaded_is_emptied_and_comes_back_under_deepspeeds_views(stage: int, precision: Any) -> None:
    options = replace(OPTIONS, precision=precision, zero=ZeroOptions(stage))
    num_elements = sum(weight.numel() for weight in tiny_model().parameters())
    results = []
    for moves in (False, True):
        backend = Moving(tiny_model(), options, persistent_size=32)
        for step in range(3):
            backend.update([some_segments(seed=step)], ClippedLoss(), 1.0)
            if moves:
                away = {part: backend.offload([part]) for part in ("optimizer", "weights", "gradients")}
                # Two moments of 4 bytes, and masters where they are not the weights.
                assert away["optimizer"].num_bytes >= num_elements * (8 if stage == 0 and precision == "fp32" else 12)
                assert away["weights"].num_bytes >= num_elements * (4 if precision == "fp32" else 2)
                for part in PARTS:
                    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in backend._tensors(part))
                for part in ("gradients", "weights", "optimizer"):
                    assert backend.onload([part]).num_bytes == away[part].num_bytes
            (scored,) = backend.log_probs([some_segments()], 1.0)
        results.append(copy_weights(backend) | {"scored": scored})
        backend.close()
    assert_identical(results[0], results[1])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_merged_weights_leave_in_the_type_of_the_computation_while_masters_are_offloaded(
    stage: int, tmp_path: Path
) -> None:
    options = replace(adapters.LORA, precision="bf16_master", average_decay=0.5, zero=ZeroOptions(stage))
    backend = Moving(tiny_model(), options, persistent_size=32)
    adapters.train(backend, range(2))
    exact, halves = copy_weights(backend), copy_weights(backend, dtype=torch.bfloat16)
    assert_close(halves, exact, 0.01)  # adapters were rounded before they were merged
    backend.offload(["optimizer"])
    assert_identical(copy_weights(backend, dtype=torch.bfloat16), halves)
    for what in (copy_weights, lambda each: export_average(each, tmp_path, torch.bfloat16)):
        with pytest.raises(RunError, match="needs optimizer on the device"):
            what(backend)
    backend.onload(["optimizer"])
    # An average in 16 bits is that of the masters.
    for dtype in (torch.bfloat16, None):
        export_average(backend, tmp_path / f"{dtype}", dtype)
    averages = [load_file(tmp_path / f"{dtype}" / "model.safetensors") for dtype in (torch.bfloat16, None)]
    assert_close(*averages, 0.01)
    assert_identical(copy_weights(backend), exact)
    assert_identical(copy_weights(backend, dtype=torch.bfloat16), halves)
    backend.close()


def test_the_options_choose_the_backend() -> None:
    backend = make_backend(tiny_model(), replace(OPTIONS, backend="deepspeed", zero=ZeroOptions(0)))
    assert isinstance(backend, ZeroBackend)
    backend.close()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 4}, "ZeRO stage 4: choose 0, 1, 2 or 3"),
        ({"zpg": 2}, "zpg 2 with ZeRO stage 2: only stage 3 shards weights"),
        ({"stage": 0, "adam_offload": True}, "adam_offload with ZeRO stage 0"),
        ({"grad_accum_dtype": "fp8"}, "grad_accum_dtype 'fp8': choose one of fp32, bf16, fp16"),
        ({"stage": 3, "tensor_parallel_size": 2}, "2 with ZeRO stage 3: .* set the stage to 0, 1 or 2, or"),
    ],
)
def test_options_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ZeroOptions(**settings)


@pytest.mark.parametrize(
    ("precision", "zero", "message"),
    [
        ("fp32", ZeroOptions(2, grad_accum_dtype="bf16"), "of a fp32 computation summed in bf16 with ZeRO stage 2"),
        ("bf16_master", ZeroOptions(1, grad_accum_dtype="fp32"), "leave grad_accum_dtype unset for bf16, or choose"),
        ("bf16", ZeroOptions(2, adam_offload=True), "adam_offload of weights in pure bf16"),
    ],
)
def test_combinations_that_deepspeed_lacks_are_refused(precision: Any, zero: ZeroOptions, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ZeroBackend("no/model", TrainOptions(precision=precision, zero=zero))


def test_ranks_that_zpg_does_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"train.deepspeed.zpg is 2, and 1 rank cannot be divided"):
        ZeroBackend("no/model", TrainOptions(zero=ZeroOptions(3, zpg=2)))


def test_without_deepspeed_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=r"pip install hotseat\[deepspeed\]`, or set train.backend to fsdp"):
        ZeroBackend("no/model", TrainOptions(zero=ZeroOptions()))
