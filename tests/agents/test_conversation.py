"""What is learned equals what was sampled, id by id, whatever a program does with its messages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from chat_templates import STOPS, sampled, tokenizer_of
from gateway_cases import learned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotseat.agents.branches import Answer, in_order, segments_of
from hotseat.agents.conversation import Conversation, ConversationError
from hotseat.types import Completion

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


class Engine:
    """Samples anything, and remembers after which tokens it sampled what."""

    def __init__(self, name: str, rng: random.Random):
        self._name, self._rng = name, rng
        self.expected: Counter = Counter()
        self._number = 0

    def sample(self, context: tuple[int, ...], is_learned: bool) -> Completion:
        tokens, is_stopped = sampled(self._name, self._rng)
        self._number += 1
        log_probs = tuple(-(self._number + at / 64) for at in range(len(tokens)))  # exact in 32 bits
        versions = (self._number,) * len(tokens)
        if is_learned:
            self.expected[context, tokens, log_probs, versions] += 1
        return Completion("", tokens, log_probs, versions, "stop" if is_stopped else "length")


def visible(name: str, tokens: tuple[int, ...]) -> str:
    return tokenizer_of(name).decode(tokens, skip_special_tokens=True)


def play(name: str, history: str, rng: random.Random) -> tuple[Conversation, Engine]:
    """A program that continues, branches, edits, shortens its history, starts subagents, and calls tools."""
    engine, noticed = Engine(name, rng), []
    conversation = Conversation(tokenizer_of(name), history=history, when_rewritten=lambda: noticed.append(1))
    chats: list[list[dict]] = [[{"role": "user", "content": "bad?"}]]
    if rng.random() < 0.5:
        chats[0].insert(0, {"role": "system", "content": "ace"})
    has_tools = rng.random() < 0.5
    for _ in range(rng.randint(1, 7)):
        messages = rng.choice(chats)
        act = rng.randrange(6)
        if act == 0:
            messages = [{"role": "user", "content": f"subtask {rng.randrange(2)}"}]
        elif act == 1 and len(messages) > 3:
            messages = [*messages[: 1 + (messages[0]["role"] == "system")]]
        elif act == 2 and messages[-1]["role"] != "assistant" and rng.random() < 0.5:
            context = conversation.of_text(conversation.text + " abc")
            is_learned = rng.random() < 0.8
            conversation.record(context, engine.sample(context.token_ids, is_learned), is_learned=is_learned)
            continue
        tools = [TOOL] if has_tools else []
        try:
            context = conversation.of_messages(messages, tools)
        except ConversationError:
            continue  # some templates do not take tools, or a role
        is_learned = rng.random() < 0.8
        completion = engine.sample(context.token_ids, is_learned)
        answer: dict = {"role": "assistant", "content": visible(name, completion.token_ids)}
        called = has_tools and completion.finish == "stop" and rng.random() < 0.5
        if called:
            function = {"name": "add", "arguments": '{"a":1}'}
            answer["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        conversation.record(context, completion, answer, is_learned=is_learned)
        if rng.random() < 0.15:
            answer = {"role": "assistant", "content": "edited"}
            called = False
        following = {"role": "user", "content": rng.choice(["more", "bad cab", "é"])}
        if called:
            following = {"role": "tool", "tool_call_id": "call_1", "content": "2"}
        chats.append([*messages, answer, following])
    return conversation, engine


SEEDS, HISTORIES = st.integers(0, 2**32), st.sampled_from(["append", "render"])
QUICK = ("smollm2", "mistral", "qwen3", "llama3_1")  # these render quickly, and differ most


def learned_of(answers: Sequence[Answer]) -> Counter:
    segments, learned_answers = segments_of(answers)
    return learned(segments, tuple(len(answer.completion.token_ids) for answer in learned_answers))


def check(name: str, seed: int, history: str) -> None:
    conversation, engine = play(name, history, random.Random(seed))
    assert learned_of(conversation.answers) == engine.expected
    if conversation.answers:
        assert learned_of(in_order(conversation.answers)) == engine.expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(QUICK), seed=SEEDS, history=HISTORIES)
def test_whatever_a_program_sends_what_is_learned_is_what_was_sampled(name, seed, history):
    check(name, seed, history)


@pytest.mark.long
@pytest.mark.parametrize("name", STOPS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=SEEDS, history=HISTORIES)
def test_with_every_template_what_is_learned_is_what_was_sampled(name, seed, history):
    check(name, seed, history)


def chat(name: str, *texts: str, history: str = "append", system: str = "ace") -> tuple[Conversation, list[int]]:
    """A conversation in which the policy gives these answers. Returns how often a template changed one of them."""
    tokenizer, noticed = tokenizer_of(name), []
    conversation = Conversation(tokenizer, history=history, when_rewritten=lambda: noticed.append(1))
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "q0"})
    for number, text in enumerate(texts, 1):
        ids = tuple(tokenizer(text + STOPS[name], add_special_tokens=False)["input_ids"])
        context = conversation.of_messages(messages)
        answer = {"role": "assistant", "content": visible(name, ids)}
        conversation.record(context, Completion("", ids, (-1.0,) * len(ids), (0,) * len(ids), "stop"), answer)
        messages += [answer, {"role": "user", "content": f"q{number}"}]
    return conversation, noticed


ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in STOPS]


@pytest.mark.parametrize("name", ALL)
def test_appending_keeps_a_conversation_in_one_segment(name):
    conversation, _ = chat(name, "<think>\nbad\n</think>\n\na", "b", system="")  # Gemma's takes no system prompt
    [segment], answers = segments_of(conversation.answers)
    assert len(answers) == 2
    added = segment.token_ids[~segment.mask]
    assert "q1" in tokenizer_of(name).decode(added)


def test_a_plain_conversation_is_one_segment_with_only_new_messages_added():
    conversation, noticed = chat("smollm2", "bad", "cab")
    [segment], answers = segments_of(conversation.answers)
    assert not noticed
    assert [len(answer.completion.token_ids) for answer in answers] == [
        3,
        3,
    ]
    assert tokenizer_of("smollm2").decode(segment.token_ids) == (
        "<|im_start|>system\nace<|im_end|>\n<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\nbad<|im_end|>\n"
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\ncab<|im_end|>"
    )


def test_thinking_that_the_template_removes_stays_or_begins_a_segment_as_configured():
    thought = "<think>\nbad\n</think>\n\n"
    kept, noticed = chat("qwen3", thought + "a", "b")
    [segment], _ = segments_of(kept.answers)
    assert noticed
    end = f"{thought}a<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    assert tokenizer_of("qwen3").decode(segment.token_ids).endswith(end)
    rendered, noticed = chat("qwen3", thought + "a", "b", history="render")
    segments, _ = segments_of(rendered.answers)
    assert noticed
    assert [thought in tokenizer_of("qwen3").decode(each.token_ids) for each in segments] == [True, False]


def test_a_system_prompt_that_moves_to_the_last_message_is_noticed():
    _, noticed = chat("mistral", "a", "b")
    assert noticed
    rendered, _ = chat("mistral", "a", "b", history="render")
    assert [tokenizer_of("mistral").decode(each.token_ids) for each in segments_of(rendered.answers)[0]] == [
        "<s>[INST]ace\n\nq0[/INST]a</s>",
        "<s>[INST]q0[/INST]a</s>[INST]ace\n\nq1[/INST]b</s>",
    ]


def answer(context: list[int], tokens: list[int], is_learned: bool = True) -> Answer:
    completion = Completion("", tuple(tokens), (-1.0,) * len(tokens), (0,) * len(tokens), "stop")
    return Answer(tuple(context), completion, is_learned)


def shown(answers: list[Answer]) -> list[tuple[list[int], list[int]]]:
    return [(s.token_ids.tolist(), s.mask.int().tolist()) for s in segments_of(answers)[0]]


def test_tokens_that_branches_share_are_learned_once():
    assert shown([answer([1], [2, 3]), answer([1, 2, 3, 4], [5]), answer([1, 2, 3, 6], [7])]) == [
        ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]),
        ([1, 2, 3, 6, 7], [0, 0, 0, 0, 1]),
    ]


def test_segments_do_not_depend_on_which_of_two_requests_at_a_time_was_answered_first():
    root, left, right = answer([1], [2]), answer([1, 2, 3], [4]), answer([1, 2, 5], [6])
    apart, last = answer([9], [8]), answer([1, 2, 3, 4, 7], [7])
    orders = ([root, left, right, apart, last], [apart, root, right, left, last])
    one, other = (shown(in_order(order)) for order in orders)
    assert one == other
    assert one[-1] == ([1, 2, 3, 4, 7, 7], [0, 0, 0, 1, 0, 1])


def test_two_equal_answers_to_a_request_are_both_learned():
    assert shown([answer([1], [2]), answer([1], [2]), answer([1, 2, 3], [4])]) == [
        ([1, 2], [0, 1]),
        ([1, 2, 3, 4], [0, 1, 0, 1]),
    ]


def test_an_answer_sampled_by_other_settings_is_context_only():
    assert shown([answer([1], [2], is_learned=False), answer([1, 2, 3], [4])]) == [([1, 2, 3, 4], [0, 0, 0, 1])]
    assert shown([answer([1], [2]), answer([1, 2, 3], [4], is_learned=False)]) == [([1, 2], [0, 1])]


def test_changed_tools_are_not_lost_by_appending():
    conversation = Conversation(tokenizer_of("qwen2_5"))
    messages = [{"role": "user", "content": "q"}]
    context = conversation.of_messages(messages)
    reply = {"role": "assistant", "content": "a"}
    conversation.record(context, Completion("", (1,), (-1.0,), (0,), "length"), reply)
    text = conversation.of_messages([*messages, reply, messages[0]], [TOOL]).text
    assert '"name": "add"' in text
