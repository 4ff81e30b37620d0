"""Words for messages."""

from hotseat.words import quantity


def test_a_number_comes_with_its_noun():
    assert [quantity(number, "engine") for number in (0, 1, 2, 2048)] == [
        *("0 engines", "1 engine", "2 engines", "2,048 engines")
    ]
    assert [quantity(number, "pass", "passes") for number in (1, 3)] == ["1 pass", "3 passes"]
