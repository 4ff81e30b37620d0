"""Environments of verifiers, single-turn, multi-turn and with tools, as `load_environment` makes them.

name: an installed environment, or a file with `load_environment`. arguments: of `load_environment`. Numbers are the
rows of the environment's data set.

The environment makes its own requests, by its own client. Rewards are of its rubric, whose functions are logged. These
are the environments of verifiers below 0.4, which `verifiers.load_environment` loads.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import openai
import verifiers

try:
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.errors import EmptyModelResponseError
except ModuleNotFoundError:
    raise ImportError(
        f"verifiers {verifiers.__version__} has no load_environment: install 'verifiers>=0.3,<0.4'"
    ) from None

# The run's bounds of an episode, as the gateway names them. The library keeps the message of an error and not its code.
_OVER = ("(agent.max_steps)", "(agent.timeout_s)", "(data.max_length)")

NEEDS_NAME = "verifiers needs the name of an environment, or a file with load_environment"


class _AnyAnswer(OpenAIChatCompletionsClient):
    """The library's client, for which an answer without text is one, too: it is scored, not an error."""

    async def raise_from_native_response(self, response: Any) -> None:
        try:
            await super().raise_from_native_response(response)
        except EmptyModelResponseError:
            if response is None or not response.choices:
                raise

    async def from_native_response(self, response: Any) -> Any:
        made = await super().from_native_response(response)
        if made.message.content is None and not made.message.tool_calls:
            made.message.content = ""
        return made


class VerifiersTasks:
    def __init__(self, name: str, arguments: dict[str, Any]):
        if name.endswith(".py"):
            sys.modules["hotseat_worker"].module_of(name)
            name = os.path.basename(name).removesuffix(".py")
        self._environment = verifiers.load_environment(name, **arguments)
        self._rows = self._environment.get_dataset()

    def prompt(self, number: int) -> str:
        prompt = self._row(number)["prompt"]
        return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])

    async def play(self, number: int, policy: Any) -> dict[str, Any]:
        # Reading certificates would take longer than an episode: the gateway has none.
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, http_client=http) as client:
            output = await self._environment.run_rollout(self._row(number), _AnyAnswer(client), policy.model, {})
        error = output.get("error")
        if error is not None and not any(bound in str(error) for bound in _OVER):
            raise RuntimeError(f"the environment ended with {error}")
        numbers = {name: value for name, value in (output.get("metrics") or {}).items() if value is not None}
        return {"reward": output["reward"], "extra": numbers}

    def _row(self, number: int) -> Any:
        if number >= len(self._rows):
            raise ValueError(f"there is no task {number}: the environment's data set has {len(self._rows)}")
        return self._rows[number]
