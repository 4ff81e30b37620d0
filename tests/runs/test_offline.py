"""Commands that sample without training, with a tiny model: answers, metrics, merged weights, conversations."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from loop_cases import make_value_model, write_rows
from reward_servers import FakeServer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hotseat.cli.ending import FAILED, OK, REFUSED
from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.loop.offline.evaluate import measure, pass_at
from hotseat.loop.offline.group_file import partial_path
from hotseat.loop.workers.group_facts import GroupFacts
from hotseat.observe import LiveView, read_lines
from hotseat.openrlhf.inference_command import main as batch_inference
from hotseat.openrlhf.merge_command import main as lora_combiner

pytestmark = pytest.mark.slow

LENGTHS = ["data.label_key=label", "--max-new-tokens", "4"]


@pytest.fixture
def here(task, monkeypatch) -> Path:
    monkeypatch.chdir(task)
    return task


def generate(*words: str, output: str = "answers.jsonl") -> int:
    return main(["generate", "model", "prompts.jsonl", "--reward", "reward.py", *LENGTHS, "--output", output, *words])


def test_answers_are_written_in_prompt_order_and_a_selection_is_taken_from_the_same_ones(here, capsys):
    assert generate("-n", "3") == OK
    rows = read_lines(here / "answers.jsonl")
    assert [(row["index"], row["sample"]) for row in rows] == [(i, j) for i in range(8) for j in range(3)]
    assert all(row["reward"] == row["output"].count("7") for row in rows)
    assert "24 lines of 24 answers to 8 prompts" in capsys.readouterr().out
    assert not partial_path(here / "answers.jsonl").exists()

    assert generate("-n", "3", "--keep", "best", output="best.jsonl") == OK
    best = [max((row for row in rows if row["index"] == i), key=lambda row: row["reward"]) for i in range(8)]
    assert read_lines(here / "best.jsonl") == best

    assert main(["generate", "model", "prompts.jsonl", *LENGTHS, "-n", "3", "--output", "plain.jsonl"]) == OK
    plain = read_lines(here / "plain.jsonl")
    assert [row["output"] for row in plain] == [row["output"] for row in rows]
    assert not [row for row in plain if "reward" in row]

    flags = "--eval_task generate --pretrain model --dataset prompts.jsonl --prompt_max_len 8 --max_new_tokens 4"
    flags += " --best_of_n 3 --post_processor iter_dpo --remote_rm_url reward.py --iter 1 --rollout_batch_size 4 --bf16"
    assert batch_inference([*flags.split(), "--output_path", "pairs.jsonl", "--zero_stage", "2"]) == OK
    assert "no effect here: --zero_stage because" in capsys.readouterr().err
    pairs = read_lines(here / "pairs.jsonl")
    assert all(pair["prompt"] in {row["input"] for row in rows[12:]} for pair in pairs)
    assert all(pair["chosen"].count("7") > pair["rejected"].count("7") for pair in pairs)


def test_answers_of_a_file_are_scored_by_a_reward_model_as_transformers_does(here, capsys):
    make_value_model(here / "rm")
    rows = [{"input": f"{a}+1=", "output": text} for a in (1, 2) for text in ("77", "1", "123")]
    write_rows(here / "answers.jsonl", rows)
    flags = "--eval_task rm --pretrain rm --dataset answers.jsonl --max_len 16 --micro_batch_size 4 --temperature 0.5"
    assert batch_inference([*flags.split(), "--output_path", "scored.jsonl"]) == OK
    said = capsys.readouterr()
    assert "no effect here: --temperature because nothing is sampled" in said.err
    assert "--max_len" not in said.err
    assert "6 lines of 6 answers to 2 prompts" in said.out
    scored = read_lines(here / "scored.jsonl")
    assert [{"input": row["input"], "output": row["output"]} for row in scored] == rows
    tokenizer = AutoTokenizer.from_pretrained(here / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(here / "rm")
    for row in scored:
        tokens = [*tokenizer(row["input"] + row["output"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            assert row["reward"] == pytest.approx(float(model(input_ids=torch.tensor([tokens])).logits), abs=1e-5)
    assert batch_inference([*flags.split(), "--post_processor", "iter_dpo", "--output_path", "pairs.jsonl"]) == OK
    for pair, group in zip(read_lines(here / "pairs.jsonl"), (scored[:3], scored[3:]), strict=True):
        rewards = {row["output"]: row["reward"] for row in group}
        assert pair["chosen"] == max(rewards, key=rewards.get)
        assert pair["rejected"] == min(rewards, key=rewards.get)
        assert pair["chosen_reward"] == rewards[pair["chosen"]]


BLOCKING = """
import os, time

def reward_func(queries, prompts, labels):
    while prompts[0] != "1+2=" and not os.path.exists({go!r}):
        time.sleep(0.05)
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""


@pytest.mark.long
def test_a_killed_command_resumes_without_loss_or_doubling(here):
    go = here / "go"
    (here / "reward.py").write_text(BLOCKING.format(go=str(go)))
    words = ["model", "prompts.jsonl", "--reward", "reward.py", "-n", "2", *LENGTHS]
    command = [sys.executable, "-m", "hotseat", "generate", *words]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    partial = partial_path(here / "answers.jsonl")
    try:
        while not partial.exists() or partial.read_bytes().count(b"\n") < 2:  # the settings and a group
            assert killed.poll() is None
            time.sleep(0.05)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    before = partial.read_bytes()
    assert not (here / "answers.jsonl").exists()
    with partial.open("ab") as file:
        file.write(b'{"index": 5, "rows"')  # as if it had been killed while it wrote

    go.touch()
    assert generate("-n", "2", "--temperature", "0.5") == REFUSED  # other settings
    assert partial.read_bytes().startswith(before)
    assert main(["generate", *words]) == OK
    assert main(["generate", *words, "--output", "whole.jsonl"]) == OK
    assert (here / "answers.jsonl").read_bytes() == (here / "whole.jsonl").read_bytes()
    assert len(read_lines(here / "whole.jsonl")) == 16


def test_failed_rewards_are_no_zeros_and_too_many_end_the_command(here, capsys):
    code = "def reward_func(queries, prompts, labels):\n"
    code += "    return [float('nan') if prompt[0] in BAD else 1.0 for prompt in prompts]\n"
    (here / "reward.py").write_text(code.replace("BAD", "'5'"))
    settings = ["reward.retries=0", "reward.max_failed_fraction=0.2"]
    assert generate(*settings) == OK
    assert [row["index"] for row in read_lines(here / "answers.jsonl")] == [0, 1, 2, 3, 5, 6, 7]
    assert "7 lines of 7 answers to 8 prompts, 1 failed" in capsys.readouterr().out
    (here / "reward.py").write_text(code.replace("BAD", "'567'"))
    assert generate(*settings, output="other.jsonl") == FAILED
    assert "3 of 8 samples failed, more than reward.max_failed_fraction 0.2 allows" in capsys.readouterr().err
    assert not (here / "other.jsonl").exists()


# --- eval -------------------------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer():
    assert pass_at(2, 4, 1) == 0.5  # 3 of the 6 pairs have the right one
    assert pass_at(1, 4, 1) == 0.25
    assert pass_at(4, 4, 1) == 1.0
    assert pass_at(2, 4, 0) == 0.0


def facts(prompt: int, rewards: list[float], lengths: list[int], *failures: int) -> GroupFacts:
    num = len(rewards)
    samples, values = tuple(range(num)), tuple(rewards)
    cut = tuple(length == 8 for length in lengths)
    failed = tuple((sample, "why") for sample in failures)
    return GroupFacts(-1, prompt, "", samples, values, values, tuple(lengths), tuple(lengths), cut, failed)


def test_metrics_of_an_evaluation():
    groups = [facts(0, [1.0, 0.0, 0.0, 0.0], [2, 2, 4, 8]), facts(1, [0.0, 1.0, 0.5], [2, 2, 1], 3)]
    metrics = measure(groups, 4)
    assert metrics == {
        "eval/reward": pytest.approx(2.5 / 7),
        "eval/accuracy": pytest.approx(2 / 7),
        "eval/pass@2": pytest.approx((1 / 2 + 2 / 3) / 2),
        "eval/pass@4": 1.0,
        "eval/failed": 1.0,
        "eval/length": 3.0,
        "eval/length_median": 2.0,
        "eval/length_max": 8.0,
        "eval/truncated": pytest.approx(1 / 7),
    }


RUN = """
task: rl
name: rl
cluster: {runtime: local}
actor: {model: model, optimizer: {learning_rate: 1e-3}}
data: {path: prompts.jsonl, label_key: label, max_length: 16}
reward: {function: reward.py}
rollout: {batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4}
train: {batch_size: 16}
eval: {path: prompts.jsonl, split: train}
"""


def test_eval_of_a_trained_model_gives_the_numbers_of_the_runs_last_evaluation(here, capsys):
    (here / "rl.yaml").write_text(RUN)
    assert main(["run", "rl.yaml"]) == OK
    last = [each for each in read_lines(here / "runs" / "rl" / "metrics.jsonl") if "eval/reward" in each][-1]
    assert main(["eval", "runs/rl/model", "prompts.jsonl", "--config", "rl.yaml"]) == OK
    [metrics] = read_lines(here / "eval" / "metrics.jsonl")
    shared = [name for name in last if name.startswith("eval/") and name in metrics]
    assert {"eval/reward", "eval/accuracy", "eval/pass@4", "eval/length"} <= set(shared)
    assert {name: metrics[name] for name in shared} == {name: last[name] for name in shared}
    assert len(read_lines(here / "eval" / "answers.jsonl")) == 32
    page = (here / "eval" / "report.html").read_text()
    assert "eval/accuracy" in page
    assert json.dumps(read_lines(here / "eval" / "samples.jsonl")[0]["prompt_text"]) in page
    assert "eval/pass@2" in capsys.readouterr().out
    assert main(["eval", "runs/rl/model", "prompts.jsonl", "--config", "rl.yaml"]) == REFUSED
    assert "answers.jsonl exists" in capsys.readouterr().err


# --- adapters and conversations ---------------------------------------------------------------------------------------


def test_merged_weights_are_those_of_the_formula(here, capsys):
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(here / "model")
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(0)
    factors = {}
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
            factors[name] = parameter.detach().clone()
    adapted.save_pretrained(here / "adapter")
    command = ["--model_path", "model", "--lora_path", "adapter", "--output_path", "merged"]
    assert lora_combiner(command) == OK
    assert "merged: model with 4 layers of adapter merged" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(here / "merged").state_dict()
    assert merged.keys() == weights.keys()
    for name, weight in weights.items():
        at = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{at}.lora_A.default.weight" in factors:
            a, b = (factors[f"{at}.lora_{factor}.default.weight"] for factor in "AB")
            weight = weight + 3.0 * b @ a
        torch.testing.assert_close(merged[name], weight)

    from loop_cases import make_task

    make_task(here / "wide", hidden_size=32)
    assert main(["merge-lora", "adapter", "elsewhere", "--base", "wide/model"]) == REFUSED
    assert "adapter does not belong to wide/model" in capsys.readouterr().err
    make_task(here / "short", num_hidden_layers=1)
    assert main(["merge-lora", "adapter", "elsewhere", "--base", "short/model"]) == REFUSED
    assert "has no layer model.layers.1" in capsys.readouterr().err


def test_a_conversation(here):
    from hotseat.loop.offline.chat import Chat, converse

    template = "{% for message in messages %}{{ message['content'] }}+{% endfor %}"
    config = loads(
        f"task: rl\nactor: {{model: {here / 'model'}}}\ncluster: {{runtime: local}}\n"
        f"data: {{max_length: 24, apply_chat_template: true, chat_template: {json.dumps(template)}}}\n"
        "rollout: {max_new_tokens: 3}\n"
    )
    chat = Chat(config, here, LiveView("chat", console=Console(quiet=True)))
    shown: list[str] = []
    try:
        converse(chat, ["12", "34", "", "/new", "12", "1" * 24, "/exit", "5"], shown.append)
    finally:
        chat.close()
    assert len(shown) == 5
    assert shown[3] == shown[0]  # the same words from the beginning, and the same seed
    assert shown[2] == "(a new conversation)"
    assert "/new begins anew" in shown[4]


def test_reward_servers_score_answers(here):
    server = FakeServer()
    flags = "--eval_task generate --pretrain model --dataset prompts.jsonl --prompt_max_len 8 --max_new_tokens 4"
    flags += f" --best_of_n 3 --post_processor rs --remote_rm_url {server.url} --output_path best.jsonl"
    try:
        assert batch_inference(flags.split()) == OK
    finally:
        server.close()
    assert [row["reward"] for row in read_lines(here / "best.jsonl")] == [
        row["output"].count("7") for row in read_lines(here / "best.jsonl")
    ]


@pytest.mark.long
def test_vllm_answers_too(here):
    from loop_cases import make_task

    make_task(here, hidden_size=64)  # heads of 32 numbers: vLLM on a CPU has no kernel for narrower ones
    assert generate("-n", "2", "--engine", "vllm") == OK
    rows = read_lines(here / "answers.jsonl")
    assert [(row["index"], row["sample"]) for row in rows] == [(i, j) for i in range(8) for j in range(2)]
    assert all(row["reward"] == row["output"].count("7") for row in rows)
