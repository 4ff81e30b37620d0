"""The stand-in for `openrlhf.utils.agent`, whose base classes agent files import."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from hotseat.errors import UnsupportedError
from hotseat.openrlhf import helpers
from hotseat.openrlhf.agents.episodes import CURRENT_EPISODE, current_episode

_LOADING = threading.RLock()
_NUM_TASKS = 128  # episodes of an executor at a time, in OpenRLHF


@contextmanager
def stand_in() -> Iterator[None]:
    """Install the stand-in for `openrlhf.utils.agent` while the block runs, and restore the modules afterwards."""
    agent = types.ModuleType("openrlhf.utils.agent")
    agent.__dict__.update({cls.__name__: cls for cls in _STAND_INS})
    agent.__dict__["__getattr__"] = _missing
    modules = {agent.__name__: agent}
    with _LOADING:
        if not helpers.is_installed():
            helpers.install()
            for name, functions in helpers.MODULES.items():
                modules[name] = types.ModuleType(name)
                modules[name].__dict__.update(functions)
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
    llm_engine: Any = None

    def __init__(self, agent_instance_cls: Any = None, *args: Any, **kwargs: Any):
        self.agent_instance_cls = agent_instance_cls
        names = ["max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue"]
        if len(args) == 4:  # the first version had no tokenizer here
            names.remove("hf_tokenizer")
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            setattr(self, name, value)

    @cached_property
    def semaphore(self) -> asyncio.Semaphore:
        """Bound of the episodes that an executor plays at a time, which executors of the first version enter."""
        return asyncio.Semaphore(int(os.environ.get("OPENRLHF_ASYNC_NUM_TASKS", _NUM_TASKS)))

    async def generate(self, prompt_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        episode = CURRENT_EPISODE.get()
        if episode is None or not episode.open_episodes.is_open(episode):  # a server's thread asks
            if self.llm_engine is None:
                return current_episode("AgentExecutor.generate")
            return await self.llm_engine.generate(prompt_ids, sampling_params, multi_modal_data=multi_modal_data)
        shown = await episode.open_episodes.look(multi_modal_data, episode.prompt)
        return await episode.generate(list(prompt_ids), sampling_params, shown)

    async def execute(self, prompt: str, label: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Play an episode with a new agent instance, or in one turn if the executor has no instance class."""
        return await current_episode("AgentExecutor.execute").play(
            self.agent_instance_cls, prompt, label, sampling_params
        )


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Stand-in for OpenRLHF's executor of agent instances."""


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Stand-in for OpenRLHF's executor of a single turn."""

    def __init__(self, remote_rm_url: Any = None):
        if remote_rm_url:
            raise UnsupportedError("SingleTurnAgentExecutor(remote_rm_url=...): set the reward of the run instead")
        super().__init__()


_STAND_INS = (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor)
