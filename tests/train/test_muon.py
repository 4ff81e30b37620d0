"""Muon: torch's own numbers from whole matrices, the same bits from any sharding, and exact resume.

From equal gradients every sharding has the same bits. Gradients of backends and of ranks differ by roundings, each of
which may turn a rounding to bf16 in the iteration: entries there are about 0.2 and have steps of 1e-3, so that five
updates with a learning rate of 1e-3 may differ by a few times 5e-6. Halves of a matrix that are orthogonalised apart
differ by 1e-4 in one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotseat.errors import UnsupportedError, UserError
from hotseat.train.backend import AdamW, Muon, TrainOptions, ZeroOptions
from hotseat.train.muon import MatrixStretch, MuonWithAdamW, matrix_names, orthogonalize
from hotseat.train.packing import split_by_count
from hotseat.train.schedule import Schedule

from . import fsdp_factory, zero_factory
from .conformance import OPTIONS as PLAIN
from .conformance import (
    ClippedLoss,
    Make,
    Scenario,
    assert_close,
    copy_weights,
    learns,
    share_of,
    some_segments,
    tiny_model,
)
from .run_ranks import TIMEOUT_S, run_ranks

pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)

RATE = 1e-3
ROUNDING = 3e-5
OPTIONS = replace(PLAIN, muon=Muon(learning_rate=RATE, momentum=0.9))
SHAPES = [(6, 4), (4, 6), (5, 5)]


def stepped_shards(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Three steps of matrices that lie end to end and are cut in the middle, as ZeRO does; this rank's part of them."""
    torch.manual_seed(0)
    sizes = [rows * columns for rows, columns in SHAPES]
    everything = torch.randn(sum(sizes))
    cut = (
        [0, 40, sum(sizes)] if num_ranks > 1 else [0, sum(sizes)]
    )  # in the second; the first rank has none of the third
    begin, end = cut[rank], cut[rank + 1]
    mine = torch.nn.Parameter(everything[begin:end].clone())
    stretches, place = [], 0
    for shape, size in zip(SHAPES, sizes, strict=True):
        first, last = max(place, begin), min(place + size, end)
        has_part = first < last
        stretches.append(
            MatrixStretch(shape, first - place, last - first, first - begin) if has_part else MatrixStretch(shape, 0, 0)
        )
        place += size
    optimizer = MuonWithAdamW([mine], [], AdamW(weight_decay=0.1), Muon(momentum=0.9))
    optimizer.bind({mine: stretches}, is_sharded=num_ranks > 1)
    optimizer.state[mine] = {"momentum_buffer": torch.zeros_like(mine)}
    optimizer.param_groups[0]["lr"] = 0.02
    for _ in range(3):
        mine.grad = torch.randn(sum(sizes))[begin:end].clone()
        optimizer.step()
    return {"part": mine.detach().clone()}


def resumes(options: TrainOptions) -> Scenario:
    """Two updates, a checkpoint and two more; and the last two again by a backend that loads the checkpoint."""

    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        def update(backend: Any, steps: range) -> None:
            for step in steps:
                work = split_by_count(some_segments(9, seed=step), 3)
                backend.update(share_of(work, (2, 1), rank, num_ranks), ClippedLoss(), 1.0)

        backend = make(tiny_model(tied=False), options)
        update(backend, range(2))
        backend.save(directory / "muon")
        update(backend, range(2, 4))
        straight = copy_weights(backend)
        backend.close()
        backend = make(tiny_model(tied=False), options)
        backend.load(directory / "muon")
        update(backend, range(2, 4))
        result = {"straight": straight, "resumed": copy_weights(backend)}
        backend.close()
        return result

    return scenario


BOTH = {"learns": learns(OPTIONS), "resumes": resumes(OPTIONS), "shards": stepped_shards}
RUNS = {"fsdp": (fsdp_factory, None)} | {f"zero{stage}": (zero_factory, stage) for stage in range(4)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("alone")
    return {name: scenario(fsdp_factory.make, 0, 1, directory) for name, scenario in BOTH.items()}


def test_steps_of_whole_matrices_are_those_of_torch() -> None:
    torch.manual_seed(0)
    shapes = [(6, 4), (4, 6), (5, 5), (7,)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    adamw = AdamW(weight_decay=0.1)
    optimizer = MuonWithAdamW(ours[:3], ours[3:], adamw, Muon(momentum=0.9))
    optimizer.bind({w: [MatrixStretch((w.shape[0], w.shape[1]), 0, w.numel())] for w in ours[:3]}, is_sharded=False)
    for weight in ours[:3]:
        optimizer.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}
    muon = torch.optim.Muon(theirs[:3], lr=0.02, weight_decay=0.1, momentum=0.9)
    adam = torch.optim.AdamW(theirs[3:], lr=1e-3, betas=adamw.betas, weight_decay=0.0, fused=True)
    for group in optimizer.param_groups:
        group["lr"] = 0.02 if group["is_muon"] else 1e-3
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        muon.step()
        adam.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


def test_singular_values_move_close_to_one() -> None:
    torch.manual_seed(1)
    for shape in ((8, 32), (32, 8)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)).float())
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_embeddings_heads_and_vectors_are_left_to_adamw() -> None:
    model = tiny_model(tied=False)
    weights = dict(model.named_parameters())
    names = matrix_names(model, weights)
    others = {name for name in weights if name not in names}
    assert others == {name for name in weights if "norm" in name or "embed" in name or "lm_head" in name}
    assert all(weights[name].ndim == 2 for name in names)


@pytest.mark.slow
def test_its_learning_rate_has_its_own_peak_and_the_schedule(alone: dict[str, Any]) -> None:
    """Without momentum and decay, a step of an orthogonal matrix is as long as the learning rate says."""
    schedule = Schedule("linear", peak=0.0, num_warmup_steps=1, num_steps=3)
    options = replace(OPTIONS, muon=Muon(0.5, 0.0), optimizer=AdamW(weight_decay=0.0), schedule=schedule)
    backend = fsdp_factory.make(tiny_model(tied=False), options)
    name = "model.layers.0.self_attn.q_proj.weight"
    lengths, before = [], copy_weights(backend)
    for step in range(3):
        backend.update(split_by_count(some_segments(9, seed=step), 3), ClippedLoss(), 1.0)
        after = copy_weights(backend)
        lengths.append(torch.linalg.matrix_norm(after[name] - before[name], 2).item())
        assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
        before = after
    backend.close()
    for length, rate in zip(lengths, (0.25, 0.5, 0.25), strict=True):
        assert 0.7 * rate < length < 1.3 * rate


def test_the_tolerance_sees_halves_that_are_orthogonalised_apart() -> None:
    torch.manual_seed(2)
    matrix = torch.randn(32, 48)
    halves = torch.cat([orthogonalize(half) for half in matrix.split(16)])
    assert (halves - orthogonalize(matrix)).abs().max() * RATE > 3 * ROUNDING


@pytest.mark.long
@pytest.mark.parametrize("stage", range(4))
def test_zero_is_as_fsdp(stage: int, alone: dict[str, Any], tmp_path: Path) -> None:
    options = replace(OPTIONS, zero=ZeroOptions(stage=stage))
    found = learns(options)(zero_factory.make, 0, 1, tmp_path)
    assert_close(found["weights"], alone["learns"]["weights"], ROUNDING)


@pytest.mark.slow
def test_matrices_differ_from_those_of_adamw(alone: dict[str, Any], tmp_path: Path) -> None:
    adamw = learns(PLAIN)(fsdp_factory.make, 0, 1, tmp_path)["weights"]
    name = "model.layers.0.mlp.up_proj.weight"
    assert (adamw[name] - alone["learns"]["weights"][name]).abs().max() > 1e-4


@pytest.mark.slow
def test_one_rank_resumes_exactly(alone: dict[str, Any]) -> None:
    for name, weight in alone["resumes"]["straight"].items():
        assert torch.equal(weight, alone["resumes"]["resumed"][name]), name


@pytest.mark.long
def test_a_checkpoint_of_one_backend_is_resumed_by_the_other(tmp_path: Path) -> None:
    options = replace(OPTIONS, zero=ZeroOptions(stage=2))
    straight = resumes(options)(zero_factory.make, 0, 1, tmp_path)["straight"]
    backend = fsdp_factory.make(tiny_model(tied=False), OPTIONS)
    backend.load(tmp_path / "muon")
    for step in range(2, 4):
        backend.update(split_by_count(some_segments(9, seed=step), 3), ClippedLoss(), 1.0)
    assert_close(copy_weights(backend), straight, ROUNDING)
    backend.close()


@pytest.mark.parametrize("run", [pytest.param(run, marks=pytest.mark.long) for run in RUNS])
def test_two_ranks_are_as_one_and_resume_exactly(
    run: str, alone: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory, stage = RUNS[run]
    monkeypatch.setenv(zero_factory.STAGE, str(stage))
    ranks = run_ranks(2, factory.__name__, tmp_path, suite=__name__, scenarios="BOTH")
    for rank in ranks:
        for name in BOTH:
            assert not isinstance(rank[name], str), rank[name]
        assert_close(rank["learns"]["weights"], alone["learns"]["weights"], ROUNDING)
        for name, weight in rank["resumes"]["straight"].items():
            assert torch.equal(weight, rank["resumes"]["resumed"][name]), name
    assert torch.equal(torch.cat([rank["shards"]["part"] for rank in ranks]), alone["shards"]["part"])


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"precision": "bf16"}, UserError, "pure bf16.*set train.fp32_master to true"),
        ({"zero": ZeroOptions(tensor_parallel_size=2)}, UnsupportedError, "whole matrices"),
        ({"zero": ZeroOptions(adam_offload=True)}, UnsupportedError, "set adam_offload to false"),
        ({"zero": ZeroOptions(deepcompile=True)}, UnsupportedError, "set deepcompile to false"),
        ({"muon": Muon(momentum=1.0)}, UserError, "below 1"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        replace(OPTIONS, **changes)
