"""Whole runs in which environments and agents of other libraries play the episodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from environment_cases import GYM, OPENENV, VERIFIERS, python_of, python_with
from loop_cases import rl_yaml
from tiny_model import make_model

from hotseat.config import loads
from hotseat.errors import ConfigError, UserError
from hotseat.loop.run import start
from hotseat.loop.workers.spool import Spool
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

OPENAI_AGENT = """
import agents
import openai

agents.set_tracing_disabled(True)

async def play(prompt, client):
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=http) as policy:
        model = agents.OpenAIChatCompletionsModel(model=client.model, openai_client=policy)
        result = await agents.Runner.run(agents.Agent(name="a", instructions="Say it.", model=model), prompt.text)
    return float(result.final_output.count("a"))
"""

SMOLAGENT = """
import smolagents

def play(prompt, client):
    model = smolagents.OpenAIServerModel(client.model, api_base=client.base_url, api_key=client.api_key)
    agent = smolagents.CodeAgent(tools=[], model=model, max_steps=1, verbosity_level=0)
    return float(len(str(agent.run(prompt.text))) % 7)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, 0, width=16, max_length=16_384)
    return folder


def run(tmp_path: Path, model: Path, agent: dict, data: dict | None = None) -> list[dict]:
    """Train for two steps; return the records of the steps."""
    text = rl_yaml(
        tmp_path,
        actor=json.dumps({"model": str(model), "optimizer": {"learning_rate": 1e-3}}),
        data=json.dumps({"path": "environment:0-3", "max_length": 2048, **(data or {})}),
        agent=json.dumps({"max_steps": 2, **agent}),
        rollout="{batch_size: 2, samples_per_prompt: 2, max_new_tokens: 6, num_slots: 4}",
        train="{dtype: fp32, batch_size: 4, micro_batch_size: 4}",
        log="{keep_rollouts: true}",
        reward="",
    )
    start(loads(text))
    records = read_lines(tmp_path / "runs" / "run" / "metrics.jsonl")[1:]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["samples_failed"] == 0
        assert record["engine_gap"] < 1e-5  # the trainer's log-probs of the same tokens
    for prompt in range(4):
        finished = Spool(tmp_path / "runs" / "run" / "rollouts").get((0, prompt))
        assert finished is not None
        assert not finished.failures
        for sample in finished.group.samples:
            learned = sum(int(segment.mask.sum()) for segment in sample.episode.segments)
            assert learned == sum(sample.episode.turn_lengths) > 0
    return records


def test_gymnasium_makes_training_steps_and_its_tasks_are_the_prompts(tmp_path, model):
    (tmp_path / "letters.py").write_text(GYM)
    environment = {"family": "gymnasium", "name": f"{tmp_path}/letters.py:Letters-v0", "num_processes": 2}
    agent = {"environment": environment, "python": python_of("gymnasium")}
    records = run(tmp_path, model, agent)
    assert all("extra/num_actions" in record for record in records)


@pytest.mark.long
def test_reasoning_gym_makes_training_steps(tmp_path, model):
    environment = {"family": "reasoning_gym", "name": "chain_sum", "arguments": {"seed": 1}}
    run(tmp_path, model, {"environment": environment, "python": python_of("reasoning_gym")})


@pytest.mark.long
def test_textarena_makes_training_steps(tmp_path, model):
    environment = {"family": "textarena", "name": "GuessTheNumber-v0"}
    run(tmp_path, model, {"environment": environment, "python": python_of("textarena")})


@pytest.mark.long
def test_openenv_makes_training_steps(tmp_path, model):
    (tmp_path / "echo.py").write_text(OPENENV)
    environment = {"family": "openenv", "name": f"{tmp_path}/echo.py", "arguments": {"observation": "echo"}}
    run(tmp_path, model, {"environment": environment, "python": python_of("openenv")})


@pytest.mark.long
@pytest.mark.parametrize("kind", ["single", "tool"])
def test_verifiers_makes_training_steps(tmp_path, model, kind):
    (tmp_path / "letters.py").write_text(VERIFIERS)
    environment = {"family": "verifiers", "name": f"{tmp_path}/letters.py", "arguments": {"kind": kind}}
    records = run(tmp_path, model, {"environment": environment, "python": python_of("verifiers"), "max_steps": 3})
    assert all("extra/has_letter" in record for record in records)


@pytest.mark.long
@pytest.mark.parametrize(("package", "code"), [("agents", OPENAI_AGENT), ("smolagents", SMOLAGENT)])
def test_agents_of_libraries_make_training_steps(tmp_path, model, package, code):
    (tmp_path / "agent.py").write_text(code)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"input": f"say {word}"}) + "\n" for word in "abcd"))
    agent = {"path": f"{tmp_path}/agent.py", "python": python_with(package), "max_steps": None}
    run(tmp_path, model, agent, {"path": f"{tmp_path}/prompts.jsonl", "max_length": 16_384})


# --- what is refused --------------------------------------------------------------------------------------------------


def problems(tmp_path: Path, model: Path, agent: dict, **data: object) -> str:
    text = rl_yaml(
        tmp_path,
        actor=json.dumps({"model": str(model)}),
        data=json.dumps({"path": "environment:0-3", "max_length": 64, **data}),
        agent=json.dumps(agent),
        reward="",
    )
    with pytest.raises((ConfigError, UserError)) as raised:
        start(loads(text))
    return str(raised.value)


def test_what_does_not_fit_is_refused_before_any_model_loads(tmp_path, model):
    gym = {"family": "gymnasium", "name": "Letters-v0"}
    assert "data.path: environment:0-3: there is no environment; set agent.environment.family" in problems(
        tmp_path, model, {"path": "a.py"}
    )
    assert "'environment:3-0': write it as environment:0-511, from the first task to the last" in problems(
        tmp_path, model, {"environment": gym}, path="environment:3-0"
    )
    assert "agent.path is a.py: an episode is played by one of the two" in problems(
        tmp_path, model, {"environment": gym, "path": "a.py"}
    )
    assert "agent.environment is set: an episode is played by one of the two" in problems(
        tmp_path, model, {"environment": gym, "command": ["true"]}
    )
    assert "there is no interpreter /no/python: `make agent-envs` makes" in problems(
        tmp_path, model, {"environment": gym, "python": "/no/python"}
    )
    assert "agent.python" in problems(tmp_path, model, {"python": "/no/python", "path": "a.py"}, path="rows.jsonl")
    assert "gymnasium Letters-v0: NameNotFound" in problems(
        tmp_path, model, {"environment": gym, "python": python_of("gymnasium")}
    )
