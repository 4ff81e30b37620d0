"""Agents that mean no good: each fails alone, with its reason, while a good episode beside it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from chat_templates import tokenizer_of
from gateway_cases import SAMPLING, WAIT_S, Engine, PlayFunction

from hotseat.agents import AgentHost, ProgramSettings, load_agent
from hotseat.agents.gateway.program_session import ServedPolicy
from hotseat.types import Failed, Prompt, SampleKey, ScoredEpisode

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "bad?"}]


async def post(client: Any, body: Any, token: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token or client.api_key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{client.base_url}/chat/completions", data=body, headers=headers) as reply,
    ):
        return reply.status, json.loads(await reply.text())


def asking(messages: Any) -> str:
    return json.dumps({"messages": messages})


async def loops_for_ever(client: Any) -> None:
    messages = list(QUESTION)
    while True:
        status, reply = await post(client, asking(messages))
        assert status == 200, reply["error"]["message"]
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "tool: again"}]


async def sends_much(client: Any) -> None:
    async def body(num_bytes: int) -> Any:
        yield b'{"messages": [{"role": "user", "content": "'
        for _ in range(num_bytes >> 20):
            yield b"a" * (1 << 20)
        yield b'"}]}'

    for num_bytes in (100 << 20, 4 << 20):  # more than is read, and more than is tokenised
        try:
            status, reply = await post(client, body(num_bytes))
        except aiohttp.ClientError:  # the gateway hangs up while the rest is sent
            continue
        assert status in (400, 413)
        assert "which no model of this length can read" in reply["error"]["message"] or status == 413
    raise RuntimeError("the gateway takes no more")


async def sends_no_json(client: Any) -> None:
    for body in ("{", "[1]", b"\xff\xfe", "[" * 100_000, '{"messages": 1e999}', asking([QUESTION]), "null"):
        assert (await post(client, body))[0] == 400
    raise RuntimeError("the gateway wants JSON")


async def sends_many(client: Any) -> None:
    flood = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FLOOD, client.base_url, client.api_key, str(sends_many.number), stdout=subprocess.PIPE
    )
    counts, _ = await flood.communicate()
    raise RuntimeError(f"answers by status: {counts.decode().strip()}")


FLOOD = """
import asyncio, collections, sys
from urllib.parse import urlsplit
url, token, number = urlsplit(sys.argv[1]), sys.argv[2], int(sys.argv[3])
body = b'{"messages": [{"role": "user", "content": "hold"}]}'
head = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n"
head += f"Authorization: Bearer {token}\\r\\nContent-Length: {len(body)}"
counts = collections.Counter()
async def one():
    try:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        opened.append(writer)
        writer.write(head.encode() + b"\\r\\n\\r\\n" + body)
        words = (await reader.readline()).split()
        counts[words[1].decode() if words else "closed"] += 1  # one that has not asked makes way for others
    except OSError as error:
        counts[type(error).__name__] += 1
    if sum(counts.values()) >= number - 512:  # the others are held
        full.set()
async def main():
    tasks = [asyncio.ensure_future(one()) for _ in range(number)]
    await full.wait()
    print(dict(sorted(counts.items())))
opened, full = [], asyncio.Event()
asyncio.run(main())
"""


async def uses_other_tokens(client: Any) -> None:
    for token in ("", "guess", "x" * 5000, client.api_key[:-1], client.api_key.swapcase()):
        assert (await post(client, asking(QUESTION), token or "none"))[0] == 401
    raise RuntimeError("no other token opens anything")


HOSTILE = {
    "much": (sends_much, "the gateway takes no more"),
    "no JSON": (sends_no_json, "the gateway wants JSON"),
    "many": (sends_many, "answers by status: {'429': "),
    "tokens": (uses_other_tokens, "no other token opens anything"),
}


class Holding(Engine):
    """Never answers the flood, whose requests are short."""

    def __call__(self, request: Any) -> Any:
        self.is_holding = "hold" in tokenizer_of("smollm2").decode(request.token_ids)
        return super().__call__(request)


def failures_beside_a_good_one(names: list[str], timeout_s: float) -> dict[str, str]:
    """Play hostile episodes, and return why each failed.

    A good one plays turns until they are over, and one that begins then is good, too.
    """
    over = threading.Event()

    async def program(prompt: Any, client: Any) -> Any:
        if prompt.label in HOSTILE:
            await HOSTILE[prompt.label][0](client)
        while True:
            is_last = over.is_set()
            status, reply = await post(client, asking(QUESTION))
            assert status == 200, reply
            if is_last:
                return 1.0
            await asyncio.sleep(0.05)

    agent = PlayFunction(program, ServedPolicy(tokenizer_of("smollm2"), ProgramSettings(), 600))
    with AgentHost(agent, Holding(), run_seed=5, timeout_s=timeout_s) as host:
        good = host.submit(Prompt(0, "q", (1,), "good"), SampleKey(0, 0, 0), SAMPLING)
        hostile = {
            name: host.submit(Prompt(1, "q", (1,), name), SampleKey(0, 1, at), SAMPLING)
            for at, name in enumerate(names)
        }
        outcomes = {name: future.result(timeout_s) for name, future in hostile.items()}
        over.set()
        outcome = good.result(WAIT_S)
        assert isinstance(outcome, ScoredEpisode), outcome
        assert outcome.reward == 1.0
        assert host.submit(Prompt(0, "q", (1,)), SampleKey(0, 0, 1), SAMPLING).result(WAIT_S).reward == 1.0
        assert not host.is_broken
    return {name: failed.reason for name, failed in outcomes.items() if isinstance(failed, Failed)}


def test_hostile_episodes_fail_alone_with_their_reasons():
    sends_many.number = 700
    names = ["much", "no JSON", "many", "tokens"]
    reasons = failures_beside_a_good_one(names, WAIT_S)
    assert [name for name in names if HOSTILE[name][1] in reasons.get(name, "")] == names, reasons


def test_an_endless_loop_of_tools_ends_at_the_deadline_and_the_next_episode_is_good():
    async def program(prompt: Any, client: Any) -> float:
        if prompt.label == "loops":
            await loops_for_ever(client)
        status, reply = await post(client, asking(QUESTION))
        assert status == 200, reply
        return 1.0

    agent = PlayFunction(program, ServedPolicy(tokenizer_of("smollm2"), ProgramSettings(), 1 << 20))
    with AgentHost(agent, Engine(), run_seed=5, timeout_s=10.0) as host:  # ample for the good one on a busy machine
        reason = host.submit(Prompt(1, "q", (1,), "loops"), SampleKey(0, 1, 0), SAMPLING).result(WAIT_S).reason
        assert reason.endswith("the agent took longer than 10 s")
        assert host.submit(Prompt(1, "q", (1,), "good"), SampleKey(0, 1, 1), SAMPLING).result(WAIT_S).reward == 1.0


# --- clients without a token ------------------------------------------------------------------------------------------


def connected(client: Any, *headers: str) -> socket.socket:
    """A connection to the gateway that has sent the headers of a request, and nothing else."""
    url = urlsplit(client.base_url)
    connection = socket.create_connection((url.hostname, url.port), WAIT_S)
    if headers:
        lines = ("POST /v1/chat/completions HTTP/1.1", "Host: x", *headers, "", "")
        connection.sendall("\r\n".join(lines).encode())
    return connection


def answer_of(connection: socket.socket) -> str:
    """The gateway's answer, which is one JSON object; "" if it ends the connection instead."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while not received.endswith(b"}}") and (data := connection.recv(1 << 16)):
            received += data
    return received.decode()


def reward_beside_strangers(attack: Any) -> float:
    """Play one episode, whose program asks once before an attack by clients without a token, and once after it.

    Returns its reward, which is 1 if both were answered.
    """

    def program(prompt: Any, client: Any) -> float:
        for act in (lambda: None, lambda: attack(client)):
            act()
            status, reply = asyncio.run(post(client, asking(QUESTION)))
            assert status == 200, reply
        return 1.0

    agent = PlayFunction(program, ServedPolicy(tokenizer_of("smollm2"), ProgramSettings(), 600))
    with AgentHost(agent, Engine(), run_seed=5, timeout_s=WAIT_S) as host:
        outcome = host.submit(Prompt(1, "q", (1,), "good"), SampleKey(0, 1, 0), SAMPLING).result(WAIT_S)
        assert isinstance(outcome, ScoredEpisode), outcome
        return outcome.reward


def test_a_request_without_a_token_is_refused_before_its_body_is_read_or_asked_for():
    def attack(client: Any) -> None:
        for more in ("Expect: 100-continue", "Content-Encoding: gzip", "Authorization: Bearer wrong"):
            with connected(client, "Content-Length: 3000000000", more) as connection:
                assert answer_of(connection).startswith("HTTP/1.1 401 ")

    assert reward_beside_strangers(attack) == 1.0


def test_packed_bodies_are_refused_and_unpacked_for_nobody():
    packed = gzip.compress(bytes(20 << 20), 1)

    def attack(client: Any) -> None:
        strangers = [connected(client, f"Content-Length: {len(packed)}", "Content-Encoding: gzip") for _ in range(6)]
        for stranger in strangers:
            with contextlib.suppress(OSError):
                stranger.sendall(packed)
        token = f"Authorization: Bearer {client.api_key}"
        for encoding in ("gzip", "br", "identity, gzip"):
            with connected(client, token, f"Content-Length: {len(packed)}", f"Content-Encoding: {encoding}") as holder:
                answer = answer_of(holder)
                assert answer.startswith("HTTP/1.1 415 ")
                assert f"Content-Encoding '{encoding}' is not supported: send the body as it is" in answer
        for stranger in strangers:
            assert answer_of(stranger).startswith("HTTP/1.1 401 ")
            stranger.close()

    assert reward_beside_strangers(attack) == 1.0


def test_connections_without_a_token_make_way_for_others(monkeypatch):
    monkeypatch.setattr("hotseat.connections._MAX_UNKNOWN", 60)

    def attack(client: Any) -> None:
        with contextlib.ExitStack() as opened:
            silent = [opened.enter_context(connected(client)) for _ in range(50)]
            silent += [opened.enter_context(connected(client)) for _ in range(50)]
            for connection in silent[50:]:
                with contextlib.suppress(OSError):
                    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nX-Half: op")
            for connection in silent[:40]:  # the last 60 of 100 stay, and one that asks comes on top
                assert answer_of(connection) == ""
            status, reply = asyncio.run(post(client, asking(QUESTION)))
            assert status == 200, reply

    assert reward_beside_strangers(attack) == 1.0


@pytest.mark.long
def test_ten_thousand_requests_at_once_are_the_problem_of_the_episode_that_sends_them():
    import resource

    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 12_000:
        pytest.skip("this system allows fewer open files")
    sends_many.number = 10_000
    [reason] = failures_beside_a_good_one(["many"], 10 * WAIT_S).values()
    assert HOSTILE["many"][1] in reason


PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": "bad?"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(request).read()
with open(os.environ["HOTSEAT_RESULT"], "w") as file:
    if task["label"] == "big":
        file.truncate(1 << 30)
    else:
        file.write("1")
"""


def test_a_result_of_a_gigabyte_fails_alone(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    programs = ProgramSettings(command=(sys.executable, str(tmp_path / "program.py")))
    agent = load_agent(None, tokenizer_of("smollm2"), max_length=600, programs=programs)
    with AgentHost(agent, Engine(), run_seed=5, timeout_s=WAIT_S) as host:
        labels = ("big", "good")
        futures = [host.submit(Prompt(3, "q", (1,), label), SampleKey(0, 3, 0), SAMPLING) for label in labels]
        big, good = (future.result(WAIT_S) for future in futures)
    assert big.reason.endswith("the result file has more than 1 MiB")
    assert good.reward == 1.0


# --- another network --------------------------------------------------------------------------------------------------

ELSEWHERE = """
import json, sys, urllib.request
for token in sys.argv[2:]:
    request = urllib.request.Request(
        sys.argv[1] + "/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "bad?"}]}).encode(),
        {"Authorization": "Bearer " + token},
    )
    try:
        print(urllib.request.urlopen(request, timeout=60).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


@pytest.fixture
def network():
    """A network namespace, joined to this one by a pair of devices: (its name, our address in it)."""
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed")
    name = f"hs{os.getpid() % 100_000}"
    subnet = f"10.{200 + os.getpid() // 256 % 50}.{os.getpid() % 256}"  # of this process: others may test, too
    commands = [
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b netns {name}",
        f"ip addr add {subnet}.1/24 dev {name}a",
        f"ip link set {name}a up",
        f"ip netns exec {name} ip addr add {subnet}.2/24 dev {name}b",
        f"ip netns exec {name} ip link set {name}b up",
    ]
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True)
            if made.returncode != 0:
                pytest.skip(f"this system forbids it: {command}: {made.stderr.strip()}")
        yield name, f"{subnet}.1"
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_the_gateway_is_reached_from_another_network_with_the_token_alone(network):
    name, address = network

    async def program(prompt: Any, client: Any) -> float:
        assert client.base_url.startswith(f"http://{address}:")
        words = ["ip", "netns", "exec", name, sys.executable, "-c", ELSEWHERE, client.base_url]
        there = await asyncio.create_subprocess_exec(*words, client.api_key, "guess", stdout=subprocess.PIPE)
        statuses, _ = await there.communicate()
        assert statuses.split() == [b"200", b"401"]
        return 1.0

    agent = PlayFunction(program, ServedPolicy(tokenizer_of("smollm2"), ProgramSettings(bind=address), 600))
    with AgentHost(agent, Engine(), run_seed=5, timeout_s=WAIT_S) as host:
        outcome = host.submit(Prompt(3, "q", (1,)), SampleKey(0, 3, 0), SAMPLING).result(WAIT_S)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert outcome.reward == 1.0
