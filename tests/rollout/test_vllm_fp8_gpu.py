"""vLLM with weights in FP8 on a CUDA device, with CUDA graphs and sleep."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotseat.algorithms.digest import named_digests
from hotseat.errors import WeightError

from .conformance import request
from .test_vllm_engine import Shared
from .test_vllm_fp8 import (  # noqa: F401  tests that run here once more
    Quantised,
    bare,
    live,
    model_of,
    test_a_layer_computes_what_rounded_weights_and_rounded_inputs_give,
    test_a_push_leaves_the_bits_that_loading_leaves_and_in_the_same_memory,
    test_digests_are_those_of_the_weights_that_arrived_while_the_engine_holds_what_it_made_of_them,
    test_log_probs_are_near_those_of_the_rounded_model_after_every_push,
    weights_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOTH: Any = ["weights", "kv_cache"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Quantised]:
    with tempfile.TemporaryDirectory() as directory:
        made = Quantised(Path(directory))
        yield made
        made.end()


def test_8_bit_weights_leave_the_device_and_come_back(shared: Shared) -> None:
    engine = bare(shared)
    try:
        engine.load_weights(weights_of(1).items(), 1)
        before, expected = live(shared), engine.generate([request("a")])
        engine.offload(BOTH)
        engine.onload(BOTH)
        after = live(shared)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert engine.digest() == named_digests(weights_of(1).items())
        assert engine.generate([request("a")])[0].token_ids == expected[0].token_ids
        engine.offload(BOTH, keep_weights=False)
        engine.onload(BOTH)
        with pytest.raises(WeightError, match="dropped"):
            engine.generate([request("a")])
        engine.load_weights(weights_of(1).items(), 2)
        after = live(shared)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert engine.digest() == named_digests(weights_of(1).items())
        assert engine.generate([request("a")])[0].token_ids == expected[0].token_ids
    finally:
        engine.close()


def test_weights_in_fp8_take_half_of_the_memory(shared: Shared) -> None:
    in_layers = [each for name, each in model_of(shared).named_parameters() if "proj.weight" in name]
    num_bytes = sum(each.numel() * each.element_size() for each in in_layers)
    num_values = sum(each.numel() for each in in_layers if each.element_size() == 1)
    assert num_values <= num_bytes < 1.05 * num_values
