"""Agents that OpenRLHF plays turn by turn: a `class AgentInstance`, or a function `step`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotseat.agents.agent import AgentError
from hotseat.agents.blocking_calls import OwnThread
from hotseat.agents.image_preparer import listed
from hotseat.agents.multi_turn import TurnResult, Turns, number, takes_seed
from hotseat.openrlhf.agents.sampling_params import SamplingParams, read_back, shown
from hotseat.types import Prompt, Sampling

FEEDBACK = "environment_feedback"
IMAGES = "environment_images"
# Keys of earlier versions, under which a function returns the whole text that the policy continues from.
WHOLE_TEXTS = ("next_observation", "next_state")


class InstanceTurns(Turns):
    """Plays a `class AgentInstance`."""

    def __init__(self, agent_instance_cls: Any):
        self._class = agent_instance_cls
        self._instance: Any = None
        self._label: Any = None
        self._thread = OwnThread("agent instance")

    async def begin(self, prompt: Prompt, seed: int) -> str | None:
        # Python refuses an __init__ that is a coroutine; in OpenRLHF it became one of a Ray actor, which awaited it.
        self._instance = self._class.__new__(self._class)
        await self._thread.call(self._instance.__init__)
        self._label = prompt.label
        states = {"observation": prompt.text, "prompt": prompt.text, "label": self._label}
        seeded = {"seed": seed} if takes_seed(self._instance.reset) else {}
        result = await self._thread.call(self._instance.reset, states, **seeded)
        observation = result.get("observation") if isinstance(result, Mapping) else result
        if not isinstance(observation, str):
            raise AgentError("AgentInstance.reset returned no text under 'observation'")
        self.first_images = listed(result.get(IMAGES)) if isinstance(result, Mapping) else ()
        return observation

    async def act(self, observation: str, action: str, sampling: Sampling) -> TurnResult:
        params = shown(sampling)
        states = {
            "observation_text": observation,
            "action_text": action,
            "label": self._label,
            "sampling_params": params,
        }
        result = await self._thread.call(self._instance.step, states)
        if not isinstance(result, Mapping):
            raise AgentError(f"AgentInstance.step returned a {type(result).__name__}, not a dict")
        return _turn_result(result, "AgentInstance.step", observation + action, params, sampling)

    async def end(self) -> None:
        self._instance = None
        self._thread.end()


class FunctionTurns(Turns):
    """Plays a module-level `step` function. load: returns the module of the episode."""

    def __init__(self, load: Callable[[], types.ModuleType]):
        self._load = load
        self._module: types.ModuleType | None = None
        self._label: Any = None
        self._seed = 0
        self._thread = OwnThread("step function")

    async def begin(self, prompt: Prompt, seed: int) -> str | None:
        self._seed = seed
        self._module = await self._thread.call(self._load)
        self._label = prompt.label
        return None

    async def act(self, observation: str, action: str, sampling: Sampling) -> TurnResult:
        assert self._module is not None
        step = self._module.step
        params = shown(sampling)
        takes_more = any(kind.kind is kind.VAR_KEYWORD for kind in inspect.signature(step).parameters.values())
        more: dict[str, Any] = {"sampling_params": params} if takes_more else {}
        if takes_seed(step):
            more["seed"] = self._seed
        result = await self._thread.call(step, observation, action, self._label, **more)
        if isinstance(result, Mapping):
            texts = (FEEDBACK, *WHOLE_TEXTS)
            return _turn_result(result, "step", observation + action, params, sampling, text_keys=texts)
        if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != 4:
            shape = f"{len(result)} values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
            raise AgentError(
                f"step returned {shape}; it has to return (reward, next_state, done, extra_info), or a dict with"
                " rewards, environment_feedback and done"
            )
        reward, state, is_done, extra = result
        if not isinstance(state, str):
            raise AgentError(f"step returned a next_state that is a {type(state).__name__}, not a string")
        feedback, context = _after(observation + action, state)
        return TurnResult(feedback, bool(is_done), number("reward", reward), extra=logs_of(extra), context=context)

    async def end(self) -> None:
        self._module = None
        self._thread.end()


def _turn_result(
    result: Mapping[str, Any],
    name: str,
    said: str,
    params: SamplingParams,
    sampling: Sampling,
    *,
    text_keys: Sequence[str] = (FEEDBACK,),
) -> TurnResult:
    """Read a step's dict. said: the text before the feedback. params: the object that the step may have changed."""
    text_key = next((key for key in text_keys if key in result), None)
    lacking = [key for key in ("rewards", "done") if key not in result]
    if text_key is None:
        lacking.insert(1 if "rewards" in lacking else 0, " or ".join(text_keys))
    if lacking:
        raise AgentError(f"{name} returned a dict without {lacking[0]!r}; it has: {', '.join(map(str, result))}")
    assert text_key is not None
    text = result[text_key]
    if not isinstance(text, str):
        raise AgentError(f"{name}: {text_key} is a {type(text).__name__}, not a string")
    feedback, context = (text, None) if text_key == FEEDBACK else _after(said, text)
    score = result.get("scores")
    return TurnResult(
        feedback,
        bool(result["done"]),
        number("rewards", result["rewards"]),
        None if score is None else number("scores", score),
        logs_of(result.get("extra_logs")),
        context,
        _next_sampling(result.get("sampling_params"), params, sampling),
        listed(result.get(IMAGES)),
    )


def _after(said: str, text: str) -> tuple[str, str | None]:
    """Return (feedback, None) if the text begins with what was said, or ("", text) if it is another context."""
    return (text[len(said) :], None) if text.startswith(said) else ("", text)


def _next_sampling(params: Any, offered: SamplingParams, sampling: Sampling) -> Sampling | None:
    """Return the sampling from the next turn on, or None if the agent changed nothing.

    params: what the step returned, if anything. offered: the object passed to the step, which it may have changed. An
    unchanged limit of new tokens is not kept: it held for this turn's room only.
    """
    if params is None or (isinstance(params, SamplingParams) and params == shown(sampling)):
        return None if offered == shown(sampling) else read_back(offered, sampling)
    return read_back(params, sampling)


def logs_of(logs: Any) -> dict[str, float]:
    if logs is None:
        return {}
    if not isinstance(logs, Mapping):
        raise AgentError(f"extra_logs is a {type(logs).__name__}, not a dict")
    return {str(name): number(f"extra_logs[{name!r}]", value, is_log=True) for name, value in logs.items()}
