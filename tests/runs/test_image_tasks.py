"""Reward models, preferences and PPO with images, one family or another in each; where they are cut changes nothing."""

import json

import image_cases
import pytest
import torch
from loop_cases import dpo_yaml, ppo_yaml, rm_yaml, same, weights
from PIL import Image
from safetensors.torch import load_file
from stopped_runs import stopped_after_saving

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.data import digest_of
from hotseat.errors import ConfigError, DataError, UserError
from hotseat.loop import inputs
from hotseat.loop.inputs import supervised_inputs
from hotseat.loop.run import start
from hotseat.model_source import ModelSource
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

NUM_PAIRS = 16
SHADES = {"black": "a", "white": "b"}  # the better answer to a picture; the texts of all rows are the same


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A model of each family, pairs of which only the picture tells the better answer, and prompts."""
    folder = tmp_path_factory.mktemp("tasks")
    for family in image_cases.FAMILIES:
        image_cases.save(family, folder / family)
        rows = []
        for index in range(NUM_PAIRS):
            shade = list(SHADES)[index % 2]
            Image.new("RGB", (28, 28), shade).save(folder / f"{shade}.png")
            answers = [SHADES[shade], next(each for each in SHADES.values() if each != SHADES[shade])]
            rows.append(
                {
                    "prompt": f"{image_cases.PLACE[family]}which?",
                    "chosen": answers[0],
                    "rejected": answers[1],
                    "images": [f"{shade}.png"],
                }
            )
        write(folder / f"{family}.jsonl", rows)
    write(folder / "prompts.jsonl", [{"input": "which?", "images": [f"{shade}.png"]} for shade in SHADES] * 2)
    return folder


def of(family, task, make, name, **changes):
    """Return the YAML of a task that learns the pairs of a family."""
    data = f"path: {task}/{family}.jsonl, prompt_key: prompt, max_length: 64, image_key: images"
    sections = {
        "name": name,
        "actor": f"{{model: {task}/{family}, optimizer: {{learning_rate: 1e-2, schedule: constant}}}}",
        "data": f"{{{data}, max_images_per_prompt: 1}}",
        "eval": f"{{path: {task}/{family}.jsonl}}",
        "train": "{dtype: fp32, batch_size: 16, micro_batch_size: 8, max_epochs: 6}",
    }
    return make(task, **sections | changes)


def metrics(task, name):
    """Return the records of a run's steps, without that of the evaluation before them."""
    return [line for line in read_lines(task / "runs" / name / "metrics.jsonl") if line["step"] > 0]


def timeless(records):
    timing = ("time/", "memory/", "machine/", "sync/", "step_s", "tokens_per_s")
    return [{key: value for key, value in record.items() if not key.startswith(timing)} for record in records]


@pytest.fixture(scope="module")
def reward_model(task):
    """A reward model of Qwen2.5-VL that was trained on the pairs."""
    start(loads(of("qwen2_5_vl", task, rm_yaml, "rm")))
    return task / "runs" / "rm" / "model"


def test_a_reward_model_tells_better_answers_by_the_picture_alone(task, reward_model):
    lines = metrics(task, "rm")
    assert lines[-1]["accuracy"] == 1.0
    assert lines[-1]["eval/accuracy"] == 1.0
    before, after = load_file(task / "qwen2_5_vl" / "model.safetensors"), load_file(reward_model / "model.safetensors")
    changed = {name for name in before.keys() & after.keys() if (before[name] != after[name]).any()}
    assert any(name.startswith("visual.") for name in changed)
    assert set(after) - set(before) == {"score.weight"}
    assert {"mean", "std"} <= set(json.loads((reward_model / "config.json").read_text()))
    with stopped_after_saving():
        start(loads(of("qwen2_5_vl", task, rm_yaml, "part"), ["checkpoint.every=2"]))
    assert main(["resume", str(task / "runs" / "part")]) == 0
    assert timeless(lines) == timeless(metrics(task, "part"))
    assert same(after, weights(task, "part"))


@pytest.mark.long
def test_ppo_with_a_reward_model_a_critic_and_a_reference_that_see_resumes_to_the_same_bits(task, reward_model):
    data = "label_key: null, max_length: 64, image_key: images, max_images_per_prompt: 1, apply_chat_template: true"
    sections = {
        "actor": f"{{model: {task}/qwen2_5_vl, optimizer: {{learning_rate: 1e-2, schedule: constant}}}}",
        "data": f"{{path: {task}/prompts.jsonl, {data}}}",
        "reward": f"{{model: {reward_model}}}",
        "rollout": "{batch_size: 2, samples_per_prompt: 4, max_new_tokens: 3, num_slots: 4}",
        "train": "{dtype: fp32, batch_size: 8, micro_batch_size: 4, num_episodes: 1}",
    }
    options = ["checkpoint.export_critic=true"]
    start(loads(ppo_yaml(task, name="ppo", **sections), options))
    with stopped_after_saving():
        start(loads(ppo_yaml(task, name="ppo_part", **sections), [*options, "checkpoint.every=1"]))
    assert main(["resume", str(task / "runs" / "ppo_part")]) == 0
    assert timeless(metrics(task, "ppo")) == timeless(metrics(task, "ppo_part"))
    assert same(weights(task, "ppo"), weights(task, "ppo_part"))
    stored = load_file(reward_model / "model.safetensors")
    critics = [load_file(task / "runs" / name / "critic" / "model.safetensors") for name in ("ppo", "ppo_part")]
    assert same(*critics)
    changed = {name for name, value in critics[0].items() if (value != stored[name]).any()}
    assert any(name.startswith("visual.") for name in changed)


LOSSES = {
    "dpo": ("qwen2_5_vl", ["train.lora.rank=4", "train.lora.alpha=16"]),  # the reference has its adapters switched off
    "ipo": ("idefics3", ["train.freeze_visual_encoder=true"]),
    "orpo": ("llava", []),
    "simpo": ("qwen3_vl", []),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "loss", ["dpo", *(pytest.param(loss, marks=pytest.mark.long) for loss in ("ipo", "orpo", "simpo"))]
)
def test_preferences_are_learned_from_the_picture_alone_packed_as_padded(task, loss):
    family, options = LOSSES[loss]
    options = [f"algorithm.dpo.loss={loss}", *options]
    made = of(family, task, dpo_yaml, loss)
    start(loads(made, options))
    lines = metrics(task, loss)
    assert lines[-1]["accuracy"] == 1.0
    assert lines[-1]["loss"] < lines[0]["loss"]
    padded = loads(of(family, task, dpo_yaml, f"{loss}_padded"), [*options, "train.packing=false"])
    start(padded)
    for one, other in zip(lines, metrics(task, f"{loss}_padded"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-4)
    before, after = load_file(task / family / "model.safetensors"), weights(task, loss)
    names = (".visual.", ".vision_tower.", ".vision_model.")
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed
    assert any(part in f".{name}" for part in names for name in changed) == (loss != "ipo")
    if loss == "dpo":
        with stopped_after_saving():
            start(loads(of(family, task, dpo_yaml, "dpo_part"), [*options, "checkpoint.every=3"]))
        assert main(["resume", str(task / "runs" / "dpo_part")]) == 0
        assert same(after, weights(task, "dpo_part"))


@pytest.mark.long
def test_a_reference_of_its_own_scores_pairs_with_images_before_training_or_during_it(task):
    """It is the same model, so the first loss is log 2; scores in files are found again for the same images alone."""
    reference = [f"reference.model={task}/qwen3_vl", "train.max_epochs=2"]
    losses = []
    for name, options in (("during", []), ("before", ["algorithm.dpo.precompute=true"])):
        start(loads(of("qwen3_vl", task, dpo_yaml, name, eval=""), [*reference, *options]))
        losses.append([line["loss"] for line in metrics(task, name)])
    assert losses[0][0] == pytest.approx(0.6931472, abs=1e-6)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    pairs = supervised_inputs(loads(of("qwen3_vl", task, dpo_yaml, "digests", eval=""), reference)).data.items
    shown = [{**row, "images": ["white.png"]} for row in map(json.loads, (task / "qwen3_vl.jsonl").open())]
    write(task / "all_white.jsonl", shown)
    other = supervised_inputs(
        loads(of("qwen3_vl", task, dpo_yaml, "digests", eval=""), [*reference, f"data.path={task}/all_white.jsonl"])
    ).data.items
    assert [pair.chosen.token_ids.tolist() for pair in pairs] == [pair.chosen.token_ids.tolist() for pair in other]
    assert digest_of(pairs) != digest_of(other)


def test_whole_conversations_about_images_are_pairs(task):
    """Images of a column go into both conversations; those that stand in messages are the same in both, or refused."""

    def pairs(rows, **changes):
        write(task / "conversations.jsonl", rows)
        made = of("qwen2_5_vl", task, dpo_yaml, "conversations", eval="", **changes)
        options = [f"data.path={task}/conversations.jsonl", "data.prompt_key=null", "data.apply_chat_template=true"]
        config = loads(made, options)
        return inputs.supervised(config, inputs.load_tokenizer(config)).items

    def conversation(answer, *parts):
        content = [*parts, {"type": "text", "text": "which?"}] if parts else "which?"
        return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]

    [in_column] = pairs([{"chosen": conversation("a"), "rejected": conversation("b"), "images": "black.png"}])
    part = {"type": "image", "image": "black.png"}
    [inside] = pairs([{"chosen": conversation("a", part), "rejected": conversation("b", part)}])
    for pair in (in_column, inside):
        assert len(pair.chosen.images) == 1
        assert pair.chosen.images == pair.rejected.images
        assert torch.equal(pair.chosen.token_ids, in_column.chosen.token_ids)
        assert torch.equal(pair.chosen.mask, in_column.chosen.mask)
    other = {"type": "image", "image": "white.png"}
    with pytest.raises(DataError, match="chosen and rejected: their messages contain different images, and a pair has"):
        pairs([{"chosen": conversation("a", part), "rejected": conversation("b", other)}])
    with pytest.raises(DataError, match="chosen and rejected: its messages contain images, and so does images"):
        pairs([{"chosen": conversation("a", part), "rejected": conversation("b", part), "images": "black.png"}])
    with pytest.raises(DataError, match=r"chosen: a string: with data.apply_chat_template set data.prompt_key"):
        pairs([{"chosen": "a", "rejected": "b", "images": "black.png"}])


def test_models_that_take_other_pixels_are_refused_by_name(task, tmp_path):
    model = tmp_path / "other"
    image_cases.save("qwen2_5_vl", model)
    path = model / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["image_processor"]["max_pixels"] = 14 * 14 * 16
    settings["image_processor"]["size"] = {"shortest_edge": 196, "longest_edge": 14 * 14 * 16}
    path.write_text(json.dumps(settings))
    config = loads(of("qwen2_5_vl", task, dpo_yaml, "others"), [f"reference.model={model}"])
    with pytest.raises(UserError, match=r"reference.model '.*' prepares images in another way than actor.model '.*'"):
        inputs.load_tokenizer(config)
    with pytest.raises(ConfigError, match=r"reward.retokenize: true, but images are prepared for the actor's tokens"):
        loads(
            "data: {image_key: a, max_images_per_prompt: 1}\nreward: {model: x, retokenize: true}\n"
            "rollout: {engine: transformers}"
        )


def test_a_server_of_rewards_takes_no_model_that_sees(reward_model):
    from hotseat.loop.serving.served_model import ModelOptions, RewardModel

    with pytest.raises(UserError, match="sees images, and requests for rewards have none: choose a model of text"):
        RewardModel(ModelOptions(ModelSource(str(reward_model))))


def test_an_adapter_is_merged_into_a_model_that_sees(task, tmp_path):
    from peft import LoraConfig, get_peft_model

    from hotseat.loop.offline.merge import merge

    base = image_cases.make("qwen2_5_vl")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    assert merge(str(task / "qwen2_5_vl"), tmp_path / "adapter", tmp_path / "merged") == 2
    before, after = (load_file(folder / "model.safetensors") for folder in (task / "qwen2_5_vl", tmp_path / "merged"))
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert len(changed) == 2
    assert all(name.endswith("q_proj.weight") for name in changed)
    assert (tmp_path / "merged" / "processor_config.json").is_file()
