"""The requests of one episode: each becomes a context for the engine, and each answer is recorded."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

from hotseat.agents.agent import AgentError, OutOfTimeError, SampleFunction
from hotseat.agents.conversation import Context, Conversation, ConversationError, History
from hotseat.agents.environments.families import EnvironmentSettings
from hotseat.agents.gateway import message_images
from hotseat.agents.gateway.fields import CAN_BE_SAMPLED, Asked, BadRequest
from hotseat.agents.gateway.parsing import Parser, parser_of
from hotseat.agents.gateway.reply import ClientAnswer, GrowingAnswer, certain
from hotseat.agents.harmony import is_harmony
from hotseat.agents.image_preparer import ImagePreparer
from hotseat.agents.transcript import decode, decode_after
from hotseat.closing import on_failure
from hotseat.types import Completion, Prompt, Sampling, WhenSampled
from hotseat.vision import PreparedImage

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Watch = Callable[[Sequence[GrowingAnswer]], object]
_MAX_TEMPERATURE = 100.0
_SHORT = 4096  # characters of a conversation that is worked on in the event loop: about a millisecond at most
_TOKEN_CHARACTERS = 4  # on average
OwnSampling = Literal["override", "refuse", "untrained"]


@dataclass(frozen=True)
class ProgramSettings:
    """Settings of programs. command: None if the program is a function. bind, advertise_url: of the gateway.

    sampling: what becomes of a client's own temperature and the like. chat_template: instead of the tokenizer's.
    chat_template_kwargs: variables of the template, where a request does not set them.
    tool_parser: family of models whose tool calls are parsed, as the package `renderers` names it.

    passed_on: names of variables of our environment that a command gets. containers: the command that removes the
    containers of an episode, such as podman. preload: modules that the interpreter of a command imports once for all
    episodes. environment: what plays in processes of its own, instead of a command or a function.
    """

    command: tuple[str, ...] | None = None
    sampling: OwnSampling = "override"
    history: History = "append"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None
    bind: str = "127.0.0.1"
    advertise_url: str | None = None
    passed_on: tuple[str, ...] = ()
    containers: str | None = None
    preload: tuple[str, ...] = ()
    run_seed: int = 0
    environment: EnvironmentSettings | None = None


@dataclass(eq=False)
class ServedPolicy:
    """The model behind the gateway, as far as all episodes share it: its tokenizer, its settings, what was logged.

    Rendering and tokenising long conversations takes milliseconds, which the event loop does not have: `work` has one
    thread do that, in the order of the calls. What is short takes less than passing it to a thread and back, and is
    done at once, unless the thread is busy. So one conversation is worked on at a time.
    """

    tokenizer: Any
    settings: ProgramSettings
    max_length: int
    max_answers: int | None = None
    preparer: ImagePreparer | None = None  # of a VLM's images; None: the run has none
    _logged: set[str] = field(default_factory=set)
    _thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "conversations"))
    _last: Future[Any] | None = None  # of what the thread was given

    def __post_init__(self) -> None:
        of_images = None if self.preparer is None else self.preparer.chat_template
        self.chat_template = self.settings.chat_template or of_images
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(token for token, about in added.items() if about.special)
        if self.settings.tool_parser is not None:
            _ = self.parser  # raises if it cannot be

    @cached_property
    def max_characters(self) -> int:
        """Return an upper bound on the characters of a text that fits into a context: longer ones are not tokenised."""
        longest = max((len(token) for token in self.tokenizer.get_vocab()), default=1)
        return 4 * longest * self.max_length + (1 << 16)

    @cached_property
    def parser(self) -> Parser | None:
        return parser_of(self.tokenizer, self.settings.tool_parser)

    @cached_property
    def has_channels(self) -> bool:
        """Tell whether answers have parts that are not for the user, also where there are no tools."""
        return self.parser is not None and is_harmony(self.tokenizer)

    async def work(self, num_characters: float, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function that works on a conversation of so many characters."""
        if num_characters <= _SHORT and (self._last is None or self._last.done()):
            return function(*args)
        working = self._last = self._thread.submit(function, *args)
        return await asyncio.wrap_future(working)

    def log_once(self, about: str, message: str) -> None:
        if about not in self._logged:
            self._logged.add(about)
            logger.warning("%s", message)

    def log_rewritten(self) -> None:
        kept = "them as they were sampled" if self.settings.history == "append" else "what is rendered"
        self.log_once(
            "history",
            "earlier answers read differently when the chat template renders them again (thinking removed, tool calls"
            " written in another way, special tokens left out): with agent.history"
            f" {self.settings.history} the policy reads {kept}",
        )


class ProgramSession:
    """One episode's side of the gateway: what was asked, what was sampled, and what went wrong.

    `failure` is done as soon as the engine fails a request: the episode cannot continue, whatever the program does.
    prompt: whose images the program may show; None: it has none.
    """

    def __init__(self, policy: ServedPolicy, sample: SampleFunction, sampling: Sampling, prompt: Prompt | None = None):
        self.sampling = sampling
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.conversation = Conversation(
            policy.tokenizer,
            chat_template=policy.chat_template,
            chat_template_kwargs=policy.settings.chat_template_kwargs,
            history=policy.settings.history,
            when_rewritten=policy.log_rewritten,
            max_characters=policy.max_characters,
            preparer=policy.preparer,
            prompt=prompt,
        )
        self._prompt_images = () if prompt is None else prompt.images
        self.is_cut = False  # the last answer ended at a limit of tokens
        self.is_out_of_time = False  # the episode's time is over, and a request was refused for it
        self._policy = policy
        self._sample = sample
        self._num_asked = 0
        self._turns: dict[bytes, set[int]] = {}  # by context: numbers of the requests for it

    async def answer(self, asked: Asked, watch: Watch | None = None) -> list[ClientAnswer]:
        """Return the answers to a request, and record them. Raises `BadRequest` for what cannot be answered.

        watch: called with the answers as soon as they are asked for, if somebody reads them while they are sampled.
        """
        policy = self._policy
        sampling, is_learned = self._sampling(asked.own)
        is_learned = is_learned and asked.is_learned
        context = await self._context_of(asked)
        room = policy.max_length - len(context.token_ids)
        if room <= 0 or not context.token_ids:
            raise BadRequest(
                f"the context has {len(context.token_ids)} tokens; it must have at least one and leave at least one of"
                f" {policy.max_length} (data.max_length) for the answer",
                "prompt" if asked.messages is None else "messages",
                code="context_length_exceeded",
            )
        if policy.max_answers is not None and self._num_asked + asked.num_answers > policy.max_answers:
            raise BadRequest(
                f"the episode has had {self._num_asked} of its {policy.max_answers} answers (agent.max_steps)",
                code="max_steps",
            )
        limit = min(sampling.max_new_tokens, room, asked.max_tokens or room)
        stops = dict.fromkeys((*sampling.stop, *asked.stop))
        sampling = replace(sampling, max_new_tokens=limit, stop=tuple(stops))
        if watch is None:
            completions = await self._complete(context, sampling, [None] * asked.num_answers)
            return await self._given(context, completions, asked, is_learned)

        def text_of(token_ids: tuple[int, ...]) -> Awaitable[str]:
            return policy.work(_size(context, token_ids), self._certain, context, asked.stop, token_ids)

        growing = [GrowingAnswer(context.token_ids, text_of) for _ in range(asked.num_answers)]
        watch(growing)
        try:
            try:
                completions = await self._complete(context, sampling, [each.take for each in growing])
            finally:
                for each in growing:
                    each.stop()  # nothing more is shown, so that the whole answers can be compared with what was
            answers = await self._given(context, completions, asked, is_learned, growing)
        except BaseException as error:
            for each in growing:
                each.fail(error)
            raise
        for each, answer in zip(growing, answers, strict=True):
            each.finish(answer)
        return answers

    async def num_context_tokens(self, asked: Asked) -> int:
        """Return the length of what the policy would read for a request. Nothing is sampled or recorded."""
        return len((await self._context_of(asked)).token_ids)

    async def _context_of(self, asked: Asked) -> Context:
        policy = self._policy
        if asked.messages is not None and policy.preparer is not None:
            asked = replace(asked, messages=await self._with_images(asked.messages, policy.preparer))
        try:
            return await policy.work(asked.num_characters, self._context, asked)
        except ConversationError as error:
            raise BadRequest(str(error), "prompt" if asked.messages is None else "messages") from error

    def _certain(self, context: Context, stops: tuple[str, ...], token_ids: tuple[int, ...]) -> str:
        """Return the text that an answer has for clients if it begins with these tokens; empty if that is not known."""
        if self._policy.has_channels:
            return ""  # which of it is for the user is known at its end
        if stops and _first_stop(self.conversation.text_of(context, token_ids), stops) is not None:
            return ""  # the tokens after it will be cut off
        return certain(self._visible(context, token_ids), stops)

    async def _given(
        self,
        context: Context,
        completions: list[Completion],
        asked: Asked,
        is_learned: bool,
        growing: Sequence[GrowingAnswer] = (),
    ) -> list[ClientAnswer]:
        size = _size(context, *(completion.token_ids for completion in completions))
        if asked.tools:  # looking for calls may take long
            size = _SHORT + 1
        return await self._policy.work(size, self._give, context, completions, asked, is_learned, growing)

    def _give(
        self,
        context: Context,
        completions: list[Completion],
        asked: Asked,
        is_learned: bool,
        growing: Sequence[GrowingAnswer] = (),
    ) -> list[ClientAnswer]:
        """Record the answers to a request and return them. growing: what clients were shown of them, if anything.

        None is recorded if one of them does not begin with what was shown: no client would have read it.
        """
        made = [self._client_answer(context, completion, asked) for completion in completions]
        if not all(each.agrees_with(answer) for each, (answer, _) in zip(growing, made, strict=False)):
            raise RuntimeError("the answer has become another one than that of which a part was streamed")
        for answer, completion in made:
            message = None if asked.messages is None else answer.message
            self.conversation.record(context, completion, message, is_learned=is_learned)
            if asked.is_learned:
                self.is_cut = answer.is_cut
        return [answer for answer, _ in made]

    def token_text(self, token_id: int) -> str:
        return decode(self._policy.tokenizer, [token_id])

    # --- settings -----------------------------------------------------------------------------------------------------

    def _sampling(self, own: Mapping[str, Any]) -> tuple[Sampling, bool]:
        """Return how to sample, and whether the answer is learned from."""
        if not own:
            return self.sampling, True
        names = ", ".join(sorted(own))
        mode = self._policy.settings.sampling
        if mode == "refuse":
            raise BadRequest(
                f"{names}: the run's own settings hold (agent.sampling is refuse), because the policy is trained under"
                " them: leave these out",
                min(own),
            )
        if mode == "override":
            self._policy.log_once(
                f"own {names}",
                f"a program asked for its own {names}: the run's settings hold (agent.sampling is override), because"
                " the policy is trained under them",
            )
            return self.sampling, True
        impossible = sorted(set(own) - set(CAN_BE_SAMPLED))
        if impossible:
            raise BadRequest(
                f"{', '.join(impossible)}: the engine cannot sample that way (agent.sampling is untrained)",
                impossible[0],
            )
        changed: dict[str, Any] = {
            name: max(0, int(value)) if name == "top_k" else float(value) for name, value in own.items()
        }
        # Whatever the engine would refuse must be refused here: its errors are not the program's own.
        if not 0 <= changed.get("temperature", 0) <= _MAX_TEMPERATURE or not 0 < changed.get("top_p", 1) <= 1:
            raise BadRequest(
                f"temperature must be from 0 to {_MAX_TEMPERATURE:g}, and top_p above 0 and at most 1", min(own)
            )
        return replace(self.sampling, **changed), False

    async def _with_images(
        self, messages: Sequence[Mapping[str, Any]], preparer: ImagePreparer
    ) -> Sequence[Mapping[str, Any]]:
        urls = message_images.urls_of(messages)
        if not urls:
            return messages
        if len(urls) > preparer.max_images:
            raise BadRequest(
                f"messages: {len(urls)} images, and data.max_images_per_prompt allows {preparer.max_images}", "messages"
            )
        for detail in message_images.details_of(messages):
            text = f"a program asked for images in detail {detail!r:.20}: the model's processor decides"
            self._policy.log_once("detail", text)
        numbers = [message_images.number_of_prompt(url, len(self._prompt_images)) for url in urls]
        own = [url for url, number in zip(urls, numbers, strict=True) if number is None]
        try:
            looked = iter(await preparer.prepare_all(own, 0))
        except AgentError as error:
            raise BadRequest(str(error), "messages") from None
        shown: list[PreparedImage] = [
            next(looked) if number is None else PreparedImage.of_file(self._prompt_images[number]) for number in numbers
        ]
        return message_images.with_images(messages, shown)

    def _context(self, asked: Asked) -> Context:
        if asked.tools and self._policy.parser is None:
            raise BadRequest(
                "tools: this model's answers cannot be parsed for tool calls: its tokenizer has no response_template,"
                " and agent.tool_parser is not set",
                "tools",
            )
        if asked.messages is not None:
            context = self.conversation.of_messages(asked.messages, asked.tools, asked.options)
        elif asked.text is not None:
            context = self.conversation.of_text(asked.text)
        else:
            assert asked.token_ids is not None, "a request for nothing"
            size = len(self._policy.tokenizer)
            if max(asked.token_ids) >= size:
                raise BadRequest(f"prompt: token {max(asked.token_ids)} is not one of the model's {size}", "prompt")
            context = self.conversation.of_tokens(asked.token_ids)
        _ = context.digest  # computed here, in the thread that may take its time
        return context

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def _complete(
        self, context: Context, sampling: Sampling, listeners: Sequence[WhenSampled | None]
    ) -> list[Completion]:
        """Sample answers to a context, all at the same time. They count for the episode's limit unless they fail.

        listeners: of each answer, if somebody reads it meanwhile.
        """
        self._num_asked += len(listeners)
        tasks: list[asyncio.Task[Completion]] = []
        try:
            if len(listeners) == 1:
                return [await self._complete_one(context, sampling, listeners[0])]
            tasks += [asyncio.ensure_future(self._complete_one(context, sampling, each)) for each in listeners]
            return list(await asyncio.gather(*tasks))
        except BaseException as error:
            self._num_asked -= len(listeners)
            if isinstance(error, OutOfTimeError):
                self.is_out_of_time = True
                raise BadRequest(f"{error} (agent.timeout_s): nothing more is sampled", code="timeout") from None
            if not isinstance(error, asyncio.CancelledError) and not self.failure.done():
                self.failure.set_result(error)
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _complete_one(self, context: Context, sampling: Sampling, when_sampled: WhenSampled | None) -> Completion:
        """Sample one answer. Its seed depends on the context, not on what else is asked for at the time.

        A request that was given up leaves its number to the next one for the same context, which is often its retry.
        """
        taken = self._turns.setdefault(context.digest, set())
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(number)
        digest = hashlib.blake2b(context.digest + str(number).encode(), digest_size=8).digest()
        turn = int.from_bytes(digest, "little") >> 1
        more: dict[str, Any] = {} if when_sampled is None else {"when_sampled": when_sampled}
        if self._policy.preparer is not None:
            more["images"] = context.images
        with on_failure(lambda: taken.discard(number)):
            return await self._sample(list(context.token_ids), sampling, turn, **more)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _client_answer(self, context: Context, completion: Completion, asked: Asked) -> tuple[ClientAnswer, Completion]:
        """Return a completion as clients read it, and its tokens up to a stop string."""
        stop = _first_stop(self.conversation.text_of(context, completion.token_ids), asked.stop)
        if stop is not None:
            completion = self._cut(context, completion, stop)
        text = self._visible(context, completion.token_ids)
        if stop is not None and stop in text:
            text = text[: text.find(stop)]
        is_cut = stop is None and completion.finish == "length"
        answer = ClientAnswer(context.token_ids, completion.token_ids, completion.log_probs, text, is_cut, stop)
        if (asked.tools or self._policy.has_channels) and stop is None:
            answer = self._with_tool_calls(answer, context, completion, asked)
        return answer, completion

    def _cut(self, context: Context, completion: Completion, stop: str) -> Completion:
        """Return a completion up to the token that completes a stop string, where an engine stops by itself."""
        ids = completion.token_ids
        lengths = range(1, len(ids))
        end = 1 + bisect_left(lengths, True, key=lambda end: stop in self.conversation.text_of(context, ids[:end]))
        return replace(
            completion,
            token_ids=ids[:end],
            log_probs=completion.log_probs[:end],
            versions=completion.versions[:end],
            finish=completion.finish if end == len(ids) else "length",  # it does not end with a stop token
        )

    def _visible(self, context: Context, token_ids: tuple[int, ...]) -> str:
        shown = [token for token in token_ids if token not in self._policy.special_ids]
        return decode_after(self._policy.tokenizer, context.token_ids, shown) if shown else ""

    def _with_tool_calls(
        self, answer: ClientAnswer, context: Context, completion: Completion, asked: Asked
    ) -> ClientAnswer:
        parser = self._policy.parser
        assert parser is not None, "tools without a parser"
        raw = self.conversation.text_of(context, completion.token_ids)
        parsed = parser(context, raw, completion.token_ids, asked.tools)
        if parsed is None:
            return answer
        calls = tuple(
            {"id": f"call_{secrets.token_hex(12)}", "function": {"name": name, "arguments": arguments}}
            for name, arguments in parsed.calls
        )
        return replace(answer, text=parsed.content, tool_calls=calls, reasoning=parsed.reasoning)

    def check(self) -> None:
        """Raise what the engine raised, and refuse an episode in which nothing was sampled."""
        if self.failure.done():
            raise self.failure.result()
        if not any(answer.is_learned for answer in self.conversation.answers):
            why = (
                "asked the policy for nothing"
                if not self.conversation.answers
                else "sampled only by settings of its own or with learn: false"
            )
            raise AgentError(f"the program {why}, so there is nothing to learn from")


def _size(context: Context, *answers: Sequence[int]) -> int:
    """Return about how many characters a context and answers to it have."""
    return len(context.text) + _TOKEN_CHARACTERS * sum(map(len, answers))


def _first_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """Return the stop string that is complete first in a text."""
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    return min(ends)[1] if ends else None
