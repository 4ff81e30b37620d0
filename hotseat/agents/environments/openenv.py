"""Environments that OpenEnv serves.

name: the address of a server, or a file with `app`, as OpenEnv's `create_app` makes it, which is served here on
loopback. Numbers are the seeds of `reset`. arguments:

    action        field of the action that gets the policy's answer (`message`); null: the answer is the action, as JSON
    observation   field of the observation that the policy reads; unset: all of them, as JSON
    reset         further arguments of `reset`
    system        a text before the first observation
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from typing import Any

from openenv import GenericEnvClient

_HIDDEN = ("done", "reward", "metadata")  # every observation has these beside its own

NEEDS_NAME = "openenv needs the address of a server, or a Python file with an app"


class OpenenvTasks:
    def __init__(self, name: str, arguments: dict[str, Any]):
        known: dict[str, Any] = {"action": "message", "observation": None, "reset": {}, "system": None}
        unknown = sorted(set(arguments) - set(known))
        if unknown:
            raise ValueError(f"openenv takes the arguments {', '.join(known)}, not {', '.join(unknown)}")
        self._arguments = {**known, **arguments}
        self._url = name if name.startswith(("http://", "https://")) else _serve(name)
        with GenericEnvClient(base_url=self._url).sync():
            pass  # it is there

    def prompt(self, number: int) -> str:
        with GenericEnvClient(base_url=self._url).sync() as environment:
            return self._text(environment.reset(seed=number, **self._arguments["reset"]))

    def play(self, number: int, policy: Any) -> dict[str, Any]:
        with GenericEnvClient(base_url=self._url).sync() as environment:

            def act(answer: str) -> tuple[str | None, float | None]:
                action = self._action(answer)
                if action is None:
                    return "This is no JSON object.", None
                result = environment.step(action)
                return None if result.done else self._text(result), float(result.reward or 0.0)

            result = environment.reset(seed=number, **self._arguments["reset"])
            return policy.converse(self._arguments["system"], None if result.done else self._text(result), act)

    def _action(self, answer: str) -> dict[str, Any] | None:
        if self._arguments["action"] is not None:
            return {self._arguments["action"]: answer}
        try:
            action = json.loads(answer)
        except ValueError:
            return None
        return action if isinstance(action, dict) else None

    def _text(self, result: Any) -> str:
        observation = result.observation
        shown = {name: value for name, value in observation.items() if name not in _HIDDEN}
        field = self._arguments["observation"]
        if field is None:
            return json.dumps(shown)
        if field not in observation:
            raise ValueError(f"the observation has no field {field!r}; it has {', '.join(shown)}")
        return str(observation[field])


def _serve(file: str) -> str:
    """Serve the app of a file on loopback, in a thread of this process, and return its address."""
    import uvicorn

    if not file.endswith(".py"):
        raise ValueError(f"{file!r} is neither the address of a server nor a Python file with an app")
    app = sys.modules["hotseat_worker"].module_of(file).app
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError(f"the app of {file} could not be served")
        time.sleep(0.01)
    return f"http://127.0.0.1:{listener.getsockname()[1]}"
