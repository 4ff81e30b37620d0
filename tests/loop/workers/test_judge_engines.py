"""Requests of a rollout host to the judge's engines, with engines that are fakes."""

from types import SimpleNamespace

import pytest
from reward_servers import WAIT_S
from test_engine_client import FakeEngines

from hotseat.errors import RunError
from hotseat.loop.workers.judge_engines import JudgeEngines
from hotseat.rewards.judge import Judge
from hotseat.rewards.rubrics import JudgeSettings
from hotseat.types import Completion


class Engines(FakeEngines):
    """All completions end by their length."""

    def outcome(self, name):
        return Completion(name, (65,), (0.0,), (0,), "length")


class Characters:
    """A tokenizer in which each character is a token."""

    chat_template = None

    def __call__(self, text, split_special_tokens):
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, token_ids, skip_special_tokens):
        return "".join(map(chr, token_ids))


@pytest.fixture
def engines():
    """Engines of a judge with room for 20 tokens."""
    fakes = Engines(1)
    writer = JudgeEngines(fakes, "host", Characters(), max_length=20, max_open=4, timeout_s=WAIT_S)
    yield SimpleNamespace(fakes=fakes, writer=writer)
    writer.close()


@pytest.mark.parametrize(("max_tokens", "num_tries"), [(6, 1), (5, 1), (6, 3)])
def test_the_limit_that_cut_a_verdict_off_is_named(engines, max_tokens, num_tries):
    """A request of 15 tokens leaves room for 5."""
    settings = JudgeSettings(
        (), "judge", rubric="{answer}", pattern="(.)", max_tokens=max_tokens, temperature=float(num_tries > 1)
    )
    [failed] = Judge(settings, engines.writer).submit(["q" + "a" * 15], ["q"], ["a"], ["0/0/0"]).result(WAIT_S)
    end = f"({num_tries} request{'s' if num_tries > 1 else ''}; sample 0/0/0)"
    if max_tokens == 5:
        expected = f"the judge wrote nothing, or was cut off before its end (reward.judge.max_tokens is 5) {end}"
    else:
        expected = (
            "the judge was cut off before its end: its request has 15 tokens, and reward.judge.engine.max_length is 20,"
            f" which leaves 5 of the 6 of reward.judge.max_tokens {end}"
        )
    assert failed.reason == expected
    assert sum(map(len, engines.fakes.submitted[0])) == num_tries


def test_a_request_that_is_made_while_the_judge_closes_is_refused(engines):
    engines.fakes.is_silent = True
    body = {"messages": [{"role": "user", "content": "aa"}], "max_tokens": 3, "temperature": 0.0}
    ends = []

    def ask_again(first):
        try:
            ends.append(engines.writer.ask(body, "0/0/1"))
        except RunError as error:
            ends.append(str(error))

    first = engines.writer.ask(body, "0/0/0")
    first.add_done_callback(ask_again)
    engines.writer.close()
    with pytest.raises(RunError, match="judge: closed before it gave all verdicts"):
        first.result(0)
    assert ends == ["judge: closed"]
