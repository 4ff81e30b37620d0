"""Reward servers that answer, fail, hang and lie, over HTTP."""

import asyncio
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import reward_servers
from aiohttp import web
from reward_servers import WAIT_S, HeldPort, sevens

from hotseat.errors import RunError, UserError
from hotseat.failed import Failed
from hotseat.rewards import Grader, Graders, Score, Scorer
from hotseat.rewards.addresses import TOKEN, bearer_token, connect_problems
from hotseat.rewards.posting import RewardService, Servers

SHORT_S = 0.2  # of what is waited for in vain


@pytest.fixture
def client(opened):
    """Makes clients of servers, which try again at once."""

    def make(*servers, **options) -> RewardService:
        options = {"timeout_s": WAIT_S, "retries": 0, "back_off_s": 0.001, "report": lambda line: None, **options}
        opened.append(RewardService([each.url for each in servers], **options))
        return opened[-1]

    return make


def submit(service: Scorer, number: int = 0, answers: tuple[str, ...] = ("7", "77")) -> Future:
    size = len(answers)
    ids = [f"0/{number}/{sample}" for sample in range(size)]
    return service.submit(
        [f"{number}+1={answer}<eos>" for answer in answers], [f"{number}+1="] * size, ["x", None], ids
    )


def score(service: RewardService, number: int = 0) -> list:
    return submit(service, number).result(WAIT_S)


def impatient(service: RewardService) -> RewardService:
    """Let it wait for servers that are away or busy only shortly; one that answers may take its time to do so."""
    service.timeout_s = SHORT_S
    return service


def reasons(samples: list) -> set[str]:
    assert all(isinstance(sample, Failed) for sample in samples)
    return {sample.reason for sample in samples}


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_a_group_is_one_request_in_openrlhfs_form(server, client):
    one = server()
    assert score(client(one)) == [Score(1.0, 1.0), Score(2.0, 2.0)]
    assert one.messages == [
        {"query": ["0+1=7<eos>", "0+1=77<eos>"], "prompts": ["0+1=", "0+1="], "labels": ["x", None]}
    ]
    assert one.headers[0]["Content-Type"] == "application/json"
    assert "Authorization" not in one.headers[0]


@pytest.mark.parametrize("label", [4, 2.5, True, ["a", None], {"a": [1]}, ""])
def test_labels_are_sent_as_they_are(server, client, label):
    one = server()
    client(one).submit(["q"], ["q"], [label], ["0/0/0"]).result(WAIT_S)
    assert [type(each) for each in one.messages[0]["labels"]] == [type(label)]
    assert one.messages[0]["labels"] == [label]


def test_scores_and_logs_are_read(server, client):
    answer = {"rewards": [1, 2], "scores": [0.5, 0], "extra_logs": {"length": [3, 4], "all": 1}, "model": "any"}
    samples = score(client(server(lambda number, message: answer)))
    assert samples == [Score(1.0, 0.5, {"length": 3.0, "all": 1.0}), Score(2.0, 0.0, {"length": 4.0, "all": 1.0})]


def test_the_token_is_sent(server, client):
    one = server()
    score(client(one, token="abc"))
    assert one.headers[0]["Authorization"] == "Bearer abc"


@pytest.mark.parametrize("token", ["with space", "new\nline", "é"])
def test_a_token_that_cannot_be_sent_is_refused(token):
    with pytest.raises(UserError, match=f"{TOKEN}: a token is made of printable ASCII"):
        bearer_token({TOKEN: token})
    assert bearer_token({}) is None
    assert bearer_token({TOKEN: "abc"}) == "abc"


def test_groups_are_scored_at_the_same_time(server, client):
    """Four requests are answered only when all of them have arrived."""
    everybody = asyncio.Event()

    async def together(number: int, message: dict) -> dict:
        if number == 3:
            everybody.set()
        await everybody.wait()
        return sevens(message)

    service = client(server(lambda number, message: together(number, message)))
    futures = [submit(service, number) for number in range(4)]
    assert [future.result(WAIT_S)[1].reward for future in futures] == [2.0] * 4


def test_no_more_requests_are_open_than_allowed(server, client):
    open_now, most = 0, 0
    as_many_as_allowed = asyncio.Event()

    async def slow(message: dict) -> dict:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == 3:
            as_many_as_allowed.set()
        await as_many_as_allowed.wait()
        await asyncio.sleep(0.01)  # in which one more might come
        open_now -= 1
        return sevens(message)

    service = client(server(lambda number, message: slow(message)), max_open=3)
    for future in [submit(service, number) for number in range(12)]:
        future.result(WAIT_S)
    assert most == 3


@pytest.mark.slow
def test_a_server_in_a_process_of_its_own(client):
    program = Path(reward_servers.__file__)
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        assert not connect_problems([url], WAIT_S)
        at = type("At", (), {"url": url})
        assert score(client(at)) == [Score(1.0, 1.0), Score(2.0, 2.0)]
        process.kill()
        process.wait()
        [reason] = reasons(score(client(at, timeout_s=SHORT_S)))
        assert reason.startswith(f"reward server {url}: ")
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.mark.slow
def test_graders_are_added_to_what_a_server_gives(server, client):
    graders = Graders([Grader("regex", "even", 10.0, pattern="77")], function=client(server()))
    try:
        one, two = submit(graders).result(WAIT_S)
    finally:
        graders.close()
    assert (one.reward, two.reward) == (1.0, 12.0)
    assert two.extra == {"even": 1.0, "function": 2.0}


# --- servers that fail ------------------------------------------------------------------------------------------------


def test_a_server_that_fails_twice_is_asked_a_third_time(server, client):
    """Scenario 26: after a pause each."""
    said = []
    one = server(lambda number, message: (500, "out of\n memory") if number < 2 else sevens(message))
    assert score(client(one, retries=2, report=said.append)) == [Score(1.0, 1.0), Score(2.0, 2.0)]
    assert one.messages[0] == one.messages[2]
    assert said == [
        f"reward server {one.url}: status 500: out of memory; trying again",
        f"reward server {one.url}: answers again",
    ]


def test_a_server_that_fails_for_ever_is_named_with_its_last_status(server, client):
    """Scenario 27."""
    one = server(lambda number, message: (500 + number, "no"))
    assert reasons(score(client(one, retries=1))) == {
        f"reward server {one.url}: status 501: no (2 attempts); samples 0/0/0, 0/0/1"
    }


def test_a_server_that_is_down_for_ever_is_waited_for_as_long_as_an_attempt_may_take(opened, client):
    """Scenario 27."""
    opened.append(HeldPort())
    [reason] = reasons(score(impatient(client(opened[0], retries=4))))
    assert reason.startswith(f"reward server {opened[0].url}: ")
    assert reason.endswith(f" (tried for {SHORT_S:g} s); samples 0/0/0, 0/0/1")


def test_a_server_that_starts_or_is_busy_is_waited_for_and_costs_no_attempt(server, client):
    def respond(number: int, message: dict):
        if number == 0:
            return web.Response(status=429, headers={"Retry-After": "0"}, text="later")
        return sevens(message)

    assert len(score(client(server(respond)))) == 2
    busy = server(lambda number, message: (429, "later"))
    [reason] = reasons(score(impatient(client(busy))))
    assert reason == f"reward server {busy.url}: status 429: later (tried for {SHORT_S:g} s); samples 0/0/0, 0/0/1"


def test_a_server_that_hangs_holds_up_no_other_group(server, client):
    """Scenario 28: the deadline is that of the request, and others are answered meanwhile."""

    async def hang() -> dict:
        await asyncio.sleep(1e6)
        return {}

    one = server(lambda number, message: hang() if message["query"][0].startswith("3+") else sevens(message))
    service = client(one)
    futures = [submit(service, number) for number in range(8)]
    hung = futures.pop(3)
    assert [future.result(WAIT_S) for future in futures] == [[Score(1.0, 1.0), Score(2.0, 2.0)]] * 7
    assert not hung.done()
    assert reasons(score(client(one, timeout_s=SHORT_S), 3)) == {
        f"reward server {one.url}: no answer within {SHORT_S:g} s (1 attempt); samples 0/3/0, 0/3/1"
    }


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((200, "<html>oops</html>"), "its answer is no JSON: <html>oops</html>"),
        ((200, ""), "its answer is no JSON: (empty)"),
        ([1.0, 2.0], "its answer is no object with 'rewards': [1.0, 2.0]"),
        ({"scores": [1, 2]}, "returned a dict without the key 'rewards'; it has: scores"),
        ({"reward": [1, 2]}, "returned a dict with the key 'reward': did you mean 'rewards'?"),
        ({"rewards": [1.0]}, "returned 1 rewards for 2 samples"),
        ({"rewards": [1.0, 2.0, 3.0]}, "returned 3 rewards for 2 samples"),
        ({"rewards": ["1.0", 2.0]}, "returned rewards with '1.0' for sample 0, not a number"),
        ({"rewards": [1.0, {"a": 1}]}, "returned rewards with a dict for sample 1, not a number"),
        ({"rewards": [1.0, 2.0], "scores": [1.0]}, "returned 1 scores for 2 samples"),
        ({"rewards": [1.0, 2.0], "extra_logs": [1]}, "returned 'extra_logs' that is not a dict"),
        ({"rewards": [1.0, 2.0], "extra_logs": {"a": ["x", 1]}}, "returned extra_logs['a'] with 'x' for sample 0"),
    ],
)
def test_an_answer_that_is_none_is_named_with_address_and_field(server, client, answer, problem):
    """Scenario 29: it is asked for again, and never taken for a zero."""
    one = server(lambda number, message: answer)
    [reason] = reasons(score(client(one, retries=1)))
    assert reason.startswith(f"reward server {one.url}: {problem}")
    assert reason.endswith("(2 attempts); samples 0/0/0, 0/0/1")


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "null", "1e300"])
def test_a_reward_that_is_no_number_fails_its_sample_alone(server, client, bad):
    one = server(lambda number, message: web.Response(text=f'{{"rewards": [3, {bad}]}}'))
    good, failed = score(client(one, retries=3))
    assert good == Score(3.0, 3.0)
    assert failed.reason.startswith(f"reward server {one.url}: the reward is ")
    assert failed.reason.endswith("; sample 0/0/1")
    assert len(one.messages) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_a_request_that_is_rejected_is_not_repeated(server, client, status):
    one = server(lambda number, message: (status, "because"))
    [reason] = reasons(score(client(one, retries=3)))
    assert reason.startswith(f"reward server {one.url}: status {status}: because")
    assert (TOKEN in reason) == (status == 401)
    assert len(one.messages) == 1


def test_a_server_elsewhere_is_not_followed(server, client):
    away = web.Response(status=307, headers={"Location": "http://elsewhere/x"})
    [reason] = reasons(score(client(server(lambda number, message: away), token="secret")))
    assert "it redirects to http://elsewhere/x; set reward.url to where it answers" in reason


def test_a_connection_that_breaks_is_an_attempt(server, client):
    async def broken(request_number: int) -> web.Response:
        raise asyncio.CancelledError  # aiohttp closes the connection

    one = server(lambda number, message: broken(number) if number == 0 else sevens(message))
    assert score(client(one, retries=1)) == [Score(1.0, 1.0), Score(2.0, 2.0)]
    assert len(one.messages) == 2


def test_what_is_open_when_the_service_is_closed_says_so(server, client):
    async def hang() -> dict:
        await asyncio.sleep(WAIT_S)
        return {}

    service = client(server(lambda number, message: hang()))
    future = submit(service)
    service.close()
    service.close()
    with pytest.raises(RunError, match="client of reward servers was closed before samples 0/0/0, 0/0/1 had an answer"):
        future.result(WAIT_S)
    with pytest.raises(RunError, match="the client of reward servers is closed"):
        submit(service)


# --- several servers --------------------------------------------------------------------------------------------------


def test_several_servers_share_the_work(server, client):
    async def together(message: dict) -> dict:
        while sum(len(each.messages) for each in servers) < 30:
            await asyncio.sleep(0.001)
        return sevens(message)

    servers = [server(lambda number, message: together(message)) for _ in range(3)]
    service = client(*servers, max_open=30)
    for future in [submit(service, number) for number in range(30)]:
        assert len(future.result(WAIT_S)) == 2
    assert [len(each.messages) for each in servers] == [10] * 3


def test_a_server_that_is_down_or_fails_is_passed_over(server, client, opened):
    opened.append(HeldPort())
    good, bad = server(), server(lambda number, message: (500, "no"))
    service = client(opened[0], bad, good, retries=1)
    for number in range(20):
        assert len(score(service, number)) == 2
        assert isinstance(score(service, number)[0], Score)
    assert len(good.messages) == 40
    assert len(bad.messages) < 10  # it is tried again now and then


def test_the_server_with_the_fewest_open_requests_is_next():
    servers = Servers(["a", "b"])
    first = servers.choose(0.0)
    second = servers.choose(0.0)
    assert [first.url, second.url] == ["a", "b"]
    servers.answered(first)
    assert servers.choose(0.0) is first
    third = servers.choose(0.0)
    assert third is first or third is second


def test_a_server_that_cannot_be_reached_is_tried_by_one_request_at_a_time():
    """It rests for 0.5, 1, 2 s and so on, up to 5; when one request was answered, others follow."""
    servers = Servers(["a", "b"])
    a, b = servers.all
    a.num_open = 1
    servers.failed(a, 0.0, "refused", is_reachable=False)
    assert servers.problems() == "a: refused"
    assert {servers.choose(0.4).url for _ in range(5)} == {"b"}
    assert servers.choose(0.5) is a  # it has no open request, and its rest is over
    assert servers.choose(0.5) is b
    servers.failed(a, 1.0, "refused", is_reachable=False)
    assert servers.choose(1.9) is b
    assert servers.choose(2.0) is a
    servers.answered(a)
    assert [servers.choose(3.0).url for _ in range(3)] == ["a"] * 3
    for time_s in range(100, 110):
        a.num_open += 1
        servers.failed(a, time_s, "refused", is_reachable=False)
    assert a.rests_until_s == 109 + 5


def test_servers_are_away_since_the_last_of_them_could_be_reached():
    servers = Servers(["a", "b"])
    a, b = servers.all
    a.num_open, b.num_open = 2, 2
    servers.failed(a, 1.0, "refused", is_reachable=False)
    assert servers.away_since_s is None
    servers.failed(b, 2.0, "refused", is_reachable=False)
    servers.failed(a, 3.0, "refused", is_reachable=False)
    assert servers.away_since_s == 2.0
    servers.begin()  # after a pause, in which one of them may have come back
    assert servers.away_since_s is None
    servers.failed(b, 9.0, "refused", is_reachable=False)
    a.num_open += 1
    servers.failed(a, 10.0, "refused", is_reachable=False)
    assert servers.away_since_s == 10.0
    servers.choose(100.0)
    servers.answered(a)
    assert servers.away_since_s is None


def test_with_no_other_a_server_that_fails_is_asked_and_one_that_is_down_is_not():
    servers = Servers(["a"])
    [a] = servers.all
    a.num_open = 1
    servers.failed(a, 0.0, "status 500", is_reachable=True)
    assert servers.choose(0.0) is a
    servers.failed(a, 0.0, "refused", is_reachable=False)
    assert servers.choose(0.0) is None


def test_after_a_failure_another_server_is_preferred():
    servers = Servers(["a", "b"])
    a, b = servers.all
    b.num_open = 5
    assert servers.choose(0.0, avoid=a) is b
    servers.failed(b, 0.0, "status 500", is_reachable=True)
    assert servers.choose(0.0, avoid=a) is a  # the other one rests


# --- before the run ---------------------------------------------------------------------------------------------------


def test_servers_are_looked_for_by_connecting(server, opened):
    one = server()
    opened.append(HeldPort())
    assert connect_problems([one.url], WAIT_S) == {}
    assert connect_problems([one.url, opened[-1].url], WAIT_S) == {
        opened[-1].url: f"port {opened[-1].port} of 127.0.0.1: Connection refused"
    }
    assert not one.messages
    unknown = connect_problems(["http://no-such-host.invalid/x"], WAIT_S)
    assert "the name no-such-host.invalid cannot be resolved" in unknown["http://no-such-host.invalid/x"]
