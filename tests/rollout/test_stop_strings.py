"""Stop strings: the token that completes one, whatever the tokens before it are."""

import pytest
from chat_templates import tokenizer_of

from hotseat.rollout.open_requests import EngineSequence
from hotseat.rollout.stop_strings import StopStrings
from hotseat.types import Request, Sampling

TOKENIZER = tokenizer_of("qwen3")


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def first(text: str, *strings: str, prompt: str = "") -> tuple[str, str] | None:
    """Return the text up to the token that completes a string, and the string."""
    found, tokens = StopStrings(TOKENIZER, strings), ids_of(text)
    for count in range(1, len(tokens) + 1):
        if (stop := found.completed(ids_of(prompt), tokens[:count])) is not None:
            return TOKENIZER.decode(tokens[:count]), stop
    return None


@pytest.mark.parametrize(
    ("text", "strings", "expected"),
    [
        ("is </answer> and more", ["</answer>"], ("is </answer>", "</answer>")),
        ("abcd", ["ac"], None),
        ("xx ab", [" a"], ("xx ab", " a")),  # " a" and "b" may be tokens, or " ab"
        ("é and ü!", ["ü"], ("é and ü", "ü")),  # of two bytes, each a token
        ("one\n\ntwo", ["\n\n"], ("one\n\n", "\n\n")),
        ("x " * 300 + "end. y", ["end.", "never"], ("x " * 300 + "end.", "end.")),
        ("a<|im_end|>b", ["<|im_end|>"], ("a<|im_end|>", "<|im_end|>")),
        ("ENDED", ["ENDED", "END"], ("END", "END")),
    ],
)
def test_the_first_token_that_completes_a_string(text, strings, expected):
    got = first(text, *strings)
    if expected is None:
        assert got is None
    else:
        assert got is not None
        assert (got[0].startswith(expected[0]), got[1]) == (True, expected[1])
        assert len(got[0]) - len(expected[0]) <= 1  # tokens here have two characters at most


def test_the_prompt_does_not_count():
    assert first("er> no", "</answer>", prompt="say </answ") is None
    assert first("x</answer>", "</answer>", prompt="</answer>") == ("x</answer>", "</answer>")


def test_of_several_tokens_those_after_the_string_are_left_out():
    tokens = ids_of("no STOP here")
    request = Request("a", (1, 2), Sampling(max_new_tokens=50, stop=("STOP",)), seed=0)
    sequence = EngineSequence(request, frozenset(), 50, StopStrings(TOKENIZER, ("STOP",)))
    assert sequence.extend(tokens[:2], [-1.0] * 2, 0) is None
    count = sequence.num_up_to_stop(tokens[2:])
    assert TOKENIZER.decode(tokens[: 2 + count]) == "no STOP"
    assert sequence.extend(tokens[2 : 2 + count], [-1.0] * count, 0) == "stop"
    assert sequence.completion("stop").stop == "STOP"
