"""Images in the messages of programs: what the policy reads, what is learned, and what is refused."""

from __future__ import annotations

import base64
import sys
from dataclasses import replace

import image_cases
import openai
import pytest
from gateway_cases import KEY, SAMPLING, WAIT_S, Engine, PlayFunction

from hotseat.agents import AgentHost, ProgramSettings, load_agent
from hotseat.agents.agent import AgentError
from hotseat.agents.branches import Answer, segments_of
from hotseat.agents.conversation import Conversation, ConversationError
from hotseat.agents.gateway.program_session import ServedPolicy
from hotseat.agents.image_preparer import ImagePreparer
from hotseat.types import Completion, Failed, Prompt, ScoredEpisode
from hotseat.vision import PreparedImage

pytestmark = pytest.mark.slow
PAD = "<|image_pad|>"
TOKENIZER = image_cases.tokenizer_with(
    ("<|vision_start|>", "<|vision_end|>", PAD, "<|video_pad|>", "<|im_start|>", "<|im_end|>")
)
TOKENIZER.chat_template = image_cases.CHAT
IMAGE, VIDEO = TOKENIZER.convert_tokens_to_ids([PAD, "<|video_pad|>"])


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def prepare(url: str) -> PreparedImage:
    """Prepare an image that is named in its own URL, of two tokens."""
    name = base64.b64decode(url.rpartition(",")[2]).decode()
    if name == "broken":
        raise AgentError("an image of the episode: broken")
    return PreparedImage(f"/{name}.safetensors", (IMAGE, IMAGE))


PREPARER = ImagePreparer(prepare, IMAGE, frozenset({IMAGE, VIDEO}), max_images=3)


def url_of(name: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(name.encode()).decode()}"


def shown(name: str) -> dict:
    return {"type": "image", "prepared": prepare(url_of(name))}


def asking(*names: str, text: str = "what?") -> dict:
    return {"role": "user", "content": [*map(shown, names), {"type": "text", "text": text}]}


def answered(text: str) -> Completion:
    ids = ids_of(text + "<|im_end|>")
    return Completion("r", ids, (-0.5,) * len(ids), (1,) * len(ids), "stop")


def test_contexts_continue_recorded_answers_only_with_the_same_images():
    conversation = Conversation(TOKENIZER, preparer=PREPARER)
    first = conversation.of_messages([asking("a")])
    assert TOKENIZER.decode(first.token_ids).count(PAD) == 2
    assert first.text.count(PAD) == 1
    assert first.images == ("/a.safetensors",)
    other = conversation.of_messages([asking("b")])
    assert other.token_ids == first.token_ids
    assert other.digest != first.digest
    said = {"role": "assistant", "content": "red"}
    conversation.record(first, answered("red"), said)
    more = conversation.of_messages([asking("a"), said, asking("b", "a", text="and now?")])
    assert more.images == ("/a.safetensors", "/b.safetensors", "/a.safetensors")
    assert more.token_ids[: len(first.token_ids)] == first.token_ids
    changed = conversation.of_messages([asking("b"), said, asking("b", "a", text="and now?")])
    assert changed.token_ids == more.token_ids
    assert changed.images[0] == "/b.safetensors"
    # What was sampled after one image is never context of what was sampled after another one.
    conversation.record(more, answered("blue"))
    conversation.record(changed, answered("blue"))
    segments, answers = segments_of(conversation.answers)
    assert [segment.images for segment in segments] == [more.images, changed.images]
    assert [len(answer.completion.token_ids) for answer in answers] == [4, 5, 5]
    assert segments[1].mask.sum() == 5


def test_images_after_the_last_learned_answer_are_left_out():
    one, two = answered("a"), answered("b")
    asked = (*ids_of("q"), IMAGE, IMAGE)
    first = Answer(asked, one, images=("/a",))
    second = Answer((*first.token_ids, IMAGE, IMAGE), two, is_learned=False, images=("/a", "/b"))
    (segment,), _ = segments_of([first, second])
    assert segment.images == ("/a",)


def test_nothing_continues_a_placeholder_that_the_policy_sampled():
    conversation = Conversation(TOKENIZER, preparer=PREPARER)
    context = conversation.of_messages([asking("a")])
    ids = (*ids_of("red"), IMAGE)
    said = {"role": "assistant", "content": "red"}
    conversation.record(context, Completion("r", ids, (-0.5,) * 4, (1,) * 4, "stop"), said)
    again = conversation.of_messages([asking("a"), said, asking(text="go on")])
    assert again.token_ids[: len(context.token_ids) + 4] != context.token_ids + ids
    conversation.record(again, answered("blue"))
    segments, _ = segments_of(conversation.answers)
    assert [int(segment.mask.sum()) for segment in segments] == [4, 5]
    assert segments[0].token_ids[-1] == IMAGE


def test_texts_and_tokens_have_the_images_of_the_prompt():
    ids = (*ids_of("see <|vision_start|>"), IMAGE, IMAGE, *ids_of("<|vision_end|>"))
    prompt = Prompt(0, f"see <|vision_start|>{PAD}<|vision_end|>", ids, None, images=("/own.safetensors",))
    conversation = Conversation(TOKENIZER, preparer=PREPARER, prompt=prompt)
    for context in (conversation.of_text(prompt.text + " now"), conversation.of_tokens(ids + ids_of(" now"))):
        assert context.token_ids == ids + ids_of(" now")
        assert context.images == ("/own.safetensors",)
    for wrong in (PAD, "<|video_pad|>", prompt.text + PAD):
        with pytest.raises(ConversationError, match="texts and tokens must be without"):
            conversation.of_text(wrong)
    with pytest.raises(ConversationError, match="0 images, and 1 places"):
        conversation.of_tokens((*ids_of("x"), IMAGE))
    with pytest.raises(ConversationError, match="1 images, and 2 places"):
        conversation.of_messages([asking("a", text=f"is {PAD} it")])


def test_a_template_of_parts_alone_gets_parts():
    parts = (
        "{% for m in messages %}{{ m.role + ':' }}{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>"
        "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
    )
    conversation = Conversation(TOKENIZER, chat_template=parts, preparer=PREPARER)
    messages = [asking("a"), {"role": "assistant", "content": "red"}, {"role": "user", "content": "why?"}]
    assert conversation.of_messages(messages).text == f"user:{PAD}what?\nassistant:red\nuser:why?\n"


class Qwen(Engine):
    """Answers in the words of the tiny tokenizer."""

    def __call__(self, request):
        future = super().__call__(request)
        made = future.result()
        future = type(future)()
        ids = ids_of("red<|im_end|>")
        future.set_result(Completion(made.request_id, ids, (-0.5,) * len(ids), (1,) * len(ids), "stop"))
        return future


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    own = image_cases.write_pixels(tmp_path_factory.mktemp("images"), 0, rows=2)
    return Prompt(3, f"{PAD}how many?", (IMAGE, IMAGE, *ids_of("how many?")), "7", images=(own,))


def play(function, prompt, preparer=PREPARER):
    engine = Qwen()
    agent = PlayFunction(function, ServedPolicy(TOKENIZER, ProgramSettings(), 600, preparer=preparer))
    with AgentHost(agent, engine, run_seed=5, timeout_s=WAIT_S) as host:
        return engine, host.submit(prompt, KEY, SAMPLING).result(WAIT_S)


def test_clients_of_three_protocols_show_images_in_every_turn(prompt):
    import anthropic  # takes seconds, which a worker without this test is spared

    async def program(prompt, client):
        assert client.content == [
            {"type": "image_url", "image_url": {"url": "hotseat:image/0"}},
            {"type": "text", "text": "how many?"},
        ]
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as chat:
            messages = [{"role": "user", "content": client.content}]
            reply = await chat.chat.completions.create(model="policy", messages=messages)
            picture = {"type": "image_url", "image_url": {"url": url_of("one"), "detail": "high"}}
            messages += [reply.choices[0].message, {"role": "user", "content": [picture]}]
            reply = await chat.chat.completions.create(model="policy", messages=messages)
            assert reply.choices[0].message.content == "red"
            parts = [{"type": "input_image", "image_url": url_of("two"), "detail": "auto"}]
            reply = await chat.responses.create(model="policy", input=[{"role": "user", "content": parts}])
            assert reply.output_text == "red"
        async with anthropic.AsyncAnthropic(base_url=client.root_url, api_key=client.api_key, max_retries=0) as claude:
            data = base64.b64encode(b"three").decode()
            source = {"type": "base64", "media_type": "image/png", "data": data}
            content = [{"type": "image", "source": source}, {"type": "text", "text": "and?"}]
            messages = [{"role": "user", "content": content}]
            reply = await claude.messages.create(model="policy", max_tokens=9, messages=messages)
            assert reply.content[0].text == "red"
        return 1.0

    engine, outcome = play(program, prompt)
    assert isinstance(outcome, ScoredEpisode), outcome
    asked = [request.images for request in engine.requests]
    (own,) = prompt.images
    assert asked == [(own,), (own, "/one.safetensors"), ("/two.safetensors",), ("/three.safetensors",)]
    assert sorted(segment.images for segment in outcome.episode.segments) == sorted(asked[1:])
    for request in engine.requests:
        assert request.token_ids.count(IMAGE) == 2 * len(request.images)


REFUSED = {
    "http://127.0.0.1/a.png": "files and addresses of images are refused: send data:image/png;base64",
    "file:///etc/passwd": "'file:///etc/passwd': files and addresses of images are refused",
    "/etc/passwd": "files and addresses of images are refused",
    "hotseat:image/1": "the prompt has 1 images, counted from 0",
    "hotseat:image/-1": "the prompt has 1 images, counted from 0",
    url_of("broken"): "an image of the episode: broken",
}


def test_what_is_refused_costs_the_program_a_request_and_not_the_episode(prompt):
    async def program(prompt, client):
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as chat:

            async def refused(*messages):
                with pytest.raises(openai.BadRequestError) as caught:
                    await chat.chat.completions.create(model="policy", messages=messages)
                return str(caught.value)

            for url, reason in REFUSED.items():
                part = {"type": "image_url", "image_url": {"url": url}}
                assert reason in await refused({"role": "user", "content": [part]})
            part = {"type": "image_url", "image_url": {"url": url_of("one")}}
            assert "4 images, and data.max_images_per_prompt allows 3" in await refused(
                {"role": "user", "content": [part] * 4}
            )
            assert "an image in an answer" in await refused({"role": "assistant", "content": [part]})
            broken = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
            assert "without the URL or the base64 of an image" in await refused(broken)
            for stranger, kind in (("what?", "str"), (None, "NoneType")):
                mixed = {"role": "user", "content": [stranger, part]}
                assert f"content of type {kind}: only text" in await refused(mixed)
            assert "type video_url: only text" in await refused({"role": "user", "content": [{"type": "video_url"}]})
            await chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "what?"}])
        return 1.0

    engine, outcome = play(program, prompt)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert [request.images for request in engine.requests] == [()]


def test_a_request_has_room_for_an_image_of_the_largest_size(prompt, monkeypatch):
    monkeypatch.setattr("hotseat.agents.gateway.gateway_server._MAX_BODY_BYTES", 1 << 20)
    monkeypatch.setattr("hotseat.agents.gateway.gateway_server._MAX_OPEN_BYTES", 2 << 20)
    preparer = replace(PREPARER, prepare=lambda url: prepare(url_of(str(len(url)))), max_image_bytes=3 << 20)

    async def program(prompt, client):
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as policy:

            async def show(num_bytes):
                url = f"data:image/png;base64,{base64.b64encode(bytes(num_bytes)).decode()}"
                content = [{"type": "image_url", "image_url": {"url": url}}]
                return await policy.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": content}]
                )

            assert (await show(3 << 20)).choices[0].message.content == "red"
            with pytest.raises(openai.APIStatusError) as caught:
                await show(4 << 20)
            assert caught.value.status_code == 413
            assert "the body has more than 5 MiB" in str(caught.value)  # one, and four for three in base64
        return 1.0

    _, outcome = play(program, prompt, preparer)
    assert isinstance(outcome, ScoredEpisode), outcome


def test_a_run_without_images_refuses_them():
    async def program(prompt, client):
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as chat:
            part = {"type": "image_url", "image_url": {"url": url_of("one")}}
            await chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": [part]}])

    _, outcome = play(program, Prompt(3, "how many?", (1,), "7"), None)
    assert isinstance(outcome, Failed)
    assert "content of type image_url: only text is possible here" in outcome.reason


COMMAND = """
import json
import os
import sys
import urllib.request

task = json.loads(sys.stdin.readline())
body = json.dumps({"messages": [{"role": "user", "content": task["content"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
assert json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] == "red"
with open(os.environ["HOTSEAT_RESULT"], "w") as file:
    file.write("1.0")
"""


def test_a_command_shows_the_images_of_its_prompt(prompt, tmp_path):
    (tmp_path / "program.py").write_text(COMMAND)
    engine = Qwen()
    programs = ProgramSettings(command=(sys.executable, str(tmp_path / "program.py")))
    agent = load_agent(None, TOKENIZER, max_length=600, programs=programs, preparer=PREPARER)
    with AgentHost(agent, engine, run_seed=5, timeout_s=WAIT_S) as host:
        outcome = host.submit(prompt, KEY, SAMPLING).result(WAIT_S)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert [request.images for request in engine.requests] == [prompt.images]
