"""Words for messages."""

from hotseat.words import cause_of, quantity


def test_a_number_comes_with_its_noun():
    assert [quantity(number, "engine") for number in (0, 1, 2, 2048)] == [
        *("0 engines", "1 engine", "2 engines", "2,048 engines")
    ]
    assert [quantity(number, "pass", "passes") for number in (1, 3)] == ["1 pass", "3 passes"]


def test_reasons_that_differ_in_samples_or_numbers_have_one_cause():
    reasons = ("0/17/3: the reward is 1.5", "0/18/0: the reward is -2", "1/1/1: the reward is 3e-05")
    assert {cause_of(reason) for reason in reasons} == {"#/#/#: the reward is #"}
    assert cause_of("the reward is nan") != cause_of("the reward is inf")
