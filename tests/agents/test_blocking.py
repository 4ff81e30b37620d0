"""Agents that block the event loop of all episodes: warned of by line, and ended by their own deadlines alone."""

import asyncio
import logging
import threading
import time

import pytest
from agent_cases import SAMPLING, TOKENIZER, WAIT_S, Script, prompt_of

from hotseat.agents import Agent, AgentHost, Deadlines, Environment, MultiTurn, SingleTurn, Step
from hotseat.errors import WorkerError
from hotseat.types import Episode, Failed, SampleKey, ScoredEpisode

pytestmark = pytest.mark.slow


class Blocks(Environment):
    """Blocks in its step where the prompt says for how long."""

    def reset(self, prompt, label):
        self.seconds = float(label)

    async def step(self, action):
        if self.seconds > 0:
            time.sleep(self.seconds)  # line 26
        else:
            await asyncio.sleep(-self.seconds)
        return Step("", reward=1.0, done=True)


def play_all(labels, **options):
    agent = MultiTurn(Blocks, TOKENIZER, max_length=100)
    with AgentHost(agent, Script(lambda request: "a"), run_seed=0, timeout_s=WAIT_S, **options) as host:
        samples = [(prompt_of("q", label), SampleKey(0, 0, at)) for at, label in enumerate(labels)]
        return [future.result(WAIT_S) for future in host.submit_many(samples, SAMPLING)]


def test_a_step_that_blocks_the_loop_is_warned_of_once_by_its_line(caplog):
    with caplog.at_level(logging.WARNING, "hotseat.agents"):
        outcomes = play_all([1.5, 1.5, -0.01])
    assert all(isinstance(outcome, ScoredEpisode) for outcome in outcomes)
    [warning] = [record.getMessage() for record in caplog.records]
    assert f"{__file__}:26 blocks the event loop, which all episodes share, for more than 0.5 s" in warning


def test_steps_that_wait_or_run_in_threads_are_not_warned_of(caplog):
    class Waits(Environment):
        def step(self, action):
            time.sleep(1.2)
            return Step("", reward=1.0, done=True)

    with caplog.at_level(logging.WARNING, "hotseat.agents"):
        play_all([-1.2, -1.2])
        with AgentHost(MultiTurn(Waits, TOKENIZER, max_length=100), Script(lambda request: "a"), run_seed=0) as host:
            host.submit(prompt_of("q"), SampleKey(0, 0, 0), SAMPLING).result(WAIT_S)
    assert not caplog.records


def test_the_deadline_of_tools_is_that_of_the_episode_which_blocks_and_of_no_other():
    blocking, waiting, quick = play_all([3.0, -0.7, -0.01], deadlines=Deadlines(tool_s=1.0))
    assert isinstance(blocking, Failed)
    assert "took longer than 1 s between answers (agent.tool_timeout_s)" in blocking.reason
    # Their own time was not over: they could not run meanwhile.
    assert isinstance(waiting, ScoredEpisode)
    assert isinstance(quick, ScoredEpisode)


def test_an_episode_that_has_blocked_longer_than_tools_may_fails_also_when_it_goes_on():
    class BlocksBetween(Agent):
        async def run(self, prompt, key, sampling, sample):
            await sample([1], sampling, 0)
            end_s = time.monotonic() + 1.2
            while time.monotonic() < end_s:
                time.sleep(0.2)
            await sample([1], sampling, 1)
            return await SingleTurn(TOKENIZER).run(prompt, key, sampling, sample)

    deadlines = Deadlines(tool_s=0.6)
    with AgentHost(BlocksBetween(), Script(lambda request: "a"), run_seed=0, deadlines=deadlines) as host:
        outcome = host.submit(prompt_of("q"), SampleKey(0, 0, 0), SAMPLING).result(WAIT_S)
    assert "took longer than 0.6 s between answers (agent.tool_timeout_s)" in outcome.reason


def test_a_host_is_given_up_soon_after_the_deadline_of_an_episode_that_blocks_for_ever():
    go_on, broken = threading.Event(), []

    class BlocksForEver(Agent):
        async def run(self, prompt, key, sampling, sample):
            if key.sample == 0:
                go_on.wait(WAIT_S)
            await asyncio.sleep(WAIT_S)
            raise AssertionError

    host = AgentHost(
        BlocksForEver(),
        Script([]),
        run_seed=0,
        timeout_s=WAIT_S,
        blocked_s=1.0,
        deadlines=Deadlines(tool_s=0.5),
        when_broken=lambda: broken.append(other.done()),
    )
    try:
        blocking, other = host.submit_many([(prompt_of("q"), SampleKey(0, 0, at)) for at in range(2)], SAMPLING)
        assert f"{__file__}:" in blocking.result(WAIT_S).reason
        with pytest.raises(WorkerError, match="an agent blocks the event loop of its host, at "):
            other.result(WAIT_S)
        assert host.is_broken
        assert broken == [False]  # called before the others fail, so that a process may end there
    finally:
        go_on.set()
        host.close()


def test_what_exits_in_a_thread_is_named_by_the_users_line():
    class Exits(Environment):
        def step(self, action):
            raise SystemExit(5)  # as sys.exit does

    with AgentHost(MultiTurn(Exits, TOKENIZER, max_length=100), Script(lambda request: "a"), run_seed=0) as host:
        outcome = host.submit(prompt_of("q"), SampleKey(0, 0, 0), SAMPLING).result(WAIT_S)
    assert "SystemExit: 5 (" in outcome.reason
    assert __file__ in outcome.reason


def test_the_rest_goes_on_after_an_episode_that_blocked():
    outcomes = play_all([0.6] + [-0.01] * 20, max_concurrent=4)
    assert all(isinstance(outcome, Episode | ScoredEpisode) for outcome in outcomes)
