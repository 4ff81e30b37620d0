"""Commands that sample without training: what is written, what is refused, and how a killed command resumes."""

import json

import pytest
from model_shells import make_shell

from hotseat.cli.ending import REFUSED
from hotseat.cli.main import main
from hotseat.errors import ConfigError, UserError
from hotseat.loop.offline.group_file import GroupFile, Selection, partial_path
from hotseat.loop.offline.options import offline_config
from hotseat.openrlhf.inference_command import main as batch_inference
from hotseat.openrlhf.merge_command import main as lora_combiner

ROWS = [{"input": "q", "output": answer, "reward": reward} for answer, reward in (("a", 0.5), ("b", 1.0), ("c", 1.0))]
SETTINGS = {"seed": 1}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the config of a model, which no test here loads, a row of data and a reward."""
    monkeypatch.chdir(tmp_path)
    make_shell(tmp_path / "model", model_type="llama", max_position_embeddings=128)
    (tmp_path / "rows.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n")
    return tmp_path


# --- what is written --------------------------------------------------------------------------------------------------


def test_a_selection_keeps_all_the_best_or_a_pair():
    assert Selection().of(ROWS) == ROWS
    assert Selection(min_reward=0.6).of(ROWS) == ROWS[1:]
    assert Selection("best").of(ROWS) == [ROWS[1]]  # the first of two with the same reward
    assert Selection("best", 2.0).of(ROWS) == []
    assert Selection("pairs").of(ROWS) == [
        {"prompt": "q", "chosen": "b", "rejected": "a", "chosen_reward": 1.0, "rejected_reward": 0.5}
    ]
    assert Selection("pairs").of(ROWS[1:]) == []  # no answer is better than another


def group(index: int, *failures: str) -> dict:
    return {"index": index, "rows": [{"output": f"answer {index}"}], "failures": [[0, why] for why in failures]}


def test_groups_come_back_in_the_order_of_prompts_without_those_that_were_cut_or_failed(tmp_path):
    output = tmp_path / "answers.jsonl"
    with GroupFile(output, SETTINGS) as file:
        for each in (group(3), group(0), group(2, "no reward")):
            file.add(each)
    with partial_path(output).open("ab") as killed:
        killed.write(b'{"index": 1, "rows": [')
    with GroupFile(output, SETTINGS) as file:
        assert [index in file for index in range(4)] == [True, False, False, True]
        file.add(group(2))
        file.add(group(1))
        assert [each["index"] for each in file.groups()] == [0, 1, 2, 3]
    with GroupFile(output, SETTINGS) as file:
        assert list(file.groups()) == [group(index) for index in range(4)]
        file.remove()
    assert not partial_path(output).exists()


def test_answers_without_a_reward_are_given_again_where_rewards_are_compared(tmp_path):
    output = tmp_path / "answers.jsonl"
    with GroupFile(output, SETTINGS) as file:  # by an agent that gave some, and --keep all
        file.add(group(0))
        file.add({"index": 1, "rows": [{"output": "answer 1", "reward": 0.5}], "failures": []})
    with GroupFile(output, SETTINGS, needs_reward=True) as file:
        assert [index in file for index in range(2)] == [False, True]
    with GroupFile(output, SETTINGS) as file:
        assert len(file) == 2


def test_answers_of_other_settings_are_not_mixed(tmp_path):
    output = tmp_path / "answers.jsonl"
    with GroupFile(output, SETTINGS) as file:
        file.add(group(0))
        with pytest.raises(UserError, match="is in use by another process"):
            GroupFile(output, SETTINGS)
    with pytest.raises(UserError, match=r"other settings: seed was 1 and is 2\. Repeat"):
        GroupFile(output, {"seed": 2})
    with GroupFile(output, {"seed": 2}, replace=True) as file:
        assert len(file) == 0
    with GroupFile(output, {"seed": 2}) as file:
        assert len(file) == 0


# --- configs ----------------------------------------------------------------------------------------------------------


def test_a_command_takes_what_matters_from_the_config_of_a_run(folder):
    (folder / "rl.yaml").write_text(
        "actor: {model: other}\ndata: {path: other.jsonl, label_key: label, max_length: 64}\n"
        "reward: {function: reward.py}\n"
        "rollout: {batch_size: 16, samples_per_prompt: 8, temperature: 0.7}\ntrain: {batch_size: 128, dtype: fp32}\n"
        "algorithm: {estimator: gae}\neval: {path: other.jsonl, samples_per_prompt: 2, reward: exact_match}\n"
    )
    config = offline_config("generate", "model", "rows.jsonl", file="rl.yaml", flags={"rollout.temperature": 0.5})
    assert (config.actor.model, config.data.path, config.data.label_key) == ("model", "rows.jsonl", "label")
    assert (config.rollout.samples_per_prompt, config.rollout.temperature) == (8, 0.5)
    assert (config.algorithm.estimator == "gae", config.train.dtype, config.data.max_length) == (False, "fp32", 64)
    evaluated = offline_config("eval", "model", "rows.jsonl", file="rl.yaml")
    assert (evaluated.eval.samples_per_prompt, evaluated.reward.function) == (2, "exact_match")
    (folder / "rl.yaml").write_text(
        "reward: {url: 'http://there', judge: {rubric: r.txt, url: 'http://there/v1', model: big}}\n"
        "eval: {path: other.jsonl, graders: [{kind: number, weight: 2.0}]}\n"
    )
    graded = offline_config("eval", "model", "rows.jsonl", file="rl.yaml")
    assert [(each.kind, each.weight) for each in graded.reward.graders] == [("number", 2.0)]
    assert (graded.reward.url, graded.reward.judge.rubric, graded.eval.graders) == (None, None, [])
    judged = offline_config("generate", "model", "rows.jsonl", file="rl.yaml")
    assert (judged.reward.url, judged.reward.judge.model) == ("http://there", "big")


def test_sequences_are_as_long_as_the_model_allows(folder):
    assert offline_config("generate", "model", "rows.jsonl").data.max_length == 128
    assert offline_config("generate", "model", "rows.jsonl", overrides=["data.max_length=32"]).data.max_length == 32


def test_settings_without_effect_are_refused(folder):
    with pytest.raises(ConfigError, match=r"train\.num_episodes: has no effect on `hotseat generate`"):
        offline_config("generate", "model", "rows.jsonl", overrides=["train.num_episodes=3"])


# --- refused before a model loads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate ./nowhere/model rows.jsonl", "there is no folder"),
        ("generate model rowz.jsonl", "did you mean rows.jsonl?"),
        ("generate model rows.jsonl data.input_key=question", "has no 'question'"),
        ("generate model rows.jsonl --reward rewards.py", "there is no file rewards.py"),
        ("generate model rows.jsonl --keep best", "--keep best compares rewards, and there are none"),
        ("generate model rows.jsonl --min-reward 1", "--min-reward compares rewards"),
        ("generate model rows.jsonl --reward reward.py --keep pairs", "give --samples 2 or more"),
        ("generate model rows.jsonl --output rows.jsonl", "rows.jsonl exists: choose another --output"),
        ("generate model rows.jsonl --output model", "model is a folder"),
        ("generate model rows.jsonl data.max_length=4096", "above the 128 positions"),
        ("generate model rows.jsonl reward.model=model", "only training runs score with reward models"),
        (
            "generate model rows.jsonl reward.judge.rubric=r.txt reward.judge.model=big",
            "only training runs have engines for a judge",
        ),
        ("eval model rows.jsonl", "no source of rewards"),
        ("eval model rows.jsonl --reward reward.py --output rows.jsonl", "rows.jsonl is a file: give a folder"),
        ("chat ./nowhere/model", "there is no folder"),
        ("merge-lora model merged", "model is no adapter: there is no adapter_config.json"),
    ],
)
def test_mistakes_are_refused_at_once(folder, capsys, words, message):
    assert main(words.split()) == REFUSED
    assert message in capsys.readouterr().err


def test_adapters_that_cannot_be_merged_are_refused(folder, capsys):
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": None}))
    command = ["--model_path", "model", "--lora_path", "adapter", "--output_path"]
    assert lora_combiner([*command, "merged"]) == REFUSED
    assert "no adapter_model.safetensors" in capsys.readouterr().err
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    assert lora_combiner([*command, "model"]) == REFUSED
    assert "model exists: choose a folder that is new or empty" in capsys.readouterr().err
    assert main(["merge-lora", "adapter", "merged"]) == REFUSED
    assert "names no base model: give --base MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--eval_task None: give one of generate, generate_vllm, rm"),
        ("--eval_task rm", "set --pretrain, --dataset, --output_path"),
        ("--eval_task generate", "set --pretrain, --dataset, --output_path"),
        ("--eval_task generate GIVEN --repetition_penalty 1.1", "--repetition_penalty is not part"),
        ("--eval_task generate GIVEN --post_processor rs", "give --remote_rm_url FILE"),
        ("--eval_task generate GIVEN --post_processor csft", "conditional SFT"),
        (
            "--eval_task generate GIVEN --remote_rm_url reward.py --post_processor iter_dpo",
            "give --best_of_n 2 or more",
        ),
        ("--eval_task generate GIVEN --use_ms", "--use_ms is not part"),
    ],
)
def test_openrlhfs_batch_inference_refuses_at_once(folder, capsys, words, message):
    given = "--pretrain model --dataset rows.jsonl --output_path answers.jsonl"
    assert batch_inference(words.replace("GIVEN", given).split()) == REFUSED
    assert message in capsys.readouterr().err
