"""What a rollout host's process dies of is known to the next one: real processes end amid episodes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_cases import SAMPLING, TOKENIZER, WAIT_S, Script, prompt_of

from hotseat.agents import AgentHost, Environment, MultiTurn, Step
from hotseat.agents.crash_record import CrashRecord, num_given_up
from hotseat.types import Failed, SampleKey, ScoredEpisode

HOST = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from agent_cases import SAMPLING, TOKENIZER, WAIT_S, Script, prompt_of
from hotseat.agents import AgentHost, load_agent
from hotseat.agents.crash_record import CrashRecord
from hotseat.types import SampleKey

record = CrashRecord(Path({folder!r}) / "crashes-1", "host-0")
record.note_exits()
agent = load_agent({agent!r}, TOKENIZER, max_length=100)
with AgentHost(agent, Script(lambda request: "a"), run_seed=0, timeout_s=WAIT_S, crashes=record) as host:
    samples = [(prompt_of("q", str(at)), SampleKey(0, 0, at)) for at in range(4)]
    for future in host.submit_many(samples, SAMPLING):
        print(future.result(WAIT_S))
"""

AGENT = """
import os, signal, threading, time
from hotseat import Environment, Step

class Dies(Environment):
    def reset(self, prompt, label):
        self.label = label
    def step(self, action):
        if self.label == "2":
            {end}
        time.sleep(0.3)
        return Step("", reward=1.0, done=True)
"""


def run_until_it_ends(tmp_path, end):
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT.format(end=end))
    path = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]
    script = HOST.format(path=path, folder=str(tmp_path), agent=str(agent))
    ended = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S) for _ in range(3)
    ]
    return [each.returncode for each in ended], ended[-1].stdout.splitlines(), agent


@pytest.mark.slow
def test_an_episode_that_exits_its_process_twice_fails_with_file_line_and_code_and_the_others_go_on(tmp_path):
    codes, outcomes, agent = run_until_it_ends(tmp_path, "os._exit(3)")
    assert codes == [3, 3, 0]
    assert [each.partition("(")[0] for each in outcomes] == [
        "ScoredEpisode",
        "ScoredEpisode",
        "Failed",
        "ScoredEpisode",
    ]
    assert f"{agent}: sample 0/0/2: the process of its rollout host ended twice with it: exit code 3" in outcomes[2]
    assert f"by os._exit at {agent}:10" in outcomes[2]
    assert num_given_up(tmp_path) == 1


@pytest.mark.long
@pytest.mark.slow
def test_of_several_episodes_that_run_while_a_process_is_killed_only_the_guilty_one_fails(tmp_path):
    codes, outcomes, _ = run_until_it_ends(tmp_path, "time.sleep(0.1); os.kill(os.getpid(), signal.SIGKILL)")
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    kinds = [each.partition("(")[0] for each in outcomes]
    assert kinds == ["ScoredEpisode", "ScoredEpisode", "Failed", "ScoredEpisode"]
    assert "it was killed, or crashed" in outcomes[2]


def test_an_episode_with_a_strike_is_played_alone_among_those_with_one(tmp_path):
    """Else the next death would be theirs together."""
    first = CrashRecord(tmp_path / "crashes-1", "host-0")
    for sample in range(6):
        first.enter(f"0/0/{sample}")
    first.leave("0/0/5")
    record = CrashRecord(tmp_path / "crashes-1", "host-0")  # as a process does that takes the place of a killed one
    assert [record.is_struck(f"0/0/{sample}") for sample in range(6)] == [True] * 5 + [False]
    running: set[str] = set()
    together: list[set[str]] = []

    class Notes(Environment):
        def reset(self, prompt, label):
            self.label = label
            running.add(label)
            together.append({*running})

        def step(self, action):
            together.append({*running})
            running.discard(self.label)
            return Step("", reward=1.0, done=True)

    agent = MultiTurn(Notes, TOKENIZER, max_length=100)
    with AgentHost(agent, Script(lambda request: "a"), run_seed=0, timeout_s=WAIT_S, crashes=record) as host:
        samples = [(prompt_of("q", str(at)), SampleKey(0, 0, at)) for at in range(6)]
        outcomes = [future.result(WAIT_S) for future in host.submit_many(samples, SAMPLING)]
    assert all(isinstance(outcome, ScoredEpisode) for outcome in outcomes)
    assert all(len(each - {"5"}) <= 1 for each in together)
    assert num_given_up(tmp_path) == 0


def test_an_episode_that_failed_for_its_deadline_is_not_played_again(tmp_path):
    CrashRecord(tmp_path / "crashes-1", "host-0").blame("0/0/1", "an agent blocks the event loop", has_failed=True)
    record = CrashRecord(tmp_path / "crashes-1", "host-0")
    agent = MultiTurn(lambda: pytest.fail("it was played"), TOKENIZER, max_length=100)
    with AgentHost(agent, Script([]), run_seed=0, timeout_s=WAIT_S, crashes=record) as host:
        outcome = host.submit(prompt_of("q"), SampleKey(0, 0, 1), SAMPLING).result(WAIT_S)
    assert isinstance(outcome, Failed)
    assert outcome.reason.endswith("sample 0/0/1: an agent blocks the event loop")


def test_a_process_that_was_closed_leaves_no_strike(tmp_path):
    record = CrashRecord(tmp_path / "crashes-1", "host-0")
    record.enter("0/0/0")
    record.leave("0/0/0")
    record.enter("0/0/0")
    record.clear()
    assert not CrashRecord(tmp_path / "crashes-1", "host-0").is_struck("0/0/0")
    record.close()
    assert not (tmp_path / "crashes-1").exists()
