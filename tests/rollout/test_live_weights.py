"""Which weights a load needs, with and without adapters."""

import pytest

from hotseat.errors import WeightError
from hotseat.rollout.live_weights import WeightNames

SHAPES = {"embed.weight": (7, 4), "q.weight": (6, 4), "norm.weight": (4,), "head.weight": (7, 4)}
FIRST = {"embed.weight": "embed.weight", "q.weight": "q.weight", "norm.weight": "norm.weight"}
TIED = {**FIRST, "head.weight": "embed.weight"}
A, B = ("q.lora_A.weight", (2, 4)), ("q.lora_B.weight", (6, 2))


def load(names: WeightNames, *weights: tuple[str, tuple[int, ...]]) -> list[str]:
    names.begin()
    for name, shape in weights:
        names.take(name, shape)
    missing = names.missing()
    if not missing:
        names.keep()
    return missing


def test_without_adapters_every_load_needs_every_weight():
    names = WeightNames(SHAPES, TIED)
    whole = [(name, SHAPES[name]) for name in FIRST]
    assert load(names, *whole) == []
    assert load(names, *whole[1:]) == ["embed.weight"]


def test_factors_have_the_shapes_of_their_layer_and_are_needed_in_every_load():
    names = WeightNames(SHAPES, TIED).with_adapters(["q"], 2)
    assert dict(names.factors) == dict([A, B])
    whole = [(name, SHAPES[name]) for name in FIRST]
    assert load(names, A, B) == list(FIRST)
    assert load(names, *whole, A, B) == []
    assert load(names, A, B) == []
    assert load(names, A) == ["q.lora_B.weight"]
    with pytest.raises(WeightError, match=r"q.lora_A.weight: got shape \[4, 4\], the engine's is \[2, 4\]"):
        load(names, ("q.lora_A.weight", (4, 4)))


def test_weights_below_adapters_that_come_in_part_or_are_lost_must_come_again():
    names = WeightNames(SHAPES, TIED).with_adapters(["q"], 2)
    whole = [(name, SHAPES[name]) for name in FIRST]
    load(names, *whole, A, B)
    assert load(names, A, B, whole[0]) == ["q.weight", "norm.weight"]
    assert load(names, A, B) == list(FIRST)
    load(names, *whole, A, B)
    names.lose()
    assert load(names, A, B) == list(FIRST)
