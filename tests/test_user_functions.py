"""A user's own loss and estimator: what the trial on a toy batch refuses, and that a run learns with them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_cases import make_group, make_segment, rl_yaml, same, weights
from safetensors.torch import load_file
from stopped_runs import stopped_after_saving

from hotseat.algorithms.advantages import Advantages, compute_advantages
from hotseat.algorithms.baselines import group_normalised
from hotseat.algorithms.policy_loss import call_policy_loss, cispo_loss
from hotseat.checks.pipeline import startup_problems
from hotseat.checks.plans import user_functions
from hotseat.checks.stage import PlanContext, run_checks
from hotseat.cli.main import main
from hotseat.config import Config, loads
from hotseat.errors import ConfigError, UserError
from hotseat.loop.run import start
from hotseat.loop.settings.training_settings import policy_settings
from hotseat.loop.workers.experience import flatten, with_advantages
from hotseat.loop.workers.losses import ADVANTAGES
from hotseat.observe import read_lines
from hotseat.planning.config_plan import make_plan
from hotseat.user_functions import absolute, user_function

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"


def check_user_functions(config: Config) -> None:
    run_checks(PlanContext(config=config, plan=make_plan(config)), [user_functions])


def trial(path: Path, **names: str) -> None:
    check_user_functions(
        loads("algorithm: {" + ", ".join(f"{key}: '{path}:{name}'" for key, name in names.items()) + "}")
    )


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        file = tmp_path / "my.py"
        file.write_text(text)
        return file

    return write


LOSS = "def f(log_probs, old_log_probs, advantages, layout, *, eps_low, eps_high):\n    "


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return log_probs.sum()", "returned the shape [] for 13 tokens: return [13], a number per token"),
        ("return [1.0]", "returned list: return a tensor with a number per token"),
        ("return layout.token_episode", "returned torch.int64: return floating-point numbers"),
        ("return log_probs / 0", "returned 13 numbers of 13 that are not finite"),
        ("return (log_probs * advantages).detach()", "returned losses without a gradient: compute them from log_probs"),
        ("return log_probs * 0", "has no gradient with respect to log_probs: no token would be learned"),
        ("return (log_probs - log_probs.detach()).abs().sqrt()", "has a gradient that is not finite"),
        ("return log_probs / log_probs.sum()", "gives an episode another loss when the next one is not in the micro"),
        ("return missing", "raised NameError: name 'missing' is not defined at line 2"),
    ],
)
def test_a_loss_that_cannot_train_is_refused_on_a_toy_batch(write, body, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        trial(write(LOSS + body), policy_loss="f")
    assert str(caught.value).startswith("this run cannot start:\n  algorithm.policy_loss: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return rewards.mean()", "returned the shape [] for 5 episodes: return [5], a number per episode"),
        ("return rewards - rewards.mean()", "gives a group other advantages when another group is not there"),
        ("return rewards.log()", "returned 1 numbers of 5 that are not finite"),
        (
            "s = [rewards[groups == g].std() for g in groups]\n    return rewards / __import__('torch').stack(s)",
            "equal",
        ),
        ("return rewards['a']", "raised"),
    ],
)
def test_an_estimator_that_cannot_work_is_refused_on_toy_groups(write, body, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        trial(write("def f(rewards, groups):\n    " + body), estimator="f")
    assert "algorithm.estimator: " in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return list(range(num + 1))", "returned 5 prompts: it has to return 4"),
        ("return [100] * num", "returned 100: positions are 0 to 5"),
        ("return [draw] * num", "raised NameError"),
        ("f.n = getattr(f, 'n', 0) + 1\n    return [f.n % 6] * num", "chose differently from the same scores"),
    ],
)
def test_a_sampler_that_cannot_choose_is_refused_on_toy_prompts(write, body, message):
    file = write("def f(num, pass_rates, num_draws, rng):\n    " + body)
    with pytest.raises(UserError, match=message):
        check_user_functions(loads(f"data: {{sampler: '{file}:f'}}"))


def test_missing_files_and_functions_are_refused_without_loading_anything(write):
    file = write("def one(a):\n    pass\n")
    config = loads(f"algorithm: {{policy_loss: '{file}:two', estimator: '{file.parent}/gone.py:f'}}")
    found = {problem.key: problem.message for problem in startup_problems(config)}
    assert found["algorithm.policy_loss"] == f"{file} has no function two; its functions are: one (line 1)"
    assert found["algorithm.estimator"].startswith(f"there is no file {file.parent}/gone.py")
    with pytest.raises(UserError, match="has no function two"):
        user_function(f"{file}:two")
    with pytest.raises(UserError, match="cannot be loaded: SyntaxError: .* at line 1"):
        user_function(f"{write('def (')}:f")


def test_a_name_that_is_neither_built_in_nor_a_function_is_refused():
    with pytest.raises(ConfigError, match="must be one of ppo, gspo, cispo, .* or FILE.py:FUNCTION; did you mean gspo"):
        loads("algorithm: {policy_loss: gspoo}")


def test_the_functions_of_the_docs_pass_the_trial_and_compute_what_they_say(write):
    _, _, section = PAGE.read_text().partition("## Custom losses and estimators")
    loss_and_estimator, sampler = re.findall(r"```python[^\n]*\n(.*?)```", section, re.S)
    file = write(loss_and_estimator + sampler)
    trial(file, policy_loss="my_loss", estimator="my_estimator")
    trial(file, estimator="optimal_baseline")
    # Lengths 1 and 3: the mean of 1 and 3, weighted, is 2.5. The other group has one episode.
    optimal = user_function(f"{file}:optimal_baseline")
    rewards, groups, lengths = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 1]), torch.tensor([1, 3, 2])
    assert optimal(rewards, groups, lengths=lengths).tolist() == [-1.5, 0.5, 0]
    check_user_functions(loads(f"data: {{sampler: '{file}:my_sampler'}}"))
    advantages = user_function(f"{file}:my_estimator")(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 1]))
    assert advantages.tolist() == [-2, 0, 0]
    batch = flatten([make_group(0, [1.0, 0.0])])
    log_probs, old = torch.linspace(-2, -1, batch.num_tokens), torch.linspace(-1, -2, batch.num_tokens)
    given = log_probs, old, torch.ones(batch.num_tokens)
    mine = call_policy_loss(user_function(f"{file}:my_loss"), *given, batch.layout, eps_low=1.0, eps_high=0.2)
    # It is CISPO without a lower bound.
    built_in = cispo_loss(*given, batch.mask, eps_low=1.0, eps_high=0.2)
    assert torch.allclose(mine.loss, built_in.loss)
    assert torch.allclose(mine.log_ratio, built_in.log_ratio)


def test_a_function_as_estimator_equals_the_built_in_one_of_the_same_formula():
    batch = flatten([make_group(0, [1.0, 0.0, 0.5]), make_group(1, [2.0, 3.0])])
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 2.0, 3.0]), torch.tensor([0, 0, 0, 1, 1])
    own = compute_advantages(group_normalised, batch.layout, rewards, groups=groups, reward_clip=(-0.5, 0.5))
    built_in = compute_advantages("group_norm", batch.layout, rewards, groups=groups, reward_clip=(-0.5, 0.5))
    assert isinstance(own, Advantages)
    assert torch.allclose(own.advantages, built_in.advantages)


WITH_LENGTHS = """
def by_length(rewards, groups, lengths):
    return rewards / lengths


def by_surprise(rewards, groups, *, log_probs, lengths):
    return __import__("torch").stack([-each.sum() for each in log_probs.split(lengths.tolist())])


def with_all(rewards, groups, **more):
    assert len(more["log_probs"]) == int(more["lengths"].sum())
    return rewards + more["lengths"]
"""


def test_estimators_get_lengths_and_log_probs_if_they_ask_for_them(write):
    file = write(WITH_LENGTHS)
    one, two = make_group(0, [1.0, 4.0], sampled=2), make_group(1, [3.0], sampled=1)
    segments = make_segment(3, 2), make_segment(2, 2)  # of one episode
    second = replace(one.samples[1], episode=replace(one.samples[1].episode, segments=segments))
    nothing = replace(one.samples[0], episode=replace(one.samples[0].episode, segments=(make_segment(2, 0),)))
    episodes = replace(one, samples=(one.samples[0], second)), replace(two, samples=(*two.samples, nothing))
    batch = flatten(episodes)
    # Two, four, one and no tokens; the log-prob of the t-th sampled token of the batch is -(t + 1).
    log_probs = torch.full((batch.num_tokens,), torch.nan)
    log_probs[batch.mask] = -torch.arange(1.0, 8)
    for name, expected in (
        ("by_length", [1 / 2, 1 / 2, *[2 / 4] * 4, 3 / 1]),
        ("by_surprise", [1 + 2, 1 + 2, *[3 + 4 + 5 + 6] * 4, 7]),
        ("with_all", [1 + 2, 1 + 2, *[2 + 4] * 4, 3 + 1]),
    ):
        trial(file, estimator=name)
        found = compute_advantages(
            user_function(f"{file}:{name}"),
            batch.layout,
            torch.tensor([1.0, 2.0, 3.0, torch.nan]),
            groups=torch.tensor([0, 0, 1, 1]),
            log_probs=log_probs,
        ).advantages[batch.mask]
        assert found.tolist() == expected
    with pytest.raises(UserError, match="takes log_probs, and there are none"):
        compute_advantages(
            user_function(f"{file}:by_surprise"), batch.layout, torch.ones(4), groups=torch.tensor([0, 0, 1, 1])
        )


def test_the_log_probs_of_an_estimator_are_the_engines(write):
    file = write(WITH_LENGTHS)
    groups = [make_group(0, [1.0, 0.0], sampled=3)]  # the engine's log-probs are -1 each
    text = f"algorithm: {{estimator: '{file}:by_surprise'}}\nrollout: {{samples_per_prompt: 2}}"
    batch = with_advantages(groups, flatten(groups), policy_settings(loads(text), 1, 0.0).advantages, lambda own: own)
    assert batch.fields[ADVANTAGES][batch.mask].tolist() == [3.0] * 6


def test_an_estimator_that_needs_siblings_is_refused_where_prompts_have_one_sample(write):
    file = write(
        "import torch\n\n\ndef f(rewards, groups):\n"
        "    each = [rewards[groups == group] for group in groups]\n"
        "    return torch.stack([(r - of.mean()) / (of.std() + 1e-4) for r, of in zip(rewards, each)])\n"
    )
    text = f"algorithm: {{estimator: '{file}:f'}}"
    check_user_functions(loads(text, ["rollout.samples_per_prompt=2"]))
    with pytest.raises(UserError, match="not finite for a group of one, and rollout.samples_per_prompt is 1"):
        check_user_functions(loads(text, ["rollout.samples_per_prompt=1"]))


def test_an_estimator_that_fails_later_names_what_it_returned():
    batch = flatten([make_group(0, [1.0, 0.0])])
    for function in (lambda rewards, groups: rewards[:1], lambda rewards, groups: rewards / 0):
        with pytest.raises(UserError, match="it has to return a finite number per episode"):
            compute_advantages(function, batch.layout, torch.tensor([1.0, 0.0]), groups=torch.tensor([0, 0]))


def test_paths_mean_the_same_in_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("my.py:f") == f"{tmp_path}/my.py:f"
    assert absolute("group_norm") == "group_norm"


OWN = """
from hotseat.algorithms.baselines import group_normalised
from hotseat.algorithms.policy_loss import ppo_loss


def loss(log_probs, old_log_probs, advantages, layout, *, eps_low, eps_high):
    return ppo_loss(log_probs, old_log_probs, advantages, layout.mask, eps_low=eps_low, eps_high=eps_high)


def estimator(rewards, groups):
    return group_normalised(rewards, groups)


def sampler(num, pass_rates, num_draws, rng):
    import numpy as np

    known = np.nan_to_num(pass_rates, nan=-1.0)
    return np.lexsort((rng.random(len(known)), known))[-num:]  # the best so far, then those that are new
"""


@pytest.mark.slow
def test_a_run_learns_with_own_functions_as_with_the_built_in_ones_that_they_call(task):
    file = task / "own.py"
    file.write_text(OWN)
    more = "mask_truncated: true, correction: {kind: seq-tis, normalise: true, reject: k1, reject_high: 2}"
    start(loads(rl_yaml(task, name="built-in", algorithm=f"{{{more}}}")))
    own = f"{{policy_loss: '{file}:loss', estimator: '{file}:estimator', {more}}}"
    start(loads(rl_yaml(task, name="own", algorithm=own)))
    records = [read_lines(task / "runs" / name / "metrics.jsonl") for name in ("built-in", "own")]
    for a, b in zip(*records, strict=True):
        assert b.get("reward") == a.get("reward")
    assert records[1][1]["rejected"] == 0
    # Tokens of answers that were cut off are sampled, and not learned.
    assert 0 < records[1][1]["learned_tokens"] < records[1][1]["sampled_tokens"]
    ours, theirs = weights(task, "built-in"), weights(task, "own")
    assert not same(ours, load_file(task / "model" / "model.safetensors"))
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], atol=1e-6)


@pytest.mark.long
@pytest.mark.slow
def test_a_sampler_chooses_from_pass_rates_and_resumes_exactly(task):
    (task / "own.py").write_text(OWN)
    data = f"{{path: {task}/prompts.jsonl, label_key: label, max_length: 16, sampler: '{task}/own.py:sampler'}}"

    start(loads(rl_yaml(task, name="whole", data=data), ["checkpoint.every=1", "train.num_episodes=2"]))
    with stopped_after_saving():
        start(loads(rl_yaml(task, name="broken", data=data), ["checkpoint.every=1", "train.num_episodes=2"]))
    assert main(["resume", str(task / "runs" / "broken")]) == 0
    assert same(weights(task, "whole"), weights(task, "broken"))
    whole, broken = ((task / "runs" / name / "ledger.jsonl").read_text() for name in ("whole", "broken"))
    assert sorted(whole.splitlines()) == sorted(broken.splitlines())
    state = json.loads(next((task / "runs/whole/checkpoints").glob("step-000004/state.json")).read_text())
    # Four steps of four prompts; those with scores come before new ones, so not every prompt had its turn.
    assert sum(state["order"]["num_draws"]) == 16
    assert state["order"]["num_draws"].count(0) == state["order"]["pass_rates"].count(None) == 4
