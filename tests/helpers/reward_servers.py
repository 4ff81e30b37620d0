"""Reward servers of tests, in this process: each listens from the start, and answers as it is told.

Run as a program it is such a server in a process of its own, which prints its address and counts sevens.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

WAIT_S = 60.0


def sevens(message: dict[str, list]) -> dict[str, list[float]]:
    """The reward of tests/helpers/loop_cases.py: how many sevens the answer has."""
    pairs = zip(message["query"], message["prompts"], strict=True)
    return {"rewards": [float(query[len(prompt) :].count("7")) for query, prompt in pairs]}


class FakeServer:
    """Answers the n-th request with `respond(n, message)`: an object for JSON, a (status, text) or an awaitable."""

    def __init__(self, respond: Callable[[int, dict], Any] = lambda number, message: sevens(message)):
        self.respond = respond
        self.messages: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/get_reward"
        self.judge_url = self.url.replace("get_reward", "v1")
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(WAIT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        for path in ("/get_reward", "/v1/chat/completions"):
            app.router.add_post(path, self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.SockSite(runner, self._socket).start())
        ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _answer(self, request: web.Request) -> web.Response:
        self.messages.append(await request.json())
        self.headers.append(dict(request.headers))
        answer = self.respond(len(self.messages) - 1, self.messages[-1])
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, web.Response):
            return answer
        if isinstance(answer, tuple):
            return web.Response(status=answer[0], text=answer[1])
        return web.Response(text=json.dumps(answer), content_type="application/json")


def written(text: str | None, finish_reason: str = "stop") -> dict:
    """A chat completion, as OpenAI's endpoints give it."""
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]
    }


class HeldPort:
    """An address at which nobody listens, and that nobody else gets."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server may still be started there
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/get_reward"

    def close(self) -> None:
        self._socket.close()


if __name__ == "__main__":
    print(FakeServer().url, flush=True)
    threading.Event().wait()
