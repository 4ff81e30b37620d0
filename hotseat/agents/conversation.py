"""Contexts for the engine from the messages of a program that keeps its history itself.

A chat client sends the whole conversation with each request. Rendering it again and tokenising it would give other
tokens than those that the policy sampled. So the answers of an episode are remembered with their tokens, and a context
takes as much as possible from them: the longest recorded prefix is used token by token, and only what follows it is
rendered and tokenised.

A chat template may render an answer differently once more messages follow: thinking is removed, a tool call is written
in another way, a system prompt moves to the last message. That is noticed, by comparing the rendered text with that of
the recorded tokens. `history` says what happens then:

    append   the recorded tokens stay, and only the text that the template adds after the answer is appended
    render   the context is what the template makes of all messages, in another segment of the episode

A conversation that continues no recorded answer, or in which the place of the answer cannot be found, is rendered as a
whole, too. Whatever is chosen here, what was sampled is learned (`branches.py`): this file says what the policy reads.

Images stand in messages as parts `{"type": "image", "prepared": PreparedImage}`. In texts an image is one
token of the model, which the template writes; in tokens it is all those that stand for it. So texts and tokens of
contexts with different images may be equal: wherever they are compared, the images are compared, too.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, lru_cache
from pathlib import PurePath
from typing import Any, Literal

from hotseat.agents.agent import AgentError
from hotseat.agents.branches import Answer
from hotseat.agents.harmony import END, RETURN
from hotseat.agents.image_preparer import ImagePreparer
from hotseat.agents.transcript import decode, decode_after
from hotseat.types import Completion, Prompt
from hotseat.vision import PreparedImage

History = Literal["append", "render"]
Message = Mapping[str, Any]

_PLACE = "hotseat7f3a9c51answer"  # stands for an answer when the text around it is looked for


class ConversationError(Exception):
    """Messages from which no context can be made; the message is for the program that sent them."""


@dataclass(frozen=True)
class Context:
    """Tokens for the engine to continue, or an answer with its context, which a later context may continue."""

    token_ids: tuple[int, ...]
    text: str
    messages: bytes | None = None  # digest of the messages; None: it was made of text or of tokens
    num_messages: int = 0
    images: tuple[str, ...] = ()  # files of the images in it, in order
    stop: str | None = None  # text of the token that ended the answer; None: none did

    @cached_property
    def digest(self) -> bytes:
        names = "/".join(PurePath(image).stem for image in self.images)  # digests of what is in them
        return hashlib.blake2b(array("q", self.token_ids).tobytes() + names.encode(), digest_size=8).digest()


_NOTHING = Context((), "")


@dataclass(eq=False)
class Conversation:
    """The contexts and answers of one episode."""

    tokenizer: Any
    _: KW_ONLY
    chat_template: str | None = None  # instead of the tokenizer's
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # where `options` do not set them
    history: History = "append"
    when_rewritten: Callable[[], object] = lambda: None  # called when a template changes what was sampled
    max_characters: int | None = None  # of a text; longer ones are refused before they are tokenised; None: no limit
    preparer: ImagePreparer | None = None  # of a VLM's images
    prompt: Prompt | None = None  # what a text or tokens may begin with besides recorded answers, with its images
    answers: list[Answer] = field(default_factory=list)  # in the order in which they were recorded
    text: str = ""  # of the last answer and its context
    _recorded: list[Context] = field(default_factory=list)
    _by_messages: dict[bytes, Context] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt.images:
            self._recorded.append(Context(self.prompt.token_ids, self.prompt.text, images=self.prompt.images))

    # --- contexts -----------------------------------------------------------------------------------------------------

    def of_messages(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), options: Mapping[str, Any] | None = None
    ) -> Context:
        """Return the context for the next answer to a conversation. options: variables of the template."""
        images, options = _images_of(messages), {**self.chat_template_kwargs, **(options or {})}
        text = self._render(messages, tools, options)
        digest = _hashed([list(tools), dict(options)])
        said: Context | None = None  # the longest answer that these messages contain
        for message in messages:
            digest = _digest_after(digest, message)
            if message.get("role") == "assistant":
                said = self._by_messages.get(digest, said)
        read = self._longest_by_text(text, images)
        if said is not None and (read is None or read.num_messages < said.num_messages):
            self.when_rewritten()
            if self.history == "append":
                tail = self._tail(messages, said, tools, options)
                if tail is not None:
                    return self._continued(said, tail, images, digest, len(messages))
        read = read or _NOTHING
        return self._continued(read, text[len(read.text) :], images, digest, len(messages))

    def of_text(self, text: str) -> Context:
        read = self._longest_by_text(text) or _NOTHING
        return self._continued(read, text[len(read.text) :])

    def of_tokens(self, token_ids: Sequence[int]) -> Context:
        tokens = tuple(token_ids)
        if self.preparer is None:
            return Context(tokens, decode(self.tokenizer, tokens))
        fitting = [each for each in reversed(self._recorded) if tokens[: len(each.token_ids)] == each.token_ids]
        read = max(fitting, key=lambda recorded: len(recorded.token_ids), default=_NOTHING)
        rest = tokens[len(read.token_ids) :]
        self._with_images(rest, ())
        text = read.text + decode_after(self.tokenizer, read.token_ids, rest)
        return Context(tokens, text, images=read.images)

    def _continued(
        self,
        recorded: Context,
        tail: str,
        images: Sequence[PreparedImage] | None = None,
        digest: bytes | None = None,
        num_messages: int = 0,
    ) -> Context:
        """Return a recorded context with a text after it. images: all of the context; None: those recorded."""
        more = () if images is None else images[len(recorded.images) :]
        added = self._with_images(self._encode(tail), more)
        paths = recorded.images + tuple(image.path for image in more)
        return Context(recorded.token_ids + added, recorded.text + tail, digest, num_messages, paths)

    def _with_images(self, token_ids: tuple[int, ...], images: Sequence[PreparedImage]) -> tuple[int, ...]:
        """Replace the token of each image by those that stand for it."""
        if self.preparer is None:
            return token_ids
        try:
            return tuple(self.preparer.expand(token_ids, images)[0])
        except AgentError:
            num_places = token_ids.count(self.preparer.image_token_id)
            tokens = ", ".join(sorted(decode(self.tokenizer, [token]) for token in self.preparer.placeholder_ids))
            raise ConversationError(
                f"{len(images)} images, and {num_places} places for them: images are parts of messages, texts and"
                f" tokens must be without {tokens}, and the chat template must write one place for each image"
            ) from None

    def _longest_by_text(self, text: str, images: Sequence[PreparedImage] | None = None) -> Context | None:
        """Return the longest recorded answer with whose context and text a text begins; the latest of several.

        images: those in the text; None: it has those of the recorded answer.
        """
        paths = None if images is None else tuple(image.path for image in images)
        fitting = [
            recorded
            for recorded in reversed(self._recorded)
            if text.startswith(recorded.text) and (paths is None or paths[: len(recorded.images)] == recorded.images)
        ]
        return max(fitting, key=lambda recorded: len(recorded.text), default=None)

    def _tail(
        self, messages: Sequence[Message], said: Context, tools: Sequence[Message], options: Mapping[str, Any]
    ) -> str | None:
        """Return what the template adds after a recorded answer, up to the next one; None if it cannot be seen.

        The template is asked with a text of ours in the place of the answer. Where the answer ended with a token, what
        follows is what comes after that token.
        """
        at = said.num_messages - 1
        calls = messages[at].get("tool_calls")
        if calls and said.stop is None:
            return None
        stub = {**messages[at], "content": _PLACE}
        for name in ("reasoning_content", "reasoning", "thinking"):
            stub.pop(name, None)
        try:
            text = self._render([*messages[:at], stub, *messages[at + 1 :]], tools, options)
        except ConversationError:
            return None
        if text.count(_PLACE) != 1:
            return None
        rest = text.partition(_PLACE)[2]
        if said.stop is None or (said.stop not in rest and not calls):
            return rest.removeprefix(END) if said.stop == RETURN else rest  # in history the one stands for the other
        _, stop, tail = rest.partition(said.stop)
        return tail if stop else None

    def _render(self, messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        if not (self.chat_template or getattr(self.tokenizer, "chat_template", None)):
            raise ConversationError("the policy's tokenizer has no chat template: set data.chat_template")
        shown = [_for_template(message) for message in messages]
        if self.preparer is not None and not _takes_text(self.tokenizer, self.chat_template):
            shown = [{**each, "content": _parts(each["content"])} for each in shown]
        try:
            return self.tokenizer.apply_chat_template(
                shown,
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConversationError(f"the chat template refuses these messages: {error}") from error

    def _encode(self, text: str) -> tuple[int, ...]:
        if self.max_characters is not None and len(text) > self.max_characters:
            raise ConversationError(f"the text has {len(text)} characters, which no model of this length can read")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConversationError(f"the text is not Unicode: {error.reason}") from None
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    # --- answers ------------------------------------------------------------------------------------------------------

    def text_of(self, context: Context, token_ids: Sequence[int]) -> str:
        """Return tokens as the text that follows the context, special tokens included."""
        return decode_after(self.tokenizer, context.token_ids, token_ids)

    def record(
        self, context: Context, completion: Completion, message: Message | None = None, *, is_learned: bool = True
    ) -> None:
        """Remember an answer. message: as the program gets it and sends it back; None if it gets only text."""
        # A placeholder that the policy sampled has no image: nothing can be read after it.
        is_end = self.preparer is not None and not self.preparer.placeholder_ids.isdisjoint(completion.token_ids)
        functions = [call["function"] for call in (message or {}).get("tool_calls") or ()]
        calls = tuple(f"{function.get('name')}({function.get('arguments')})" for function in functions)
        answer = Answer(context.token_ids, completion, is_learned, calls, context.images, is_end)
        self.answers.append(answer)
        added = self.text_of(context, completion.token_ids)
        has_end = completion.finish == "stop" and completion.stop is None  # a token that the template writes, too
        stop = decode(self.tokenizer, completion.token_ids[-1:]) if has_end else None
        self.text = context.text + added
        if is_end:
            return
        num_messages = 0 if message is None else context.num_messages + 1
        recorded = Context(answer.token_ids, self.text, None, num_messages, context.images, stop)
        self._recorded.append(recorded)
        if message is not None and context.messages is not None:
            self._by_messages[_digest_after(context.messages, message)] = recorded


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message in the form that templates read.

    Content is text or, with images, parts of text and of images; arguments of tool calls are objects.
    """
    shown = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    shown["content"] = _parts(content) if _images_of([message]) else text_of_content(content)
    if shown.get("tool_calls"):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"].get("arguments"))}}
            for call in shown["tool_calls"]
        ]
    return shown


def text_of_content(content: Any) -> str:
    """Return a message's content as text: a string, or parts of which each is text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise ConversationError(f"a message has content of type {kind}: only text is possible here")
        return "".join(part["text"] for part in content)
    raise ConversationError(
        f"a message has content that is a {type(content).__name__}, not a string or a list of parts"
    )


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return content as parts of text and of images, of which templates read only the types."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        {"type": "image"} if _is_image(part) else {"type": "text", "text": text_of_content([part])} for part in content
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _images_of(messages: Sequence[Message]) -> list[PreparedImage]:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    return [part["prepared"] for part in parts if isinstance(part.get("prepared"), PreparedImage)]


@lru_cache(maxsize=64)
def _takes_text(tokenizer: Any, chat_template: str | None) -> bool:
    """Tell whether a template shows content that is a text; some take only lists of parts, and show nothing else."""
    messages = [{"role": "user", "content": _PLACE}]
    try:
        return _PLACE in tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False)
    except Exception:  # a template may raise any error
        return False


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _digest_after(before: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message. Of an answer, what clients send back counts."""
    if message.get("role") == "assistant":
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        named = [[call.get("name"), _parsed(call.get("arguments"))] for call in calls]
        return _hashed(["assistant", text_of_content(message.get("content")), named], before)
    rest = {name: value for name, value in message.items() if value is not None and name != "content"}
    content: Any = message.get("content")
    if _images_of([message]):
        parts = [[part["prepared"].path] if _is_image(part) else text_of_content([part]) for part in content]
        return _hashed([rest, parts], before)
    return _hashed([rest, text_of_content(content)], before)


def _hashed(value: Any, before: bytes = b"") -> bytes:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
