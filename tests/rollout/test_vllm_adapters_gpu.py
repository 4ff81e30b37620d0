"""vLLM's adapters on a CUDA device, with CUDA graphs and sleep, in 16 bits: its kernels take no others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hotseat.algorithms.digest import named_digests
from hotseat.errors import WeightError

from . import conformance
from .conformance import named_weights, reference_log_probs, request
from .test_vllm_adapters import LLAMA, Adapted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS = [5, 6, 7, 8, 9, 11, 3, 60, 2]


@pytest.fixture(scope="module")
def adapted() -> Iterator[Adapted]:
    with tempfile.TemporaryDirectory() as directory:
        made = Adapted(Path(directory), LLAMA, dtype=torch.float16, tolerance=3e-2)
        yield made
        made.end()


def test_adapters_are_applied_before_and_after_a_push(adapted: Adapted) -> None:
    conformance.new_weights_leave_nothing_of_the_old_ones(adapted.subject())
    with adapted.engine() as engine:
        for number in (0, 1, 2):
            engine.load_weights(adapted.factors(number).items(), number)
            expected = reference_log_probs(adapted.model(number), TOKENS, 1.0)
            assert engine.score([TOKENS])[0] == pytest.approx(expected, abs=adapted.tolerance)
            assert engine.digest() == named_digests([*named_weights(adapted.base), *adapted.factors(number).items()])


def test_adapters_leave_the_device_and_come_back_with_the_weights(adapted: Adapted) -> None:
    with adapted.engine() as engine:
        expected, digest = engine.generate([request("a")]), engine.digest()
        engine.offload(["weights", "kv_cache"])
        engine.onload(["weights", "kv_cache"])
        assert engine.digest() == digest
        assert engine.generate([request("a")])[0].token_ids == expected[0].token_ids


def test_weights_that_were_dropped_must_all_come_again(adapted: Adapted) -> None:
    with adapted.engine() as engine:
        expected = engine.generate([request("a")])
        engine.offload(["weights", "kv_cache"], keep_weights=False)
        engine.onload(["weights", "kv_cache"])
        with pytest.raises(WeightError, match="missing model.embed_tokens.weight"):
            engine.load_weights(adapted.factors(0).items(), 1)
        engine.load_weights([*adapted.factors(0).items(), *named_weights(adapted.base)], 1)
        assert engine.generate([request("a")])[0].token_ids == expected[0].token_ids
        score = engine.score([TOKENS])[0]
        assert score == pytest.approx(reference_log_probs(adapted.model(0), TOKENS, 1.0), abs=adapted.tolerance)
