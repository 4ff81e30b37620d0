"""The process in which environments of a library run, under an interpreter that may be another than ours.

Run by `processes/child.py`. The task has `file`, a Python file, and for those of this folder the `name` and `arguments`
of an environment. Needs nothing but Python's own library, because its interpreter has what the environment's library
asks for, and not what Hotseat does.

Takes messages from the channel, and answers each with one that has the same `id`:

    {"id": 1, "prompts": [0, 511]}                          the first texts of tasks, by number
    {"id": 2, "play": {"text", "label", "client": {...}}}   one episode, with the fields of its `PolicyClient`
    {"cancel": 2}                                           no answer is waited for any more

Episodes run side by side: async ones in one event loop, plain ones in a thread each. What they print, and what of them
blocks or ends the process, is reported by `worker_reports.py`. The end of the channel ends the process and all that it
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import http.client
import importlib.util
import inspect
import json
import os
import runpy
import select
import signal
import sys
import threading
import traceback
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotseat.processes.child import FrameChannel

_MAX_THREADS = 4096
_GARBAGE_THRESHOLD = 20_000
_MAX_SHOWN = 1000  # characters of an error, from either end
_MAX_TRACEBACK = 1 << 13
_CANCELLED = "CancelledError: it was cancelled"
_OVER = ("max_steps", "context_length_exceeded", "timeout")  # the run's bounds of an episode


@dataclass(frozen=True)
class PolicyClient:
    """The policy of one episode, behind the gateway: `base_url` and `api_key` are for an OpenAI client.

    `root_url` is the address for Anthropic's client. `seed` is the episode's own; any name of a model is accepted.
    `content` is the prompt as the content of a message: its text or, with images, parts in OpenAI's form. Several
    threads may ask at a time.
    """

    base_url: str
    api_key: str
    root_url: str
    seed: int
    model: str = "policy"
    content: str | list[dict[str, Any]] = ""

    def ask(self, messages: Sequence[Mapping[str, Any]], **body: Any) -> str | None:
        """Return the answer to a conversation; None if the episode may have no more turns or tokens."""
        address = urllib.parse.urlsplit(self.base_url)
        connect = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = connect(address.netloc)
        try:
            connection.request(
                "POST",
                address.path.rstrip("/") + "/chat/completions",
                json.dumps({"model": self.model, "messages": list(messages), **body}),
                {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
            )
            response = connection.getresponse()
            reply = json.loads(response.read())
        finally:
            connection.close()
        if response.status == 200:
            return reply["choices"][0]["message"]["content"] or ""
        error = reply.get("error") or {}
        if error.get("code") in _OVER:
            return None
        raise RuntimeError(f"the policy answered with status {response.status}: {error.get('message')}")

    def converse(
        self, system: str | None, observation: str | None, act: Callable[[str], tuple[str | None, float | None]]
    ) -> dict[str, Any]:
        """Play an episode in turns, and return its result.

        act: takes an answer, and returns the next observation (None at the end) and the reward, which is None for an
        answer that is no action.
        """
        messages, rewards = opening(system), []
        while observation is not None:
            messages.append({"role": "user", "content": observation})
            answer = self.ask(messages)
            if answer is None:
                break
            messages.append({"role": "assistant", "content": answer})
            observation, reward = act(answer)
            rewards.append(reward)
        valid = [reward for reward in rewards if reward is not None]
        extra = {"num_actions": len(valid), "invalid_actions": len(rewards) - len(valid)}
        return {"reward": sum(valid), "extra": extra}


def opening(system: str | None) -> list[dict[str, str]]:
    """Return the messages before the first observation."""
    return [] if system is None else [{"role": "system", "content": system}]


class _Worker:
    def __init__(self, channel: FrameChannel, spec: Mapping[str, Any]):
        self._channel = channel
        self._sending = threading.Lock()
        self._reports = _beside("worker_reports.py")
        self._lines = _beside("../user_lines.py")
        _beside("lazy_certificates.py").install()
        self._prints = self._reports.Prints(self._send)
        self._prints.capture()
        self._reports.note_exits(
            self._reports.current_episode.get,
            lambda episode, how: self._send({"exits": episode, "how": how}),
            self._lines.line_of,
        )
        if spec.get("helpers"):
            _install_helpers()
        module = _load(spec["file"])
        self._play: Any  # a function of prompt and client
        if "arguments" in spec:
            if spec["name"] is None:
                raise ValueError(module.NEEDS_NAME)
            self._tasks = getattr(module, spec["tasks"])(spec["name"], spec["arguments"])
            self._play = self._play_task
        else:
            self._play = getattr(module, "play", None)
            problem = play_problem(self._play, spec["file"])
            if problem is not None:
                raise ValueError(problem)
        # What was loaded stays, and clients make thousands of objects that are in no cycle.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GARBAGE_THRESHOLD, 50, 50)
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "episode")
        self._running: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, Mapping[str, Any]] = {}  # to begin
        self._has_waiting = asyncio.Event()

    async def serve(self) -> None:
        self._channel.socket.setblocking(False)
        reader, _ = await asyncio.open_connection(sock=self._channel.socket)
        loop = asyncio.get_running_loop()
        watch = self._reports.BlockReports(loop, self._send, self._episode_of, self._lines.line_of)
        watch.show_life()
        watch.start()
        beginning = asyncio.ensure_future(self._begin())
        self._send({"id": 0, "result": None})  # ready
        with contextlib.suppress(EOFError):
            while True:
                asked = await self._channel.receive_from(reader)
                if "cancel" not in asked:
                    self._waiting[asked["id"]] = asked
                    self._has_waiting.set()
                elif self._waiting.pop(asked["cancel"], None) is not None:
                    self._send({"id": asked["cancel"], "error": _CANCELLED, "traceback": ""})
                elif asked["cancel"] in self._running:
                    self._running[asked["cancel"]].cancel()
        beginning.cancel()
        os.killpg(0, signal.SIGKILL)

    async def _begin(self) -> None:
        """Begin what was asked for, one episode in each round of the loop.

        Together, hundreds of them would make clients for seconds, in which the first ones' connections run out of time.
        """
        while True:
            while self._waiting:
                number = next(iter(self._waiting))
                self._running[number] = asyncio.ensure_future(self._answer(self._waiting.pop(number)))
                await asyncio.sleep(0)
            self._has_waiting.clear()
            await self._has_waiting.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message from any thread. All writing is done here, none by the event loop."""
        data = memoryview(self._channel.frame(message))
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `serve` sees the end, too
            while data:
                try:
                    data = data[self._channel.socket.send(data) :]
                except BlockingIOError:
                    select.select([], [self._channel.socket], [])

    def _episode_of(self, task: asyncio.Task[Any] | None) -> int | None:
        return next((number for number, each in list(self._running.items()) if each is task), None)

    async def _answer(self, asked: Mapping[str, Any]) -> None:
        number = asked["id"]
        self._reports.current_episode.set(number)
        self._prints.begin(number)
        try:
            if "prompts" in asked:
                first, last = asked["prompts"]
                result = await self._in_thread(lambda: [self._tasks.prompt(at) for at in range(first, last + 1)])
            else:
                result = await self._episode(asked["play"])
            answer = {"id": number, "result": result}
            json.dumps(answer)
        except asyncio.CancelledError:
            answer = {"id": number, "error": _CANCELLED, "traceback": ""}
        except BaseException as error:  # one episode's sys.exit must not end the others
            shown = "".join(traceback.format_exception(error))
            answer = {"id": number, "error": self._described(error), "traceback": shown[-_MAX_TRACEBACK:]}
        finally:
            del self._running[number]
            self._prints.end(number)
        self._send(answer)

    async def _episode(self, asked: Mapping[str, Any]) -> Any:
        client = PolicyClient(**asked["client"])
        prompt = SimpleNamespace(text=asked["text"], label=asked["label"])
        if inspect.iscoroutinefunction(self._play):
            result = await self._play(prompt, client)
        else:
            result = await self._in_thread(self._play, prompt, client)
            if inspect.isawaitable(result):
                result = await result
        return _plain(result)

    def _play_task(self, prompt: Any, client: PolicyClient) -> Any:
        if not str(prompt.label).isdecimal():
            raise ValueError(f"the label {prompt.label!r} is not the number of a task: data.label_key names its column")
        return self._tasks.play(int(prompt.label), client)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a thread of the episode's context. What is no `Exception` cannot pass between threads."""

        def call() -> Any:
            try:
                return function(*arguments)
            except BaseException as error:
                if isinstance(error, Exception) and not isinstance(error, StopIteration):
                    raise
                raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None

        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, call)

    def _described(self, error: BaseException) -> str:
        return _shown(self._lines.describe_error(error))


def play_problem(function: Any, file: str) -> str | None:
    """Return why an object cannot play episodes, the `play` of a file; None if it can."""
    if not callable(function):
        return f"{file} has no function play(prompt, client)"
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        return f"{file}: play cannot be called with (prompt, client): {error}"
    return None


def _beside(name: str) -> Any:
    """Load a file of this package, which the interpreter need not have."""
    file = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), name))
    module_name = f"hotseat_{os.path.basename(file).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _install_helpers() -> None:
    """Make importable what files of other frameworks import."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for helper in runpy.run_path(os.path.join(package, "extensions.py"))["REWARD_HELPERS"]:
        runpy.run_path(os.path.join(package, helper))["install"]()


def _shown(text: str) -> str:
    return text if len(text) <= 2 * _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ... {text[-_MAX_SHOWN:]}"


def module_of(file: str) -> ModuleType:
    """Import a user's file under its own name, with its folder on the path for the modules beside it."""
    folder, name = os.path.split(os.path.abspath(file))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name.removesuffix(".py"))


def _load(file: str) -> ModuleType:
    name = "hotseat_environment"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = os.path.dirname(os.path.abspath(file))
    if folder != os.path.dirname(os.path.abspath(__file__)):
        sys.path.insert(0, folder)  # a user's: for the modules beside it
    spec.loader.exec_module(module)
    return module


def _plain(result: Any) -> Any:
    """Replace numbers of numpy and the like by Python's."""
    if isinstance(result, Mapping):
        return {str(name): _plain(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return [_plain(value) for value in result]
    return result.item() if callable(getattr(result, "item", None)) else result


def main(channel: FrameChannel, task: Mapping[str, Any]) -> None:
    sys.modules["hotseat_worker"] = sys.modules[__name__]
    try:
        worker = _Worker(channel, task)
    except BaseException as error:
        traceback.print_exc()
        described = _shown(_beside("../user_lines.py").describe_error(error))
        channel.send({"id": 0, "error": described, "traceback": ""})
    else:
        try:
            asyncio.run(worker.serve())
        except BaseException:
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):  # the file may be full or closed
            sys.stdout.flush()
        os.killpg(0, signal.SIGKILL)
