"""Whole runs with images: SFT, RL with a reference, resuming; and what is refused before a model loads."""

import importlib.util
import json
import shutil
from pathlib import Path

import image_cases
import pytest
from loop_cases import rl_yaml, same, sft_yaml, weights
from safetensors.torch import load_file
from stopped_runs import stopped_after_saving

from hotseat.checks.pipeline import MODELS
from hotseat.checks.stage import CheckContext, run_checks
from hotseat.cli.main import main
from hotseat.config import Config, loads
from hotseat.errors import ConfigError, DataError, UserError
from hotseat.loop.run import start
from hotseat.model_source import ModelSource
from hotseat.observe import read_lines

REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query[len(prompt):])) % 5) for query, prompt in zip(queries, prompts)]
"""
DATA = "max_length: 64, image_key: images, max_images_per_prompt: 1, apply_chat_template: true"
SMALL = ("train.batch_size=8", "train.micro_batch_size=8", "train.num_episodes=1")
ROLLOUT = "{batch_size: 2, samples_per_prompt: 4, max_new_tokens: 3, num_slots: 4}"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A tiny Qwen2.5-VL and eight questions, each about an image of its own; one has none."""
    folder = tmp_path_factory.mktemp("images")
    image_cases.save("qwen2_5_vl", folder / "model")
    rows = []
    for index in range(8):
        image_cases.drawn(index, 28, 28).save(folder / f"{index}.png")
        images = [f"{index}.png"] if index != 5 else None
        rows.append({"input": f"how {index}?", "output": str(index), "label": str(index), "images": images})
    for name in ("prompts", "examples"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


def rl(task, name, **changes):
    data = f"{{path: {task}/prompts.jsonl, label_key: label, {DATA}}}"
    return rl_yaml(task, **{"name": name, "data": data, "rollout": ROLLOUT} | changes)


def timeless(records):
    timing = ("time/", "memory/", "machine/", "sync/", "step_s", "tokens_per_s")
    return [{key: value for key, value in record.items() if not key.startswith(timing)} for record in records]


def gaps(records):
    """Return how far log-probs of the engine and of the trainer were apart, on samples and on the canary."""
    return [record[key] for record in records for key in ("engine_gap_max", "canary_gap") if key in record]


@pytest.mark.long
@pytest.mark.slow
def test_rl_with_images_is_resumed_to_the_same_bits(task):
    common = ["train.batch_size=8", "train.micro_batch_size=8", "algorithm.kl.coef=0.01", "train.num_episodes=1"]
    start(loads(rl(task, "whole"), common))
    with stopped_after_saving():
        start(loads(rl(task, "part"), [*common, "checkpoint.every=2"]))
    assert main(["resume", str(task / "runs" / "part")]) == 0
    whole, part = (read_lines(task / "runs" / name / "metrics.jsonl") for name in ("whole", "part"))
    assert timeless(whole) == timeless(part)
    assert same(weights(task, "whole"), weights(task, "part"))
    before = load_file(task / "model" / "model.safetensors")
    changed = {name for name, value in weights(task, "whole").items() if (value != before[name]).any()}
    assert any(name.startswith("visual.") for name in changed)
    # Engine and trainer see the same image: what the policy sampled has the same log-probs on both sides.
    assert max(gaps(whole)) < 1e-4
    # The model that was trained is complete: it can be trained again.
    assert (task / "runs" / "whole" / "model" / "processor_config.json").is_file()
    shown = [line for line in read_lines(task / "runs" / "whole" / "samples.jsonl") if line.get("images")]
    assert shown
    page = (task / "runs" / "whole" / "report.html").read_text()
    assert "img-src data:" in page


AGENT = """
from PIL import Image

from hotseat.agents import Environment, Step


class Shows(Environment):
    turn = 0

    def step(self, action):
        self.turn += 1
        shade = 40 * (len(action) + self.turn)
        picture = Image.new("RGB", (28, 28), (shade % 256, 80, 9))
        return Step("<|vision_start|><|image_pad|><|vision_end|>", float(shade), self.turn == 2, images=[picture])
"""


@pytest.mark.slow
def test_an_environment_that_shows_images_is_learned_from(task, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    overrides = [f"agent.path={tmp_path}/agent.py", "data.max_images_per_prompt=2", "data.max_length=96"]
    start(loads(rl(task, "shown", reward="{}"), [*overrides, *SMALL]))
    run_dir = task / "runs" / "shown"
    # The trainer reads the images of both turns as the engine did.
    assert max(gaps(read_lines(run_dir / "metrics.jsonl"))) < 1e-4
    # The run has ended well: of the images of its episodes, thumbnails stay that the report shows.
    stay = {file.name for file in (run_dir / "episode_images").iterdir()}
    shown = {Path(image) for line in read_lines(run_dir / "samples.jsonl") for image in line.get("images", ())}
    assert stay == {image.with_suffix(".png").name for image in shown if image.parent == run_dir / "episode_images"}
    assert stay
    # Those of the data stay whole, for other runs, and none of an episode is among them.
    assert {image.parent for image in shown} == {run_dir / "episode_images", task / "runs" / "images"}
    assert all(image.exists() for image in shown if image.parent == task / "runs" / "images")


EXECUTOR = """
from openrlhf.utils.agent import AgentExecutorBase
from PIL import Image


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens, ranges, shown = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"], [], list(images or [])
        for turn in range(2):
            output = await llm_engine.generate(tokens, sampling_params, multi_modal_data={"image": shown})
            sampled = output.outputs[0].token_ids
            ranges.append((len(tokens), len(tokens) + len(sampled)))
            if sampled[-1] in hf_tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"]):
                tokens = tokens + sampled
                break
            shown.append(Image.new("RGB", (28, 28), (40 * len(sampled) + turn, 80, 9)))
            made = hf_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", images=shown[-1:])
            assert len(made["input_ids"][0]) > 3  # the processor writes all tokens of the image
            tokens = tokens + sampled + list(made["input_ids"][0])
        return {"observation_tokens": tokens, "action_ranges": ranges, "reward": float(tokens[-1] % 3)}
"""


@pytest.mark.long
def test_an_executor_that_shows_images_is_learned_from(task, tmp_path):
    (tmp_path / "agent.py").write_text(EXECUTOR)
    overrides = [f"agent.path={tmp_path}/agent.py", "data.max_images_per_prompt=3", "data.max_length=96"]
    start(loads(rl(task, "executed", reward="{}"), [*overrides, *SMALL]))
    assert max(gaps(read_lines(task / "runs" / "executed" / "metrics.jsonl"))) < 1e-4


@pytest.mark.slow
def test_images_of_agents_are_no_larger_than_the_engine_was_started_for(task, tmp_path):
    from transformers import AutoTokenizer

    from hotseat.agents.agent import AgentError
    from hotseat.data.images import ImageLimits
    from hotseat.loop.workers.host_settings import HostImages, make_image_preparer

    model = str(task / "model")
    largest = image_cases.write_pixels(tmp_path, 0)
    folders = str(tmp_path / "images"), str(tmp_path / "data")
    settings = HostImages(*folders, ImageLimits(1, 10**6, 10**6), largest=largest)
    preparer = make_image_preparer(settings, ModelSource(model), AutoTokenizer.from_pretrained(model))
    assert len(preparer.prepare(image_cases.drawn(0, 28, 28)).token_ids) == 4
    with pytest.raises(AgentError, match="12 tokens, and vLLM was started for images of 4: make it smaller"):
        preparer.prepare(image_cases.drawn(0))


PLAY = """
import base64
import io

import anthropic
import openai
from PIL import Image


def picture(shade):
    file = io.BytesIO()
    Image.new("RGB", (28, 28), (shade % 256, 80, 9)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def play(prompt, client):
    messages = [{"role": "user", "content": client.content}]
    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as policy:
        for turn in range(2):
            said = policy.chat.completions.create(model=client.model, messages=messages).choices[0].message
            url = f"data:image/png;base64,{picture(40 * (len(said.content) + turn))}"
            messages += [said, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with anthropic.Anthropic(base_url=client.root_url, api_key=client.api_key, max_retries=0) as policy:
        source = {"type": "base64", "media_type": "image/png", "data": picture(client.seed)}
        content = [{"type": "text", "text": "and "}, {"type": "image", "source": source}]
        policy.messages.create(model=client.model, max_tokens=3, messages=[{"role": "user", "content": content}])
    return float(client.seed % 3)
"""


@pytest.mark.long
def test_programs_that_send_images_are_learned_from(task, tmp_path):
    (tmp_path / "agent.py").write_text(PLAY)
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()[:4]]
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({**row, "input": "<|image_pad|>" + row["input"], "images": [f"{task}/{row['images'][0]}"]})
            + "\n"
            for row in rows
        )
    )
    overrides = [f"agent.path={tmp_path}/agent.py", "data.max_images_per_prompt=2", "data.max_length=96"]
    overrides += [f"data.path={tmp_path}/rows.jsonl", "data.apply_chat_template=false"]
    start(loads(rl(task, "played", reward="{}"), [*overrides, *SMALL]))
    records = read_lines(task / "runs" / "played" / "metrics.jsonl")
    # The trainer computes the log-probs that the engine sampled with, of all turns and protocols.
    assert max(gaps(records)) < 1e-4
    shown = [line["images"] for line in read_lines(task / "runs" / "played" / "samples.jsonl")]
    assert {len(images) for images in shown} == {3}  # one of the prompt, and two of the program


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_rl_with_images_in_vllm_learns_from_what_it_sampled(task, tmp_path):
    model = image_cases.save("qwen2_5_vl", tmp_path / "model", hidden_size=64)  # vLLM's heads on a CPU are no smaller
    rollout = ROLLOUT.replace("num_slots: 4", "engine: vllm")
    for name, more in (("vllm", ()), ("vllm-adapted", ("train.lora.rank=2",))):
        start(loads(rl(task, name, rollout=rollout), [f"actor.model={model}", *SMALL, *more]))
        assert max(gaps(read_lines(task / "runs" / name / "metrics.jsonl"))) < 1e-4
        assert any(line.get("images") for line in read_lines(task / "runs" / name / "samples.jsonl"))


@pytest.mark.slow
def test_a_frozen_encoder_and_adapters_learn_from_examples_with_images(task):
    data = f"{{path: {task}/examples.jsonl, output_key: output, {DATA}}}"
    before = load_file(task / "model" / "model.safetensors")
    for name, override in (("frozen", "train.freeze_visual_encoder=true"), ("adapted", "train.lora.rank=2")):
        start(loads(sft_yaml(task, name=name, data=data, eval=""), [override, "train.max_epochs=3"]))
        losses = [line["loss"] for line in read_lines(task / "runs" / name / "metrics.jsonl")]
        assert losses[-1] < losses[0]
        if name == "frozen":
            after = weights(task, name)
            changed = {key for key, value in after.items() if (value != before[key]).any()}
            assert changed
            assert not any(key.startswith("visual.") for key in changed)


@pytest.mark.slow
def test_a_chat_template_that_only_the_processor_has_is_used_and_exported(task, tmp_path):
    from hotseat.loop import inputs
    from hotseat.vision import copy_processor

    model = tmp_path / "model"
    shutil.copytree(task / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    made = []
    for name in (task / "model", model):
        config = loads(rl(task, "templates"), [f"actor.model={name}"])
        tokenizer = inputs.load_tokenizer(config)
        made.append([prompt.token_ids for prompt in inputs.rl_prompts(config, tokenizer)[0]])
    assert tokenizer.chat_template is None
    assert made[0] == made[1] != []
    for name, other in (("chat_template.json", "chat_template.jinja"), ("chat_template.jinja", "chat_template.json")):
        folder = tmp_path / name
        folder.mkdir()
        copy_processor(str(model if name.endswith("json") else task / "model"), folder)
        assert (folder / name).exists()
        assert not (folder / other).exists()
    (folder / name).write_text("of the run")
    copy_processor(str(task / "model"), folder)
    assert (folder / name).read_text() == "of the run"


def check_models(config: Config) -> None:
    run_checks(CheckContext(config=config), MODELS)


REFUSED = {
    "data: {image_key: a}": "data.max_images_per_prompt: 0, and data.image_key names a column of images",
    "rollout: {engine: vllm, quantization: fp8}": "rollout.quantization: fp8 is not built",
    "rollout: {engine: vllm, kv_cache_dtype: fp8}": "rollout.kv_cache_dtype: fp8 is not built for images yet: leave it",
    "agent: {environment: {family: gymnasium}}": "agent.environment.family: environments of libraries are not built",
    "env: {path: x.py, images: true}\nrollout: {engine: vllm}": "rollout.engine: vllm is not built for images of",
    "env: {path: x.py}": "data.image_key: has no effect: env.path is set, and the simulator's tasks and seeds are",
    "train: {sequence_parallel_size: 2}": "train.sequence_parallel_size: not built for images yet: leave it unset",
    "train: {liger_kernel: true}": "train.liger_kernel: not built for images yet",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_built_for_images_is_refused_by_name(text):
    given = text if "image" in text else f"{text}\ndata: {{image_key: a, max_images_per_prompt: 1}}"
    with pytest.raises(ConfigError) as caught:
        loads(given)
    assert REFUSED[text] in str(caught.value)


@pytest.mark.slow
def test_bad_images_and_models_without_sight_are_named_before_a_model_loads(task, tmp_path):
    from transformers import LlamaConfig

    from hotseat.loop import inputs

    rows = [{"input": "a", "images": [name]} for name in ("0.png", "gone.png", "notes.png")]
    (task / "notes.png").write_text("not an image")
    (task / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = loads(rl(task, "bad"), [f"data.path={task}/bad.jsonl"])
    with pytest.raises(DataError) as caught:
        inputs.rl_prompts(config, inputs.load_tokenizer(config))
    said = str(caught.value)
    assert f"bad.jsonl:2: images: no such file: {task}/gone.png" in said
    assert "bad.jsonl:3: images: not an image in one of the formats" in said
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="Llama takes no images here, and data.image_key is set"):
        check_models(loads(rl(task, "blind"), [f"actor.model={tmp_path}"]))
    without = rl_yaml(task, data=f"{{path: {task}/prompts.jsonl, max_length: 64}}")
    with pytest.raises(UserError, match=r"Qwen2_5_VL takes images, and the run has none: set data.image_key"):
        check_models(loads(without))


def test_adapters_outside_of_the_language_model_are_refused_where_vllm_would_apply_them(task):
    vllm = "{engine: vllm, batch_size: 2, samples_per_prompt: 4, max_new_tokens: 3, lora_sync: adapter}"
    text = rl(task, "adapters", rollout=vllm)
    with pytest.raises(UserError) as caught:
        check_models(loads(text, ["train.lora.rank=2"]))
    assert "model.visual.blocks.0.attn.qkv is one of 12 layers outside of the language model" in str(caught.value)
    pattern = ".*language_model.*_proj"
    assert f"such as {pattern}, or rollout.lora_sync to merged" in str(caught.value)
    check_models(loads(text, ["train.lora.rank=2", f"train.lora.target_modules={pattern}"]))
    check_models(loads(text, ["train.lora.rank=2", "rollout.lora_sync=merged"]))


def test_adapters_of_llava_are_refused_before_vllm_loads_it(task, tmp_path):
    name = image_cases.save("llava", tmp_path / "model")
    vllm = "{engine: vllm, batch_size: 2, samples_per_prompt: 4, max_new_tokens: 3, lora_sync: adapter}"
    lora = ["train.lora.rank=2", "train.lora.target_modules=.*language_model.*_proj", f"actor.model={name}"]
    with pytest.raises(UserError, match=r"LLaVA's visual encoder.*: set rollout.lora_sync to merged"):
        check_models(loads(rl(task, "adapters", rollout=vllm), lora))
    check_models(loads(rl(task, "adapters", rollout=vllm), [*lora, "rollout.lora_sync=merged"]))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_applies_adapters_of_the_language_model_beside_images(task, tmp_path):
    # vLLM's attention on a CPU has no smaller heads than this model has.
    image_cases.save("qwen2_5_vl", tmp_path / "model", hidden_size=64)
    vllm = "{engine: vllm, batch_size: 2, samples_per_prompt: 4, max_new_tokens: 3, lora_sync: adapter}"
    lora = ["train.lora.rank=2", "train.lora.alpha=16", "train.lora.target_modules=.*language_model.*_proj"]
    learning = ["actor.optimizer.learning_rate=0.03", f"actor.model={tmp_path}/model", f"run_dir={tmp_path}/runs"]
    start(loads(rl(task, "adapters", rollout=vllm), [*SMALL, *lora, *learning]))
    records = read_lines(tmp_path / "runs" / "adapters" / "metrics.jsonl")[1:]
    assert [record["version"] for record in records] == [1.0, 2.0, 3.0, 4.0]
    # Digests agreed, and so do log-probs, although the policy moves.
    assert max(gaps(records)) < 1e-4
    # Two layers of 64: q, o [64, 64], k, v [32, 64], three of the MLP with 128, of rank 2; 4 bytes a number.
    num_factors = 2 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert [record["sync/gb"] for record in records] == pytest.approx([4e-9 * num_factors] * 4)
