"""What a rollout host makes of jobs, with an engine that answers at once."""

import random

from loop_cases import rl_yaml
from test_engine_client import FakeEngines

from hotseat.config import loads
from hotseat.loop.rl.launch import replaying
from hotseat.loop.settings.rollout_settings import host_settings
from hotseat.loop.workers.group_facts import Job
from hotseat.loop.workers.host_settings import HostSettings, ScorerSettings
from hotseat.loop.workers.rollout_host import RolloutHost
from hotseat.model_source import ModelSource
from hotseat.types import Prompt, Sampling

DRAWING = """
import random
from hotseat.agents import Environment, Step


class Drawing(Environment):
    def reset(self, prompt, label):
        pass

    def step(self, action):
        return Step(feedback="", reward=random.random(), done=True)
"""


class OneEngine(FakeEngines):
    size = 1


def make_host(task, agent: str) -> RolloutHost:
    (task / "agent.py").write_text(agent)
    host = RolloutHost(
        HostSettings(
            tokenizer=ModelSource(f"{task}/model"),
            run_seed=3,
            max_length=16,
            agent=f"{task}/agent.py",
            max_turns=2,
            max_concurrent=1,
            episode_timeout_s=60.0,
            scorers=ScorerSettings(),
            has_reward_model=False,
            reward_tokenizer=None,
        )
    )
    host.connect("host-0", OneEngine(1))
    return host


def test_an_agent_that_draws_draws_the_same_for_the_same_samples(task):
    """Also in a host that was replaced, and whatever was drawn before."""
    first, replaced = make_host(task, DRAWING), make_host(task, DRAWING)

    def reward(host: RolloutHost, epoch: int, prompt: int) -> float:
        [facts] = host.collect([Job(Prompt(prompt, "1+2=", (3, 12, 4, 13)), epoch, 1)], Sampling(4))
        return facts.rewards[0]

    before = random.getstate()
    try:
        drawn = reward(first, 0, 5)
        others = {reward(first, 0, 6), reward(first, 1, 5)}
        random.random()
        assert reward(first, 0, 5) == reward(replaced, 0, 5) == drawn
        assert len(others | {drawn}) == 3
    finally:
        random.setstate(before)
        first.close()
        replaced.close()


def test_a_replay_starts_no_graders(tmp_path):
    """Nor anything else that scores: the groups of a recording have their rewards."""
    (tmp_path / "rubric.txt").write_text("Is it right?")
    scored = (
        f"{{function: reward.py, graders: [{{kind: exact}}], judge: {{rubric: {tmp_path}/rubric.txt, model: judge}}}}"
    )
    evaluated = "{path: held_out.jsonl, graders: [{kind: number}]}"
    settings = host_settings(loads(rl_yaml(tmp_path, reward=scored, eval=evaluated)), tmp_path)
    assert settings.scorers.reward.graders
    assert settings.scorers.evaluation.graders
    host = replaying(settings, tmp_path, samples=False)
    assert host.agent is None
    assert host.scorers == ScorerSettings()
