"""Whole runs with agent files of every form that OpenRLHF's versions had, written anew from their documents."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from loop_cases import rl_yaml

from hotseat.config import loads
from hotseat.loop.run import start
from hotseat.loop.workers.spool import Spool
from hotseat.observe import read_lines
from hotseat.types import ScoredEpisode

pytestmark = pytest.mark.slow

STEP_WITH_STATE = """
import torch
step_idx = 0
max_steps = 1
async def step(state, action, label, **kwargs):
    global step_idx
    done = step_idx >= max_steps
    step_idx += 1
    reward = torch.tensor(float(action.count("7"))) if done else torch.tensor(0)
    return reward, state + action + "+", done, {"turns": step_idx}
"""

STEP_WITH_DICT = """
step_idx = 0
async def step(observation, action, label, **kwargs):
    global step_idx
    step_idx += 1
    return {
        "rewards": action.count("7"), "scores": 0.5, "environment_feedback": "+", "done": step_idx == 2,
        "sampling_params": kwargs["sampling_params"], "extra_logs": {"turns": step_idx},
    }
"""

INSTANCE = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0
    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}
    async def step(self, states, **kwargs):
        self.turn += 1
        return {
            "rewards": torch.tensor(float(states["action_text"].count("7"))), "scores": torch.tensor(0.5),
            "environment_feedback": "+", "done": self.turn == 2, "sampling_params": states.get("sampling_params"),
            "extra_logs": {"turns": torch.tensor(self.turn)},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""

EXECUTE = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ranges, reward = [], 0.0
        sampling_params.max_tokens = 4
        for text in ("+", ""):
            output = (await llm_engine.generate(tokens, sampling_params, multi_modal_data=None)).outputs[0]
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            reward += output.text.count("7")
            tokens = tokens + output.token_ids + hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        return {
            "prompt": prompt, "label": label, "observation_tokens": tokens, "action_ranges": ranges,
            "rollout_log_probs": None, "reward": reward, "scores": 0.5, "truncated": False, "extra_logs": {"turns": 2},
        }
"""

SERVER = """
import asyncio, threading, uuid
import aiohttp
from aiohttp import web
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    def start(self, engine, tokenizer):
        self.engine, self.tokenizer, self.traces = engine, tokenizer, {}
        ready = threading.Event()

        def serve():
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)

            async def begin():
                app = web.Application()
                app.router.add_post("/v1/completions", self.complete)
                runner = web.AppRunner(app)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
                ready.set()

            loop.run_until_complete(begin())
            loop.run_forever()

        threading.Thread(target=serve, daemon=True).start()
        ready.wait(60)

    async def complete(self, request):
        body = await request.json()
        trace = self.traces.setdefault(body["session"], [])
        tokens = (trace[-1][0] + trace[-1][1] if trace else []) + self.tokenizer(body["text"])["input_ids"]
        output = (await self.engine.generate(tokens, self.sampling_params)).outputs[0]
        trace.append((tokens, list(output.token_ids)))
        return web.json_response({"text": output.text})

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        sampling_params.max_tokens = 4
        self.sampling_params = sampling_params
        if not hasattr(self, "url"):
            self.start(llm_engine, hf_tokenizer)
        session, reward = uuid.uuid4().hex, 0.0
        for text in (prompt, "+"):
            async with aiohttp.request("POST", self.url, json={"session": session, "text": text}) as reply:
                reward += (await reply.json())["text"].count("7")
        trace = self.traces.pop(session)
        return {
            "observation_tokens": trace[-1][0] + trace[-1][1],
            "action_ranges": [(len(context), len(context) + len(tokens)) for context, tokens in trace],
            "reward": reward, "extra_logs": {"turns": 2},
        }
"""

FORMS = {
    "step_with_state": STEP_WITH_STATE,
    "step_with_dict": STEP_WITH_DICT,
    "instance": INSTANCE,
    "execute": EXECUTE,
    "server": SERVER,
}


# The placements and algorithms that OpenRLHF's commands have: hybrid, and --async_train --partial_rollout.
HYBRID: dict[str, str] = {}
ASYNC = {
    "cluster": "{runtime: local, inventory: 1x3, component_placement: {actor: 0, rollout: 1, reference: 2}}",
    "overlap": "{staleness: 1, order: arrival, in_flight: keep}",
}
KL = {
    "k1 in the reward": {"coef": 0.01, "estimator": "k1"},
    "k2 as a loss": {"coef": 0.01, "estimator": "k2", "as_loss": True},
    "k3 as a loss": {"coef": 0.01, "estimator": "k3", "as_loss": True},
}
# One run of each form, in which every KL is met; the others take their time.
SHORT = {
    ("step_with_state", "hybrid", "k1 in the reward"),
    ("step_with_dict", "async", "k2 as a loss"),
    ("instance", "hybrid", "k3 as a loss"),
    ("execute", "async", "k1 in the reward"),
    ("server", "hybrid", "k2 as a loss"),
}
CASES = [
    pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
    for case in itertools.product(FORMS, ("hybrid", "async"), KL)
]


@pytest.mark.parametrize(("form", "placement", "kl"), CASES)
def test_an_agent_file_for_openrlhf_trains(task: Path, form: str, placement: str, kl: str):
    (task / "agent.py").write_text(FORMS[form])
    sections = {
        "agent": json.dumps({"path": f"{task}/agent.py", "turn_length": "rest"}),
        "reward": "",
        "data": json.dumps({"path": f"{task}/prompts.jsonl", "label_key": "label", "max_length": 24}),
        "log": "{keep_rollouts: true}",
        "algorithm": json.dumps({"kl": KL[kl]}),
    }
    start(loads(rl_yaml(task, **sections, **(ASYNC if placement == "async" else HYBRID))))
    records = read_lines(task / "runs" / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all("kl" in record for record in records[1:])
    if placement == "hybrid":
        # The trainer's log-probs of the engine's tokens; with stale weights they differ.
        assert all(record["engine_gap"] < 1e-5 for record in records[1:])
    for prompt in range(8):
        finished = Spool(task / "runs" / "run" / "rollouts").get((0, prompt))
        assert finished is not None
        assert not finished.failures
        for sample in finished.group.samples:
            check_sample(sample, form)


def check_sample(sample: ScoredEpisode, form: str) -> None:
    """One or two turns: the first may have used all of the length, where the agent leaves that to us."""
    [segment] = sample.episode.segments
    num_turns = len(sample.episode.turn_lengths)
    assert num_turns in (1, 2)
    if num_turns == 1:
        assert len(segment.token_ids) >= 23
        assert sample.episode.is_truncated
    elif form not in ("execute", "server"):
        assert sample.extra["turns"] == 2
    tokens = segment.token_ids[segment.mask]
    is_seven = tokens == 2 + 7  # after <pad> and <eos>
    first = sample.episode.turn_lengths[0]
    counted = is_seven[first:] if form == "step_with_state" else is_seven
    assert sample.reward == counted.sum()
