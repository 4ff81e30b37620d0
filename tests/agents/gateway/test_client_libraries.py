"""Agents of other libraries, which reach the policy through the gateway by their own calls.

`make agent-envs` installs the libraries; what they send is in `test_gateway_server.py`, by clients of OpenAI and
Anthropic.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_templates import tokenizer_of
from environment_cases import python_with
from gateway_cases import KEY, SAMPLING, WAIT_S, Engine, learned

from hotseat.agents import AgentHost, ProgramSettings, load_agent
from hotseat.agents.environments.families import EnvironmentSettings
from hotseat.types import Prompt, ScoredEpisode

pytestmark = [pytest.mark.slow, pytest.mark.long]

START_S = 300.0  # libraries are large, and others work on the same cores
CALL = '<think>bad</think>\n\n<tool_call>{"name":"add","arguments":{"a":  1}}</tool_call>'  # as no template writes it
FINAL = '<tool_call>{"name":"final_answer","arguments":{"answer":"ace"}}</tool_call>'
CODE = "Thoughts: none\n<code>\nfinal_answer(add(a=1) * 21)\n</code>|cut"  # where it asks to stop


def play(tmp_path: Path, package: str, code: str, *answers: str) -> ScoredEpisode:
    """Run a program that uses a package, with what the engine is to answer: all of it is learned, id by id."""
    from trl.chat_template_utils import qwen3_template

    tokenizer_of("qwen3").response_template = qwen3_template
    (tmp_path / "program.py").write_text(code)
    settings = EnvironmentSettings(file=f"{tmp_path}/program.py", python=python_with(package))
    programs = ProgramSettings(environment=settings)
    agent = load_agent(None, tokenizer_of("qwen3"), max_length=40_000, programs=programs)
    engine = Engine(*answers, name="qwen3")
    with AgentHost(agent, engine, run_seed=5, timeout_s=START_S) as host:
        outcome = host.submit(Prompt(3, "bad?", (1,), "7"), KEY, SAMPLING).result(START_S + WAIT_S)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert learned(outcome.episode.segments, outcome.episode.turn_lengths) == engine.sampled
    assert sum(engine.sampled.values()) == len(answers)
    return outcome


OPENAI_AGENTS = """
import agents
import openai

agents.set_tracing_disabled(True)

@agents.function_tool
def add(a: int) -> str:
    "Add one."
    return str(a + 1)

async def play(prompt, client):
    policy = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    model = agents.MODEL(model=client.model, openai_client=policy)
    agent = agents.Agent(name="adder", instructions="Add.", tools=[add], model=model)
    result = await agents.Runner.run(agent, prompt.text)
    assert result.final_output == "ace", result.final_output
    streamed = agents.Runner.run_streamed(agent, prompt.text)
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds and streamed.final_output == "dad", (kinds, streamed.final_output)
    await policy.close()
    return 1.0
"""


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_with_a_tool_and_streaming(tmp_path, model):
    play(tmp_path, "agents", OPENAI_AGENTS.replace("MODEL", model), CALL, "ace", CALL, "dad")


SMOLAGENTS = """
import smolagents

@smolagents.tool
def add(a: int) -> int:
    '''Add one.

    Args:
        a: a number
    '''
    return a + 1

def play(prompt, client):
    model = smolagents.OpenAIServerModel(client.model, api_base=client.base_url, api_key=client.api_key)
    for is_streamed in (False, True):
        agent = smolagents.ToolCallingAgent(tools=[add], model=model, stream_outputs=is_streamed, verbosity_level=0)
        assert agent.run(prompt.text) == "ace"
    coder = smolagents.CodeAgent(tools=[add], model=model, verbosity_level=0)
    return float(coder.run(prompt.text))
"""


def test_smolagents_that_call_tools_and_that_write_code(tmp_path):
    outcome = play(tmp_path, "smolagents", SMOLAGENTS, CALL, FINAL, CALL, FINAL, CODE)
    assert outcome.reward == 42.0


LITELLM = """
import litellm

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

def play(prompt, client):
    where = {"model": "openai/policy", "api_base": client.base_url, "api_key": client.api_key}
    messages = [{"role": "user", "content": prompt.text}]
    message = litellm.completion(messages=messages, tools=TOOLS, **where).choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}'), call
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    chunks = litellm.completion(messages=messages, tools=TOOLS, stream=True, **where)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ace"
    anthropic = {"model": "anthropic/policy", "api_base": client.root_url, "api_key": client.api_key}
    reply = litellm.completion(messages=messages[:1], max_tokens=20, **anthropic)
    assert reply.choices[0].message.content == "dad", reply
    return 1.0
"""


def test_litellm_with_tools_streaming_and_two_protocols(tmp_path):
    play(tmp_path, "litellm", LITELLM, CALL, "ace", "dad")
