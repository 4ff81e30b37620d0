"""Rewards that a model gives: the same numbers as transformers', wherever rewards go."""

import json

import pytest
import torch
from loop_cases import make_task, make_value_model, ppo_yaml, rl_yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hotseat.config import loads
from hotseat.errors import RunError, UserError
from hotseat.loop.rl.assemble import columns
from hotseat.loop.run import start
from hotseat.loop.workers.model_workers import BatchSettings
from hotseat.loop.workers.value_models import RewardSettings, RewardWorker
from hotseat.model_source import ModelSource
from hotseat.observe import read_lines
from hotseat.train.backend import TrainOptions
from hotseat.types import MicroBatch

pytestmark = pytest.mark.slow


@pytest.fixture
def task(tmp_path):
    task = make_task(tmp_path)
    make_value_model(task / "reward_model")
    return task


def run(task, name: str, *overrides: str, **changes: str) -> list[dict]:
    sections = {"reward": f"{{model: {task}/reward_model}}"} | changes
    start(loads(rl_yaml(task, name=name, **sections), overrides))
    return read_lines(task / "runs" / name / "metrics.jsonl")


def score(path, sequences) -> list[float]:
    """By transformers, a sequence at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([sequence])).logits) for sequence in sequences]


def sampled(task, name: str) -> list[tuple[float, list[str]]]:
    """(reward, text of each token) of the recorded samples."""
    lines = map(json.loads, (task / "runs" / name / "samples.jsonl").read_text().splitlines())
    return [(line["reward"], line["segments"][-1]["text"]) for line in lines]


def tokens_of(task, texts: list[str]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    return [tokenizer.convert_tokens_to_ids(text) for text in texts]


@pytest.mark.parametrize("cut", [BatchSettings(2, None), BatchSettings(1, 6)])
def test_a_segment_is_worth_what_transformers_says_of_its_last_token(task, cut):
    sequences = [[2, 3, 4, 5, 1], [6, 7], [8, 9, 10, 11, 12, 13, 2], [3]]  # one longer than the budget
    lengths = torch.tensor([0, *map(len, sequences)])
    num_tokens = int(lengths.sum())
    batch = MicroBatch(
        torch.tensor([token for sequence in sequences for token in sequence]),
        lengths.cumsum(0),
        torch.zeros(num_tokens, dtype=torch.bool),
        torch.zeros(num_tokens),
        sample_ids=tuple("abcd"),
    )
    worker = RewardWorker(ModelSource(str(task / "reward_model")), TrainOptions(head="value", optimizer=None))
    expected = score(task / "reward_model", sequences)
    found = worker.rewards([batch], RewardSettings(cut, None))
    assert [found[name] for name in "abcd"] == pytest.approx(expected, abs=1e-5)
    scaled = worker.rewards([batch], RewardSettings(cut, (0.5, 2.0)))
    assert [scaled[name] for name in "abcd"] == pytest.approx([(each - 0.5) / 2 for each in expected], abs=1e-5)
    worker.close()


def test_a_run_learns_from_a_models_rewards(task, capsys):
    """Training, filtering, evaluation and the lines on the screen all see them."""
    records = run(
        task,
        "run",
        "algorithm.filtering.enabled=true",
        "algorithm.filtering.low=0.6",
        "algorithm.filtering.high=100",
        "train.num_episodes=2",
        "log.samples_every=1",
        eval=f"{{path: {task}/prompts.jsonl, samples_per_prompt: 2}}",
    )
    assert sum(record["groups_dropped"] for record in records[1:]) > 0
    # Not those with numbers that the tokenizer has no text for, or with a pad at the end: transformers looks before it.
    found = [(reward, texts) for reward, texts in sampled(task, "run") if "" not in texts and texts[-1] != "<pad>"]
    assert len(found) > 8
    expected = score(task / "reward_model", [tokens_of(task, texts) for _, texts in found])
    assert [reward for reward, _ in found] == pytest.approx(expected, abs=1e-4)
    assert records[0]["eval/reward"] != 0.0
    assert "eval/accuracy" not in records[0]  # its numbers have no upper end
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rl ")]
    evaluated = [record for record in records if "eval/reward" in record]
    assert len(evaluated) > 1
    assert [line for line in lines if "held-out" in line] == [
        line for line, record in zip(lines, records, strict=True) if "eval/reward" in record
    ]
    for record in evaluated:
        assert f"held-out reward {record['eval/reward']:.3f}" in lines[records.index(record)]
    assert "loss" in records[1]


@pytest.mark.long
def test_rewards_are_normalised_by_what_the_model_brings(task):
    make_value_model(task / "scaled", mean=0.25, std=0.5)
    plain = run(task, "plain")
    scaled = run(task, "scaled", reward=f"{{model: {task}/scaled, normalize: true}}")
    assert scaled[1]["reward"] == pytest.approx((plain[1]["reward"] - 0.25) / 0.5, abs=1e-5)


def test_a_model_that_is_no_number_leaves_no_reward(task, monkeypatch):
    def rewards(*args, **kwargs) -> dict[str, float]:
        return {f"0/{prompt}/{sample}": float("nan") for prompt in range(8) for sample in range(4)}

    monkeypatch.setattr(RewardWorker, "rewards", rewards)

    with pytest.raises(RunError, match=r"(?s)16 of 16 samples have no reward .*the reward model gave nan"):
        run(task, "run")


JUDGE = "def reward_func(queries, prompts, labels):\n    return [float(label == '3') for label in labels]\n"


def test_a_line_shows_accuracy_unless_a_reward_model_judges_evaluations(task):
    model, file, judged = (
        columns(loads(rl_yaml(task, reward=reward, eval=evaluation)))
        for reward, evaluation in (
            ("{model: reward_model}", "{path: prompts.jsonl}"),
            ("{function: reward.py}", "{path: prompts.jsonl}"),
            ("{model: reward_model}", "{path: prompts.jsonl, reward: judge.py}"),
        )
    )
    assert model["eval/reward"].format(1.25) == "held-out reward 1.250"
    assert "eval/accuracy" not in model
    for shown in (file, judged):
        assert shown["eval/accuracy"].format(0.5) == "accuracy 0.500"
        assert "eval/reward" not in shown


def test_a_file_judges_evaluations_while_a_model_gives_the_rewards(task):
    (task / "judge.py").write_text(JUDGE)
    plain = run(task, "plain")
    judged = run(task, "judged", "reward.retries=0", eval=f"{{path: {task}/prompts.jsonl, reward: {task}/judge.py}}")
    for record in (judged[0], judged[-1]):
        assert record["eval/reward"] == record["eval/accuracy"] == 1 / 8  # prompts with that label
    assert [record["reward"] for record in judged[1:]] == [record["reward"] for record in plain[1:]]


def test_a_file_judges_evaluations_of_agents_with_rewards_of_their_own(task):
    (task / "judge.py").write_text(JUDGE)
    (task / "agent.py").write_text(
        "from hotseat.agents import Environment, Step\n\n\n"
        "class Generous(Environment):\n"
        "    def step(self, action):\n"
        "        return Step(reward=5.0, done=True)\n"
    )
    [before, *learned] = run(
        task,
        "judged",
        f"agent.path={task}/agent.py",
        reward="",
        eval=f"{{path: {task}/prompts.jsonl, reward: {task}/judge.py}}",
    )
    assert before["eval/reward"] == 1 / 8
    assert all(record["reward"] == 5.0 for record in learned)


# --- what is refused before a model loads ---------------------------------------------------------------------------


def refused(task, *overrides: str, **changes: str) -> str:
    with pytest.raises(UserError) as caught:
        run(task, "run", *overrides, **changes)
    assert not (task / "runs" / "run" / "metrics.jsonl").exists()
    return str(caught.value)


def with_another_tokenizer(task):
    """The reward model, reading digits in another order."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *"9876543210+="])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    path = make_value_model(task / "foreign")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    return path


def test_a_reward_model_that_reads_other_tokens_is_refused_or_given_text(task):
    foreign = with_another_tokenizer(task)
    message = refused(task, reward=f"{{model: {foreign}}}")
    assert "foreign' cannot read the tokens of actor.model" in message
    assert "10 tokens differ ('0' is 2 and 11, '1' is 3 and 10, '2' is 4 and 9, ...)" in message
    assert "reward.retokenize to true" in message
    run(task, "retokenized", reward=f"{{model: {foreign}, retokenize: true}}")
    found = sampled(task, "retokenized")
    theirs = AutoTokenizer.from_pretrained(foreign)
    # Text without the actor's end token; the model's own where the answer has ended.
    texts = ["".join(text for text in texts if text not in ("<eos>", "<pad>")) for _, texts in found]
    sequences = [
        theirs(text)["input_ids"] + ([theirs.eos_token_id] if tokens[-1] == "<eos>" else [])
        for text, (_, tokens) in zip(texts, found, strict=True)
    ]
    assert any(tokens[-1] == "<eos>" for _, tokens in found)
    assert [reward for reward, _ in found] == pytest.approx(score(foreign, sequences), abs=1e-4)


def test_a_judge_that_is_not_there_is_refused(task):
    message = refused(task, eval=f"{{path: {task}/prompts.jsonl, reward: {task}/nobody.py}}")
    assert f"eval.reward: there is no file {task}/nobody.py" in message


def test_a_reward_model_with_another_end_is_refused(task):
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    tokenizer.eos_token = "="
    tokenizer.save_pretrained(task / "reward_model")
    assert "the eos_token is '<eos>' and '='" in refused(task)


def test_a_critic_that_reads_other_tokens_is_refused(task):
    foreign = with_another_tokenizer(task)
    with pytest.raises(
        UserError, match=r"^critic.model .*foreign' cannot read the tokens of actor.model .*tokens differ"
    ):
        start(loads(ppo_yaml(task), [f"critic.model={foreign}"]))
    # Unset, it would be the reward model, which may read other tokens.
    with pytest.raises(UserError, match=r"^critic.model \(unset: reward.model\) .*set critic.model to the actor's"):
        start(loads(ppo_yaml(task, reward=f"{{model: {foreign}, retokenize: true}}")))


def test_a_model_without_a_tokenizer_is_refused(task):
    for file in (task / "reward_model").glob("tokenizer*"):
        file.unlink()
    assert "reward_model': no tokenizer there" in refused(task)


def test_a_mean_that_is_not_stored_is_refused(task):
    message = refused(task, reward=f"{{model: {task}/reward_model, normalize: true}}")
    assert "config.json of reward.model" in message
    assert "has mean None and std None" in message


def test_rewards_have_one_source(task):
    with pytest.raises(UserError, match="reward.model: reward.function is set too: rewards have one source"):
        loads(rl_yaml(task, reward=f"{{function: {task}/reward.py, model: {task}/reward_model}}"))


def test_a_language_model_is_no_reward_model(task):
    said = refused(task, reward=f"{{model: {task}/model}}")
    assert "model': it has no weights called score.*, the head of a reward model: choose a reward model, or set" in said


def test_a_model_of_several_labels_is_no_reward_model(task):
    from safetensors.torch import load_file, save_file

    path = task / "reward_model" / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"score.weight": weights["score.weight"].repeat(3, 1)}, path, {"format": "pt"})
    assert "its score.weight gives 3 numbers, and a reward is one" in refused(task)


def test_functions_are_added_to_a_models_rewards_and_each_part_is_recorded(task):
    (task / "parts.py").write_text("def longer(queries, prompts, labels):\n    return [len(q) for q in queries]\n")
    several = f"functions: [{{function: '{task}/parts.py:longer', weight: 0.25}}]"
    records = run(task, "both", "log.samples_every=1", reward=f"{{model: {task}/reward_model, {several}}}")
    lines = list(map(json.loads, (task / "runs" / "both" / "samples.jsonl").read_text().splitlines()))
    assert lines
    for line in lines:
        assert line["reward"] == pytest.approx(line["extra"]["model"] + 0.25 * line["extra"]["longer"])
    assert {"extra/model", "extra/longer"} <= records[1].keys()
