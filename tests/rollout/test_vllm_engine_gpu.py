"""vLLM on a CUDA device: the conformance suite with sleep, and that memory is really given back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from . import conformance
from .conformance import Subject, named_weights, request
from .test_transformers_engine import random_model
from .test_vllm_engine import MODEL, Shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with tempfile.TemporaryDirectory() as directory:
        made = Shared(Path(directory), MODEL)
        yield made
        made.end()


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conformance(shared: Shared, check: Any) -> None:
    check(Subject(engine=shared.engine, model=lambda n: random_model(MODEL, n), is_bit_exact=False, tolerance=5e-3))


def test_the_cache_leaves_alone_and_its_memory_is_free(shared: Shared) -> None:
    with shared.engine() as engine:
        expected = engine.generate([request("a")])
        free = torch.cuda.mem_get_info()[0]
        moved = engine.offload(["kv_cache"])
        assert torch.cuda.mem_get_info()[0] - free == pytest.approx(moved.num_bytes, rel=0.05)
        engine.load_weights(named_weights(shared.model(0)), 1)  # the cache may be offloaded meanwhile
        engine.onload(["kv_cache"])
        assert engine.generate([request("a")])[0].token_ids == expected[0].token_ids
