"""Episodes that misbehave, beside others that do not."""

import asyncio
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import replace

import pytest
import torch
from agent_cases import KEY, SAMPLING, TOKENIZER, WAIT_S, Clock, Script, completion_of, marked, play, prompt_of

from hotseat.agents import (
    Agent,
    AgentHost,
    Deadlines,
    Environment,
    MultiTurn,
    OpenRequests,
    SingleTurn,
    Step,
    Transcript,
)
from hotseat.agents.crash_record import CrashRecord
from hotseat.errors import RunError, UserError, WorkerError
from hotseat.types import Episode, Failed, SampleKey, Sampling, ScoredEpisode, Segment


class Does(Agent):
    """Runs a coroutine function as an agent."""

    def __init__(self, function):
        self.run = function


def outcome(function, script=None, **options):
    options = {"run_seed": 5, "timeout_s": WAIT_S, **options}
    with AgentHost(Does(function), script or Script(lambda request: "a"), **options) as host:
        return host.submit(prompt_of("q"), KEY, SAMPLING).result(WAIT_S)


async def good(prompt, key, sampling, sample):
    return await SingleTurn(TOKENIZER).run(prompt, key, sampling, sample)


# --- running many -----------------------------------------------------------------------------------------------------


def test_at_most_so_many_episodes_run_at_a_time_and_start_in_order():
    running, most, started = 0, 0, []

    async def run(prompt, key, sampling, sample):
        nonlocal running, most
        started.append(key.sample)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return await good(prompt, key, sampling, sample)

    with AgentHost(Does(run), Script(lambda request: "a"), run_seed=0, max_concurrent=3) as host:
        futures = [host.submit(prompt_of("q"), SampleKey(0, 0, at), SAMPLING) for at in range(30)]
        episodes = [future.result(WAIT_S) for future in futures]
    assert [episode.key.sample for episode in episodes] == started == list(range(30))
    assert most == 3


def test_an_engine_may_answer_by_an_awaitable():
    async def ask(request):
        await asyncio.sleep(0)
        return completion_of(request, "b")

    assert marked(outcome(good, ask)) == ["q[b]"]


def test_a_future_that_is_cancelled_before_its_turn_is_left_out():
    go_on = threading.Event()

    async def run(prompt, key, sampling, sample):
        await asyncio.to_thread(go_on.wait, WAIT_S)
        return await good(prompt, key, sampling, sample)

    with AgentHost(Does(run), Script(lambda request: "a"), run_seed=0, max_concurrent=1) as host:
        first, second, third = (host.submit(prompt_of("q"), SampleKey(0, 0, at), SAMPLING) for at in range(3))
        assert second.cancel()
        go_on.set()
        assert isinstance(first.result(WAIT_S), Episode)
        assert isinstance(third.result(WAIT_S), Episode)
        with pytest.raises(CancelledError):
            second.result(0)


def test_what_waits_for_a_place_does_not_begin_when_the_host_closes():
    begun, both = [], threading.Event()

    async def run(prompt, key, sampling, sample):
        begun.append(key.sample)
        if len(begun) == 2:
            both.set()
        await asyncio.Event().wait()

    with AgentHost(Does(run), Script(lambda request: "a"), run_seed=0, max_concurrent=2) as host:
        futures = [host.submit(prompt_of("q"), SampleKey(0, 0, at), SAMPLING) for at in range(5)]
        assert both.wait(WAIT_S)
    for future in futures:
        with pytest.raises(RunError, match="the agent host is closed"):
            future.result(0)
    assert begun == [0, 1]


# --- failing ----------------------------------------------------------------------------------------------------------


def test_an_episode_that_raises_fails_alone():
    async def run(prompt, key, sampling, sample):
        if key.sample == 1:
            raise ZeroDivisionError("by nothing")
        return await good(prompt, key, sampling, sample)

    with AgentHost(Does(run), Script(lambda request: "a"), run_seed=0) as host:
        futures = [host.submit(prompt_of("q"), SampleKey(0, 0, at), SAMPLING) for at in range(3)]
        outcomes = [future.result(WAIT_S) for future in futures]
    assert [type(one) for one in outcomes] == [Episode, Failed, Episode]
    assert outcomes[1].reason.startswith("Does: sample 0/0/1: the agent raised ZeroDivisionError: by nothing (")


def test_an_episode_that_takes_too_long_fails_and_its_request_is_aborted():
    aborted = []
    failed = outcome(good, lambda request: Future(), timeout_s=0.1, requests=OpenRequests(aborted.append))
    assert failed == Failed("Does: sample 0/3/1: the agent took longer than 0.1 s")
    assert aborted == [["0/3/1/0#0"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timeout_s", "deadlines", "reason"),
    [
        (2.0, None, "the agent took longer than 2 s"),
        (WAIT_S, Deadlines(tool_s=0.1), "took longer than 0.1 s between answers"),
    ],
)
def test_an_episode_that_does_not_want_to_end_is_left_behind_and_asks_no_more(timeout_s, deadlines, reason):
    script = Script(lambda request: "a")
    over, tried = threading.Event(), threading.Event()

    async def run(prompt, key, sampling, sample):
        if key.sample == 0:
            while not over.is_set():
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    continue
            with pytest.raises(Exception, match="the episode is over"):
                await sample([1], sampling, 0)
            tried.set()
        return await good(prompt, key, sampling, sample)

    with AgentHost(Does(run), script, run_seed=0, timeout_s=timeout_s, max_concurrent=1, deadlines=deadlines) as host:
        stubborn, next_one = (host.submit(prompt_of("q"), SampleKey(0, 0, at), SAMPLING) for at in range(2))
        assert reason in stubborn.result(WAIT_S).reason
        assert isinstance(next_one.result(WAIT_S), Episode)
        over.set()
        assert tried.wait(WAIT_S)
    assert len(script.requests) == 1


def test_an_engine_that_fails_is_not_the_episodes_failure():
    def ask(request):
        future = Future()
        future.set_exception(WorkerError("engine 2 died"))
        return future

    async def hides_it(prompt, key, sampling, sample):
        try:
            return await good(prompt, key, sampling, sample)
        except Exception:
            raise ValueError("something else") from None

    for function in (good, hides_it):
        with pytest.raises(WorkerError, match="engine 2 died"):
            outcome(function, ask)


def test_an_engine_that_cancels_is_not_the_episodes_failure():
    def ask(request):
        future = Future()
        future.cancel()
        return future

    with pytest.raises(WorkerError, match=r"request 0/3/1/0#0 was cancelled by the engine"):
        outcome(good, ask)


def test_an_agent_that_cancels_itself_fails():
    async def raises(prompt, key, sampling, sample):
        raise asyncio.CancelledError

    async def cancels(prompt, key, sampling, sample):
        asyncio.current_task().cancel()
        await asyncio.sleep(WAIT_S)

    for run in (raises, cancels):
        assert "the agent cancelled itself" in outcome(run).reason


def test_a_users_mistake_is_raised():
    async def run(prompt, key, sampling, sample):
        raise UserError("no such option")

    with pytest.raises(UserError, match="no such option"):
        outcome(run)


@pytest.mark.parametrize("change", [{"temperature": 0.1}, {"top_p": 0.5}, {"top_k": 3}])
def test_an_agent_may_not_change_the_distribution(change):
    async def run(prompt, key, sampling, sample):
        return await sample([1], replace(sampling, **change), 0)

    with pytest.raises(UserError, match=rf"an agent asked for {next(iter(change))} .* set rollout"):
        outcome(run)


def test_aborted_and_empty_completions_fail():
    """Scenario 37."""

    def says(text, finish):
        def ask(request):
            future = Future()
            future.set_result(completion_of(request, text, finish))
            return future

        return ask

    assert outcome(good, says("a", "abort")).reason.endswith("request 0/3/1/0#0 was aborted")
    assert outcome(good, says("", "length")).reason.endswith("request 0/3/1/0#0: the engine sampled no token")


def test_requests_that_cannot_be():
    async def twice(prompt, key, sampling, sample):
        await sample([1], sampling, 0)
        await sample([1], sampling, 0)

    async def nothing(prompt, key, sampling, sample):
        await sample([], sampling, 0)

    assert "turn 0 was sampled twice" in outcome(twice).reason
    assert "asked to sample from no tokens" in outcome(nothing).reason


# --- what comes back --------------------------------------------------------------------------------------------------


def changed(change):
    """An agent that returns what `change` makes of a good episode."""

    async def run(prompt, key, sampling, sample):
        transcript = Transcript(TOKENIZER, prompt)
        transcript.add_sampled(await sample(transcript.context, sampling, 0))
        transcript.add_sampled(await sample(transcript.context, sampling, 1))
        return change(transcript.episode(key, is_truncated=False))

    return outcome(run)


def with_segment(episode, **fields):
    return replace(episode, segments=(replace(episode.segments[0], **fields),))


def test_only_what_the_engine_sampled_is_accepted():
    assert isinstance(changed(lambda episode: episode), Episode)
    other = torch.tensor([9, 8, 7])
    for change in (
        lambda episode: with_segment(episode, token_ids=other),
        lambda episode: with_segment(episode, token_ids=torch.tensor([1, *episode.segments[0].token_ids[1:].tolist()])),
        lambda episode: replace(episode, turn_lengths=()),  # two completions look like one
        lambda episode: replace(episode, turn_lengths=(2,)),
    ):
        assert "but the engine did not sample them after the tokens before them" in changed(change).reason
    for fields in ({"log_probs": torch.tensor([0.0, -9.0, -0.5])}, {"versions": torch.tensor([-1, 7, 1])}):
        reason = changed(lambda episode, fields=fields: with_segment(episode, **fields)).reason
        assert "with log-probs of its own" in reason
    assert (
        "turn_lengths [1] for 2 sampled tokens" in changed(lambda episode: replace(episode, turn_lengths=(1,))).reason
    )


def test_outcomes_that_are_none():
    nothing = Segment(torch.tensor([1]), torch.tensor([False]), torch.zeros(1), torch.tensor([-1]))
    for change, reason in (
        (lambda episode: None, "the agent returned a NoneType, neither an Episode nor a ScoredEpisode"),
        (lambda episode: Episode(SampleKey(0, 0, 0), episode.segments, ""), "returned the episode of sample 0/0/0"),
        (lambda episode: Episode(KEY, (nothing,), ""), "an episode without a sampled token"),
        (
            lambda episode: ScoredEpisode(episode, float("nan"), 1.0),
            "the agent returned an episode with a reward of nan",
        ),
        (
            lambda episode: ScoredEpisode(episode, 1.0, float("inf")),
            "the agent returned an episode with a score of inf",
        ),
    ):
        assert changed(change).reason.endswith(reason)


# --- ending -----------------------------------------------------------------------------------------------------------


def test_close_wakes_everybody():
    host = AgentHost(Does(good), lambda request: Future(), run_seed=0, max_concurrent=1)
    running, waiting = (host.submit(prompt_of("q"), SampleKey(0, 0, at), SAMPLING) for at in range(2))
    begin = time.monotonic()
    host.close()
    host.close()
    assert time.monotonic() - begin < WAIT_S
    assert not host._thread.is_alive()
    assert not host._watch.is_alive()
    for future in (running, waiting):
        with pytest.raises(RunError, match="the agent host is closed"):
            future.result(0)
    with pytest.raises(RunError, match="the agent host is closed"):
        host.submit(prompt_of("q"), KEY, SAMPLING)


def test_who_asks_while_the_loop_ends_is_told_by_the_future(monkeypatch):
    host = AgentHost(Does(good), Script(lambda request: "a"), run_seed=0)
    ask = host._loop.call_soon_threadsafe

    def too_late(callback, *args):
        if callback == host._give_places:
            raise RuntimeError("Event loop is closed")
        return ask(callback, *args)

    monkeypatch.setattr(host._loop, "call_soon_threadsafe", too_late)
    future = host.submit(prompt_of("q"), SampleKey(0, 0, 0), SAMPLING)
    host.close()
    with pytest.raises(RunError, match="the agent host is closed"):
        future.result(0)


@pytest.mark.slow
def test_an_agent_that_blocks_the_loop_is_found_out(tmp_path):
    go_on = threading.Event()

    async def run(prompt, key, sampling, sample):
        if key.sample == 0:
            go_on.wait(WAIT_S)  # not awaited: nothing else moves
        return await good(prompt, key, sampling, sample)

    record = CrashRecord(tmp_path / "crashes", "host-0")
    script = Script(lambda request: "a")
    host = AgentHost(Does(run), script, run_seed=0, timeout_s=0.1, blocked_s=1.0, crashes=record)
    try:
        blocking, other = host.submit_many([(prompt_of("q"), SampleKey(0, 0, at)) for at in range(2)], SAMPLING)
        reason = blocking.result(WAIT_S).reason
        assert "sample 0/0/0: the agent took longer than 0.1 s, where " in reason
        assert reason.endswith("test_host.py:346 blocks the event loop of all episodes")
        with pytest.raises(WorkerError, match="an agent blocks the event loop of its host"):
            other.result(WAIT_S)
        assert host.is_broken
        skipped = CrashRecord(tmp_path / "crashes", "host-0").reason_to_skip("0/0/0")
        assert reason.endswith(f"sample 0/0/0: {skipped}")
        with pytest.raises(WorkerError, match="an agent blocks the event loop"):
            host.submit(prompt_of("q"), KEY, SAMPLING)
    finally:
        go_on.set()
        host.close()


def test_an_agent_that_ends_the_loop_is_found_out():
    stopping = []

    async def run(prompt, key, sampling, sample):
        async def stop():
            raise SystemExit(3)

        if key.sample == 1:
            stopping.append(asyncio.create_task(stop()))
            await asyncio.sleep(WAIT_S)
        raise SystemExit(4)

    with AgentHost(Does(run), Script([]), run_seed=0) as host:
        first = host.submit(prompt_of("q"), SampleKey(0, 0, 0), SAMPLING)
        assert "the agent raised SystemExit: 4" in first.result(WAIT_S).reason
        with pytest.raises(WorkerError, match="an agent ended the event loop of its host: SystemExit: 3"):
            host.submit(prompt_of("q"), SampleKey(0, 0, 1), SAMPLING).result(WAIT_S)
        assert host.is_broken
        with pytest.raises(WorkerError, match="an agent ended the event loop"):
            host.submit(prompt_of("q"), KEY, SAMPLING)
    # Asked for here: asyncio logs an exception that nobody asked for when its task is collected, in any later test.
    assert [task.exception().code for task in stopping] == [3]


def test_what_waits_for_an_episode_may_submit_the_next_or_close():
    host = AgentHost(Does(good), Script(lambda request: "a"), run_seed=0)
    last: Future = Future()

    def next_one(future):
        last.set_result(host.submit(prompt_of("q"), SampleKey(0, 0, 1), SAMPLING))

    host.submit(prompt_of("q"), SampleKey(0, 0, 0), SAMPLING).add_done_callback(next_one)
    second = last.result(WAIT_S)
    assert isinstance(second.result(WAIT_S), Episode)
    host.submit(prompt_of("q"), SampleKey(0, 0, 2), SAMPLING).add_done_callback(lambda future: host.close())
    host.close()


def test_the_same_sample_again_has_another_request_but_the_same_seed():
    script = Script(lambda request: "a")
    with AgentHost(SingleTurn(TOKENIZER), script, run_seed=9) as host:
        for _ in range(2):
            host.submit(prompt_of("q"), KEY, Sampling(5)).result(WAIT_S)
    first, second = script.requests
    assert first.id != second.id
    assert first.seed == second.seed == KEY.seed(9, 0)
    assert play(SingleTurn(TOKENIZER), Script(["b"])).key == KEY


# --- deadlines --------------------------------------------------------------------------------------------------------

EPISODE_S = 200.0


class Slow:
    """An engine that answers nothing until it is told to end, and then what it has sampled: one token.

    With a clock, an episode's time is over once a request waits.
    """

    def __init__(self, *prompt_answers):
        self.answers = list(prompt_answers)
        self.waiting = {}
        self.clock = None

    def __call__(self, request):
        future = self.waiting[request.id] = Future()
        future.request = request
        if self.answers:
            future.set_result(completion_of(request, self.answers.pop(0)))
        elif self.clock is not None:
            self.clock.pass_by(EPISODE_S)
        return future

    def abort(self, names):
        for name in names:
            future = self.waiting[name]
            future.set_result(completion_of(future.request, "c", "abort"))


class Counts(Environment):
    """Rewards each action by its length, and never ends."""

    def step(self, action):
        return Step("|", reward=float(len(action)))


def played(engine, environment=Counts, timeout_s=WAIT_S, **deadlines):
    agent = MultiTurn(environment, TOKENIZER, max_length=100)
    limits = Deadlines(**deadlines)
    with AgentHost(
        agent, engine, run_seed=5, timeout_s=timeout_s, requests=OpenRequests(engine.abort), deadlines=limits
    ) as host:
        engine.clock = Clock(host._loop) if timeout_s == EPISODE_S else None
        return host.submit(prompt_of("q"), KEY, SAMPLING).result(WAIT_S)


def test_an_answer_that_takes_too_long_fails_the_sample_by_name():
    reason = played(Slow("ab"), turn_s=0.05).reason
    assert reason.endswith("the policy took longer than 0.05 s for one answer (agent.turn_timeout_s)")


def test_an_answer_that_takes_too_long_is_cut_and_scored_where_that_is_configured():
    engine = Slow("ab")
    engine.abort = lambda names, abort=engine.abort: (engine.answers.extend(["de"] * 40), abort(names))
    scored = played(engine, turn_s=0.05, scores_policy=True)
    assert marked(scored.episode)[0].startswith("q[ab]|[c]|[de]|[de]|")  # it goes on after the cut
    assert scored.turn_rewards[:3] == (2.0, 1.0, 2.0)


def test_a_policy_that_runs_out_of_time_is_scored_where_that_is_configured():
    scored = played(Slow("ab"), timeout_s=EPISODE_S, scores_policy=True)
    assert marked(scored.episode) == ["q[ab]|[c]"]
    assert scored.turn_rewards == (2.0, 1.0)
    assert scored.episode.is_truncated


def test_a_tool_that_takes_too_long_fails_the_sample_even_where_the_policy_is_scored():
    class Blocks(Counts):
        def step(self, action):
            released.wait(WAIT_S)
            return super().step(action)

    released = threading.Event()
    failed = [
        played(Slow("ab"), Blocks, tool_s=0.1, scores_policy=True),
        played(Slow("ab"), Blocks, timeout_s=0.2, scores_policy=True),
    ]
    released.set()
    assert "took longer than 0.1 s between answers (agent.tool_timeout_s)" in failed[0].reason
    assert failed[1].reason.endswith("the agent took longer than 0.2 s")


def test_a_policy_that_sampled_nothing_in_time_fails():
    engine = Slow()
    engine.abort = lambda names: [
        engine.waiting[name].set_result(completion_of(engine.waiting[name].request, "", "abort")) for name in names
    ]
    assert "its time was over before a token was sampled" in played(engine, turn_s=0.02, scores_policy=True).reason
    engine.abort = lambda names: [engine.waiting[name].cancel() for name in names]
    assert "did not return what it had sampled" in played(engine, turn_s=0.02, scores_policy=True).reason


def test_earlier_turns_are_scored_where_the_policy_sampled_nothing_of_the_last_in_time():
    engine = Slow("ab")
    engine.abort = lambda names: [
        engine.waiting[name].set_result(completion_of(engine.waiting[name].request, "", "abort"))
        for name in names
        if not engine.waiting[name].done()
    ]
    scored = played(engine, timeout_s=EPISODE_S, scores_policy=True)
    assert marked(scored.episode)[0].startswith("q[ab]")
    assert scored.turn_rewards == (2.0,)
    assert scored.episode.is_truncated


def test_the_limit_of_tools_holds_after_a_request_that_was_given_up():
    aborted = []

    async def run(prompt, key, sampling, sample):
        given_up = asyncio.create_task(sample([1], sampling, 0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.Event().wait()

    limits = Deadlines(tool_s=0.1, scores_policy=True)
    failed = outcome(
        run, lambda request: Future(), timeout_s=WAIT_S, requests=OpenRequests(aborted.append), deadlines=limits
    )
    assert "took longer than 0.1 s between answers (agent.tool_timeout_s)" in failed.reason
    assert aborted == [["0/3/1/0#0"]]


def test_tools_that_block_do_not_block_other_episodes():
    released = threading.Event()

    class Blocks(Counts):
        def reset(self, prompt, label):
            if label == "blocks":
                released.wait(WAIT_S)

        def step(self, action):
            return Step("", reward=1.0, done=True)

    agent = MultiTurn(Blocks, TOKENIZER, max_length=100)
    with AgentHost(agent, Script(lambda request: "a"), run_seed=5, timeout_s=WAIT_S) as host:
        stuck = host.submit(prompt_of("q", "blocks"), KEY, SAMPLING)
        others = [host.submit(prompt_of("q"), SampleKey(0, 3, at), SAMPLING) for at in range(20)]
        assert {other.result(WAIT_S).reward for other in others} == {1.0}
        assert not stuck.done()
        released.set()
        assert stuck.result(WAIT_S).reward == 1.0


def test_an_environment_gets_the_seed_of_its_episode():
    seeds = []

    class Seeded(Counts):
        def reset(self, prompt, label, seed):
            seeds.append(seed)

        def step(self, action):
            return Step(done=True, reward=0.0)

    agent = MultiTurn(Seeded, TOKENIZER, max_length=100, run_seed=3)
    for _ in range(2):
        with AgentHost(agent, Script(lambda request: "a"), run_seed=3) as host:
            for at in range(2):
                host.submit(prompt_of("q"), SampleKey(0, 0, at), SAMPLING).result(WAIT_S)
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_an_episode_says_when_each_turn_was_asked_for_and_answered():
    engine = Slow("ab", "c", "d")
    engine.abort = lambda names, abort=engine.abort: (time.sleep(0.05), abort(names))
    facts = played(engine, timeout_s=EPISODE_S, scores_policy=True).episode.facts
    assert len(facts.turns) == 4
    times = [time_s for turn in facts.turns for time_s in (turn.asked_s, turn.answered_s)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-2] + 0.05 <= times[-1] <= facts.took_s
    assert facts.waited_s >= 0
