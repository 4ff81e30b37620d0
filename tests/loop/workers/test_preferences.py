"""Preference optimisation: the loss of pairs, the reference in its forms, and runs of one and of several ranks."""

import os
import sys
import time
from math import exp, log
from pathlib import Path

import preloaded
import pytest
import torch
import transformers
from loop_cases import dpo_yaml, make_task, more_sevens, same, weights, write_rows
from rank_cases import meeting

from hotseat.config import loads, to_saved
from hotseat.config.schema.algorithm_options import DpoConfig
from hotseat.data import Example, Pair
from hotseat.errors import PlacementError, UserError
from hotseat.loop.inputs import supervised_inputs
from hotseat.loop.run import start
from hotseat.loop.workers.model_workers import BatchSettings
from hotseat.loop.workers.preferences import PreferenceObjective, ScoredPair, with_reference
from hotseat.loop.workers.reference import digest_of_model, read_scores, write_scores
from hotseat.observe import read_lines
from hotseat.openrlhf.translate import translate
from hotseat.planning.config_plan import is_offloaded, make_plan
from hotseat.train.backend import LoraOptions, Outputs, TrainOptions, UpdateReport
from hotseat.train.make import make_backend


def example(*token_ids: int, context: int = 1) -> Example:
    return Example(torch.tensor(token_ids), torch.arange(len(token_ids)) >= context, "data.jsonl:1")


PAIRS = [
    Pair(example(2, 3, 4, 1), example(2, 3, 1)),
    Pair(example(5, 1), example(6, 7, 8, 9, 1)),
    Pair(example(2, 9, 1), example(2, 8, 1)),
]
# Log-prob of each token, and of the reference: that of a sequence is the sum over all its tokens but the first.
POLICY = {token: -token / 4 for token in range(10)}
REFERENCE = {token: -1 / (token + 1) for token in range(10)}


def token_values(batch, table: dict[int, float]) -> torch.Tensor:
    values = torch.tensor([table[token] for token in batch.token_ids.tolist()])
    return torch.where(batch.mask, values, 99.0)  # what stands elsewhere does not matter


def total(answer: Example, table: dict[int, float]) -> float:
    return sum(table[token] for token in answer.token_ids.tolist()[1:])


def deltas() -> list[float]:
    """(log π − log π_ref) of the better answer, less that of the other, of each pair."""
    return [
        sum(sign * (total(side, POLICY) - total(side, REFERENCE)) for sign, side in ((1, p.chosen), (-1, p.rejected)))
        for p in PAIRS
    ]


def softplus(x: float) -> float:
    return log(1 + exp(x))


# --- batches and the loss ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [BatchSettings(1, None), BatchSettings(2, None), BatchSettings(None, 9)])
@pytest.mark.parametrize("is_scored", [False, True])
def test_the_loss_of_a_step_is_the_mean_over_its_pairs_however_it_is_cut(cut, is_scored):
    objective = PreferenceObjective(DpoConfig(beta=0.5, nll_coef=0.2))
    pairs = PAIRS
    if is_scored:
        sides = [(total(p.chosen, REFERENCE), total(p.rejected, REFERENCE)) for p in PAIRS]
        pairs = [ScoredPair(p.chosen, p.rejected, 0.0, both) for p, both in zip(PAIRS, sides, strict=True)]
    nll = [-total(p.chosen, POLICY) / (len(p.chosen.token_ids) - 1) for p in PAIRS]
    expected = sum(softplus(-0.5 * delta) + 0.2 * n for delta, n in zip(deltas(), nll, strict=True)) / 3
    loss, right = 0.0, 0.0
    batches = objective.batches(pairs[:1], pairs, cut) + objective.batches(pairs[1:], pairs, cut)  # two ranks
    for batch in batches:
        assert batch.sample_ids[::2] == batch.sample_ids[1::2]
        if not is_scored:
            batch = with_reference(batch, token_values(batch, REFERENCE))
        part, sums = objective.loss(Outputs(log_probs=token_values(batch, POLICY)), batch)
        loss, right = loss + float(part), right + float(sums["accuracy"])
    assert loss == pytest.approx(expected, rel=1e-6)
    assert right == sum(delta > 0 for delta in deltas())


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (PreferenceObjective(DpoConfig(loss="ipo", beta=0.5)), [(delta - 1) ** 2 for delta in deltas()]),
        (
            PreferenceObjective(DpoConfig(loss="dpo", beta=0.5, label_smoothing=0.1)),
            [0.9 * softplus(-0.5 * delta) + 0.1 * softplus(0.5 * delta) for delta in deltas()],
        ),
    ],
)
def test_an_evaluation_over_ranks(objective, expected):
    measured = [
        [
            total(p.chosen, POLICY),
            total(p.rejected, POLICY),
            len(p.chosen.token_ids) - 1,
            len(p.rejected.token_ids) - 1,
            total(p.chosen, REFERENCE),
            total(p.rejected, REFERENCE),
        ]
        for p in PAIRS
    ]
    found = objective.evaluation([measured[:2], measured[2:], []])
    rewards = [[0.5 * (total(side, POLICY) - total(side, REFERENCE)) for side in (p.chosen, p.rejected)] for p in PAIRS]
    assert found == pytest.approx(
        {
            "eval/accuracy": sum(c > r for c, r in rewards) / 3,
            "eval/loss": sum(expected) / 3,
            "eval/margin": sum(c - r for c, r in rewards) / 3,
            "eval/chosen_reward": sum(c for c, _ in rewards) / 3,
            "eval/rejected_reward": sum(r for _, r in rewards) / 3,
        }
    )


def test_metrics_of_an_update():
    objective = PreferenceObjective(DpoConfig(loss="simpo"))
    sums = {"num_pairs": 4.0, "accuracy": 3.0, "chosen_reward": 2.0, "rejected_reward": -1.0, "chosen_nll": 8.0}
    found = objective.metrics(UpdateReport(1, 0.7, 1.0, 1e-3, False, 0, 14, 14, sums))
    assert found == {
        "accuracy": 0.75,
        "chosen_reward": 0.5,
        "rejected_reward": -0.25,
        "chosen_nll": 2.0,
        "margin": 0.75,
    }


# --- the reference ----------------------------------------------------------------------------------------------------


def test_scores_are_read_as_written_and_a_damaged_file_is_not(tmp_path):
    path, scores = tmp_path / "folder" / "a.safetensors", [(-1.1, -2.2), (-0.3, -1e-9)]
    assert read_scores(path, 2) is None
    write_scores(path, scores)
    assert read_scores(path, 2) == scores
    assert read_scores(path, 3) is None
    assert [file.name for file in path.parent.iterdir()] == ["a.safetensors"]
    path.write_bytes(path.read_bytes()[:20])
    assert read_scores(path, 2) is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"algorithm.dpo.precompute: .*/file/a.safetensors cannot be written"):
        write_scores(tmp_path / "file" / "a.safetensors", [(0.0, 0.0)])


def test_the_digest_of_a_model_knows_its_weights_and_its_config(task):
    before = digest_of_model(str(task / "model"))
    assert before == digest_of_model(str(task / "model"))
    config = task / "model" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert digest_of_model(str(task / "model")) != before


def test_adapters_switched_off_score_as_the_base_and_switch_on_again(task):
    options = TrainOptions(lora=LoraOptions(rank=4, alpha=64))
    backend, base = make_backend(task / "model", options), make_backend(task / "model", TrainOptions(optimizer=None))
    objective = PreferenceObjective(DpoConfig(loss="simpo", beta=2.0))
    batches = objective.batches(PAIRS, PAIRS, BatchSettings(4, None))
    for _ in range(2):
        backend.update(batches, objective.loss, 1.0)
    [expected] = base.log_probs(batches, 1.0)
    [trained] = backend.log_probs(batches, 1.0)
    with backend.without_adapters():
        [found] = backend.log_probs(batches, 1.0)
    assert torch.equal(found, expected)
    assert not torch.allclose(trained, expected)
    assert torch.equal(backend.log_probs(batches, 1.0)[0], trained)
    backend.close()
    base.close()


# --- planning ---------------------------------------------------------------------------------------------------------

SHAPE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
}


def planned(*overrides: str, inventory: str = "1x1xH200"):
    config = loads("task: dpo\ndata: {max_length: 512}\ntrain: {batch_size: 8}", overrides)
    actor = config.actor.model_copy(update={"shape": SHAPE})
    return make_plan(config.model_copy(update={"actor": actor}), inventory)


def used_gib(plan) -> dict[str, float]:
    return {step.step: step.used_gib for group in plan.groups for step in group.steps}


def test_the_plan_prices_the_reference():
    live, offloaded = planned(), planned("reference.enable_offload=true")
    precomputed = planned("algorithm.dpo.precompute=true")
    lora = planned("train.lora.rank=8")
    without = planned("algorithm.dpo.loss=simpo", "algorithm.dpo.beta=2")
    assert list(used_gib(live)) == ["prepare", "update"]
    assert (is_offloaded(live, "reference"), is_offloaded(offloaded, "reference")) == (False, True)
    reference_gib = 2 * live_parameters() / 2**30
    assert used_gib(live)["update"] - used_gib(offloaded)["update"] == pytest.approx(reference_gib, rel=0.02)
    assert used_gib(precomputed)["update"] == used_gib(offloaded)["update"]
    assert used_gib(without)["update"] == pytest.approx(used_gib(offloaded)["update"])
    assert [role.name for role in lora.roles] == [role.name for role in without.roles] == ["actor"]


def live_parameters() -> int:
    layers = 24 * (4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048)
    return layers + 2 * 32000 * 2048 + 2048


def test_a_reference_that_does_not_fit_beside_the_actor_is_offloaded():
    least = "train.chosen_tokens_per_device=1024"
    wide, narrow = planned(least), planned(least, inventory="1x1xGPU-38G")
    assert not is_offloaded(wide, "reference")
    assert is_offloaded(narrow, "reference")


def test_a_reference_on_other_devices_is_refused(task):
    config = loads(dpo_yaml(task, cluster="{component_placement: {actor: 0, reference: 1}}"))
    with pytest.raises(PlacementError, match=r"in task dpo each rank of the actor holds the reference's part"):
        supervised_inputs(config)


def test_a_reference_with_other_tokens_is_refused(task):
    other = task / "other"
    transformers.AutoModelForCausalLM.from_pretrained(task / "model").save_pretrained(other)
    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model")
    tokenizer.add_tokens(["abc"])
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError, match="cannot read the tokens of actor.model"):
        supervised_inputs(loads(dpo_yaml(task, reference=f"{{model: {other}}}")))


def test_a_bad_row_is_refused_before_a_model_loads(task):
    rows = more_sevens(4, seed=0)
    rows[2]["rejected"] = rows[2]["chosen"]
    write_rows(task / "pairs.jsonl", rows)
    with pytest.raises(UserError, match=r"pairs.jsonl:3: chosen and rejected are the same"):
        supervised_inputs(loads(dpo_yaml(task)))


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def task(tmp_path):
    return make_task(tmp_path, initializer_range=0.3)


def run(task: Path, name: str, *overrides: str) -> list[dict]:
    start(loads(dpo_yaml(task, name=name), overrides))
    return read_lines(task / "runs" / name / "metrics.jsonl")


def largest_gap(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["true", "false"])
def test_the_first_steps_are_those_of_a_plain_loop(task, packing):
    """Loss and gradient norm of two steps on all pairs, against transformers' own model, autograd and torch's AdamW."""
    rows = more_sevens(16, seed=0)
    write_rows(task / "pairs.jsonl", rows)
    once = ("train.batch_size=16", "train.max_epochs=2", f"train.packing={packing}", "algorithm.dpo.beta=0.3")
    _, first, second = run(task, "dpo", *once, "actor.optimizer.max_grad_norm=0")
    model = transformers.AutoModelForCausalLM.from_pretrained(task / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)

    def log_probs() -> torch.Tensor:
        found = []
        for row in rows:
            for key in ("chosen", "rejected"):
                ids = torch.tensor(tokenizer(row["prompt"] + row[key] + "<eos>").input_ids)
                each = model(ids[None, :-1]).logits[0].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
                found.append(each[len(tokenizer(row["prompt"]).input_ids) - 1 :].sum())
        return torch.stack(found).view(-1, 2)

    reference = log_probs().detach()
    for record in (first, second):
        gaps = log_probs() - reference
        loss = torch.log(1 + torch.exp(-0.3 * (gaps[:, 0] - gaps[:, 1]))).mean()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        optimizer.param_groups[0]["lr"] = record["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_a_tiny_model_learns_and_every_form_of_the_reference_gives_the_same_model(task):
    few = ("data.max_samples=64", "eval.max_samples=20", "train.micro_batch_size=4")
    records = run(task, "live", *few, "train.max_epochs=4", "train.batch_size=16", "train.micro_batch_size=16")
    assert (records[0]["eval/accuracy"], records[0]["eval/margin"]) == (0.0, 0.0)  # the policy is the reference
    assert records[1]["loss"] == pytest.approx(log(2), abs=1e-6)
    assert records[-1]["eval/accuracy"] > 0.7
    assert records[-1]["eval/margin"] > 0.1
    assert records[-1]["margin"] == pytest.approx(records[-1]["chosen_reward"] - records[-1]["rejected_reward"])
    few = ("data.max_samples=16", "eval.max_samples=8", "train.batch_size=8", "train.micro_batch_size=4")
    one_pair = (*few, "train.micro_batch_size=1")  # equal cuts
    run(task, "alone", *one_pair)
    run(task, "offloaded", *one_pair, "reference.enable_offload=true")
    run(task, "named", *one_pair, f"reference.model={task}/model")
    run(task, "kept", *one_pair, "algorithm.dpo.precompute=true")
    run(task, "reused", *one_pair, "algorithm.dpo.precompute=true", "train.backend=deepspeed")
    run(task, "other cuts", *few, "algorithm.dpo.precompute=true")
    for name in ("offloaded", "named", "kept"):
        assert same(weights(task, "alone"), weights(task, name)), name
    for name in ("reused", "other cuts"):
        assert largest_gap(weights(task, "alone"), weights(task, name)) < 1e-5
    files = list((task / "runs" / "reference_log_probs").iterdir())
    assert len(files) == 2  # pairs to learn from, and held-out ones
    assert "pairs are kept in" in (task / "runs" / "kept" / "events.jsonl").read_text()
    assert "for 16 pairs were there already" in (task / "runs" / "reused" / "events.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, marks=pytest.mark.long) for options in ((), ("train.lora.rank=4",))),
        ("algorithm.dpo.precompute=true",),
    ],
    ids=str,
)
def test_resumed_equals_uninterrupted(task, options):
    few = ("data.max_samples=64", "eval.max_samples=20", *options)
    whole = run(task, "whole", *few)
    run(task, "part", *few, "train.max_epochs=1", "checkpoint.every=1")
    newest = sorted((task / "runs" / "part" / "checkpoints").iterdir())
    assert newest
    more = ("train.max_epochs=2", "checkpoint.every=1", "checkpoint.resume=true")
    run(task, "both", *few, "train.max_epochs=2")
    resumed = run(task, "part", *few, *more)
    assert len(whole) < len(resumed)
    assert same(weights(task, "both"), weights(task, "part"))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ipo", "orpo", "simpo"])
def test_other_losses_raise_the_accuracy(task, loss):
    rate = "actor.optimizer.learning_rate=0.003" if loss == "ipo" else "actor.optimizer.learning_rate=0.01"
    beta = "algorithm.dpo.beta=2" if loss == "simpo" else "algorithm.dpo.beta=0.2"
    records = run(task, loss, f"algorithm.dpo.loss={loss}", beta, rate, "train.max_epochs=2")
    assert records[-1]["eval/accuracy"] > records[0]["eval/accuracy"] + 0.05
    assert records[-1]["eval/margin"] > records[0]["eval/margin"]


RANKS = """
import sys
import torch.distributed as dist
from hotseat.config import load
from hotseat.loop.run import start

dist.init_process_group("gloo")
for path in sys.argv[1:]:
    start(load(path), launched=True)
dist.destroy_process_group()
"""


def launch(task: Path, *paths: Path) -> None:
    """Run configs one after another in two ranks, as a launcher starts them."""
    (task / "ranks.py").write_text(RANKS)
    command, processes = [sys.executable, str(task / "ranks.py"), *map(str, paths)], []
    with meeting(2) as environments:
        try:
            for rank, own in enumerate(environments):
                env = {**os.environ, **own, "LOCAL_RANK": str(rank)}
                processes.append(
                    preloaded.popen(command, env=env, stdout=preloaded.PIPE, stderr=preloaded.PIPE, text=True)
                )
            deadline = time.monotonic() + 900
            said = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]


WAYS = {
    "fsdp": (),
    "zero2": ("train.backend=deepspeed",),
    "shared": ("train.sequence_parallel_size=2",),
}
MORE_WAYS = {
    "kept": ("algorithm.dpo.precompute=true",),
    "zero3": ("train.backend=deepspeed", "train.deepspeed.zero_stage=3", "reference.enable_offload=true"),
    "shared-zero3": (
        "train.sequence_parallel_size=2",
        "train.backend=deepspeed",
        "train.deepspeed.zero_stage=3",
        "algorithm.dpo.precompute=true",
    ),
    "lora": ("train.lora.rank=4",),
    "lora-shared": ("train.lora.rank=4", "train.sequence_parallel_size=2"),
    "lora-zero3": ("train.lora.rank=4", "train.backend=deepspeed", "train.deepspeed.zero_stage=3"),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ways", [WAYS, pytest.param(MORE_WAYS, marks=pytest.mark.long)], ids=["few", "all"])
@pytest.mark.long
def test_two_ranks_of_either_backend_train_as_one(task, ways):
    few = ("data.max_samples=64", "eval.max_samples=20", "train.micro_batch_size=8")
    run(task, "one", *few)
    run(task, "one-lora", *few, "train.lora.rank=4")
    paths = []
    for name, options in ways.items():
        overrides = "\n".join((*few, *options))
        paths.append(task / f"{name}.yaml")
        paths[-1].write_text(to_saved(loads(dpo_yaml(task, name=name), overrides.splitlines())))
    launch(task, *paths)
    for name in ways:
        one = "one-lora" if name.startswith("lora") else "one"
        assert largest_gap(weights(task, one), weights(task, name)) < 1e-5, name
        ends = [read_lines(task / "runs" / each / "metrics.jsonl")[-1] for each in (one, name)]
        for key in ("loss", "accuracy", "margin", "eval/accuracy", "eval/loss", "eval/margin"):
            assert ends[0][key] == pytest.approx(ends[1][key], abs=1e-5), (name, key)


@pytest.mark.slow
def test_openrlhfs_command_is_the_run_of_its_config(task):
    flags = f"--pretrain {task}/model --dataset {task}/pairs.jsonl --eval_dataset {task}/held_out_pairs.jsonl"
    flags += " --max_len 16 --prompt_key prompt --train_batch_size 64 --micro_train_batch_size 16 --learning_rate 1e-3"
    flags += f" --beta 0.2 --ipo --nll_loss_coef 0.1 --ref_offload --backend fsdp --save_path {task}/model2"
    translation = translate("train_dpo", flags.split(), {})
    assert not translation.unsupported
    assert not translation.missing
    config = loads(translation.yaml, ["cluster.runtime=local", f"run_dir={task}/runs", "name=dpo"])
    assert (config.algorithm.dpo.loss, config.reference.enable_offload) == ("ipo", True)
    final = start(config)
    assert final["eval/accuracy"] > 0.5
    assert (task / "model2" / "model.safetensors").is_file()
