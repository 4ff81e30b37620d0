"""Agent files written for OpenRLHF, unchanged, without OpenRLHF.

OpenRLHF's versions had four forms, which are all in use:

    step(state, action, label, **kwargs) -> reward, next_state, done, extra_info      a function, with module globals
    step(observation, action, label, **kwargs) -> {rewards, next_observation, done, ...}          the same, in a dict
    class AgentInstance: reset(states), step(states) -> {rewards, environment_feedback, done, ...}
    class AgentExecutor(MultiTurnAgentExecutor | AgentExecutorBase): execute(prompt, label, sampling_params, ...)

While a file loads, `openrlhf.utils.agent` is a stand-in made by this module, whether OpenRLHF is installed or not. The
helpers in `hotseat.openrlhf_helpers` stand in for OpenRLHF's where it is not installed, also for later imports.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hotseat import openrlhf_helpers
from hotseat.agents._threads import OwnThread
from hotseat.agents.agent import Agent, AgentError, SampleFunction
from hotseat.agents.multi_turn import MultiTurn, TurnResult, Turns, number, takes_seed
from hotseat.agents.sight import EpisodeImage, ImagePreparer, listed
from hotseat.agents.transcript import decode, decode_after
from hotseat.errors import UnsupportedError, UserError
from hotseat.types import Completion, Episode, Prompt, SampleKey, Sampling, ScoredEpisode, Segment, WhenSampled

# --- the stand-in -----------------------------------------------------------------------------------------------------

_LOADING = threading.RLock()
_MAX_UNCLAIMED = 65536  # completions of a server's calls that no episode has returned yet


@contextmanager
def stand_in() -> Iterator[None]:
    """Install the stand-in for `openrlhf.utils.agent` while the block runs, and restore the modules afterwards."""
    agent = types.ModuleType("openrlhf.utils.agent")
    agent.__dict__.update({cls.__name__: cls for cls in _STAND_INS})
    agent.__dict__["__getattr__"] = _missing
    modules = {agent.__name__: agent}
    with _LOADING:
        if not openrlhf_helpers.is_installed():
            openrlhf_helpers.install()
            for name, helpers in openrlhf_helpers.MODULES.items():
                modules[name] = types.ModuleType(name)
                modules[name].__dict__.update(helpers)
            for name in ("openrlhf", "openrlhf.utils"):
                modules[name].__dict__["__path__"] = []
            for name, stand_in_module in modules.items():
                package, _, child = name.rpartition(".")
                if package:
                    setattr(modules[package], child, stand_in_module)
        before = {name: sys.modules.get(name) for name in modules}
        sys.modules.update(modules)
        try:
            yield
        finally:
            for name, module in before.items():
                if module is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = module


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnsupportedError(
        f"openrlhf.utils.agent.{name}: no stand-in for it in this version; there are:"
        f" {', '.join(cls.__name__ for cls in _STAND_INS)}"
    )


class AgentInstanceBase:
    """Stand-in for OpenRLHF's base class of environments."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> Any:
        return states

    async def step(self, states: dict[str, Any], **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.step")


class AgentExecutorBase:
    """Stand-in for OpenRLHF's base class of executors; it accepts the constructor arguments of all versions."""

    agent_instance_cls: Any = None

    def __init__(self, agent_instance_cls: Any = None, *args: Any, **kwargs: Any):
        self.agent_instance_cls = agent_instance_cls
        names = ["max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue"]
        if len(args) == 4:  # the first version had no tokenizer here
            names.remove("hf_tokenizer")
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            setattr(self, name, value)

    async def generate(self, prompt_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        recording = _recording("AgentExecutor.generate")
        shown = await recording.shared.look(multi_modal_data, recording.prompt)
        return await recording.generate(list(prompt_ids), sampling_params, shown)

    async def execute(self, prompt: str, label: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Play an episode with a new agent instance, or in one turn if the executor has no instance class."""
        return await _recording("AgentExecutor.execute").play(self.agent_instance_cls, prompt, label, sampling_params)


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Stand-in for OpenRLHF's executor of agent instances."""


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Stand-in for OpenRLHF's executor of a single turn."""

    def __init__(self, remote_rm_url: Any = None):
        if remote_rm_url:
            raise UnsupportedError("SingleTurnAgentExecutor(remote_rm_url=...): set the reward of the run instead")
        super().__init__()


_STAND_INS = (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor)


# --- sampling parameters ----------------------------------------------------------------------------------------------


@dataclass
class SamplingParams:
    """Sampling parameters that agent files read and may change, with the names that vLLM's have."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = 1
    n: int = 1
    min_tokens: int = 0
    min_p: float = 0.0
    stop: Any = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = True


_ONLY_DEFAULT = ("n", "min_tokens", "min_p", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty")


def shown(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )


def read_back(params: Any, sampling: Sampling) -> Sampling:
    """Translate sampling parameters, ours or vLLM's own, into a `Sampling`."""
    plain = shown(sampling)
    for name in _ONLY_DEFAULT:
        default, value = getattr(plain, name), getattr(params, name, None)
        if value != default and value not in (None, []):
            raise UnsupportedError(f"sampling_params.{name} = {value!r}: an agent cannot set it in this version")
    top_k = getattr(params, "top_k", plain.top_k)
    return Sampling(
        max_new_tokens=getattr(params, "max_tokens", None) or sampling.max_new_tokens,
        temperature=getattr(params, "temperature", plain.temperature),
        top_p=getattr(params, "top_p", plain.top_p),
        top_k=0 if top_k in (None, -1) else top_k,
        stop_token_ids=tuple(getattr(params, "stop_token_ids", None) or ()),
        ignore_eos=getattr(params, "ignore_eos", plain.ignore_eos),
    )


# --- agent instances --------------------------------------------------------------------------------------------------


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


FEEDBACK = "environment_feedback"
IMAGES = "environment_images"
# Keys of earlier versions, under which a function returns the whole text that the policy continues from.
WHOLE_TEXTS = ("next_observation", "next_state")


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


# --- step functions ---------------------------------------------------------------------------------------------------


class FunctionTurns(Turns):
    """Plays a module-level `step` function. load: returns the module, a fresh one if it has globals that change."""

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


# --- executors --------------------------------------------------------------------------------------------------------


class ExecutorAgent(Agent):
    """Runs `AgentExecutor.execute`, one object for all episodes, and turns each result into an episode.

    Every completion is recorded as it passes, so that log-probs and weight versions are the engine's own. The tokens
    that the executor declares to be actions must be among the recorded ones.

    sight: of a model that sees images. Executors then get a processor in place of the tokenizer, as in OpenRLHF.
    """

    makes_checked_episodes = True

    def __init__(
        self,
        executor_cls: Any,
        tokenizer: Any,
        *,
        max_length: int,
        max_steps: int | None = None,
        sight: ImagePreparer | None = None,
    ):
        self._tokenizer = tokenizer
        self._offered = tokenizer
        if sight is not None and sight.processor is not None:
            self._offered = _ProcessorOfText(sight.processor, tokenizer)
        self._shared = _Shared(sight)
        self._limits = {"max_length": max_length, "max_steps": max_steps}
        offered = {
            "max_steps": max_steps or sys.maxsize,
            "max_length": max_length,
            "llm_engine": _Engine(self._shared),
            "hf_tokenizer": self._offered,
            "result_queue": _ResultQueue(),
        }
        self._executor = executor_cls(**accepted(executor_cls.__init__, offered, "AgentExecutor.__init__", True))

    async def run(
        self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: SampleFunction
    ) -> Episode | ScoredEpisode:
        recording = _Recording(self._tokenizer, prompt, key, sampling, sample, self._limits, self._shared)
        _RECORDING.set(recording)
        offered = {
            "prompt": prompt.text,
            "label": prompt.label,
            "sampling_params": shown(sampling),
            "max_length": self._limits["max_length"],
            "hf_tokenizer": self._offered,
            "llm_engine": _Engine(self._shared),
            "images": list(prompt.images) or None,
        }
        execute = self._executor.execute
        with self._shared.opened(recording):
            result = await execute(**accepted(execute, offered, "AgentExecutor.execute", True))
            return recording.episode(recording.put if result is None else result)


def accepted(function: Any, offered: dict[str, Any], name: str, fill_kwargs: bool = False) -> dict[str, Any]:
    """Select from `offered` the arguments that a function takes. A required parameter that is not offered is an error.

    fill_kwargs: a function with `**kwargs` takes all of them.
    """
    taken = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and fill_kwargs:
            return offered
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name == "self":
            continue
        if parameter.name in offered:
            taken[parameter.name] = offered[parameter.name]
        elif parameter.default is parameter.empty:
            raise UserError(f"{name} requires {parameter.name!r}; it can be given: {', '.join(offered)}")
    return taken


_RECORDING: contextvars.ContextVar[_Recording | None] = contextvars.ContextVar("recording", default=None)


def _recording(name: str) -> _Recording:
    recording = _RECORDING.get()
    if recording is None:
        raise UnsupportedError(
            f"{name} was called outside of AgentExecutor.execute, from another thread or a server: this version cannot"
            " tell which episode such a call belongs to"
        )
    return recording


class _ProcessorOfText:
    """A processor that also does what a tokenizer does: executors call it with a text, and ask it for tokens."""

    def __init__(self, processor: Any, tokenizer: Any):
        self._processor, self._tokenizer = processor, tokenizer

    def __call__(self, *texts: Any, **arguments: Any) -> Any:
        if arguments.get("images") is None:
            arguments.pop("images", None)
            return self._tokenizer(*texts, **arguments)
        return self._processor(**({"text": texts[0]} if texts else {}), **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer if hasattr(self._tokenizer, name) else self._processor, name)


class _Engine:
    """Stand-in for OpenRLHF's engine: `await generate(token_ids, sampling_params)` returns vLLM's form of output."""

    def __init__(self, shared: _Shared):
        self._shared = shared

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any, *more: Any, multi_modal_data: Any = None
    ) -> Any:
        if more or not isinstance(prompt_token_ids, list | tuple):
            raise UnsupportedError(
                "llm_engine.generate with vLLM's own arguments (prompt, sampling_params, request_id): in this version"
                " use self.generate(token_ids, sampling_params)"
            )
        recording = _RECORDING.get()
        if recording is None or not self._shared.is_open(recording):
            shown = await self._shared.look(multi_modal_data, None)
            return await self._shared.generate(list(prompt_token_ids), sampling_params, shown)
        shown = await self._shared.look(multi_modal_data, recording.prompt)
        return await recording.generate(list(prompt_token_ids), sampling_params, shown)


@dataclass(eq=False)
class _Call:
    """A request to the engine and its completion. episode: as whose it was sampled. user: who learns from it."""

    episode: _Recording
    context: tuple[int, ...]
    completion: Completion
    images: tuple[EpisodeImage, ...] = ()  # those in the context
    user: _Recording | None = None


class _Shared:
    """The open episodes of an executor, for its calls from a server, which do not say whose they are.

    Such a call is sampled as if it were of an open episode that it may be of. Whoever returns its tokens as actions
    learns from it: equal tokens are as good as each other. sight: of a model that sees images.
    """

    def __init__(self, sight: ImagePreparer | None = None) -> None:
        self.sight = sight
        self._open: list[_Recording] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.calls: deque[_Call] = deque(maxlen=_MAX_UNCLAIMED)

    @contextmanager
    def opened(self, recording: _Recording) -> Iterator[None]:
        self._loop = asyncio.get_running_loop()
        self._open.append(recording)
        try:
            yield
        finally:
            self._open.remove(recording)
            unclaimed = [call for call in self.calls if call.user is None] if self._open else []
            self.calls.clear()
            self.calls.extend(unclaimed)

    def is_open(self, recording: _Recording) -> bool:
        return recording in self._open

    async def look(self, multi_modal_data: Any, prompt: Prompt | None) -> tuple[EpisodeImage, ...]:
        """Prepare the images of a call. Without any, they are those of the prompt, if it is known."""
        if multi_modal_data is None:
            return () if prompt is None else tuple(map(EpisodeImage.of_file, prompt.images))
        if self.sight is None:
            raise AgentError("generate with multi_modal_data, and the run has no images: set data.image_key")
        if not isinstance(multi_modal_data, Mapping):
            raise UserError(
                f"generate with multi_modal_data of type {type(multi_modal_data).__name__}: it must be a dict, as in"
                ' {"image": [...]}'
            )
        if others := sorted(set(multi_modal_data) - {"image"}):
            raise UnsupportedError(f"generate with multi_modal_data of {', '.join(others)}: only images are possible")
        images = listed(multi_modal_data.get("image"))
        prepared = {path for recording in self._open for path in recording.prompt.images}
        known = [isinstance(image, str) and image in prepared for image in images]
        num_known = sum(known)
        looked = iter(
            await self.sight.look([i for i, is_known in zip(images, known, strict=True) if not is_known], num_known)
        )
        return tuple(
            EpisodeImage.of_file(image) if is_known else next(looked)
            for image, is_known in zip(images, known, strict=True)
        )

    def expanded(self, token_ids: Sequence[int], images: Sequence[EpisodeImage]) -> tuple[int, ...]:
        """Return tokens with all that stand for each image, of which they may have one or all."""
        if self.sight is None:
            return tuple(token_ids)
        return tuple(self.sight.expand(self.sight.collapse(token_ids, images), images)[0])

    async def generate(self, token_ids: list[int], params: Any, images: tuple[EpisodeImage, ...]) -> Any:
        """Sample for a call from any thread, in the event loop of the episodes."""
        if self._loop is None or not self._open:
            raise AgentError("llm_engine.generate was called while no episode was open")
        sampling = asyncio.run_coroutine_threadsafe(self._generate(token_ids, params, images), self._loop)
        return await asyncio.wrap_future(sampling)

    async def _generate(self, token_ids: list[int], params: Any, images: tuple[EpisodeImage, ...]) -> Any:
        recording = self._likely(self.expanded(token_ids, images))
        return await recording.generate(token_ids, params, images, self.calls)

    def _likely(self, token_ids: tuple[int, ...]) -> _Recording:
        """Return the open episode that a call continues; else one of the same prompt, or any, that asked least."""
        for call in reversed(self.calls):
            start, end = len(call.context), len(call.context) + len(call.completion.token_ids)
            if call.episode not in self._open or len(token_ids) < end:
                continue
            if token_ids[:start] == call.context and token_ids[start:end] == tuple(call.completion.token_ids):
                return call.episode
        same = [each for each in self._open if token_ids[: len(each.prompt.token_ids)] == each.prompt.token_ids]
        return min(same or self._open, key=lambda each: each.num_asked)


class _ResultQueue:
    """Queue for the results of executors of the first version; later ones return them."""

    async def put(self, result: Any) -> None:
        _recording("result_queue.put").put = result


@dataclass(eq=False)
class _Recording:
    """One episode of an executor: its requests to the engine and their completions."""

    tokenizer: Any
    prompt: Prompt
    key: SampleKey
    sampling: Sampling
    sample: SampleFunction
    limits: dict[str, Any]
    shared: _Shared
    put: Any = None
    calls: list[_Call] = field(default_factory=list)
    num_asked: int = 0

    async def generate(
        self,
        token_ids: list[int],
        params: Any,
        images: tuple[EpisodeImage, ...] = (),
        calls: deque[_Call] | None = None,
    ) -> Any:
        """Sample for a call of this episode. calls: where to record it instead."""
        token_ids = list(self.shared.expanded(token_ids, images))
        completion = await self._ask(token_ids, read_back(params, self.sampling), images)
        call = _Call(self, tuple(token_ids), completion, images)
        if calls is None:
            self.calls.append(call)
        else:
            calls.append(call)
        output = types.SimpleNamespace(
            text=decode_after(self.tokenizer, token_ids, completion.token_ids),
            token_ids=list(completion.token_ids),
            logprobs=[
                {token: types.SimpleNamespace(logprob=log_prob)}
                for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True)
            ],
            finish_reason=completion.finish,
        )
        return types.SimpleNamespace(
            request_id=completion.request_id, prompt_token_ids=token_ids, outputs=[output], finished=True
        )

    async def play(self, agent_instance_cls: Any, text: str, label: Any, params: Any) -> dict[str, Any]:
        """Play the turns as OpenRLHF's own `execute` does, and return a dict in its format."""
        prompt = replace(self.prompt, label=label)
        if text != prompt.text:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            ids = self.shared.expanded(ids, tuple(map(EpisodeImage.of_file, prompt.images)))
            prompt = replace(prompt, text=text, token_ids=ids)
        make_turns = _OneTurn if agent_instance_cls is None else lambda: InstanceTurns(agent_instance_cls)
        agent = MultiTurn.of_turns(make_turns, self.tokenizer, sight=self.shared.sight, **self.limits)
        played = await agent.run(prompt, self.key, read_back(params, self.sampling), self._sample)
        scored = played if isinstance(played, ScoredEpisode) else None
        episode = played.episode if isinstance(played, ScoredEpisode) else played
        (segment,) = episode.segments
        sampled, ranges = segment.mask.nonzero().squeeze(1).tolist(), []
        for length in episode.turn_lengths:
            ranges.append((sampled[0], sampled[0] + length))
            sampled = sampled[length:]
        return {
            "prompt": text,
            "label": label,
            "reward": None if scored is None else scored.reward,
            "scores": None if scored is None else scored.score,
            "observation_tokens": segment.token_ids.tolist(),
            "action_ranges": ranges,
            "rollout_log_probs": segment.log_probs.tolist(),
            "truncated": episode.is_truncated,
            "extra_logs": {} if scored is None else dict(scored.extra),
            "turn_rewards": () if scored is None else scored.turn_rewards,
        }

    def episode(self, result: Any) -> Episode | ScoredEpisode:
        """Build the episode that an executor's dict describes, or several: its segments, which share one reward."""
        if not isinstance(result, list | tuple):
            return self._episode(result)
        if not result:
            raise AgentError("AgentExecutor.execute returned an empty list")
        parts = [self._episode(each) for each in result]
        rewards = {part.reward if isinstance(part, ScoredEpisode) else None for part in parts}
        if len(rewards) > 1:
            raise AgentError(
                "AgentExecutor.execute returned samples with different rewards; they are one episode, with one reward"
            )
        episodes = [part.episode if isinstance(part, ScoredEpisode) else part for part in parts]
        whole = replace(
            episodes[-1],
            segments=tuple(segment for episode in episodes for segment in episode.segments),
            turn_lengths=tuple(length for episode in episodes for length in episode.turn_lengths),
        )
        last = parts[-1]
        return replace(last, episode=whole, turn_rewards=()) if isinstance(last, ScoredEpisode) else whole

    def _episode(self, result: Any) -> Episode | ScoredEpisode:
        if not isinstance(result, Mapping):
            raise AgentError(f"AgentExecutor.execute returned a {type(result).__name__}, not a dict")
        for name in ("observation_tokens", "action_ranges"):
            if name not in result:
                raise AgentError(f"AgentExecutor.execute returned a dict without {name!r}; it has: {', '.join(result)}")
        tokens = [int(token) for token in result["observation_tokens"]]
        ranges = [(int(begin), int(end)) for begin, end in result["action_ranges"]]
        if not ranges:
            raise AgentError("AgentExecutor.execute returned no action_ranges")
        segment, lengths, images = self._segment(tokens, ranges)
        episode = Episode(
            self.key,
            (segment,) if lengths else (),  # nothing is left to learn where other samples have the same tokens
            self._query(tokens, images),
            bool(result.get("truncated", False)),
            lengths,
        )
        if result.get("reward") is None:
            return episode
        reward = number("reward", result["reward"])
        score = reward if result.get("scores") is None else number("scores", result["scores"])
        turn_rewards = tuple(result.get("turn_rewards", ()))
        if len(turn_rewards) != len(ranges) or sum(turn_rewards) != reward:
            turn_rewards = ()  # the executor changed the reward, so the turns' no longer sum up to it
        return ScoredEpisode(episode, reward, score, logs_of(result.get("extra_logs")), turn_rewards)

    def _query(self, tokens: list[int], images: Sequence[EpisodeImage]) -> str:
        """Return tokens as text, with one token for each image."""
        sight = self.shared.sight
        prompt: Sequence[int] = self.prompt.token_ids
        if sight is not None:
            tokens = sight.collapse(tokens, images)
            prompt = sight.collapse(prompt, tuple(map(EpisodeImage.of_file, self.prompt.images)))
        if tokens[: len(prompt)] != list(prompt):
            return decode(self.tokenizer, tokens)
        return self.prompt.text + decode_after(self.tokenizer, prompt, tokens[len(prompt) :])

    def _segment(
        self, tokens: list[int], ranges: list[tuple[int, int]]
    ) -> tuple[Segment, tuple[int, ...], tuple[EpisodeImage, ...]]:
        """Return the tokens up to the last action, the lengths of the actions learned from here, and the images."""
        lengths = []
        end = ranges[-1][1]
        prompted = tuple(map(EpisodeImage.of_file, self.prompt.images))
        last = self._call(tokens, *ranges[-1], prompted)
        images = last[0].images
        calls = [(*self._call(tokens, begin, stop, images), begin, stop) for begin, stop in ranges[:-1]]
        calls.append((*last, *ranges[-1]))
        if self.shared.sight is not None:
            if any(call.images != images[: len(call.images)] for call, *_ in calls):
                raise AgentError("AgentExecutor.execute returned actions that were sampled after different images")
            tokens = [*calls[-1][0].context, *tokens[ranges[-1][0] : end]]
            calls = [
                (call, is_new, len(call.context), len(call.context) + stop - begin)
                for call, is_new, begin, stop in calls
            ]
            end = len(tokens)
        mask = torch.zeros(end, dtype=torch.bool)
        log_probs = torch.zeros(end, dtype=torch.float32)
        versions = torch.full((end,), -1, dtype=torch.int32)
        for call, is_new, begin, stop in calls:
            if not is_new:
                continue
            completion = call.completion
            lengths.append(stop - begin)
            mask[begin:stop] = True
            log_probs[begin:stop] = torch.tensor(completion.log_probs)
            versions[begin:stop] = torch.tensor(completion.versions, dtype=torch.int32)
        paths = tuple(image.path for image in images)
        segment = Segment(torch.tensor(tokens[:end], dtype=torch.int64), mask, log_probs, versions, paths)
        return segment, tuple(lengths), images

    def _call(self, tokens: list[int], begin: int, end: int, images: tuple[EpisodeImage, ...]) -> tuple[_Call, bool]:
        """Return the call that sampled an action, and whether this is the first time that the episode has it.

        images: those that it was probably sampled after, or the first of them: the same tokens may have been sampled
        after others, too, also in another episode.
        """
        fitting = [call for call in (*self.calls, *self.shared.calls) if self._fits(call, tokens, begin, end)]
        if self.shared.sight is not None:
            fitting.sort(key=lambda call: any(one != other for one, other in zip(call.images, images, strict=False)))
        for call in fitting:
            if call.user is None:
                call.user = self
                return call, True
        for call in fitting:
            if call.user is self:
                return call, False
        raise AgentError(
            f"AgentExecutor.execute says that tokens {begin} to {end} are an action, but that is not what the engine"
            " sampled there"
        )

    def _fits(self, call: _Call, tokens: list[int], begin: int, end: int) -> bool:
        """Tell whether an action and what precedes it are those of a call, whichever way images are written."""
        if self.shared.sight is not None:
            sight, context = self.shared.sight, call.context
            return call.completion.token_ids == tuple(tokens[begin:end]) and sight.collapse(
                tokens[:begin], call.images
            ) == sight.collapse(context, call.images)
        return len(call.context) == begin and (*call.context, *call.completion.token_ids) == tuple(tokens[:end])

    async def _sample(
        self,
        token_ids: list[int],
        sampling: Sampling,
        turn: int,
        images: tuple[str, ...] | None = None,
        when_sampled: WhenSampled | None = None,
    ) -> Completion:
        shown = tuple(map(EpisodeImage.of_file, images or ()))
        completion = await self._ask(token_ids, sampling, shown)
        self.calls.append(_Call(self, tuple(token_ids), completion, shown))
        return completion

    async def _ask(self, token_ids: list[int], sampling: Sampling, images: tuple[EpisodeImage, ...]) -> Completion:
        self.num_asked += 1
        seen = () if self.shared.sight is None else (tuple(image.path for image in images),)
        return await self.sample(token_ids, sampling, self.num_asked - 1, *seen)


class _OneTurn(Turns):
    async def begin(self, prompt: Prompt, seed: int) -> str | None:
        return None

    async def act(self, observation: str, action: str, sampling: Sampling) -> TurnResult:
        return TurnResult("", True)
