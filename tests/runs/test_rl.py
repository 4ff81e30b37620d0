"""The reinforcement loop, end to end on files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from environments import own_environment
from loop_cases import make_task, rl_yaml, same, weights
from safetensors.torch import load_file, save_file

from hotseat.config import loads
from hotseat.errors import RewardError, RunError
from hotseat.loop.run import start
from hotseat.observe import read_lines
from hotseat.rollout import TransformersEngine

pytestmark = pytest.mark.slow


def run(task: Path, *overrides: str, **changes: str) -> list[dict]:
    config = loads(rl_yaml(task, **changes), overrides)
    start(config)
    return read_lines(Path(config.run_dir) / config.name / "metrics.jsonl")


def test_a_run_learns_and_leaves_everything_behind(task):
    records = run(
        task,
        "train.num_episodes=16",
        "actor.optimizer.learning_rate=0.01",
        f"eval.path={task}/prompts.jsonl",
        "eval.samples_per_prompt=2",
        "eval.every=16",
    )
    assert len(records) == 33  # evaluation before, and 16 passes of 8 prompts, 4 at a time
    first = sum(record["reward"] for record in records[1:6]) / 5
    last = sum(record["reward"] for record in records[-5:]) / 5
    assert last > first + 0.5
    assert {"eval/reward", "eval/accuracy", "eval/pass@2"} <= records[-1].keys()
    assert {"loss", "grad_norm", "engine_gap", "canary_gap", "time/rollout", "time/update"} <= records[1].keys()
    assert records[1]["engine_gap"] < 1e-5
    assert records[1]["policy_kl"] == 0.0  # the one optimizer step of a rollout has nothing before it
    directory = task / "runs" / "run"
    assert {"config.yaml", "plan.json", "metrics.jsonl", "tensorboard", "model"} <= {
        p.name for p in directory.iterdir()
    }
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(directory / "model")
    assert AutoTokenizer.from_pretrained(directory / "model")("1+2=")["input_ids"]


def test_a_run_learns_answers_whose_thinking_was_ended(task):
    """The tiny model has no thinking: every prompt ends within it, and the tags are unknown tokens."""
    records = run(
        task,
        "data.input_template='{}<think>'",
        "data.max_length=32",
        "rollout.max_new_tokens=6",
        "rollout.max_thinking_tokens=2",
        "log.keep_rollouts=true",
        "rollout.stop='7'",
    )
    assert records[1]["engine_gap"] < 1e-5
    samples = read_lines(task / "runs" / "run" / "samples.jsonl")
    lengths = [[turn["length"] for turn in sample["turns"]] for sample in samples]
    assert any(len(each) == 2 and each[0] == 2 for each in lengths)
    assert all(sum(each) <= 6 for each in lengths)


def test_evaluation_sets_have_metrics_of_their_own_and_may_choose_the_best_checkpoint(task, capsys):
    (task / "first.jsonl").write_text("".join((task / "prompts.jsonl").read_text().splitlines(keepends=True)[:2]))
    records = run(
        task,
        f"eval.sets={{sums: {{path: {task}/prompts.jsonl}}, first: {{path: {task}/first.jsonl}}}}",
        "checkpoint.best_metric=first/accuracy",
        "checkpoint.every=1",
    )
    for record in (records[0], records[-1]):
        together = (record["eval/sums/reward"] * 8 + record["eval/first/reward"] * 2) / 10
        assert record["eval/reward"] == pytest.approx(together)
        assert {"eval/sums/accuracy", "eval/first/pass@2", "eval/first/pass@4", "eval/accuracy"} <= record.keys()
    assert "first 0." in capsys.readouterr().out
    assert "eval/first/accuracy" in (task / "runs" / "run" / "report.html").read_text()


def test_the_same_seed_gives_the_same_curve_to_the_last_digit(task):
    first, second = run(task, "name=a"), run(task, "name=b")
    timing = ("time/", "memory/", "machine/", "sync/", "step_s", "tokens_per_s")
    for a, b in zip(first, second, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timing)} == {
            k: v for k, v in b.items() if not k.startswith(timing)
        }
    assert same(weights(task, "a"), weights(task, "b"))
    run(task, "name=c", seed="4")
    assert not same(weights(task, "a"), weights(task, "c"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # a CPU without 16-bit units says so
@pytest.mark.parametrize("has_master", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_16_bit_engines_get_16_bit_weights_whatever_the_trainer_keeps(task, has_master):
    train = f"{{dtype: bf16, fp32_master: {has_master}, batch_size: 16, micro_batch_size: 8}}"
    records = run(task, train=train)
    assert [record["version"] for record in records[1:]] == [1.0, 2.0]  # digests agreed
    assert records[-1]["canary_gap"] < 0.25


@pytest.mark.long
def test_how_the_batch_is_cut_changes_nothing_but_the_last_bits(task):
    run(task, "name=a", "train.micro_batch_size=16")
    run(task, "name=b", "train.micro_batch_size=2")
    run(task, "name=c", "train.max_tokens_per_device=40", train="{dtype: fp32, batch_size: 16}")
    a, b, c = (weights(task, name) for name in "abc")
    for name in a:
        assert (a[name] - b[name]).abs().max() < 1e-5
        assert (a[name] - c[name]).abs().max() < 1e-5


def test_several_optimizer_steps_and_epochs_move_the_ratio(task):
    records = run(task, "train.batch_size=8", "train.max_epochs=2", "actor.optimizer.learning_rate=0.05")
    assert records[1]["policy_kl"] != 0.0


def test_a_reference_is_measured_and_charged(task):
    records = run(task, "algorithm.kl.coef=0.1", "algorithm.kl.as_loss=true", "algorithm.kl.estimator=k3")
    assert records[1]["kl"] == pytest.approx(0.0, abs=1e-6)  # the policy starts where the reference is
    assert records[2]["kl"] > 0
    assert records[2]["kl_coefficient"] == 0.1


@pytest.mark.long
def test_a_policy_is_distilled_from_a_teacher(task, tmp_path_factory):
    teacher = make_task(tmp_path_factory.mktemp("teacher"), seed=5)
    file = teacher / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] *= 15  # as it is made, its distribution is almost flat
    save_file(tensors, file, {"format": "pt"})
    (task / "nothing.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n")
    records = run(
        task,
        "algorithm.distill_coef=1",
        f"reference.model={teacher}/model",
        "train.num_episodes=12",
        "actor.optimizer.learning_rate=0.01",
        reward=f"{{function: {task}/nothing.py}}",
    )
    distances = [record["kl"] for record in records[1:]]
    assert sum(distances[-4:]) < 0.6 * sum(distances[:4])


def test_a_run_notes_maths_that_is_not_what_its_name_stands_for(task, capsys):
    loss = "{policy_loss: gspo, aggregation: token_mean, correction: {kind: rollout-ratio}, kl: KL}"
    kl = "{coef: 0.1, as_loss: true, estimator: k1, allow_k1_loss: true}"
    records = run(task, "train.batch_size=8", algorithm=loss.replace("KL", kl))
    assert "corrected" not in records[1]  # by the ratio itself, not by weights
    said = capsys.readouterr().out
    assert said.count("algorithm.aggregation is token_mean; gspo's own is sequence_mean") == 1
    assert said.count("warning: algorithm.kl.estimator is k1 as a loss") == 1


def test_an_estimator_that_compares_no_siblings_runs(task):
    records = run(task, "algorithm.estimator=reinforce", "algorithm.entropy_coef=0.01")
    assert len(records) == 3
    assert records[1]["entropy"] > 0


def test_a_reward_that_fails_is_never_a_zero(task):
    """Scenario 30."""
    (task / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return [float('nan') if i == 0 else float(len(q) % 3) for i, q in enumerate(queries)]\n"
    )
    with pytest.raises(RewardError, match=r"4 of 16 samples have no reward .*reward.max_failed_fraction"):
        run(task, "reward.retries=0")
    records = run(task, "name=tolerant", "reward.retries=0", "reward.max_failed_fraction=0.5")
    assert records[1]["samples_failed"] == 4
    assert records[1]["samples"] == 12


def test_a_reward_that_raises_names_file_function_and_sample(task):
    (task / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    raise KeyError('answer')\n")
    with pytest.raises(RewardError) as caught:
        run(task, "reward.retries=0")
    assert "reward.py" in str(caught.value)
    assert "reward_func" in str(caught.value)
    assert "KeyError" in str(caught.value)


def test_an_agent_from_a_file_plays_several_turns(task):
    (task / "agent.py").write_text(
        "from hotseat.agents import Environment, Step\n\n\n"
        "class Twice(Environment):\n"
        "    def reset(self, prompt, label):\n"
        "        self.turn = 0\n"
        "    def step(self, action):\n"
        "        self.turn += 1\n"
        "        return Step(feedback='+', reward=float(len(action) % 2), done=self.turn == 2)\n"
    )
    records = run(
        task, f"agent.path={task}/agent.py", reward="", data=f"{{path: {task}/prompts.jsonl, max_length: 24}}"
    )
    assert records[1]["length"] > 4  # more than one turn's four tokens


# --- placement changes speed, never maths ---------------------------------------------------------------------------


def run_command(task: Path, name: str, *overrides: str, cluster: str, **changes: str) -> None:
    """`hotseat run` in a process of its own, without what another test's Ray may have left in the environment."""
    (task / f"{name}.yaml").write_text(rl_yaml(task, cluster=cluster, name=name, **changes))
    env = own_environment()
    command = [sys.executable, "-m", "hotseat.cli.main", "run", str(task / f"{name}.yaml"), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=860, env=env)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


# With several optimizer steps and a reference every phase is on the way.
EVERY_PHASE = ("train.batch_size=8", "algorithm.kl.coef=0.1")
HYBRID = "{actor: 0, reference: '@actor', rollout: 1-2}"


def test_placement_changes_no_bit(task):
    """Invariant 1. On Ray a colocated run is among the tests of kills, a disaggregated one among those of overlap."""
    placements = {
        "colocated": "{actor: 0, 'reference,rollout': '@actor'}",
        "disaggregated": "{actor: 0, reference: 1, rollout: 2}",
        "hybrid": HYBRID,
    }
    run(task, "name=in_process", *EVERY_PHASE)
    for name, placement in placements.items():
        offload = "true" if name == "colocated" else "false"
        cluster = f"{{runtime: local, component_placement: {placement}}}"
        run(task, f"name={name}", *EVERY_PHASE, f"rollout.enable_offload={offload}", cluster=cluster)
        assert json.loads((task / "runs" / name / "plan.json").read_text())["label"] == name
        assert same(weights(task, "in_process"), weights(task, name)), name


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_on_ray_a_hybrid_placement_changes_no_bit(task):
    """All roles, in each placement on Ray, are in a long test of PPO."""
    run(task, "name=in_process", *EVERY_PHASE)
    run_command(task, "hybrid", *EVERY_PHASE, cluster=f"{{runtime: ray, component_placement: {HYBRID}}}")
    assert same(weights(task, "in_process"), weights(task, "hybrid"))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_how_weights_travel_changes_no_bit(task):
    """One engine beside the actor, two elsewhere: the same over shared memory alone and with a broadcast."""
    cluster = "{runtime: ray, component_placement: {actor: 0, rollout: 0-2}}"
    run_command(task, "host", cluster=cluster)
    run_command(task, "gloo", "rollout.weight_transport=gloo", cluster=cluster)
    assert same(weights(task, "host"), weights(task, "gloo"))
    records = read_lines(task / "runs" / "gloo" / "metrics.jsonl")
    assert [record["version"] for record in records[1:]] == [1.0, 2.0]
    num_bytes = sum(tensor.nbytes for tensor in weights(task, "gloo").values())
    assert records[1]["sync/gb"] == pytest.approx(num_bytes / 1e9, rel=0.05)  # tensors start at multiples of 64 bytes
    assert {"sync/transfer_ms", "sync/proof_ms", "sync/gb_per_s"} <= records[1].keys()


@pytest.mark.long
def test_a_broadcast_works_within_one_process(task):
    cluster = "{runtime: local, component_placement: {actor: 0, rollout: 1}}"
    run(task, "name=host", cluster=cluster)
    run(task, "name=gloo", "rollout.weight_transport=gloo", cluster=cluster)
    assert same(weights(task, "host"), weights(task, "gloo"))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_two_training_ranks_agree_with_one(task):
    """With groups; `make test` has two ranks with a critic, in the tests of PPO."""
    run(task, "name=one")
    cluster = "{runtime: ray, component_placement: {actor: 0-1, rollout: '0,2'}}"
    run_command(task, "two", "rollout.weight_transport=gloo", cluster=cluster)
    one, two = weights(task, "one"), weights(task, "two")
    for name in one:
        assert (one[name] - two[name]).abs().max() < 1e-5


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(["train.sequence_parallel_size=2"], id="sequences"),
        pytest.param(["train.backend=deepspeed", "train.deepspeed.tensor_parallel_size=2"], id="layers"),
    ],
)
def test_two_ranks_that_share_sequences_or_layers_agree_with_one(task, shared):
    """Of actor and reference, with several optimizer steps, one ratio per sequence, and a token budget."""
    make_task(task, num_key_value_heads=2)
    common = ["train.batch_size=8", "train.max_tokens_per_device=30", "rollout.max_tokens_per_device=40"]
    common += ["algorithm.kl.coef=0.1", "algorithm.policy_loss=gspo", "algorithm.aggregation=sequence_mean"]
    train = "{dtype: fp32, max_epochs: 2}"
    one = run(task, "name=one", *common, train=train)
    cluster = "{runtime: ray, component_placement: {actor: 0-1, 'reference,rollout': '@actor'}}"
    run_command(task, "two", *common, *shared, cluster=cluster, train=train)
    two = read_lines(task / "runs" / "two" / "metrics.jsonl")
    for a, b in zip(one[1:], two[1:], strict=True):
        for name in ("loss", "kl", "grad_norm", "policy_kl", "clipped", "sampled_tokens"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), name
    alone, together = weights(task, "one"), weights(task, "two")
    for name in alone:
        assert (alone[name] - together[name]).abs().max() < 1e-5


@pytest.mark.long
def test_an_engine_that_scores_with_its_cache_answers_the_canary_in_its_turn(task, monkeypatch):
    """Its cache is away while weights come, so the answer follows before anything is sampled."""
    offload = {
        "actor": f"{{model: {task}/model, enable_offload: true, optimizer: {{learning_rate: 1e-2}}}}",
        "rollout": "{batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4, num_slots: 8, enable_offload: true}",
    }
    run(task, name="at-once", **offload)
    monkeypatch.setattr(TransformersEngine, "scores_with", frozenset({"weights", "kv_cache"}))
    records = run(task, name="later", **offload)
    assert 0 < records[-1]["canary_gap"] < 1e-3
    assert same(weights(task, "at-once"), weights(task, "later"))


def test_a_canary_that_is_answered_later_still_stops_the_run(task, monkeypatch):
    monkeypatch.setattr(TransformersEngine, "scores_with", frozenset({"weights", "kv_cache"}))
    score = TransformersEngine.score
    monkeypatch.setattr(
        TransformersEngine, "score", lambda *args: [[value - 1.0 for value in row] for row in score(*args)]
    )
    offload = "{batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4, num_slots: 8, enable_offload: true}"
    with pytest.raises(RunError, match="engine 0 and the trainer disagree on version 0"):
        run(task, rollout=offload)
