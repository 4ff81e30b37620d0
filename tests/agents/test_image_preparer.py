"""Environments that show images: their tokens stand in the text, and requests and segments have their files."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
from agent_cases import KEY, SAMPLING, TOKENIZER, WAIT_S, Script, ids_of, play, prompt_of
from safetensors.torch import save

from hotseat.agents import AgentHost, Environment, Step
from hotseat.agents.agent import AgentError
from hotseat.agents.agent_file import load_agent
from hotseat.agents.image_preparer import ImagePreparer
from hotseat.agents.multi_turn import MultiTurn
from hotseat.errors import UnsupportedError, UserError
from hotseat.types import Failed, Prompt, SampleKey
from hotseat.vision import TOKENS, PreparedImage

(PLACE,) = ids_of("@")  # the image token
(VIDEO,) = ids_of("%")


def prepare(image):
    if image == "broken":
        raise AgentError("an image that an environment showed: broken")
    return PreparedImage(f"/{image}.safetensors", (*ids_of("<"), PLACE, PLACE, *ids_of(">")))


PREPARER = ImagePreparer(prepare, PLACE, frozenset({PLACE, VIDEO}), max_images=2)


def agent_of(*steps):
    class Shows(Environment):
        def __init__(self):
            self.left = iter(steps)

        def step(self, action):
            return next(self.left)

    return MultiTurn(Shows, TOKENIZER, max_length=100, preparer=PREPARER)


def test_images_stand_in_the_feedback_and_go_with_what_is_sampled_after_them():
    script = Script(["a", "b", "c"])
    episode = play(agent_of(Step("x@y", images=["one"]), Step("z", images=()), Step(done=True)), script)
    assert script.contexts == ["q:", "q:ax<@@>y", "q:ax<@@>ybz"]
    one = ("/one.safetensors",)
    assert [request.images for request in script.requests] == [(), one, one]
    (segment,) = episode.segments
    assert segment.images == one
    assert TOKENIZER.decode(segment.token_ids.tolist()) == "q:ax<@@>ybzc"
    assert episode.query == "q:ax@ybzc"  # as the environment wrote it


def test_an_image_after_the_last_answer_is_not_learned_with_it():
    episode = play(agent_of(Step("@", images=["one"]), Step("@" * 97, images=["two"] * 97)), Script(["a", "b"]))
    assert isinstance(episode, Failed)  # more than two images
    full = MultiTurn(lambda: _Once(), TOKENIZER, max_length=8, preparer=PREPARER)
    episode = play(full, Script(["abc"]))
    (segment,) = episode.segments
    assert segment.images == ()
    assert episode.is_truncated


class _Once(Environment):
    def step(self, action):
        return Step("@", images=["one"])


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (Step("x", images=["one"]), "has 0 places for images, and it showed 1"),
        (Step("x@"), "has 1 places for images, and it showed 0"),
        (Step("%"), "has 0 places for images, and it showed 0"),
        (Step("@@@", images=["a", "b", "c"]), "showed 3 more images after 0, and data.max_images_per_prompt allows 2"),
        (Step("@", images="broken"), "an image that an environment showed: broken"),
    ],
)
def test_images_that_cannot_be(step, reason):
    failed = play(agent_of(step, Step(done=True)), Script(["a", "b"]))
    assert isinstance(failed, Failed)
    assert reason in failed.reason


def test_a_placeholder_that_the_policy_samples_ends_the_episode():
    script = Script(["a@", "never"])
    episode = play(agent_of(Step("x"), Step(done=True)), script)
    assert len(script.requests) == 1
    assert episode.is_truncated


def test_a_prompt_keeps_its_images_in_every_turn():
    prompt = prompt_of("q:<@@>")
    prompt = type(prompt)(**{**vars(prompt), "images": ("/own.safetensors",)})
    script = Script(["a", "b"])
    with AgentHost(agent_of(Step("@", images=["one"]), Step(done=True)), script, run_seed=5, timeout_s=WAIT_S) as host:
        episode = host.submit(prompt, KEY, SAMPLING).result(WAIT_S)
    assert script.requests[1].images == ("/own.safetensors", "/one.safetensors")
    assert episode.segments[0].images == ("/own.safetensors", "/one.safetensors")


INSTANCE = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        return {"rewards": 1.0, "environment_feedback": "@", "environment_images": ["one"], "done": self.turn == 2}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def prepared(folder, name):
    """Write the file of a prepared image, as far as agents read it."""
    path = folder / f"{name}.safetensors"
    tokens = (*ids_of("<"), PLACE, PLACE, *ids_of(">"))
    path.write_bytes(save({"pixel_values": torch.zeros(1)}, {TOKENS: json.dumps(tokens)}))
    return str(path)


def load(tmp_path, text, preparer=PREPARER):
    (tmp_path / "agent.py").write_text(text)
    return load_agent(tmp_path / "agent.py", TOKENIZER, max_length=100, preparer=preparer)


def play_with(agent, script, *images):
    prompt = Prompt(3, "q:@" if images else "q:", ids_of("q:<@@>") if images else ids_of("q:"), "4", images=images)
    with AgentHost(agent, script, run_seed=5, timeout_s=WAIT_S) as host:
        return host.submit(prompt, KEY, SAMPLING).result(WAIT_S)


def test_instances_of_openrlhf_show_images(tmp_path):
    one = prepared(tmp_path, "one")
    files = ImagePreparer(PreparedImage.of_file, PLACE, frozenset({PLACE, VIDEO}), max_images=2)
    for text in (INSTANCE, INSTANCE.partition("class AgentExecutor")[0]):
        script = Script(["a", "b"])
        play(load(tmp_path, text.replace('"one"', repr(one)), files), script)
        assert [request.images for request in script.requests] == [(), (one,)]


EXECUTE = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens = list(hf_tokenizer(PROMPT, add_special_tokens=False)["input_ids"])
        images, ranges = list(images or []), []
        for text in ("+@", ""):
            data = {"image": images} if images else None
            output = await llm_engine.generate(tokens, sampling_params, multi_modal_data=data)
            sampled = output.outputs[0].token_ids
            ranges.append((len(tokens), len(tokens) + len(sampled)))
            tokens = tokens + sampled + hf_tokenizer(text, add_special_tokens=False)["input_ids"]
            images.append("one")
        return {"observation_tokens": tokens, "action_ranges": ranges, "reward": 1.0}
"""


@pytest.mark.parametrize("first", ["prompt", "prompt.replace('@', '<@@>')"])
def test_executors_pass_images_to_generate_and_write_one_token_for_each_or_all(tmp_path, first):
    own = prepared(tmp_path, "own")
    script = Script(["a", "b"])
    scored = play_with(load(tmp_path, EXECUTE.replace("PROMPT", first)), script, own)
    assert script.contexts == ["q:<@@>", "q:<@@>a+<@@>"]
    assert [request.images for request in script.requests] == [(own,), (own, "/one.safetensors")]
    (segment,) = scored.episode.segments
    assert segment.images == (own, "/one.safetensors")
    assert TOKENIZER.decode(segment.token_ids.tolist()) == "q:<@@>a+<@@>b"
    assert TOKENIZER.decode(segment.token_ids[segment.mask].tolist()) == "ab"
    assert scored.episode.query == "q:@a+@b"


def test_an_executor_that_says_nothing_about_images_has_those_of_the_prompt(tmp_path):
    own = prepared(tmp_path, "own")
    text = EXECUTE.replace("PROMPT", "prompt").replace(", multi_modal_data=data", "").replace("+@", "+")
    script = Script(["a", "b"])
    scored = play_with(load(tmp_path, text), script, own)
    assert [request.images for request in script.requests] == [(own,), (own,)]
    assert scored.episode.segments[0].images == (own,)


def test_an_executor_may_change_the_prompt_around_the_usual_execution_with_images(tmp_path):
    own = prepared(tmp_path, "own")
    text = INSTANCE.replace('["one"]', f"[{prepared(tmp_path, 'one')!r}]") + (
        "\n    async def execute(self, prompt, label, sampling_params, images=None, **kwargs):\n"
        "        return await super().execute('Think. ' + prompt, label, sampling_params)\n"
    )
    files = ImagePreparer(PreparedImage.of_file, PLACE, frozenset({PLACE, VIDEO}), max_images=2)
    script = Script(["a", "b"])
    scored = play_with(load(tmp_path, text, files), script, own)
    assert script.contexts == ["Think. q:<@@>", "Think. q:<@@>a<@@>"]
    assert [len(request.images) for request in script.requests] == [1, 2]
    assert [Path(image).stem for image in scored.episode.segments[0].images] == ["own", "one"]


def test_images_of_a_reset_stand_in_the_first_observation(tmp_path):
    text = INSTANCE.partition("class AgentExecutor")[0] + (
        "    async def reset(self, states):\n"
        "        return {'observation': states['observation'] + 'see @', 'environment_images': 'two'}\n"
    )
    script = Script(["a", "b"])
    play(load(tmp_path, text), script)
    assert script.contexts == ["q:see <@@>", "q:see <@@>a<@@>"]
    assert script.requests[1].images == ("/two.safetensors", "/one.safetensors")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("{'image': ['one']}", "a text of the agent has 0 places for images, and it showed 1"),
        ("{'image': 'broken'}", "an image that an environment showed: broken"),
        ("{'image': ['one'] * 3}", "data.max_images_per_prompt allows 2"),
    ],
)
def test_images_that_executors_cannot_show(tmp_path, data, reason):
    text = EXECUTE.replace("PROMPT", "prompt").replace("multi_modal_data=data", f"multi_modal_data={data}")
    failed = play_with(load(tmp_path, text), Script(["a", "b"]))
    assert isinstance(failed, Failed)
    assert reason in failed.reason


def test_executors_show_images_only_and_only_to_models_that_see(tmp_path):
    text = EXECUTE.replace("PROMPT", "prompt").replace("=data", "={'video': [1]}")
    with pytest.raises(UnsupportedError, match="multi_modal_data of video: only images are possible"):
        play_with(load(tmp_path, text), Script(["a", "b"]))
    with pytest.raises(UserError, match="multi_modal_data of type list: it must be a dict"):
        play_with(load(tmp_path, text.replace("{'video': [1]}", "[1]")), Script(["a", "b"]))
    failed = play_with(load(tmp_path, text.replace("video", "image"), None), Script(["a", "b"]))
    assert "generate with multi_modal_data, and the run has no images: set data.image_key" in failed.reason


def test_actions_after_other_images_are_no_actions_of_one_episode(tmp_path):
    text = EXECUTE.replace("PROMPT", "'q:@'").replace(
        '{"image": images}', '{"image": [["one"], ["two", "one"]][len(ranges)]}'
    )
    text = text.replace("list(images or [])", "['']")
    failed = play_with(load(tmp_path, text), Script(["a", "b"]))
    assert "returned actions that were sampled after different images" in failed.reason


SERVED = """
import asyncio

from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    waiting = []

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens = list(hf_tokenizer(prompt, add_special_tokens=False)["input_ids"])
        data = {"image": images}
        call = lambda: asyncio.run(llm_engine.generate(tokens, sampling_params, multi_modal_data=data))
        # As of a server: in a thread that does not know the episode.
        output = await asyncio.get_running_loop().run_in_executor(None, call)
        self.waiting.append(asyncio.get_running_loop().create_future())
        if len(self.waiting) == 2:
            for each in self.waiting:
                each.set_result(None)
        await self.waiting[len(self.waiting) - 1]
        sampled = output.outputs[0].token_ids
        ranges = [(len(tokens), len(tokens) + len(sampled))]
        return {"observation_tokens": tokens + sampled, "action_ranges": ranges, "reward": 1.0}
"""


def test_calls_of_a_server_are_learned_by_the_episode_whose_images_they_have(tmp_path):
    paths = [prepared(tmp_path, name) for name in ("a", "b")]
    prompts = [Prompt(at, "q:@", ids_of("q:<@@>"), "4", images=(path,)) for at, path in enumerate(paths)]
    samples = [(prompt, SampleKey(0, prompt.index, 0)) for prompt in prompts]
    agent = load(tmp_path, SERVED)
    with AgentHost(agent, Script(lambda _: "cat"), run_seed=5, timeout_s=WAIT_S) as host:
        outcomes = [future.result(WAIT_S) for future in host.submit_many(samples[::-1], SAMPLING)[::-1]]
    assert [outcome.episode.segments[0].images for outcome in outcomes] == [prompt.images for prompt in prompts]


def test_an_action_that_was_sampled_again_after_another_image_is_found_with_its_image(tmp_path):
    text = EXECUTE.replace("PROMPT", "'q:@'").replace(
        'for text in ("+@", ""):', "for text, images in (('', ['one']), ('+@', ['two']), ('', ['two', 'one'])):"
    )
    text = text.replace('images.append("one")', "if images == ['one']: tokens, ranges = tokens[:-1], []")
    scored = play_with(load(tmp_path, text), Script(["a", "a", "b"]))
    (segment,) = scored.episode.segments
    assert segment.images == ("/two.safetensors", "/one.safetensors")
    assert TOKENIZER.decode(segment.token_ids[segment.mask].tolist()) == "ab"


def test_other_work_does_not_wait_for_images():
    go_on = threading.Event()

    def waits(image):
        assert go_on.wait(WAIT_S)
        return prepare(image)

    preparer = ImagePreparer(waits, PLACE, frozenset({PLACE, VIDEO}), max_images=2)

    async def look():
        looks = [asyncio.ensure_future(preparer.prepare_all([str(at)], 0)) for at in range(64)]
        await asyncio.sleep(0)
        await asyncio.to_thread(go_on.set)  # in a thread of those that all work shares
        return await asyncio.gather(*looks)

    assert [image.path for (image,) in asyncio.run(look())] == [f"/{at}.safetensors" for at in range(64)]
