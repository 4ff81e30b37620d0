"""Environments of other libraries, played in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
from chat_templates import tokenizer_of
from environment_cases import GYM, OPENENV, VERIFIERS, python_of
from gateway_cases import SAMPLING, WAIT_S, Engine, Outcome, learned, processes_of

from hotseat.agents import AgentHost, ProgramSettings, load_agent
from hotseat.agents.environments import environment_worker
from hotseat.agents.environments.environment_agent import check_environment, environment_rows
from hotseat.agents.environments.environment_worker import _plain
from hotseat.agents.environments.families import FAMILIES, EnvironmentSettings, library_problem
from hotseat.errors import UserError
from hotseat.processes import ChildProcess
from hotseat.types import Failed, Prompt, SampleKey, ScoredEpisode

pytestmark = pytest.mark.slow

WORKER = Path(environment_worker.__file__)
START_S = 300.0  # libraries are large, and others work on the same cores


def play(
    settings: EnvironmentSettings, *engines: Engine, label: str | None = "1", name: str = "smollm2", max_steps: int = 4
) -> list[Outcome]:
    """One episode for each engine, all with the same agent."""
    programs = ProgramSettings(environment=settings)
    agent = load_agent(None, tokenizer_of(name), max_length=4000, max_steps=max_steps, programs=programs)
    outcomes = []
    for engine in engines:
        with AgentHost(agent, engine, run_seed=5, timeout_s=START_S) as host:
            key = SampleKey(0, 3, len(outcomes))
            outcomes.append(host.submit(Prompt(3, "bad?", (1,), label), key, SAMPLING).result(START_S + WAIT_S))
    return outcomes


def check(outcome: Outcome, engine: Engine, num_answers: int) -> ScoredEpisode:
    """What is learned is what the engine sampled, id by id."""
    assert isinstance(outcome, ScoredEpisode), outcome
    assert learned(outcome.episode.segments, outcome.episode.turn_lengths) == engine.sampled
    assert sum(engine.sampled.values()) == num_answers
    return outcome


def reason(outcome: Outcome) -> str:
    assert isinstance(outcome, Failed), outcome
    return outcome.reason.partition(": sample ")[2].partition(": ")[2]


def settings_of(family: str, name: str, **arguments: Any) -> EnvironmentSettings:
    return EnvironmentSettings(family, name, json.dumps(arguments), python=python_of(family))


# --- the families -----------------------------------------------------------------------------------------------------


def test_gymnasium_text_spaces(tmp_path):
    (tmp_path / "letters.py").write_text(GYM)
    settings = settings_of("gymnasium", f"{tmp_path}/letters.py:Letters-v0", bonus=0.5, system="Play.")
    assert environment_rows(settings, 1, 2) == [{"text": "say b", "label": "1"}, {"text": "say c", "label": "2"}]
    engine, other = Engine("bob", "bab", "b"), Engine("c")
    first, second = play(settings, engine, other)
    scored = check(first, engine, 3)  # "bob" is no action
    assert scored.reward == 2 + 1 + 2 * 0.5
    assert scored.extra == {"num_actions": 2, "invalid_actions": 1}
    assert "system\nPlay.<|im_end|>" in engine.contexts[0]
    assert "say b" in engine.contexts[0]
    assert "bob<|im_end|>\n<|im_start|>user\nThis is no action. Actions are Text(1, 3" in engine.contexts[1]
    assert check(second, other, 2).reward == 1.0


@pytest.mark.long
def test_reasoning_gym():
    settings = settings_of("reasoning_gym", "chain_sum", seed=3, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    [row] = environment_rows(settings, 6, 6)
    assert row == environment_rows(settings, 4, 6)[2]
    a, sign, b = row["text"].partition("?")[0].split(":")[1].split("=")[0].split()
    right = int(a) + int(b) if sign == "+" else int(a) - int(b)
    engine, other = Engine(f"I think <answer>{right}</answer>"), Engine("none")
    first, second = play(settings, engine, other, label="6")
    assert row["text"] in engine.contexts[0]
    assert check(first, engine, 1).reward == 1.0
    assert check(second, other, 1).reward < 0.5


OPPONENT = """
def move(observation):
    return "[0 1]"
"""


@pytest.mark.long
def test_textarena(tmp_path):
    settings = settings_of("textarena", "GuessTheNumber-v0")
    [row, again] = environment_rows(settings, 3, 3) + environment_rows(settings, 3, 3)
    assert row == again
    assert "between 1 and 20" in row["text"]
    # It wants numbers in brackets, which the policy finds by going through them: with a seed it is always the same.
    engine = Engine(*(f"[{guess}]" for guess in range(1, 5)))
    [outcome] = play(settings, engine, label="3")
    scored = check(outcome, engine, scored_moves(outcome))
    assert "higher" in engine.contexts[1].rpartition("user")[2]
    assert engine.contexts[1].count("between 1 and 20") == 1  # what was read is not sent again
    assert scored.extra["num_moves"] in (1, 2, 3, 4)

    (tmp_path / "opponent.py").write_text(OPPONENT)
    game = settings_of("textarena", "Nim-v0", num_players=2, seat=1, opponent=f"{tmp_path}/opponent.py:move")
    engine = Engine("[1 1]", "[2 1]", "hello")
    [outcome] = play(game, engine)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert learned(outcome.episode.segments, outcome.episode.turn_lengths) == engine.sampled
    with pytest.raises(UserError, match="Nim-v0 with 2 players needs the argument opponent for the other seats"):
        check_environment(settings_of("textarena", "Nim-v0", num_players=2))
    with pytest.raises(UserError, match="Nim-v0: seat 2, but 2 players have 0 to 1"):
        check_environment(settings_of("textarena", "Nim-v0", num_players=2, seat=2, opponent="self"))


@pytest.mark.long
def test_the_policy_plays_all_seats_of_a_game_and_learns_from_its_own():
    game = settings_of("textarena", "Nim-v0", num_players=2, seat=1, opponent="self")
    # Piles of 3, 4 and 5: who takes the last object wins. Seat 0 begins.
    engine = Engine("[0 3]", "[1 4]", "[2 4]", "[2 1]")
    [outcome] = play(game, engine)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert outcome.reward == 1.0
    assert outcome.extra == {"num_moves": 2, "finished": 1.0}
    own = Counter({sampled: 1 for sampled in engine.sampled if sampled[3][0] in (2, 4)})  # by the engine's count
    assert learned(outcome.episode.segments, outcome.episode.turn_lengths) == own
    assert "Welcome to Nim, Player 0!" in engine.contexts[0]
    assert "Welcome to Nim, Player 1!" in engine.contexts[1]
    assert engine.contexts[3].startswith(engine.contexts[1])
    assert "[2 4]" in engine.contexts[3]

    [cut] = play(game, Engine("[0 3]", "[1 4]"), max_steps=2)
    assert isinstance(cut, ScoredEpisode), cut
    assert (cut.reward, cut.extra) == (0.0, {"num_moves": 1, "finished": 0.0})


def scored_moves(outcome: Outcome) -> int:
    assert isinstance(outcome, ScoredEpisode), outcome
    return int(outcome.extra["num_moves"])


@pytest.mark.long
def test_openenv_serves_a_file_and_is_reached_at_an_address(tmp_path):
    (tmp_path / "echo.py").write_text(OPENENV)
    settings = settings_of("openenv", f"{tmp_path}/echo.py", observation="echo")
    assert environment_rows(settings, 2, 2) == [{"text": "say c", "label": "2"}]
    engine = Engine("cab", "cc")
    [outcome] = play(settings, engine, label="2")
    assert check(outcome, engine, 2).reward == 3.0
    assert "user\ncab?<|im_end|>" in engine.contexts[1]

    as_json = settings_of("openenv", f"{tmp_path}/echo.py", action=None)
    engine = Engine("cab", '{"message": "c"}', '{"message": "c"}')
    [outcome] = play(as_json, engine, label="2")
    scored = check(outcome, engine, 3)
    assert (scored.reward, scored.extra["invalid_actions"]) == (2.0, 1)
    assert '{"echo": "say c"}' in engine.contexts[0]

    with pytest.raises(UserError, match="the observation has no field 'text'; it has echo"):
        environment_rows(settings_of("openenv", f"{tmp_path}/echo.py", observation="text"), 0, 0)
    with pytest.raises(UserError, match="openenv takes the arguments action, observation, reset, system, not model"):
        check_environment(settings_of("openenv", f"{tmp_path}/echo.py", model="x"))


@pytest.mark.long
def test_verifiers_environments_with_and_without_tools(tmp_path):
    from trl.chat_template_utils import qwen3_template

    tokenizer_of("qwen3").response_template = qwen3_template
    (tmp_path / "letters.py").write_text(VERIFIERS)
    settings = settings_of("verifiers", f"{tmp_path}/letters.py")
    assert environment_rows(settings, 1, 1) == [{"text": "say b", "label": "1"}]
    engine, other = Engine("bad"), Engine("cad")
    first, second = play(settings, engine, other)
    assert check(first, engine, 1).reward == 1.0
    assert first.extra["has_letter"] == 1.0
    assert check(second, other, 1).reward == 0.0
    engine = Engine("")  # nothing but the token that ends an answer
    [outcome] = play(settings, engine)
    assert check(outcome, engine, 1).reward == 0.0
    with pytest.raises(UserError, match="there is no task 8: the environment's data set has 8"):
        environment_rows(settings, 7, 8)

    tools = settings_of("verifiers", f"{tmp_path}/letters.py", kind="tool")
    call = '<tool_call>\n{"name": "lookup", "arguments": {"letter":"b"}}\n</tool_call>'  # as no template writes it
    engine = Engine(call, "bad", name="qwen3")
    [outcome] = play(tools, engine, name="qwen3")
    assert check(outcome, engine, 2).reward == 1.0
    assert '"name": "lookup"' in engine.contexts[0]
    assert "<tool_response>\nbad\n</tool_response>" in engine.contexts[1]

    engine = Engine(call, name="qwen3")  # it has no other answer, and the run allows one
    [outcome] = play(tools, engine, name="qwen3", max_steps=1)
    assert check(outcome, engine, 1).reward == 0.0


# --- processes --------------------------------------------------------------------------------------------------------

PLAY = """
import os, time
began = time.monotonic()  # tells processes apart, which may be alone in their namespaces

async def play(prompt, client):
    if prompt.label == "ends":
        os._exit(7)
    answer = client.ask([{"role": "user", "content": prompt.text}])
    if prompt.label == "raises":
        raise ValueError("no luck")
    return {"reward": len(answer), "extra": {"began": began, "is_home": os.environ["HOME"] == os.getcwd()}}
"""


def own_function(tmp_path: Path, code: str = PLAY) -> EnvironmentSettings:
    (tmp_path / "agent.py").write_text(textwrap.dedent(code))
    return EnvironmentSettings(file=f"{tmp_path}/agent.py", python=sys.executable)


def test_a_function_plays_under_another_interpreter_in_a_process_that_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings = own_function(tmp_path, PLAY.replace("async def", "def"))
    programs = ProgramSettings(environment=settings)
    agent = load_agent(None, tokenizer_of("smollm2"), max_length=600, programs=programs)
    engine = Engine("cab")
    with AgentHost(agent, engine, run_seed=5, timeout_s=WAIT_S) as host:
        outcomes = [
            host.submit(Prompt(3, "bad?", (1,), label), SampleKey(0, 3, at), SAMPLING).result(WAIT_S)
            for at, label in enumerate(["a", "raises", "ends", "b", "c"])
        ]
    first, raised, ended, after, last = outcomes
    assert first.reward == 3
    assert first.extra["is_home"] == 1.0
    assert reason(raised) == f"the agent raised ValueError: no luck ({tmp_path}/agent.py:10)"
    assert reason(ended) == f"its process ended twice with it: exit code 7, by os._exit at {tmp_path}/agent.py:7"
    assert after.extra["began"] == last.extra["began"] != first.extra["began"]
    for outcome in (first, after, last):
        assert isinstance(outcome, ScoredEpisode)
    deadline = time.monotonic() + WAIT_S
    while processes_of(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_host_that_closes_leaves_the_processes_of_the_agents_next_host_alone(tmp_path):
    programs = ProgramSettings(environment=own_function(tmp_path))
    agent = load_agent(None, tokenizer_of("smollm2"), max_length=600, programs=programs)

    def ask(host: AgentHost, sample: int) -> Outcome:
        return host.submit(Prompt(3, "bad?", (1,), "a"), SampleKey(0, 3, sample), SAMPLING).result(WAIT_S)

    with AgentHost(agent, Engine("cab"), run_seed=5, timeout_s=WAIT_S) as late:
        assert ask(late, 0).reward == 3
        with AgentHost(agent, Engine("cab"), run_seed=5, timeout_s=WAIT_S) as host:
            before = ask(host, 1)
            late.close()
            after = ask(host, 2)
    assert after.reward == 3
    assert after.extra["began"] == before.extra["began"]


@pytest.mark.long
def test_an_episode_that_takes_too_long_ends_and_others_go_on(tmp_path):
    code = """
        import asyncio

        async def play(prompt, client):
            if prompt.label == "slow":
                await asyncio.sleep(1e6)
            return float(len(await asyncio.to_thread(client.ask, [{"role": "user", "content": "bad?"}])))
    """
    programs = ProgramSettings(environment=own_function(tmp_path, code))
    agent = load_agent(None, tokenizer_of("smollm2"), max_length=600, programs=programs)
    slow = Prompt(3, "bad?", (1,), "slow")
    with AgentHost(agent, Engine("cab"), run_seed=5, timeout_s=WAIT_S) as host:
        assert host.submit(Prompt(3, "bad?", (1,), "a"), SampleKey(0, 3, 0), SAMPLING).result(WAIT_S).reward == 3
        held_up = host.submit(slow, SampleKey(0, 3, 1), SAMPLING)
        assert host.submit(Prompt(3, "bad?", (1,), "b"), SampleKey(0, 3, 2), SAMPLING).result(WAIT_S).reward == 3
        assert not held_up.done()
    with AgentHost(agent, Engine("cab"), run_seed=5, timeout_s=1.0) as host:
        assert isinstance(host.submit(slow, SampleKey(0, 3, 1), SAMPLING).result(WAIT_S), Failed)


def test_the_end_of_its_socket_ends_the_process_and_what_it_started(tmp_path):
    code = """
        import subprocess, sys

        child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1e6)"])

        def play(prompt, client):
            return 0.0
    """
    settings = own_function(tmp_path, code)
    output, write = os.pipe()  # both processes hold its end
    child = ChildProcess(WORKER, settings.spec, stdout=write, stderr=None)
    os.close(write)
    assert child.receive(WAIT_S) == {"id": 0, "result": None}
    child.socket.close()  # as if the host were gone
    assert child.process.wait(WAIT_S) == -signal.SIGKILL
    with os.fdopen(output, "rb") as written:
        assert written.read() in (b"up\n", b"")  # ends when the last one has


ENVIRONMENT_HOST = """
import json, sys, time
from hotseat.agents.environments.environment_agent import StartedEnvironment
from hotseat.agents.environments.families import EnvironmentSettings
started = StartedEnvironment(EnvironmentSettings(file=sys.argv[1], python=sys.executable), ())
print(json.dumps(started.receive()), flush=True)
time.sleep(1e6)
"""


@pytest.mark.long
def test_environments_of_a_host_that_was_killed_end_with_what_they_started(tmp_path):
    code = """
        import subprocess

        subprocess.Popen(["sleep", "1000"], start_new_session=True)

        def play(prompt, client):
            return 0.0
    """
    own_function(tmp_path, code)
    folders = tmp_path / "folders"
    folders.mkdir()
    env = {**os.environ, "TMPDIR": str(folders)}
    command = [sys.executable, "-c", ENVIRONMENT_HOST, f"{tmp_path}/agent.py"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as host:
        assert json.loads(host.stdout.readline()) == {"id": 0, "result": None}
        assert processes_of(folders)
        host.kill()
    deadline = time.monotonic() + WAIT_S
    while processes_of(folders) or os.listdir(folders):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_process_that_fails_says_why_before_it_is_killed(tmp_path):
    settings = own_function(tmp_path)
    child = ChildProcess(WORKER, settings.spec, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    child.receive(WAIT_S)
    child.socket.send(struct.pack("<Q", 1) + b"{")  # no JSON
    child.process.wait(WAIT_S)
    assert "JSONDecodeError" in child.written()
    child.end()


def test_numbers_of_numpy_become_pythons_wherever_they_are():
    result = _plain({"reward": numpy.float32(0.5), "turn_rewards": [numpy.int64(1), (numpy.float64(2), "x")]})
    assert json.dumps(result) == '{"reward": 0.5, "turn_rewards": [1, [2.0, "x"]]}'


def test_what_cannot_be_loaded_is_said_before_anything_is_played(tmp_path):
    with pytest.raises(UserError, match="agent.py has no function play"):
        check_environment(own_function(tmp_path, "x = 1"))
    with pytest.raises(UserError, match=r"agent.environment: .*agent.py: ZeroDivisionError: .*agent.py:1"):
        check_environment(own_function(tmp_path, "nothing = 1 / 0"))
    with pytest.raises(UserError, match="its process ended with exit code 3"):
        check_environment(own_function(tmp_path, "import os\nos._exit(3)"))
    with pytest.raises(UserError, match="its process cannot be started"):
        check_environment(EnvironmentSettings(file="x.py", python="/no/python"))


def test_a_version_of_verifiers_without_these_environments_is_refused(tmp_path, monkeypatch):
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text("__version__ = '0.4.0'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="verifiers 0.4.0 has no load_environment: install 'verifiers>=0.3,<0.4'"):
        check_environment(EnvironmentSettings("verifiers", "x"))


def test_a_missing_library_names_how_to_install_it(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    extras = {name: name for name in FAMILIES} | {"reasoning_gym": "reasoning-gym"}
    for name, env in FAMILIES.items():
        assert library_problem(name, str(bare)) == (
            f"{name}: the package {name} is not installed for {bare}: pip install 'hotseat[{extras[name]}]', or"
            f" `make agent-envs` and agent.python: .agent-envs/{env}/bin/python"
        )
    assert library_problem("verifiers", "/no/python") == (
        "there is no interpreter /no/python: `make agent-envs` makes those of the families of environments"
    )
