"""The agent that runs an `AgentExecutor`, and what its constructor and `execute` are offered."""

from __future__ import annotations

import sys
from typing import Any

from hotseat.agents.agent import Agent, SampleFunction
from hotseat.agents.agent_file import accepted
from hotseat.agents.image_preparer import ImagePreparer
from hotseat.errors import UnsupportedError
from hotseat.openrlhf.agents.episodes import CURRENT_EPISODE, ExecutorEpisode, OpenEpisodes, current_episode
from hotseat.openrlhf.agents.sampling_params import shown
from hotseat.types import Episode, Prompt, SampleKey, Sampling, ScoredEpisode


class ExecutorAgent(Agent):
    """Runs `AgentExecutor.execute`, one object for all episodes, and turns each result into an episode.

    Every completion is recorded as it passes, so that log-probs and weight versions are the engine's own. The tokens
    that the executor declares to be actions must be among the recorded ones.

    preparer: of a VLM's images. Executors then get a processor in place of the tokenizer, as in OpenRLHF.
    """

    makes_checked_episodes = True

    def __init__(
        self,
        executor_cls: Any,
        tokenizer: Any,
        *,
        max_length: int,
        max_steps: int | None = None,
        preparer: ImagePreparer | None = None,
    ):
        self._tokenizer = tokenizer
        self._offered = tokenizer
        if preparer is not None and preparer.processor is not None:
            self._offered = _ProcessorOfText(preparer.processor, tokenizer)
        self._open_episodes = OpenEpisodes(preparer)
        self._limits = {"max_length": max_length, "max_steps": max_steps}
        offered = {
            "max_steps": max_steps or sys.maxsize,
            "max_length": max_length,
            "llm_engine": EngineStandIn(self._open_episodes),
            "hf_tokenizer": self._offered,
            "result_queue": ResultQueue(),
        }
        self._executor = executor_cls(**accepted(executor_cls.__init__, offered, "AgentExecutor.__init__", True))
        if getattr(self._executor, "llm_engine", self) is None:  # one whose constructor takes no engine
            self._executor.llm_engine = offered["llm_engine"]

    async def run(
        self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: SampleFunction
    ) -> Episode | ScoredEpisode:
        episode = ExecutorEpisode(self._tokenizer, prompt, key, sampling, sample, self._limits, self._open_episodes)
        CURRENT_EPISODE.set(episode)
        offered = {
            "prompt": prompt.text,
            "label": prompt.label,
            "sampling_params": shown(sampling),
            "max_length": self._limits["max_length"],
            "hf_tokenizer": self._offered,
            "llm_engine": EngineStandIn(self._open_episodes),
            "images": list(prompt.images) or None,
        }
        execute = self._executor.execute
        with self._open_episodes.opened(episode):
            result = await execute(**accepted(execute, offered, "AgentExecutor.execute", True))
            return episode.from_result(episode.put if result is None else result)


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


class EngineStandIn:
    """Stand-in for OpenRLHF's engine: `await generate(token_ids, sampling_params)` returns vLLM's form of output."""

    def __init__(self, open_episodes: OpenEpisodes):
        self._open_episodes = open_episodes

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any, *more: Any, multi_modal_data: Any = None
    ) -> Any:
        if more or not isinstance(prompt_token_ids, list | tuple):
            raise UnsupportedError(
                "llm_engine.generate with vLLM's own arguments (prompt, sampling_params, request_id): in this version"
                " use self.generate(token_ids, sampling_params)"
            )
        episode = CURRENT_EPISODE.get()
        if episode is None or not self._open_episodes.is_open(episode):
            shown = await self._open_episodes.look(multi_modal_data, None)
            return await self._open_episodes.generate(list(prompt_token_ids), sampling_params, shown)
        shown = await self._open_episodes.look(multi_modal_data, episode.prompt)
        return await episode.generate(list(prompt_token_ids), sampling_params, shown)


class ResultQueue:
    """Queue for the results of executors of the first version; later ones return them."""

    async def put(self, result: Any) -> None:
        current_episode("result_queue.put").put = result
