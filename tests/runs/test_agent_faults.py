"""Whole runs on Ray whose agents end their process, block it, or print."""

from __future__ import annotations

import json

import pytest
from loop_cases import rl_yaml

from hotseat.config import loads
from hotseat.loop.run import start

pytestmark = [pytest.mark.slow, pytest.mark.ray]

AGENT = """
import logging, os, time
from hotseat import Environment, Step

class Faulty(Environment):
    def reset(self, prompt, label, seed=0):
        self.prompt = prompt
        print("reset of", prompt)
        if prompt == "5+6=":
            os._exit(3)
    async def step(self, action):
        if self.prompt == "3+4=":
            time.sleep(10000)
        if self.prompt == "2+3=":
            raise ValueError("no such sum")
        return Step("", reward=float(len(action)), done=True)
"""


@pytest.mark.long
def test_what_blocks_or_ends_its_host_fails_alone_and_prints_are_in_the_logs(task, capfd):
    (task / "agent.py").write_text(AGENT)
    changes = {
        "cluster": "{component_placement: {actor: 0, rollout: 1}}",
        "agent": f"{{path: {task}/agent.py, tool_timeout_s: 2}}",
        "reward": "{max_failed_fraction: 1.0}",
    }
    small = [
        "rollout.samples_per_prompt=2",
        "rollout.batch_size=3",
        "train.batch_size=6",
        "train.micro_batch_size=6",
        "train.num_episodes=1",
    ]
    start(loads(rl_yaml(task, **changes), [*small, "algorithm.estimator=reinforce"]))
    run = task / "runs" / "run"
    ledger = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    reasons = {reason for entry in ledger if (reason := entry.get("reason"))}
    agent = f"{task}/agent.py"
    assert any("ended twice with it: exit code 3" in reason and f"{agent}:10" in reason for reason in reasons), reasons
    assert any("blocks the event loop" in reason and f"{agent}:13" in reason for reason in reasons), reasons
    assert any("ValueError: no such sum" in reason for reason in reasons), reasons
    console = capfd.readouterr()
    assert f"{agent}:13 blocks the event loop, which all episodes share" in console.out + console.err
    kept = (run / "logs" / "agents-0.log").read_text()
    assert "  reset of 1+2=\n" in kept
    assert "ValueError: no such sum\n" in kept
