"""A choice of attention, and deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hotseat import determinism
from hotseat.errors import UserError
from hotseat.train.backend import TrainOptions
from hotseat.train.make import check_options, make_backend

from . import fsdp_factory
from .conformance import OPTIONS, ClippedLoss, copy_weights, some_segments, tiny_model


@pytest.fixture
def restored() -> Iterator[None]:
    """Undo what `use_deterministic_kernels` changes in the process."""
    names = [*determinism.CUBLAS, *determinism.FLASH]
    before = {name: os.environ.pop(name, None) for name in names}
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_chosen_attention_is_used_and_computes_the_same(attention: str) -> None:
    chosen = fsdp_factory.make(tiny_model(), replace(OPTIONS, layout="padded", attention=attention))
    usual = fsdp_factory.make(tiny_model(), replace(OPTIONS, layout="padded"))
    assert chosen._model.config._attn_implementation == attention
    for backend in (chosen, usual):
        backend.update([some_segments()], ClippedLoss(), 1.0)
    [ours], [expected] = (backend.log_probs([some_segments()], 1.0) for backend in (chosen, usual))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    chosen.close()
    usual.close()


@pytest.mark.parametrize(
    ("attention", "says"),
    [
        ("quick", "transformers has none that is called 'quick'; it has .*eager.*sdpa"),
        ("flash_attention_2", "flash_attention_2 needs a CUDA device and the package flash_attn; leave it unset"),
        ("someone/kernel", "needs the package kernels"),
    ],
)
def test_an_attention_that_is_not_there_is_refused(attention: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotseat.train.model_checks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=says):
        check_options(TrainOptions(layout="padded", attention=attention))


def test_a_chosen_attention_needs_padded_rows() -> None:
    with pytest.raises(UserError, match="does not keep packed sequences apart: set train.packing to false"):
        TrainOptions(attention="eager")


@pytest.mark.slow
def test_deterministic_kernels_are_switched_on_before_a_model_is_made(restored: None) -> None:
    weights = []
    for _ in range(2):
        backend = make_backend(tiny_model(), replace(OPTIONS, is_deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        backend.update([some_segments()], ClippedLoss(), 1.0)
        weights.append(copy_weights(backend))
        backend.close()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_process_that_trains_keeps_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    make_backend(tiny_model(), OPTIONS).close()
    assert not torch.backends.cudnn.allow_tf32


def test_vllm_is_told_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    determinism.use_batch_invariant_kernels()
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # a user's own choice stays
    determinism.use_batch_invariant_kernels()
    assert os.environ["VLLM_BATCH_INVARIANT"] == "0"
