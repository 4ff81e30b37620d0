"""Agent files written for OpenRLHF, in every form that its documents show."""

import asyncio
import builtins
import re
import sys

import pytest
from agent_cases import KEY, SAMPLING, TOKENIZER, WAIT_S, Script, ids_of, marked, play, prompt_of

from hotseat.agents import AgentError, AgentHost, load_agent
from hotseat.agents.agent_file import load_file
from hotseat.errors import UnsupportedError, UserError
from hotseat.types import Episode, Failed, Prompt, SampleKey, ScoredEpisode

# A module-level step with globals, as the guide to asynchronous RL has it.
STEP = """
from typing import Any, Dict, Tuple
import torch

step_idx = 0
max_steps = 2

async def step(state, action, label, **kwargs) -> Tuple[float, Dict[str, Any], bool]:
    global step_idx, max_steps
    if step_idx >= max_steps:
        done = True
        reward = torch.rand(1) * 0 + 1
        next_state = state + action + " The answer is correct. <|endoftext|>"
    else:
        done = False
        reward = torch.tensor(0)
        next_state = state + action + " try again: "
    step_idx += 1
    extra_info = {}
    return reward, next_state, done, extra_info
"""

# A class with a coroutine for a constructor and an executor with five arguments, as the guide to custom rewards has it.
CLASSES = """
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase
import torch
from typing import Dict, Any

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = 1

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        observation_text = states["observation_text"]
        action_text = states["action_text"]
        label = states["label"]
        done = self.step_idx >= self.max_steps
        reward = float(action_text == label) if done else 0.0
        feedback = "[END]" if done else "[NEXT]"
        self.step_idx += 1
        return {
            "rewards": torch.tensor([reward]),
            "scores": torch.tensor([max(0.0, reward + 0.5)]),
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"step": self.step_idx, "correct": reward == 1.0},
        }

class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)
"""

OVERRIDE = """
    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
"""

# The form since version 0.9: a plain constructor, and an executor of agent instances.
NEW = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        return {
            "rewards": float(self.turn),
            "environment_feedback": f"({self.turn})",
            "done": self.turn == 2,
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


# A module-level step that returns a dict, as the example of versions 0.8.3 to 0.8.6 does.
DICT = """
from typing import Any, Dict
import torch

step_idx = 0
max_steps = 1

async def step(observation, action, label, **kwargs) -> Dict[str, Any]:
    global step_idx
    done = step_idx >= max_steps
    reward = torch.tensor([float(action == label)]) if done else torch.tensor(0)
    next_observation = observation + action + (" [CORRECT]</s>" if done else " [TRY AGAIN]")
    step_idx += 1
    return {
        "rewards": reward,
        "scores": reward / 2,
        "next_observation": next_observation,
        "done": done,
        "sampling_params": kwargs.get("sampling_params", None),
        "extra_logs": {"dummy_scores": reward},
    }
"""

HAS_TO_RETURN = (
    "it has to return (reward, next_state, done, extra_info), or a dict with rewards, environment_feedback and done"
)


@pytest.fixture
def load(tmp_path):
    def load_text(text: str, **limits):
        (tmp_path / "agent_func.py").write_text(text)
        return load_agent(tmp_path / "agent_func.py", TOKENIZER, **{"max_length": 200, **limits})

    return load_text


def without_executor(text: str) -> str:
    return text.partition("class AgentExecutor(")[0]


# --- step functions ---------------------------------------------------------------------------------------------------


def test_a_step_function_with_module_globals(load):
    scored = play(load(STEP), Script(["a", "b", "c"]))
    assert marked(scored.episode) == ["q:[a] try again: [b] try again: [c]"]
    assert scored.episode.query.endswith("c The answer is correct. <|endoftext|>")
    assert (scored.reward, scored.turn_rewards, scored.extra) == (1.0, (0.0, 0.0, 1.0), {})


def test_each_episode_of_a_step_function_sees_its_own_globals(load):
    script = Script(lambda request: "a")
    with AgentHost(load(STEP), script, run_seed=0, max_concurrent=8) as host:
        futures = [host.submit(prompt_of("q"), SampleKey(0, 0, at), SAMPLING) for at in range(40)]
        assert {len(future.result(WAIT_S).turn_rewards) for future in futures} == {3}
    assert "hotseat_agent" not in sys.modules


LOADED = """
import builtins
builtins.num_loaded += 1
{flag}
def step(state, action, label, **kwargs):
    return 1.0, state + action, True, {{}}
"""


@pytest.mark.parametrize(("flag", "num_loaded"), [("", 4), ("SHARED_GLOBALS = False", 4), ("SHARED_GLOBALS = True", 1)])
def test_a_file_is_run_for_each_episode_unless_it_shares_its_globals(load, monkeypatch, flag, num_loaded):
    monkeypatch.setattr("builtins.num_loaded", 0, raising=False)
    agent = load(LOADED.format(flag=flag))
    for _ in range(3):
        assert play(agent, Script(["a"])).reward == 1.0
    assert builtins.num_loaded == num_loaded


SLOW = "import time\n{flag}\ntime.sleep({s})\ndef step(state, action, label):\n    return 1.0, state, True, {{}}\n"


@pytest.mark.parametrize(
    ("text", "has_note"),
    [
        (SLOW.format(flag="", s=0.25), True),
        (SLOW.format(flag="SHARED_GLOBALS = True", s=0.25), False),
        ("import time\n" + NEW.replace("\nclass AgentInstance", "\ntime.sleep(0.25)\nclass AgentInstance"), False),
    ],
)
def test_a_note_names_the_flag_if_running_a_file_for_each_episode_takes_long(tmp_path, text, has_note):
    file = tmp_path / "agent_func.py"
    file.write_text(text)
    _, note = load_file(file, None)
    assert (note is not None) == has_note
    if has_note:
        assert re.fullmatch(
            rf"{file} is run for every episode, which takes 0\.\d s: with SHARED_GLOBALS = True .*", note
        )


def test_a_plain_step_function_that_takes_three_arguments(load):
    text = "def step(state, action, label):\n    return 1.0, state + action, label == 'x', {'seen': 2}\n"
    scored = play(load(text), Script(["a"]), label="x")
    assert (scored.reward, scored.extra) == (1.0, {"seen": 2.0})


def test_a_step_function_that_rewrites_the_state_starts_another_segment(load):
    text = "async def step(state, action, label, **kwargs):\n    return 0.5, 'memory: ' + action, 'b' in action, {}\n"
    scored = play(load(text), Script(["a", "b"]))
    assert marked(scored.episode) == ["q:[a]", "memory: a[b]"]
    assert scored.episode.turn_lengths == (1, 1)
    assert scored.reward == 1.0


FEEDBACK = DICT.replace('"next_observation": next_observation', '"environment_feedback": " [TRY AGAIN]"')


@pytest.mark.parametrize("text", [DICT, DICT.replace('"next_observation":', '"next_state":'), FEEDBACK])
def test_a_step_function_that_returns_a_dict(load, text):
    scored = play(load(text), Script(["a", "b"]), label="b")
    assert marked(scored.episode) == ["q:[a] [TRY AGAIN][b]"]
    assert (scored.reward, scored.score, scored.turn_rewards) == (1.0, 0.5, (0.0, 1.0))
    assert scored.extra == {"dummy_scores": 1.0}
    assert not scored.episode.is_truncated


def test_a_dict_may_have_no_scores_and_no_logs(load):
    text = "def step(state, action, label):\n    return {'rewards': 2, 'next_state': state + action, 'done': True}\n"
    scored = play(load(text), Script(["a"]))
    assert (scored.reward, scored.score, scored.extra) == (2.0, 2.0, {})


def test_a_dict_with_another_observation_starts_another_segment(load):
    text = DICT.replace("observation + action + (", "'memory: ' + action + (")
    assert marked(play(load(text), Script(["a", "b"])).episode) == ["q:[a]", "memory: a [TRY AGAIN][b]"]


def test_a_dict_may_bound_the_next_answer(load):
    text = DICT.replace("    step_idx += 1\n", "    step_idx += 1\n    kwargs['sampling_params'].max_tokens = 3\n")
    script = Script(["a", "b"])
    play(load(text), script)
    assert [request.sampling.max_new_tokens for request in script.requests] == [50, 3]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"rewards": reward,', "", "step returned a dict without 'rewards'; it has: scores, next_observation, done"),
        ('"done": done,', "", "step returned a dict without 'done'; it has: rewards"),
        (
            '"next_observation": next_observation,',
            "",
            "step returned a dict without 'environment_feedback or next_observation or next_state'; it has: rewards",
        ),
        ('"next_observation": next_observation', '"next_observation": 3', "step: next_observation is a int, not a"),
        ("reward / 2", "[1, 2]", "scores is a list of 2, not one number"),
    ],
)
def test_dicts_that_cannot_be(load, old, new, reason):
    failed = play(load(DICT.replace(old, new)), Script(["a", "b"]))
    assert reason in failed.reason


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("None", f"step returned a NoneType; {HAS_TO_RETURN}"),
        ("'four'", f"step returned a str; {HAS_TO_RETURN}"),
        ("(1.0, 'x', True)", f"step returned 3 values; {HAS_TO_RETURN}"),
        ("(1.0, None, True, {})", "step returned a next_state that is a NoneType, not a string"),
        ("(float('nan'), 'x', True, {})", "reward is nan"),
        ("(None, 'x', True, {})", "reward is a NoneType, not one number"),
        ("(1.0, 'x', True, 3)", "extra_logs is a int, not a dict"),
    ],
)
def test_step_functions_that_cannot_be(load, result, reason):
    failed = play(load(f"async def step(state, action, label, **kwargs):\n    return {result}\n"), Script(["a"]))
    assert failed.reason.endswith(reason)
    assert "agent_func.py: sample 0/3/1: " in failed.reason


# --- agent instances --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [CLASSES, CLASSES + OVERRIDE, without_executor(CLASSES)])
def test_classes_of_the_guide(load, text):
    script = Script(["3<eos>", "4"])
    scored = play(load(text), script, label="4")
    assert isinstance(scored, ScoredEpisode)
    assert marked(scored.episode) == ["q:[3<eos>][NEXT][4]"]
    assert (scored.reward, scored.score) == (1.0, 1.5)
    assert (scored.turn_rewards, scored.extra) == ((0.0, 1.0), {"step": 2.0, "correct": 1.0})
    assert scored.episode.turn_lengths == (2, 1)
    assert not scored.episode.is_truncated
    assert [request.sampling.temperature for request in script.requests] == [0.7, 0.7]


@pytest.mark.parametrize("text", [NEW, without_executor(NEW)])
def test_classes_of_the_newer_api(load, text):
    scored = play(load(text), Script(["a", "b"]))
    assert marked(scored.episode) == ["q:[a](1)[b]"]
    assert (scored.reward, scored.score, scored.turn_rewards) == (3.0, 3.0, (1.0, 2.0))


def test_turns_end_at_max_steps(load):
    for text in (CLASSES, NEW):
        scored = play(load(text, max_steps=1), Script(["a"]))
        assert scored.episode.turn_lengths == (1,)
        assert scored.episode.is_truncated


def test_executors_and_instances_with_other_constructors(load):
    four = CLASSES.replace("llm_engine, hf_tokenizer, result_queue", "llm_engine, result_queue")
    assert play(load(four), Script(["3", "4"]), label="4").reward == 1.0
    anything = NEW.replace("def __init__(self):\n        super().__init__(AgentInstance)", "pass").replace(
        "(MultiTurnAgentExecutor):", "(MultiTurnAgentExecutor):\n    agent_instance_cls = AgentInstance"
    )
    anything += "\n    def __init__(self, *args, **kwargs):\n        super().__init__(AgentInstance, *args, **kwargs)\n"
    assert play(load(anything), Script(["a", "b"])).reward == 3.0


def test_agents_may_bound_the_next_answer_and_set_its_stop_tokens(load):
    text = without_executor(NEW).replace(
        "        self.turn += 1\n",
        "        self.turn += 1\n        params = states['sampling_params']\n"
        "        params.max_tokens, params.stop_token_ids = 3, [7]\n",
    )
    script = Script(["a", "b"])
    play(load(text), script)
    limits = [(request.sampling.max_new_tokens, request.sampling.stop_token_ids) for request in script.requests]
    assert limits == [(50, ()), (3, (7,))]
    returned = text.replace('"done"', '"sampling_params": params, "done"')
    script = Script(["a", "b"])
    play(load(returned), script)
    assert script.requests[1].sampling.max_new_tokens == 3


def test_agents_may_not_change_the_distribution(load):
    text = without_executor(CLASSES).replace("done = ", "states['sampling_params'].temperature = 0.1; done = ", 1)
    with pytest.raises(UserError, match="an agent asked for temperature 0.1, but the run samples at 0.7"):
        play(load(text), Script(["a", "b"]))
    text = without_executor(CLASSES).replace("done = ", "states['sampling_params'].stop = ['x']; done = ", 1)
    with pytest.raises(UnsupportedError, match=r"sampling_params.stop = \['x'\]: an agent cannot set it"):
        play(load(text), Script(["a", "b"]))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"rewards": float(self.turn),', "", "a dict without 'rewards'; it has: environment_feedback, done"),
        ("return {", "return 3\n        {", "AgentInstance.step returned a int, not a dict"),
        ('f"({self.turn})"', "None", "environment_feedback is a NoneType, not a string"),
        ("float(self.turn)", "[1.0, 2.0]", "rewards is a list of 2, not one number"),
        ('"done"', '"scores": float("nan"), "done"', "scores is nan"),
        ('"done"', '"extra_logs": {"x": "y"}, "done"', "extra_logs['x'] is a str, not one number"),
        ("async def step", "async def reset(self, states):\n        return {}\n\n    async def step", "'observation'"),
    ],
)
def test_instances_that_cannot_be(load, old, new, reason):
    failed = play(load(NEW.replace(old, new)), Script(["a", "b"]))
    assert isinstance(failed, Failed)
    assert reason in failed.reason


def test_images_need_a_run_with_images(load):
    failed = play(load(NEW.replace('"done"', '"environment_images": ["x"], "done"')), Script(["a", "b"]))
    assert isinstance(failed, Failed)
    assert "the environment showed images, and the run has none: set data.image_key" in failed.reason


def test_reset_may_return_another_observation(load):
    text = without_executor(NEW) + "    async def reset(self, states):\n        return states['observation'] + 'go '\n"
    assert marked(play(load(text), Script(["a", "b"])).episode) == ["q:go [a](1)[b]"]


# --- executors --------------------------------------------------------------------------------------------------------

EXECUTE = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ranges = []
        for text in ("+", ""):
            output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
            assert output.logprobs[0][output.token_ids[0]].logprob < 0
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            tokens = tokens + output.token_ids + hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        return {
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": None,
            "reward": 2.0,
            "scores": 0.25,
            "truncated": output.finish_reason == "length",
            "extra_logs": {"text": len(output.text)},
        }
"""


def test_an_executor_that_talks_to_the_engine_itself(load):
    scored = play(load(EXECUTE), Script(["aa", "b|cut"]))
    assert marked(scored.episode) == ["q:[aa]+[b]"]
    assert (scored.reward, scored.score, scored.extra) == (2.0, 0.25, {"text": 1.0})
    assert (scored.episode.query, scored.episode.is_truncated) == ("q:aa+b", True)
    assert scored.episode.segments[0].versions.tolist() == [-1, -1, 0, 0, -1, 1]


def test_many_episodes_of_one_executor_do_not_mix(load):
    script = Script(lambda request: TOKENIZER.decode(request.token_ids[:3]))
    with AgentHost(load(EXECUTE), script, run_seed=0) as host:
        futures = [host.submit(prompt_of(f"{at:03}:"), SampleKey(0, 0, at), SAMPLING) for at in range(20)]
        texts = [marked(future.result(WAIT_S).episode)[0] for future in futures]
    assert texts == [f"{at:03}:[{at:03}]+[{at:03}]" for at in range(20)]


def test_an_executor_may_change_prompt_and_reward_around_the_usual_execution(load):
    text = CLASSES + (
        "    async def execute(self, prompt, label, sampling_params):\n"
        "        result = await super().execute('Think. ' + prompt, label, sampling_params)\n"
        "        result['reward'] = result['reward'] * 10\n"
        "        return result\n"
    )
    scored = play(load(text), Script(["3", "4"]), label="4")
    assert marked(scored.episode) == ["Think. q:[3][NEXT][4]"]
    assert scored.episode.query == "Think. q:3[NEXT]4"
    assert (scored.reward, scored.turn_rewards) == (10.0, ())


def test_an_executor_of_the_first_version_puts_its_result_into_the_queue(load):
    text = CLASSES + (
        "    async def execute(self, prompt, label, sampling_params):\n"
        "        tokens = self.hf_tokenizer(prompt, add_special_tokens=False)['input_ids']\n"
        "        output = (await self.generate(tokens, sampling_params)).outputs[0]\n"
        "        result = {'observation_tokens': tokens + output.token_ids, 'reward': 0.5}\n"
        "        result['action_ranges'] = [(len(tokens), len(tokens) + len(output.token_ids))]\n"
        "        await self.result_queue.put(result)\n"
    )
    scored = play(load(text), Script(["a"]))
    assert marked(scored.episode) == ["q:[a]"]
    assert scored.reward == 0.5


def test_a_single_turn_executor_leaves_the_reward_to_the_run(load):
    text = (
        "from openrlhf.utils.agent import SingleTurnAgentExecutor\nclass AgentExecutor(SingleTurnAgentExecutor): pass\n"
    )
    episode = play(load(text), Script(["a"]))
    assert isinstance(episode, Episode)
    assert marked(episode) == ["q:[a]"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"action_ranges": ranges', '"action_ranges": []', "returned no action_ranges"),
        ('"action_ranges": ranges,', "", "a dict without 'action_ranges'"),
        ('"action_ranges": ranges', '"action_ranges": [(1, 3)]', "tokens 1 to 3 are an action, but that is not what"),
        ('"observation_tokens": tokens', '"observation_tokens": [5] * 9', "that is not what the engine sampled there"),
        ('"reward": 2.0', '"reward": float("nan")', "reward is nan"),
        ("return {", "return 3\n        {", "AgentExecutor.execute returned a int, not a dict"),
        ("return {", "return\n        {", "AgentExecutor.execute returned a NoneType, not a dict"),
    ],
)
def test_executors_that_cannot_be(load, old, new, reason):
    assert reason in play(load(EXECUTE.replace(old, new)), Script(["aa", "b"])).reason


def test_an_executor_without_a_reward(load):
    assert isinstance(play(load(EXECUTE.replace('"reward": 2.0', '"reward": None')), Script(["aa", "b"])), Episode)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "generate(tokens, sampling_params)",
            "generate(tokens, sampling_params, 'id')",
            "llm_engine.generate with vLLM",
        ),
        ("generate(tokens, sampling_params)", "generate({}, sampling_params)", "llm_engine.generate with vLLM"),
    ],
)
def test_what_executors_cannot_do_yet_is_named(load, old, new, message):
    with pytest.raises(UnsupportedError, match=message):
        play(load(EXECUTE.replace(old, new)), Script(["aa", "b"]))


SERVER = """
import asyncio
import threading
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    \"\"\"Asks the engine from an event loop in another thread, as a server does, and keeps its own traces.\"\"\"

    def serve(self, engine):
        self.engine, self.loop = engine, asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    async def ask(self, tokens, params):
        asked = asyncio.run_coroutine_threadsafe(self.engine.generate(tokens, params, multi_modal_data=None), self.loop)
        return list((await asyncio.wrap_future(asked)).outputs[0].token_ids)

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        if not hasattr(self, "loop"):
            self.serve(llm_engine)
        tokens = hf_tokenizer(prompt)["input_ids"]
        ranges = []
        for _ in range(2):
            sampled = await self.ask(list(tokens), sampling_params)
            ranges.append((len(tokens), len(tokens) + len(sampled)))
            tokens += sampled
        return {"observation_tokens": tokens, "action_ranges": ranges, "reward": 1.0}
"""


def test_calls_from_a_server_thread_belong_to_who_returns_their_tokens(load):
    agent = load(SERVER)
    script = Script(lambda request: "ab"[len(request.token_ids) % 2] * 2)
    with AgentHost(agent, script, run_seed=5, timeout_s=WAIT_S) as host:
        keys = [SampleKey(0, prompt, sample) for prompt in range(3) for sample in range(4)]
        prompts = {at: Prompt(at, "q" * at + ":", ids_of("q" * at + ":")) for at in range(3)}
        futures = host.submit_many([(prompts[key.prompt], key) for key in keys], SAMPLING)
        outcomes = [future.result(WAIT_S) for future in futures]
    agent._executor.loop.call_soon_threadsafe(agent._executor.loop.stop)
    expected = [(":[bb][bb]", "q:[aa][aa]", "qq:[bb][bb]")[key.prompt] for key in keys]
    assert [marked(outcome.episode) for outcome in outcomes] == [[text.replace("][", "")] for text in expected]
    assert [outcome.episode.turn_lengths for outcome in outcomes] == [(2, 2)] * 12
    assert len({request.seed for request in script.requests}) == 24


@pytest.mark.parametrize("constructor", ["", "def __init__(self, llm_engine, hf_tokenizer, **more):\n        pass"])
def test_the_executors_own_generate_works_from_a_server_thread_and_its_semaphore_bounds_episodes(load, constructor):
    text = SERVER.replace("import asyncio\n", "import asyncio\nimport contextvars\n", 1)
    text = text.replace(
        "asyncio.run_coroutine_threadsafe(self.engine.generate(tokens, params, multi_modal_data=None), self.loop)",
        "contextvars.Context().run(asyncio.run_coroutine_threadsafe, self.generate(tokens, params), self.loop)",
    )
    text = text.replace("    async def execute(", f"    {constructor}\n\n    async def execute(")
    text = text.replace("        tokens = hf", "        await self.semaphore.acquire()\n        tokens = hf")
    text = text.replace("        return {", "        self.semaphore.release()\n        return {")
    agent = load(text)
    scored = play(agent, Script(["aa", "b"]))
    agent._executor.loop.call_soon_threadsafe(agent._executor.loop.stop)
    assert isinstance(scored, ScoredEpisode), scored
    assert marked(scored.episode) == ["q:[aab]"]
    turns = scored.episode.facts.turns  # the policy's time is known of each
    assert len(turns) == 2
    assert all(turn.asked_s <= turn.answered_s for turn in turns)


def test_a_servers_call_outside_of_any_episode_is_refused(load):
    agent = load(SERVER)
    with AgentHost(agent, Script(["aa", "b"]), run_seed=5, timeout_s=WAIT_S) as host:
        host.submit(prompt_of("q:"), KEY, SAMPLING).result(WAIT_S)
    executor = agent._executor
    asked = asyncio.run_coroutine_threadsafe(executor.engine.generate([1], None), executor.loop)
    with pytest.raises(AgentError, match="llm_engine.generate was called while no episode was open"):
        asked.result(WAIT_S)
    executor.loop.call_soon_threadsafe(executor.loop.stop)


def test_several_samples_of_a_call_are_segments_that_learn_shared_tokens_once(load):
    text = EXECUTE.replace("return {", "first = {").rstrip()
    text += (
        "\n        part = {'observation_tokens': tokens[:ranges[0][1]], 'action_ranges': ranges[:1]}"
        "\n        return [{**first, **part}, first]\n"
    )
    scored = play(load(text), Script(["aa", "b"]))
    assert isinstance(scored, ScoredEpisode), scored
    assert marked(scored.episode) == ["q:[aa]", "q:aa+[b]"]
    assert scored.reward == 2.0
    different = text.replace("ranges[:1]}", "ranges[:1], 'reward': 1.0}")
    assert "returned samples with different rewards" in play(load(different), Script(["aa", "b"])).reason
    empty = text.rpartition("return [")[0] + "return []\n"
    assert "AgentExecutor.execute returned an empty list" in play(load(empty), Script(["aa", "b"])).reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from openrlhf.utils.agent import AgentPool\n", r"agent_func.py: openrlhf.utils.agent.AgentPool: no stand-in"),
        (
            "from openrlhf.utils.agent import SingleTurnAgentExecutor\nclass AgentExecutor(SingleTurnAgentExecutor):\n"
            "    def __init__(self):\n        super().__init__('http://x')\n",
            "set the reward of the run instead",
        ),
    ],
)
def test_what_is_not_built_is_named_when_the_file_loads(load, text, message):
    with pytest.raises(UnsupportedError, match=message):
        load(text)


def test_an_executor_that_requires_something_else(load):
    with pytest.raises(UserError, match=r"AgentExecutor.__init__ requires 'remote'; it can be given: max_steps"):
        load(NEW.replace("def __init__(self):", "def __init__(self, remote):"))


# --- the stand-in -----------------------------------------------------------------------------------------------------


def test_the_stand_in_is_there_only_while_a_file_loads(load):
    load("import openrlhf.utils.agent as agents\nclass AgentInstance(agents.AgentInstanceBase): pass\n")
    assert not [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]
    with pytest.raises(UserError, match="No module named 'openrlhf.cli'"):
        load("import openrlhf.cli\n")
    with pytest.raises(UserError, match="cannot import name 'get_tokenizer' from 'openrlhf.utils'"):
        load("from openrlhf.utils import get_tokenizer\n")
    assert not [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]


def test_the_package_that_runs_openrlhfs_commands_is_not_taken_for_openrlhf(load, monkeypatch):
    from hotseat.openrlhf.shim import DIRECTORY

    monkeypatch.syspath_prepend(str(DIRECTORY))
    load("import openrlhf.utils.agent as agents\nclass AgentInstance(agents.AgentInstanceBase): pass\n")
    assert not [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]
