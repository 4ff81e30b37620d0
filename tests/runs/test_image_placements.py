"""Placement changes no bit of a run with images, whatever the family."""

import json

import image_cases
import pytest
from loop_cases import rl_yaml, same, weights
from safetensors.torch import load_file

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.loop.run import start

REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query[len(prompt):])) % 5) for query, prompt in zip(queries, prompts)]
"""
DISAGGREGATED = "{actor: 0, reference: 1, rollout: 2}"
HYBRID = "{actor: 0, reference: '@actor', rollout: 1-2}"


def make_task(folder, family):
    """Write a tiny model and four questions, each about an image of its own."""
    image_cases.save(family, folder / "model")
    rows = []
    for index in range(4):
        image_cases.drawn(index, 28, 28).save(folder / f"{index}.png")
        text = f"{image_cases.PLACE[family]}how {index}?"
        rows.append({"input": text, "label": str(index), "images": [f"{index}.png"]})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def yaml_of(folder, name, **changes):
    return rl_yaml(
        folder,
        name=name,
        data=f"{{path: {folder}/prompts.jsonl, label_key: label, max_length: 64, image_key: images,"
        " max_images_per_prompt: 1}",
        rollout="{batch_size: 2, samples_per_prompt: 4, max_new_tokens: 3, num_slots: 4}",
        train="{dtype: fp32, batch_size: 8, micro_batch_size: 4}",
        algorithm="{kl: {coef: 0.1}}",
        **changes,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl", *(pytest.param(each, marks=pytest.mark.long) for each in image_cases.FAMILIES[1:])],
)
@pytest.mark.long
def test_placement_changes_no_bit_of_a_run_with_images(family, tmp_path):
    make_task(tmp_path, family)
    start(loads(yaml_of(tmp_path, "in_process")))
    for label, placement in {"disaggregated": DISAGGREGATED, "hybrid": HYBRID}.items():
        start(loads(yaml_of(tmp_path, label, cluster=f"{{runtime: local, component_placement: {placement}}}")))
        assert json.loads((tmp_path / "runs" / label / "plan.json").read_text())["label"] == label
        assert same(weights(tmp_path, "in_process"), weights(tmp_path, label)), label
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert any((value != before[name]).any() for name, value in weights(tmp_path, "in_process").items())


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_on_ray_placement_changes_no_bit_of_a_run_with_images(family, tmp_path):
    make_task(tmp_path, family)
    start(loads(yaml_of(tmp_path, "in_process")))
    config = tmp_path / "ray.yaml"
    config.write_text(yaml_of(tmp_path, "ray", cluster=f"{{runtime: ray, component_placement: {HYBRID}}}"))
    assert main(["run", str(config)]) == 0
    assert same(weights(tmp_path, "in_process"), weights(tmp_path, "ray"))
