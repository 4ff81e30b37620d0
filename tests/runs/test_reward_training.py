"""Reward models: the loss of pairs, what is measured, and the model that comes out."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest
import torch
import transformers
from loop_cases import more_sevens, rm_yaml, write_rows
from safetensors.torch import load_file

from hotseat.config import loads
from hotseat.data import Example, Pair, digest_of
from hotseat.demo import make_tokenizer
from hotseat.errors import UserError
from hotseat.loop import inputs
from hotseat.loop.run import start
from hotseat.loop.workers.model_workers import BatchSettings
from hotseat.loop.workers.objectives import RewardModelObjective
from hotseat.observe import read_lines
from hotseat.openrlhf.translate import translate
from hotseat.train.backend import Outputs, TrainOptions, UpdateReport
from hotseat.train.make import make_backend

OBJECTIVE = RewardModelObjective("sigmoid", use_margin=False, pad_token_id=0)
VALUE = TrainOptions(head="value")


def example(*token_ids: int, context: int = 1) -> Example:
    return Example(torch.tensor(token_ids), torch.arange(len(token_ids)) >= context, "data.jsonl:1")


PAIRS = [
    Pair(example(2, 3, 4, 1), example(2, 3, 1), margin=0.5),
    Pair(example(5, 1), example(6, 7, 8, 9, 1), margin=1.0),
    Pair(example(2, 9, 1), example(2, 8, 1)),
]


def softplus(x: float) -> float:
    return log(1 + exp(x))


# --- batches and the loss ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [BatchSettings(1, None), BatchSettings(2, None), BatchSettings(4, None)])
@pytest.mark.parametrize("use_margin", [False, True])
@pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
def test_the_loss_of_a_step_is_the_mean_over_its_pairs_however_it_is_cut(cut, use_margin, kind):
    objective = RewardModelObjective(kind, use_margin, 0)
    rewards = {(2, 3, 4, 1): 2.0, (2, 3, 1): 1.0, (5, 1): -1.0, (6, 7, 8, 9, 1): 0.5, (2, 9, 1): 3.0, (2, 8, 1): 0.0}
    margins = (0.5, 1.0, 0.0) if use_margin else (0.0, 0.0, 0.0)
    expected = sum(softplus(margins[i] - d) for i, d in enumerate((1.0, -1.5, 3.0))) / 3
    total, right = 0.0, 0.0
    batches = objective.batches(PAIRS[:1], PAIRS, cut) + objective.batches(PAIRS[1:], PAIRS, cut)  # two ranks
    for batch in batches:
        segments = [batch.token_ids[a:b].tolist() for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)]
        values = torch.full((batch.num_tokens,), 99.0)  # what stands elsewhere than at the ends does not matter
        values[batch.offsets[1:] - 1] = torch.tensor([rewards[tuple(segment[:-1])] for segment in segments])
        loss, sums = objective.loss(Outputs(values=values), batch)
        total, right = total + float(loss), right + float(sums["accuracy"])
    assert total == pytest.approx(expected, rel=1e-6)
    assert right == 2


def test_a_pair_is_never_parted():
    for cut in (BatchSettings(1, None), BatchSettings(1, 8), BatchSettings(1, 15)):
        for batch in OBJECTIVE.batches(PAIRS, PAIRS, cut):
            assert batch.sample_ids[::2] == batch.sample_ids[1::2]
    assert [batch.num_segments for batch in OBJECTIVE.batches(PAIRS, PAIRS, BatchSettings(2, None))] == [4, 2]


def test_the_reward_stands_after_the_last_token_and_a_prompt_before_the_mask():
    [batch] = OBJECTIVE.batches(
        [Pair(example(2, 3, 4, 1, context=2), example(2, 3, 1, context=2))], PAIRS, BatchSettings(1, None)
    )
    assert batch.offsets.tolist() == [0, 5, 9]
    assert batch.mask.tolist() == [False, False, True, True, True, False, False, True, True]
    assert batch.weights.tolist() == pytest.approx([0, 0, 0, 0, 1 / 6, 0, 0, 0, 1 / 6])


def test_metrics_of_an_update():
    [batch] = OBJECTIVE.batches(PAIRS[:2], PAIRS[:2], BatchSettings(2, None))
    values = torch.zeros(batch.num_tokens)
    values[batch.offsets[1:] - 1] = torch.tensor([1.0, 0.0, 2.0, 3.0])
    _, sums = OBJECTIVE.loss(Outputs(values=values), batch)
    report = UpdateReport(1, 0.7, 1.0, 1e-3, False, 0, 14, 14, {name: float(value) for name, value in sums.items()})
    assert OBJECTIVE.metrics(report) == {"accuracy": 0.5, "chosen_reward": 1.5, "rejected_reward": 1.5}


def test_an_evaluation_over_ranks():
    found = replace(OBJECTIVE, use_margin=True).evaluation([[(1.0, 0.0, 0.5)], [(0.0, 2.0, 0.0)], []])
    assert found == pytest.approx(
        {
            "eval/accuracy": 0.5,
            "eval/loss": (softplus(-0.5) + softplus(2.0)) / 2,
            "eval/margin": -0.5,
            "eval/reward_mean": 0.75,
            "eval/reward_std": (2.75 / 3) ** 0.5,  # of 1, 0, 0, 2: squares add up to 2.75, divided by n - 1
        }
    )
    assert OBJECTIVE.evaluation([[(1.0, 1.0, 0.0)]])["eval/reward_std"] == 1e-8


def test_the_digest_of_pairs_knows_both_answers_and_the_margin():
    a, b = example(2, 3, 1), example(2, 4, 1)
    several = [[Pair(a, b)], [Pair(b, a)], [Pair(a, b, 0.5)], [Pair(a, a)], [Pair(a, b), Pair(a, b)]]
    assert len({digest_of(pairs) for pairs in several}) == len(several)


# --- filling ----------------------------------------------------------------------------------------------------------


def test_the_pad_token_is_never_the_end_token():
    tokenizer = make_tokenizer()
    assert inputs._pad_token(tokenizer) == (0, [])
    tokenizer.pad_token = None
    found, [note] = inputs._pad_token(tokenizer)
    assert (found, tokenizer.pad_token) == (0, "<pad>")  # a special token still
    assert "has no pad token, without which transformers scores no batches: '<pad>' is exported as such" in note
    tokenizer.pad_token = "<eos>"
    found, [note] = inputs._pad_token(tokenizer)
    assert found == 0
    assert "has its end token as pad token, so that transformers would read rewards a token early" in note


def test_without_a_spare_special_token_only_the_config_names_the_pad_token():
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    found, [note] = inputs._pad_token(tokenizer)
    assert (found, tokenizer.pad_token) == (1, None)
    assert "pad batches with token id 1" in note


# --- runs -------------------------------------------------------------------------------------------------------------


def notes(task: Path, name: str) -> str:
    return (task / "runs" / name / "events.jsonl").read_text()


def texts(rows: list[dict]) -> list[str]:
    return [row["prompt"] + row[key] + "<eos>" for row in rows for key in ("chosen", "rejected")]


def transformers_scores(model: Path, lines: list[str], batch_size: int) -> torch.Tensor:
    """As anybody would: batches that the tokenizer fills up."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    assert scorer.config.num_labels == 1
    found = []
    for first in range(0, len(lines), batch_size):
        filled = tokenizer(lines[first : first + batch_size], padding=True, return_tensors="pt")
        with torch.no_grad():
            found.append(scorer(filled.input_ids, attention_mask=filled.attention_mask).logits[:, 0])
    return torch.cat(found)


def our_scores(model: Path, rows: list[dict], options: TrainOptions = VALUE, **changes: str) -> torch.Tensor:
    """[2 · num_rows]: by our backend, from pairs as a run reads them."""
    task = model.parents[2]
    write_rows(task / "scored.jsonl", rows)
    config = loads(rm_yaml(task, **changes), [f"data.path={task}/scored.jsonl", "data.max_lost_fraction=1"])
    data = inputs.supervised(config, inputs.load_tokenizer(config))
    backend = make_backend(model, options)
    try:
        measured = data.objective.measure(
            backend, data.objective.batches(data.items, data.items, BatchSettings(999, None))
        )
    finally:
        backend.close()
    return torch.tensor(measured)[:, :2].flatten()


@pytest.mark.slow
def test_a_tiny_model_learns_and_scores_alike_everywhere(task):
    final = start(loads(rm_yaml(task), ["train.max_epochs=3"]))
    records = read_lines(task / "runs" / "rm" / "metrics.jsonl")
    assert len(records) == 25  # evaluation before, and 256 pairs x 3 epochs / 32
    assert records[0]["eval/accuracy"] < final["eval/accuracy"]
    assert final["eval/accuracy"] >= 0.95
    assert final.items() <= records[-1].items()
    assert records[-1]["accuracy"] >= 0.9
    assert records[-1]["chosen_reward"] > records[-1]["rejected_reward"]
    assert records[-1]["loss"] < records[1]["loss"] - 0.3
    model, held_out = task / "runs" / "rm" / "model", more_sevens(100, seed=1)
    theirs, ours = transformers_scores(model, texts(held_out), 16), our_scores(model, held_out)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert float((theirs[::2] > theirs[1::2]).float().mean()) == pytest.approx(final["eval/accuracy"])
    config = json.loads((model / "config.json").read_text())
    assert config["mean"] == pytest.approx(float(theirs.double().mean()), abs=1e-5)
    assert config["std"] == pytest.approx(float(theirs.double().std()), abs=1e-5)


@pytest.mark.slow
def test_an_average_says_of_itself_how_it_scores(task):
    start(loads(rm_yaml(task), ["train.ema.enabled=true", "train.ema.beta=0.9"]))
    held_out, told = texts(more_sevens(100, seed=1)), []
    for folder in ("model", "model_ema"):
        model = task / "runs" / "rm" / folder
        theirs = transformers_scores(model, held_out, 16).double()
        told.append(json.loads((model / "config.json").read_text()))
        assert told[-1]["mean"] == pytest.approx(float(theirs.mean()), abs=1e-5)
        assert told[-1]["std"] == pytest.approx(float(theirs.std()), abs=1e-5)
        assert told[-1]["pad_token_id"] == 0
    assert told[0]["std"] > 1.1 * told[1]["std"]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["true", "false"])
def test_the_first_step_is_that_of_a_plain_loop(task, packing):
    """Loss and gradient norm of one step on all pairs, against transformers' own model and autograd."""
    rows = more_sevens(32, seed=0)
    write_rows(task / "pairs.jsonl", rows)
    start(loads(rm_yaml(task), ["algorithm.reward_modelling.margin=true", f"train.packing={packing}"]))
    _, record = read_lines(task / "runs" / "rm" / "metrics.jsonl")  # the first is the evaluation before training
    before = make_backend(task / "model", VALUE)  # the head that the run began with
    before.export(task / "before")
    before.close()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(task / "before")
    tokenizer, losses = make_tokenizer(), []
    for row in rows:
        one, other = (
            model(torch.tensor([tokenizer(row["prompt"] + row[key] + "<eos>").input_ids])).logits.squeeze()
            for key in ("chosen", "rejected")
        )
        losses.append(torch.log(1 + torch.exp(other - one + row["margin"])))
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.slow
def test_pairs_that_truncation_makes_alike_are_told_and_what_is_cut_keeps_its_end(task):
    same = {"prompt": "1+1=", "chosen": "1" * 15 + "7", "rejected": "1" * 15 + "2"}
    long = {"prompt": "1+1=", "chosen": "7" * 20, "rejected": "1" * 20}
    write_rows(task / "pairs.jsonl", [*more_sevens(30, seed=0), same, long, {**same, "rejected": "1" * 14}, long])
    start(loads(rm_yaml(task, eval=""), ["data.max_lost_fraction=1"]))
    told = notes(task, "rm")
    assert "32 pairs (2 truncated, 0 dropped without an answer, 2 dropped with the same answer twice)" in told
    assert "no pairs are held out (eval.path): the model's mean and std are of pairs it learned from" in told
    model = task / "runs" / "rm" / "model"
    ends = ["1+1=" + digit * 11 + "<eos>" for digit in "71"]  # 16 tokens
    torch.testing.assert_close(our_scores(model, [long]), transformers_scores(model, ends, 2), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_tokenizer_without_a_pad_token(task):
    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(task / "model")
    config = json.loads((task / "model" / "config.json").read_text())
    (task / "model" / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    start(loads(rm_yaml(task), ["data.max_samples=32"]))
    assert "the tokenizer has no pad token, without which transformers scores no batches" in notes(task, "rm")
    model, held_out = task / "runs" / "rm" / "model", more_sevens(20, seed=1)
    assert json.loads((model / "config.json").read_text())["pad_token_id"] == 0
    alone, together = (transformers_scores(model, texts(held_out), size) for size in (1, 40))
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_head_by_another_name_comes_back(task):
    """Written under that name, read under it whatever is asked for; made anew where there is none, always alike."""
    short = "data.max_samples=32"
    start(loads(rm_yaml(task), [short, "algorithm.reward_modelling.value_head_prefix=value_head"]))
    start(loads(rm_yaml(task, name="plain"), [short]))
    model, plain, rows = task / "runs" / "rm" / "model", task / "runs" / "plain" / "model", more_sevens(10, seed=1)
    written = load_file(model / "model.safetensors")
    assert "value_head.weight" in written
    assert not [name for name in written if name.startswith("score")]
    scores = our_scores(model, rows)
    assert torch.equal(scores, our_scores(plain, rows))
    assert torch.equal(scores, our_scores(model, rows, replace(VALUE, value_head_prefix="value_head")))
    # A checkpoint that does not say its prefix is read by the one that is asked for.
    config = json.loads((model / "config.json").read_text())
    del config["value_head_prefix"]
    (model / "config.json").write_text(json.dumps(config))
    assert torch.equal(scores, our_scores(model, rows, replace(VALUE, value_head_prefix="value_head")))
    anew = our_scores(model, rows)
    assert not torch.allclose(scores, anew)
    assert torch.equal(anew, our_scores(model, rows))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_openrlhfs_command_on_two_ranks_agrees_with_one_process(task):
    flags = (
        f"--pretrain {task}/model --dataset {task}/pairs.jsonl --eval_dataset {task}/held_out_pairs.jsonl --max_len 16"
    )
    flags += (
        " --prompt_key prompt --train_batch_size 64 --micro_train_batch_size 16 --learning_rate 1e-2 --backend fsdp"
    )
    argv = [*flags.split(), "--save_path", f"{task}/launched", "--ckpt_path", f"{task}/ckpt"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "hotseat.cli.train_rm"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([*command, *argv], capture_output=True, text=True, timeout=860, env=env, cwd=task)
    assert done.returncode == 0, done.stderr[-2000:]
    same = translate("train_rm", argv, {}).yaml
    start(
        loads(same, ["cluster.runtime=local", f"run_dir={task}/runs", "name=rm", f"checkpoint.export_path={task}/one"])
    )
    one = load_file(task / "one" / "model.safetensors")
    two = load_file(task / "launched" / "model.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        assert (one[name] - two[name]).abs().max() < 1e-5, name
    one, two = (json.loads((path / "config.json").read_text()) for path in (task / "one", task / "launched"))
    assert {k: one[k] for k in ("mean", "std")} == pytest.approx({k: two[k] for k in ("mean", "std")}, abs=1e-5)


def test_a_margin_that_no_row_has_is_refused(task):
    write_rows(task / "pairs.jsonl", [{**row, "margin": 0} for row in more_sevens(4, seed=0)])
    config = loads(rm_yaml(task), ["algorithm.reward_modelling.margin=true"])
    with pytest.raises(UserError, match="no row of data.path has a number other than 0 under 'margin'"):
        inputs.supervised(config, inputs.load_tokenizer(config))
