"""PPO with a critic: what a step computes, and whole runs."""

import itertools
import subprocess
import sys

import pytest
import torch
from environments import own_environment
from loop_cases import make_task, make_value_model, ppo_yaml, same
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import UserError, WeightError
from hotseat.loop.devices.scheduler import DeviceScheduler
from hotseat.loop.rl.step_metrics import critic_metrics
from hotseat.loop.run import start
from hotseat.loop.workers.experience import AdvantageSettings, Share
from hotseat.loop.workers.losses import PolicyObjective, ValueObjective
from hotseat.loop.workers.model_workers import ActorWorker, BatchSettings, InferenceWorker, ModelWorker, PolicySettings
from hotseat.loop.workers.observations import PolicyInput
from hotseat.loop.workers.simulation import _value_segment
from hotseat.loop.workers.value_models import CriticSettings, CriticWorker
from hotseat.model_source import ModelSource
from hotseat.observe import read_lines
from hotseat.train.backend import AdamW, TrainOptions
from hotseat.train.schedule import Schedule
from hotseat.types import Episode, Prompt, PromptGroup, SampleKey, ScoredEpisode, Segment

pytestmark = pytest.mark.slow


def run(task, name: str, *overrides: str, **changes: str) -> list[dict]:
    start(loads(ppo_yaml(task, name=name, **changes), [*overrides]))
    return read_lines(task / "runs" / name / "metrics.jsonl")


def weights(path) -> dict:
    return load_file(path / "model.safetensors")


# --- a step on recorded episodes, against one written by hand -------------------------------------------------------

LAM, GAMMA, KL, CLIP, VALUE_CLIP, RATE, EPS = 0.9, 0.99, 0.1, 0.2, 0.02, 1e-3, 1e-4
NUM_EPOCHS = 2
SETTINGS = {"optimizer": AdamW((0.9, 0.95), EPS, 0.0), "schedule": Schedule("constant", RATE)}


def recorded() -> list[PromptGroup]:
    """Four groups of two answers, of two to five sampled tokens, the second of which the environment inserted."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for prompt in range(4):
        samples = []
        for sample in range(2):
            length = 3 + int(torch.randint(3, 6, (), generator=generator))
            mask = torch.arange(length) >= 3
            mask[4] = False
            segment = Segment(
                torch.randint(2, 14, (length,), generator=generator),
                mask,
                torch.zeros(length),
                torch.where(mask, 0, -1).to(torch.int32),
            )
            reward = float(torch.randn((), generator=generator))
            samples.append(ScoredEpisode(Episode(SampleKey(0, prompt, sample), (segment,), ""), reward, reward))
        groups.append(PromptGroup(Prompt(prompt, "", (1, 2, 3)), tuple(samples)))
    return groups


def log_probs_of(model, token_ids):
    logits = model(token_ids[None]).logits[0, :-1]
    return torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]])


def values_of(model, token_ids):
    hidden = model.model(token_ids[None]).last_hidden_state
    return torch.cat([torch.zeros(1), model.score(hidden)[0, :-1, 0]])


def step_by_hand(actor, critic, reference, episodes, num_steps: int) -> None:
    """Proximal policy optimisation as in the papers, a token at a time."""
    segments = [episode.episode.segments[0] for episode in episodes]
    with torch.no_grad():
        old = [log_probs_of(actor, segment.token_ids) for segment in segments]
        base = [log_probs_of(reference, segment.token_ids) for segment in segments]
        old_values = [values_of(critic, segment.token_ids) for segment in segments]
    advantages, returns = [], []
    for episode, segment, mine, theirs, value in zip(episodes, segments, old, base, old_values, strict=True):
        times = segment.mask.nonzero()[:, 0].tolist()
        advantage, target = torch.zeros(len(mine)), torch.zeros(len(mine))
        following_value = following_advantage = 0.0
        for t in reversed(times):
            reward = -KL * float(mine[t] - theirs[t]) + (episode.reward if t == times[-1] else 0.0)
            delta = reward + GAMMA * following_value - float(value[t])
            following_advantage = delta + GAMMA * LAM * following_advantage
            following_value = float(value[t])
            advantage[t], target[t] = following_advantage, following_advantage + following_value
        advantages.append(advantage)
        returns.append(target)
    every = torch.cat([a[segment.mask] for a, segment in zip(advantages, segments, strict=True)])
    advantages = [(a - every.mean()) / every.std(correction=0) for a in advantages]
    adams = {
        model: torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
        for model in (actor, critic)
    }

    def learn(model, losses) -> None:
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adams[model].step()
        adams[model].zero_grad()

    size = len(episodes) // num_steps
    for _ in range(NUM_EPOCHS):
        for first in range(0, len(episodes), size):
            losses = []
            for i in range(first, first + size):
                value = values_of(critic, segments[i].token_ids)
                near = old_values[i] + (value - old_values[i]).clamp(-VALUE_CLIP, VALUE_CLIP)
                worse = torch.maximum((value - returns[i]) ** 2, (near - returns[i]) ** 2)
                losses.append(0.5 * worse[segments[i].mask])
            learn(critic, losses)
    for _ in range(NUM_EPOCHS):
        for first in range(0, len(episodes), size):
            losses = []
            for i in range(first, first + size):
                ratio = (log_probs_of(actor, segments[i].token_ids) - old[i]).exp()
                surrogate = torch.minimum(ratio * advantages[i], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[i])
                losses.append(-surrogate[segments[i].mask])
            learn(actor, losses)


def test_a_step_equals_one_written_by_hand(task):
    make_value_model(task / "critic")
    reference = make_task(task / "other", seed=5) / "model"
    groups = recorded()
    cut = BatchSettings(micro_batch_size=3, max_tokens=None)
    policy = PolicySettings(
        objective=PolicyObjective("ppo", CLIP, CLIP, None, None, 0.5, 2.0, "k1", 0.0, None),
        advantages=AdvantageSettings("gae", GAMMA, LAM, True, None, KL, "k1", 0, 1.0, None, 5),
        aggregation="token_mean",
        max_epochs=NUM_EPOCHS,
        needs_old_log_probs=True,
        temperature=1.0,
        score=cut,
        train=cut,
    )
    learning = CriticSettings(ValueObjective(VALUE_CLIP), NUM_EPOCHS, cut, cut)
    actor = ActorWorker(ModelSource(str(task / "model")), TrainOptions(**SETTINGS), "float32")
    critic = CriticWorker(ModelSource(str(task / "critic")), TrainOptions(head="value", **SETTINGS))
    base = ModelWorker(ModelSource(str(reference)), TrainOptions(optimizer=None))
    # The critic has its samples in another order, as on other ranks: they are matched by name.
    steps = ((0, 0), (0, 0), (1, 1), (1, 1))
    shares, others = Share(tuple(groups), steps), Share(tuple(groups[::-1]), steps[::-1])
    values = critic.values([others], learning)
    actor.prepare([shares], 2, policy, [base.score([others], cut, 1.0)], critic=[values])
    reports = critic.update([actor.returns()], 2, learning)
    assert len(actor.update(policy)) == len(reports) == 2 * NUM_EPOCHS
    assert sum(report.metrics["value_clipped"] for report in reports) > 0

    mine = AutoModelForCausalLM.from_pretrained(task / "model")
    my_critic = AutoModelForSequenceClassification.from_pretrained(task / "critic")
    my_reference = AutoModelForCausalLM.from_pretrained(reference)
    step_by_hand(mine, my_critic, my_reference, [sample for group in groups for sample in group.samples], 2)
    for model, worker in ((mine, actor), (my_critic, critic)):
        found, before = dict(worker._backend.weights()), {}
        before = weights(task / ("model" if worker is actor else "critic"))
        for name, weight in model.named_parameters():
            assert (found[name] - weight).abs().max() < 1e-5, name
            assert (before[name] - weight).abs().max() > 1e-4, name  # it has moved
    for worker in (actor, critic, base):
        worker.close()


@pytest.mark.parametrize("time_step", ["token", "chunk"])
def test_the_critic_values_what_follows_an_episode_that_ran_out_of_time(task, time_step):
    """Two episodes of two chunks; the first ran out of time, and its last observation is there to be valued."""
    make_value_model(task / "critic")
    [first, second, *_] = recorded()
    seen = (5, 9, 3, 7)
    played = first.samples[0].episode.segments[0], first.samples[1].episode.segments[0]
    cut_off = Episode(
        SampleKey(0, 0, 0),
        (*played, _value_segment(PolicyInput([*seen]), 1)),
        "",
        is_truncated=True,
        has_bootstrap=True,
    )
    groups = (
        PromptGroup(first.prompt, (ScoredEpisode(cut_off, 0.25, 0.25),)),
        PromptGroup(second.prompt, second.samples[:1]),
    )
    share, cut = Share(groups, ((0,), (0,))), BatchSettings(micro_batch_size=4, max_tokens=None)
    critic = CriticWorker(ModelSource(str(task / "critic")), TrainOptions(head="value", **SETTINGS))
    learning = CriticSettings(ValueObjective(None), 1, cut, cut, time_step)
    values = critic.values([share], learning)
    model = AutoModelForSequenceClassification.from_pretrained(task / "critic")
    with torch.no_grad():
        after = float(model.score(model.model(torch.tensor([seen])).last_hidden_state)[0, -1, 0])
        expected = [values_of(model, segment.token_ids) * segment.mask for segment in played]
    assert abs(after) > 1e-3
    assert values["0/0/0"][2].tolist() == pytest.approx([0.0] * len(seen) + [after], abs=1e-6)
    for found, wanted in zip(values["0/0/0"], expected, strict=False):
        assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)

    actor = ActorWorker(ModelSource(str(task / "model")), TrainOptions(**SETTINGS), "float32")
    policy = PolicySettings(
        objective=PolicyObjective("ppo", CLIP, CLIP, None, None, 0.5, 2.0, "k1", 0.0, None),
        advantages=AdvantageSettings("gae", GAMMA, 0.0, True, None, 0.0, "k1", 0, 1.0, None, 5, time_step, "token"),
        aggregation="token_mean",
        max_epochs=1,
        needs_old_log_probs=False,
        temperature=1.0,
        score=cut,
        train=cut,
    )
    actor.prepare([share], 1, policy, [], critic=[values])
    returns = actor.returns()
    # With lambda 0 the return of the last step is its reward and the discounted value of what follows.
    of_last = returns["0/0/0"][1][played[1].mask]
    assert float(of_last[of_last != 0][-1]) == pytest.approx(0.25 + GAMMA * after, abs=1e-6)
    [report] = critic.update([returns], 1, learning)
    num_sampled = sum(int(segment.mask.sum()) for segment in (*played, second.samples[0].episode.segments[0]))
    if time_step == "token":
        assert report.num_sampled == num_sampled  # the critic learns nothing from the observation that it valued
    for worker in (actor, critic):
        worker.close()


def test_variance_that_the_critic_explains():
    """Returns 1 and 3, valued 1 and 2: errors 0 and 1. Variances 1 and 1/4."""
    from hotseat.train.backend import UpdateReport

    sums = {"value": 3.0, "value_clipped": 1.0, "return": 4.0, "return_squares": 10.0}
    sums |= {"value_error": 1.0, "value_error_squares": 1.0}
    report = UpdateReport(1, 0.5, 2.0, 0.1, False, 0, 4, 2, sums)
    assert critic_metrics([report, report]) == {
        "value_loss": 0.5,
        "critic_grad_norm": 2.0,
        "critic_learning_rate": 0.1,
        "critic_skipped_updates": 0.0,
        "value": 1.5,
        "value_clipped": 0.5,
        "return": 2.0,
        "explained_variance": 0.75,
    }


# --- whole runs -----------------------------------------------------------------------------------------------------


def test_the_policy_learns_and_the_critic_follows(task):
    records = run(task, "run", "train.num_episodes=5", "algorithm.kl.coef=0.01", "algorithm.kl.target=null")
    first, last = records[1], records[-1]
    assert last["reward"] > first["reward"] + 1
    assert last["value"] == pytest.approx(last["return"], abs=1.0)  # it began near 0, and the returns still grow
    names = {"value_loss", "value_clipped", "explained_variance", "critic_grad_norm", "critic_learning_rate"}
    assert names <= first.keys()


def test_only_the_critic_learns_while_it_warms_up(task):
    """Exactly two of four rollouts, and its learning rate begins where it would have begun."""
    optimizer = "{learning_rate: 1e-2, schedule: linear, warmup_ratio: 0.5}"
    records = run(
        task,
        "run",
        "critic.warmup_steps=2",
        actor=f"{{model: {task}/model, optimizer: {optimizer}}}",
        checkpoint="{every: 1, keep_last: 9, export_each: true, export_critic: true}",
    )
    first = weights(task / "model")
    steps = [task / "runs" / "run" / "checkpoints" / f"step-{step:06}" for step in range(1, 5)]
    assert [same(first, weights(step / "model")) for step in steps] == [True, True, False, False]
    critics = [weights(step / "critic") for step in steps]
    assert not any(same(a, b) for a, b in itertools.pairwise(critics))
    assert same(critics[-1], weights(task / "runs" / "run" / "critic"))
    assert (task / "runs" / "run" / "critic" / "tokenizer.json").is_file()
    assert all((steps[-1] / name / "tokenizer.json").is_file() for name in ("model", "critic"))
    assert ["loss" in record for record in records[1:]] == [False, False, True, True]
    assert [record["kl_coefficient"] == 0.1 for record in records[1:]] == [True, True, False, False]
    # Four optimizer steps in a rollout, sixteen in all, the first eight of them warm up: 4/9 after the first four.
    assert records[3]["learning_rate"] == pytest.approx(1e-2 * 4 / 9)


@pytest.mark.long
def test_a_model_of_an_older_kind_learns_with_a_critic_too(task):
    """GPT-2 names its sizes in other words, so that the planner cannot tell its memory."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    shape = GPT2Config(vocab_size=16, **sizes, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(task / "model")
    records = run(task, "run", "algorithm.kl.coef=0.1")
    assert all({"kl", "value_loss"} <= record.keys() and record["engine_gap"] < 1e-4 for record in records[1:])
    AutoModelForCausalLM.from_pretrained(task / "runs" / "run" / "model")


def test_a_warm_up_that_never_ends_is_refused(task):
    with pytest.raises(UserError, match=r"critic.warmup_steps is 4, and the run has 4 steps: the actor would never"):
        run(task, "run", "critic.warmup_steps=4")


@pytest.mark.parametrize(("step", "is_behind"), [pytest.param(1, "false", marks=pytest.mark.long), (3, "true")])
def test_a_run_with_a_critic_resumes_bit_for_bit(task, monkeypatch, step, is_behind):
    """Invariant 5: two backends in a checkpoint, an adaptive KL, and the end of the critic's warm-up in between."""
    from hotseat.loop.state.saving import Saver

    options = ("critic.warmup_steps=2", "checkpoint.every=1", f"checkpoint.background={is_behind}")
    options += ("checkpoint.export_critic=true",)
    whole = run(task, "whole", *options)

    class Stop(Exception):
        pass

    after_step = Saver.after_step

    def stopping(self, at, *args):
        after_step(self, at, *args)
        if at == step:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "after_step", stopping)
        with pytest.raises(Stop):
            run(task, "broken", *options)
    assert main(["resume", str(task / "runs" / "broken")]) == 0
    timing = ("time/", "memory/", "machine/", "sync/", "step_s", "tokens_per_s")
    for a, b in zip(whole, read_lines(task / "runs" / "broken" / "metrics.jsonl"), strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timing)} == {
            k: v for k, v in b.items() if not k.startswith(timing)
        }
    for model in ("model", "critic"):
        assert same(weights(task / "runs" / "whole" / model), weights(task / "runs" / "broken" / model))


@pytest.mark.long
def test_models_take_the_device_one_after_another(task, monkeypatch):
    """Every role leaves between its turns: in each turn nothing is there but what the plan says, and no bit changes."""
    make_value_model(task / "reward_model")
    changes = {"reward": f"{{model: {task}/reward_model}}", "eval": f"{{path: {task}/prompts.jsonl, every: 1}}"}
    filtering = ("algorithm.filtering.enabled=true", "algorithm.filtering.low=-100", "algorithm.filtering.high=100")
    options = (*filtering, "train.num_episodes=1")  # two steps
    run(task, "plain", *options, **changes)
    turns: list[tuple[str, frozenset]] = []
    turn = DeviceScheduler.lease

    def watched(self, phase, role):
        found = turn(self, phase, role)

        class Turn:
            def __enter__(inner):
                found.__enter__()
                aside = {(name, str(part)) for (name, _), parts in self._offloaded.items() for part in parts}
                step = next(s for s in self._plan.steps if s.phase == phase and role in s.roles)
                [device] = self._plan.groups
                at = next(each for each in device.steps if each.step == step.name)
                everything = {(holding.role, str(holding.part)) for holding in at.holdings}
                needed = {(work.role, str(part)) for work in step.works for part in work.parts}
                assert everything - aside == needed, step.name
                turns.append((step.name, frozenset(needed)))

            def __exit__(inner, *error):
                return found.__exit__(*error)

        return Turn()

    monkeypatch.setattr(DeviceScheduler, "lease", watched)
    roles = ("actor", "critic", "reference", "reward", "rollout")
    run(task, "in_turn", *options, *(f"{role}.enable_offload=true" for role in roles), **changes)
    order = [name for name, _ in turns if name != "sync"]
    prepare = [f"prepare.{turn}" for turn in range(4)]  # reward, reference, critic, actor
    one_step = ["rollout", *prepare, "update.0", "update.1"]
    assert order[:3] == ["rollout", "rollout", "prepare.0"]  # the canary's answers, then the first evaluation
    assert order[3 : 3 + len(one_step)] == one_step
    assert dict(turns)["update.0"] == {("critic", part) for part in ("weights", "gradients", "optimizer")}
    assert dict(turns)["prepare.0"] == {("reward", "weights")}
    assert same(weights(task / "runs" / "plain" / "model"), weights(task / "runs" / "in_turn" / "model"))


# --- on Ray ---------------------------------------------------------------------------------------------------------


def run_on_ray(task, name: str, placement: str, *overrides: str, **changes: str) -> None:
    """In a process of its own, without what another test's Ray may have left in the environment."""
    text = ppo_yaml(task, name=name, cluster=f"{{component_placement: {placement}}}", **changes)
    (task / f"{name}.yaml").write_text(text)
    env = own_environment()
    command = [sys.executable, "-m", "hotseat.cli.main", "run", str(task / f"{name}.yaml"), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=860, env=env)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


@pytest.mark.ray
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("placement", "coef", "transport"),
    [
        ("{actor: 0-1, 'critic,reward': 2, rollout: '0,2'}", 0.0, ["rollout.weight_transport=gloo"]),
        ("{actor: 0, reference: 1-2, critic: 0-2, reward: 1-2, rollout: '@actor'}", 0.1, []),
    ],
)
@pytest.mark.long
def test_critics_and_reward_models_of_any_number_of_ranks_give_the_same(task, placement, coef, transport):
    """Weights reach the engine on a device of the actor through host memory, the other one by a broadcast."""
    make_value_model(task / "reward_model")
    algorithm = f"algorithm={{estimator: gae, gae_lambda: 0.9, kl: {{coef: {coef}}}}}"
    options = ("checkpoint.export_critic=true", "train.num_episodes=1", algorithm)
    reward = f"{{model: {task}/reward_model}}"
    run(task, "one", *options, reward=reward)
    run_on_ray(task, "several", placement, *options, *transport, reward=reward)
    for model in ("model", "critic"):
        one, several = (weights(task / "runs" / name / model) for name in ("one", "several"))
        for name in one:
            assert (one[name] - several[name]).abs().max() < 1e-5, (model, name)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_on_one_rank_each_placement_changes_no_bit(task):
    """Invariant 1, with all roles."""
    make_value_model(task / "reward_model")
    options = ("checkpoint.export_critic=true", "train.num_episodes=1")
    reward = f"{{model: {task}/reward_model}}"
    run(task, "in_process", *options, reward=reward)
    run_on_ray(task, "apart", "{actor: 0, reference: 1, critic: 2, reward: 3, rollout: 4}", *options, reward=reward)
    roles = ("actor", "critic", "reference", "reward", "rollout")
    offload = [f"{role}.enable_offload=true" for role in roles]
    run_on_ray(task, "in_turn", "{'actor,critic,reference,reward,rollout': 0}", *options, *offload, reward=reward)
    for model in ("model", "critic"):
        one, *others = (weights(task / "runs" / name / model) for name in ("in_process", "apart", "in_turn"))
        assert all(same(one, other) for other in others), model


@pytest.mark.long
def test_old_log_probs_on_devices_of_their_own_change_no_bit(task):
    """The inference role has the actor's weights before every rollout, and says what the actor would have said."""
    run(task, "without", "train.num_episodes=1")
    placement = "{runtime: local, component_placement: {actor: 0, rollout: 0, critic: 0, reference: 0, inference: 1}}"
    records = run(task, "with", "train.num_episodes=1", cluster=placement)
    assert same(weights(task / "runs" / "without" / "model"), weights(task / "runs" / "with" / "model"))
    assert all(record["engine_gap"] < 1e-4 for record in records[1:])
    flow = """[{name: play, run: [rollout]}, {name: old, run: [inference]}, {name: score, run: [critic, reference]},
      {name: value, train: [critic]}, {name: policy, train: [actor]}, {name: send, push: [rollout, inference]}]"""
    offload = [f"{role}.enable_offload=true" for role in ("actor", "critic", "reference", "rollout")]
    run(task, "arranged", "train.num_episodes=1", *offload, cluster=placement, flow=flow)
    assert same(weights(task / "runs" / "without" / "model"), weights(task / "runs" / "arranged" / "model"))


def test_an_inference_rank_that_serves_other_weights_is_found(task, monkeypatch):
    monkeypatch.setattr(InferenceWorker, "take_bucket", lambda self, bucket: None)
    placement = "{runtime: local, component_placement: {actor: 0, rollout: 0, critic: 0, reference: 0, inference: 1}}"
    with pytest.raises(WeightError, match="inference rank 0 serves other values of .* than the trainer holds"):
        run(task, "stale", cluster=placement)
