"""Environments that show images: their tokens stand in the text, and requests and segments have their files."""

import pytest
from agent_cases import KEY, SAMPLING, TOKENIZER, WAIT_S, Script, ids_of, play, prompt_of

from hotseat.agents import AgentHost, Environment, Step
from hotseat.agents.agent import AgentError
from hotseat.agents.loading import load_agent
from hotseat.agents.multi_turn import MultiTurn
from hotseat.agents.sight import Shown, Sight
from hotseat.errors import NotBuiltError
from hotseat.types import Failed

(PLACE,) = ids_of("@")  # the image token
(VIDEO,) = ids_of("%")


def prepare(image):
    if image == "broken":
        raise AgentError("an image that an environment showed: broken")
    return Shown(f"/{image}.safetensors", (*ids_of("<"), PLACE, PLACE, *ids_of(">")))


SIGHT = Sight(prepare, PLACE, frozenset({PLACE, VIDEO}), max_images=2)


def agent_of(*steps):
    class Shows(Environment):
        def __init__(self):
            self.left = iter(steps)

        def step(self, action):
            return next(self.left)

    return MultiTurn(Shows, TOKENIZER, max_length=100, sight=SIGHT)


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
    full = MultiTurn(lambda: _Once(), TOKENIZER, max_length=8, sight=SIGHT)
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


def test_instances_of_openrlhf_show_images(tmp_path):
    file = tmp_path / "agent.py"
    for text in (INSTANCE, INSTANCE.partition("class AgentExecutor")[0]):
        file.write_text(text)
        script = Script(["a", "b"])
        play(load_agent(file, TOKENIZER, max_length=100, sight=SIGHT), script)
        assert [request.images for request in script.requests] == [(), ("/one.safetensors",)]
    file.write_text(INSTANCE + "\n    async def execute(self, prompt, label, sampling_params):\n        return {}\n")
    with pytest.raises(NotBuiltError, match="an AgentExecutor with an execute of its own is not built for images yet"):
        load_agent(file, TOKENIZER, max_length=100, sight=SIGHT)
