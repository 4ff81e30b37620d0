"""A budget for thinking: what is inserted, what is sampled, and when nothing is."""

import pytest
from agent_cases import SAMPLING, TOKENIZER, Script, marked, play

from hotseat.agents import load_agent
from hotseat.agents.thinking import BudgetedThinking, is_thinking
from hotseat.types import Episode


def answer(
    *answers: str, text: str = "q:<think>", budget: int = 4, max_length: int = 200
) -> tuple[str, list[int], bool]:
    """Return the episode with what was sampled in brackets, the tokens asked for, and whether it was truncated."""
    script = Script(answers)
    episode = play(BudgetedThinking(TOKENIZER, budget, max_length), script, text)
    assert isinstance(episode, Episode), episode
    assert sum(episode.turn_lengths) == sum(int(segment.mask.sum()) for segment in episode.segments)
    [shown] = marked(episode)
    return shown, [request.sampling.max_new_tokens for request in script.requests], episode.is_truncated


def test_thinking_that_uses_up_the_budget_is_ended_and_the_answer_goes_on():
    shown, asked, is_truncated = answer("abcd|cut", "ef<eos>")
    assert shown == "q:<think>[abcd]\n</think>\n\n[ef<eos>]"
    assert asked == [4, SAMPLING.max_new_tokens - 4]
    assert not is_truncated


def test_thinking_that_the_answer_has_begun_counts_too():
    shown, _, _ = answer("<think>ab|cut", "c<eos>", text="q:", budget=9)
    assert shown == "q:[<think>ab]\n</think>\n\n[c<eos>]"


def test_a_longer_answer_that_is_not_thinking_goes_on_as_it_is():
    assert answer("a</think>|cut", "c<eos>", budget=9)[0] == "q:<think>[a</think>c<eos>]"
    assert answer("abcd|cut", "ef<eos>", text="q:")[0] == "q:[abcdef<eos>]"


def test_a_shorter_answer_is_sampled_in_one_call():
    assert answer("ab<eos>") == ("q:<think>[ab<eos>]", [4], False)
    assert answer("ab|cut") == ("q:<think>[ab]", [4], True)  # at the end of its time


def test_the_answer_is_truncated_at_its_own_limit_and_at_that_of_the_sequence():
    assert answer("abcd|cut", "ef|cut")[2]
    num_prompt = len("q:<think>")
    shown, asked, is_truncated = answer("abcd|cut", max_length=num_prompt + 4 + len("\n</think>\n\n"))
    assert (shown, asked, is_truncated) == ("q:<think>[abcd]", [4], True)


@pytest.mark.parametrize(
    ("prompt", "said", "expected"),
    [
        ("<think>\n", "", True),
        ("what is <think>?", "abc", False),
        ("", "<think>a</think>b", False),
        ("<think>", "a</think><think>b", True),
    ],
)
def test_where_thinking_is_open(prompt, said, expected):
    assert is_thinking(prompt, said) == expected


def test_without_an_agent_the_budget_chooses_how_answers_are_sampled():
    assert type(load_agent(None, TOKENIZER, max_length=9, max_thinking_tokens=3)) is BudgetedThinking
