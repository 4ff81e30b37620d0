"""The one-file GRPO in examples/ and the framework do the same maths on the same episodes."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from weight_changes import assert_changed_alike

from hotseat.algorithms.baselines import group_normalised
from hotseat.loop.workers.experience import AdvantageSettings, Share
from hotseat.loop.workers.losses import PolicyObjective
from hotseat.loop.workers.model_workers import ActorWorker, BatchSettings, PolicySettings
from hotseat.model_source import ModelSource
from hotseat.train.backend import AdamW, TrainOptions
from hotseat.train.schedule import Schedule
from hotseat.types import Episode, Prompt, PromptGroup, SampleKey, ScoredEpisode, Segment

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_single_file.py"
NUM_STEPS, NUM_UPDATES, NUM_PROMPTS, GROUP_SIZE = 20, 2, 8, 4


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("grpo_single_file", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_single_file"] = module
    spec.loader.exec_module(module)
    return module


def groups_of(tokens, sampled, log_probs, rewards, prompt_length) -> list[PromptGroup]:
    """The recorded tokens as episodes, cut where the answer ended."""
    groups = []
    for prompt in range(NUM_PROMPTS):
        samples = []
        for sample in range(GROUP_SIZE):
            row = prompt * GROUP_SIZE + sample
            length = prompt_length + int(sampled[row].sum())
            mask = torch.arange(length) >= prompt_length
            scattered = torch.zeros(length)
            scattered[prompt_length:] = log_probs[row, : length - prompt_length]
            versions = torch.where(mask, 0, -1).to(torch.int32)
            segment = Segment(tokens[row, :length], mask, scattered, versions)
            reward = float(rewards[row])
            samples.append(ScoredEpisode(Episode(SampleKey(0, prompt, sample), (segment,), ""), reward, reward))
        ids = tuple(tokens[prompt * GROUP_SIZE, :prompt_length].tolist())
        groups.append(PromptGroup(Prompt(prompt, "", ids), tuple(samples)))
    return groups


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_steps_on_recorded_episodes_give_the_same_weights(example, tmp_path):
    torch.manual_seed(0)
    mine, task = example.make_model(5), example.Task.make(5)
    example.make_model(5).save_pretrained(tmp_path)
    optimizer = example.Optimizer(mine, peak=1e-4, num_steps=NUM_STEPS * NUM_UPDATES, warmup=0.05, min_ratio=0.1)
    theirs = ActorWorker(
        ModelSource(str(tmp_path)),
        TrainOptions(
            optimizer=AdamW((0.9, 0.95), 1e-8, 0.0),
            schedule=Schedule("linear", 1e-4, 2, NUM_STEPS * NUM_UPDATES, 0.1),
            layout="padded",
        ),
        "float32",
    )
    cut = BatchSettings(micro_batch_size=16, max_tokens=None)
    settings = PolicySettings(
        objective=PolicyObjective("ppo", 0.2, 0.2, None, None, 0.5, 2.0, "k1", 0.0, None),
        advantages=AdvantageSettings("group_norm", 1.0, 1.0, True, None, 0.0, "k1", 0, 1.0, None, 5),
        aggregation="token_mean",
        max_epochs=1,
        needs_old_log_probs=True,
        temperature=1.0,
        score=cut,
        train=cut,
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        sums = [each for each in task.train[:NUM_PROMPTS] for _ in range(GROUP_SIZE)]
        tokens = example.generate(mine, example.prompts_of(sums), 1.0, generator)
        # Right answers are rare this early: any reward that differs within a group will do.
        rewards = torch.rand(len(sums), generator=generator).round()
        advantages = example.group_advantages(rewards, GROUP_SIZE)
        mask = example.sampled_mask(tokens)
        with torch.no_grad():
            old = example.log_probs_of(mine, tokens)
        groups = groups_of(tokens, mask, old, rewards, example.PROMPT_LENGTH)
        half = len(sums) // NUM_UPDATES
        for first in range(0, len(sums), half):
            part = slice(first, first + half)
            log_probs = example.log_probs_of(mine, tokens[part])
            optimizer.step(example.clipped_loss(log_probs, old[part], advantages[part, None], mask[part]))
        steps = tuple((index * GROUP_SIZE // half,) * GROUP_SIZE for index in range(NUM_PROMPTS))
        theirs.prepare([Share(tuple(groups), steps)], NUM_UPDATES, settings, [])
        assert len(theirs.update(settings)) == NUM_UPDATES
    found = dict(theirs._backend.weights())
    before = dict(example.make_model(5).named_parameters())
    assert_changed_alike(before, {name: found[name] for name in before}, dict(mine.named_parameters()), 1e-4)
    theirs.close()


def test_the_advantage_is_the_frameworks(example):
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    assert torch.allclose(example.group_advantages(rewards, 3), group_normalised(rewards, groups))


def test_the_task_is_the_demos(example):
    from hotseat import demo

    for a, b in [(0, 0), (9, 1), (58, 67), (99, 99), (12, 34)]:
        assert example.question(a, b) == demo.question(a, b)
        assert example.answer(a, b) == demo.answer(a, b)
        assert example.careless_answer(a, b) == demo.careless(a, b)
    assert demo.careless(58, 67) == "015"
    assert demo.answer(58, 67) == "125"
