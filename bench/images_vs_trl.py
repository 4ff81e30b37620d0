"""GRPO with images on one device, beside TRL's GRPOTrainer in the same call: a model of Qwen2.5-VL-3B's shape.

Weights are random, and tokenizer and processor are made from their classes: nothing is fetched. Every prompt has an
image of its own, of 448 x 448 pixels, which becomes 256 tokens; the end token lies outside of the model's vocabulary,
so that answers have their full length, unless one ends with a placeholder of images, which is rare in a vocabulary of
this size. Both sides train all weights in bf16, the visual encoder included, make one optimizer step of each batch, and
have no reference. TRL samples with vLLM in its own process, with sleep mode, where vLLM can take images; its best
setting counts. It prepares images in every step, and Hotseat before the run: what that takes for a batch is measured
by itself, and added to Hotseat's step in the last line.

    python bench/images_vs_trl.py                          both sides; on a machine without a GPU, in a tiny shape
    python bench/images_vs_trl.py --engine transformers    Hotseat by its own engine; --trl-engine likewise
    python bench/images_vs_trl.py --only hotseat trl-8     some; results stay in --directory, and all are printed
    python bench/images_vs_trl.py --limit 330              seconds for everything; a part that is cut off counts with
                                                           the steps that it has made
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.trl_side import timed_steps

from hotseat.model_source import ModelSource

TARGET = 1.3  # times as fast as TRL
NUM_WARM_UP = {"hotseat": 2, "trl": 1}  # steps that do not count; TRL compiles nothing
LEAST_S = 60  # seconds that a part needs at least: with fewer left it is not begun
GRACE_S = 20  # seconds for a part that is cut off to end its processes
PACKAGES = ("torch", "transformers", "PIL", "torchvision", "vllm", "trl", "datasets", "accelerate")
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Shapes of a model and of its task."""

    vocab_size: int
    text: dict[str, Any]
    vision: dict[str, Any]
    mrope_section: tuple[int, int, int]
    edge: int  # of images, in pixels
    num_prompts: int
    group_size: int
    num_new_tokens: int
    steps: int
    trl_steps: int
    micro_batch: int
    engines: dict[str, tuple[int, float]]  # of Hotseat: vLLM engines on the device, and the share of each
    peers: dict[str, tuple[int, bool]]  # of TRL: samples of a micro-batch, and whether it recomputes activations


SIZES = {
    "tiny": Size(
        vocab_size=512,
        text={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
        vision={"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "fullatt_block_indexes": [1]},
        mrope_section=(4, 6, 6),
        edge=56,
        num_prompts=4,
        group_size=4,
        num_new_tokens=8,
        steps=4,
        trl_steps=3,
        micro_batch=8,
        engines={"hotseat": (1, 0.4)},
        peers={"trl-8": (8, False)},
    ),
    "3B": Size(
        vocab_size=151_936,
        text={"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
        vision={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
        mrope_section=(16, 24, 24),
        edge=448,
        num_prompts=32,
        group_size=8,
        num_new_tokens=256,
        steps=5,
        trl_steps=3,
        micro_batch=16,
        engines={"hotseat": (1, 0.2), "hotseat-2": (2, 0.13)},
        peers={"trl-ckpt-32": (32, True), "trl-8": (8, False), "trl-ckpt-64": (64, True), "trl-16": (16, False)},
    ),
}
NUM_WORDS = 16  # of a prompt

CONFIG = """
task: rl
name: {name}
run_dir: {directory}/runs
cluster: {{{cluster}}}
actor: {{model: {model}, optimizer: {{learning_rate: 1e-6, schedule: constant}}}}
data: {{path: {model}/prompts.jsonl, label_key: label, max_length: {max_length}, max_samples: {num_rows},
  image_key: images, max_images_per_prompt: 1, apply_chat_template: true, prompt_max_length: {prompt_length}}}
reward: {{function: {directory}/reward.py}}
rollout: {{engine: {engine}, batch_size: {num_prompts}, samples_per_prompt: {group_size},
  max_new_tokens: {num_new_tokens}{more}}}
algorithm: {{estimator: group_norm}}
train: {{{dtype}, batch_size: {batch}, micro_batch_size: {micro_batch}}}
log: {{samples_per_step: 0}}
"""

REWARD = """
def reward_func(queries, prompts, labels):
    return [sum(map(ord, query[len(prompt):])) / 1e5 for query, prompt in zip(queries, prompts)]
"""


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def missing() -> list[str]:
    """List packages that are not installed, with what cannot be measured without them."""
    effects = {
        "torchvision": "vLLM's and transformers' full processors need it: TRL samples by transformers, through Pillow",
        "vllm": "both sides sample by transformers",
        "trl": "TRL is not measured",
        "datasets": "TRL is not measured",
        "accelerate": "TRL is not measured",
    }
    return [f"{name}: not installed: {effects.get(name, 'nothing works')}" for name in PACKAGES if not has(name)]


# --- the model and its data -------------------------------------------------------------------------------------------


def make_config(size: Size) -> Any:
    from transformers import Qwen2_5_VLConfig

    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {name: size.vocab_size - len(SPECIAL) + at for at, name in enumerate(names)}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(size.mrope_section)}
    text = {
        "vocab_size": size.vocab_size,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": size.vocab_size,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        **size.text,
    }
    vision = {"out_hidden_size": size.text["hidden_size"], "patch_size": 14, **size.vision}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def make_tokenizer(size: Size) -> Any:
    """Make a tokenizer with one token per word; special tokens come last, and the end is outside of the model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*(f"w{index}" for index in range(size.vocab_size - len(SPECIAL))), *SPECIAL, "<eos>"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", unk_token="w0", eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_processor(tokenizer: Any) -> Any:
    """Make the family's processor: whole where torchvision is installed, else for images alone, by Pillow."""
    from transformers import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if has("torchvision"):
        from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

        whole: Any = Qwen2_5_VLProcessor
        return whole(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=TEMPLATE)
    parts = {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])}
    images_alone: Any = type("Qwen2_5_VLProcessor", (Qwen2_5_VLProcessor,), parts)
    return images_alone(Qwen2VLImageProcessorPil(), tokenizer, chat_template=TEMPLATE)


def write_model(directory: Path, name: str) -> None:
    import numpy as np
    import torch
    from PIL import Image
    from transformers import Qwen2_5_VLForConditionalGeneration

    size, path = SIZES[name], directory / name
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration(make_config(size))
    torch.set_default_dtype(torch.float32)
    model.to(dtype).save_pretrained(path)
    make_processor(make_tokenizer(size)).save_pretrained(path)
    (directory / "reward.py").write_text(REWARD)
    rng, rows = random.Random(0), []
    (path / "images").mkdir(exist_ok=True)
    for index in range(size.steps * size.num_prompts):
        # Blocks of one colour: noise would be larger as a file than pictures are.
        blocks = np.random.default_rng(index).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((size.edge, size.edge), Image.Resampling.NEAREST).save(
            path / "images" / f"{index}.png"
        )
        words = " ".join(f"w{rng.randrange(1, size.vocab_size - len(SPECIAL))}" for _ in range(NUM_WORDS))
        rows.append({"input": words, "label": "", "images": [f"images/{index}.png"]})
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- the two sides ----------------------------------------------------------------------------------------------------


def engine_of(directory: Path, name: str, part: str, engine: str) -> str:
    """Return the engine that Hotseat samples with; auto: vLLM where there is a GPU, and it takes images."""
    import torch

    from hotseat.config import loads
    from hotseat.errors import ConfigError

    if engine != "auto":
        return engine
    if not has("vllm") or not has("torchvision") or not torch.cuda.is_available():
        return "transformers"
    try:
        loads(config_text(directory, name, part, "vllm"))
    except ConfigError as error:
        print(f"Hotseat samples by transformers: {error}")
        return "transformers"
    return "vllm"


def config_text(directory: Path, name: str, part: str, engine: str) -> str:
    import torch

    size, is_gpu = SIZES[name], torch.cuda.is_available()
    num_engines, share = size.engines[part]
    prompt_length = (size.edge // 28) ** 2 + NUM_WORDS + 8  # with the template's own tokens
    more = f", num_slots: {size.num_prompts * size.group_size}"
    if engine == "vllm":
        more = f", num_engines: {num_engines}, memory_share: {share}, prefix_caching: true"
    rollout = "@actor" if num_engines == 1 else f"0:0-{num_engines - 1}"
    return CONFIG.format(
        name=f"{name}-{part}-{time.time_ns()}",
        directory=directory,
        cluster=f'component_placement: {{actor: 0, rollout: "{rollout}"}}' if is_gpu else "runtime: local",
        model=directory / name,
        max_length=prompt_length + size.num_new_tokens,
        prompt_length=prompt_length,
        num_rows=size.steps * size.num_prompts,
        engine=engine,
        num_prompts=size.num_prompts,
        group_size=size.group_size,
        num_new_tokens=size.num_new_tokens,
        more=more,
        dtype="dtype: bf16, fp32_master: false" if is_gpu else "dtype: fp32",
        batch=size.num_prompts * size.group_size,
        micro_batch=size.micro_batch,
    )


def run_hotseat(directory: Path, name: str, part: str, engine: str) -> dict[str, Any]:
    from hotseat.config import loads
    from hotseat.loop.run import start

    config = loads(config_text(directory, name, part, engine_of(directory, name, part, engine)))
    start(config)
    return read_run(directory, name, Path(config.run_dir) / str(config.name))


def read_run(directory: Path, name: str, run_dir: Path) -> dict[str, Any]:
    """Return the result of a run of Hotseat, or of the steps that it has made."""
    from hotseat.config import load
    from hotseat.observe import read_lines

    records = [record for record in read_lines(run_dir / "metrics.jsonl") if "step_s" in record]
    kept = records[NUM_WARM_UP["hotseat"] :]
    if not kept:
        raise RuntimeError(f"{run_dir}: {len(records)} steps, all of which are warm-up")
    keys = [key for key in kept[0] if key.startswith(("time/", "memory/")) or key in ("engine_gap", "canary_gap")]
    return {
        "engine": load(run_dir / "config.yaml").rollout.engine,
        "seconds": [record["step_s"] for record in records],
        "length": statistics.fmean(record["length"] for record in kept),
        "medians": {key: statistics.median(record.get(key, 0.0) for record in kept) for key in keys},
        "prepare_s": seconds_to_prepare(directory / name) * SIZES[name].num_prompts,
    }


def seconds_to_prepare(model: Path) -> float:
    """Return the seconds in which Hotseat reads and prepares one image."""
    import tempfile

    from transformers import AutoTokenizer

    from hotseat.data.images import ImageLimits, ImageStore, load_processor

    limits = ImageLimits(1, 2**26, 2**26)
    processor = load_processor(ModelSource(str(model)), AutoTokenizer.from_pretrained(model))
    with tempfile.TemporaryDirectory() as folder:
        store = ImageStore(Path(folder), processor, limits)
        images = sorted((model / "images").glob("*.png"))[:16]
        start = time.perf_counter()
        for image in images:
            store.prepare(image.name, "images", image.parent)
        return (time.perf_counter() - start) / len(images)


def run_trl(directory: Path, name: str, peer: str, engine: str) -> dict[str, Any]:
    import torch
    from datasets import Dataset, Image
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    size, model = SIZES[name], directory / name
    micro_batch, is_checkpointed = SIZES[name].peers[peer]
    is_gpu = torch.cuda.is_available()
    use_vllm = engine == "vllm" or (engine == "auto" and is_gpu and has("vllm") and has("torchvision"))
    rows = [json.loads(line) for line in (model / "prompts.jsonl").open()]
    shown = {
        "prompt": [[{"role": "user", "content": row["input"]}] for row in rows],
        "image": [str(model / row["images"][0]) for row in rows],
    }
    lengths: list[int] = []
    part_file = directory / f"{name}-{peer}.json"
    num_samples = size.num_prompts * size.group_size

    def result(seconds: list[float]) -> dict[str, Any]:
        kept = lengths[NUM_WARM_UP["trl"] * num_samples :]
        used = "vllm" if use_vllm else "transformers"
        return {"engine": used, "seconds": seconds, "length": statistics.fmean(kept or lengths)}

    def reward(completions: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [sum(map(ord, completion[0]["content"])) / 1e5 for completion in completions]

    vllm: dict[str, Any] = {
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": is_gpu,
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_model_length": 1024,
        # A sampled placeholder would have no pixels in TRL's forward; its own generation suppresses it, too.
        "generation_kwargs": {"logit_bias": {size.vocab_size - len(SPECIAL) + at: -100.0 for at in range(4)}},
    }
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        processing_class=make_processor(AutoTokenizer.from_pretrained(model, padding_side="left")),
        args=GRPOConfig(
            output_dir=str(directory / peer),
            lr_scheduler_type="constant",
            learning_rate=1e-6,
            beta=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
            max_steps=size.trl_steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=num_samples // micro_batch,
            num_generations=size.group_size,
            max_completion_length=size.num_new_tokens,
            bf16=is_gpu,
            use_cpu=not is_gpu,
            model_init_kwargs={"dtype": "bfloat16" if is_gpu else "float32"},
            gradient_checkpointing=is_checkpointed,
            use_vllm=use_vllm,
            **(vllm if use_vllm else {}),
        ),
        train_dataset=Dataset.from_dict(shown).cast_column("image", Image()),
    )
    return result(timed_steps(trainer, lambda seconds: part_file.write_text(json.dumps(result(seconds)))))


# --- tables -----------------------------------------------------------------------------------------------------------


def step_s(part: str, result: dict[str, Any]) -> float:
    return statistics.median(result["seconds"][NUM_WARM_UP[part.partition("-")[0]] :])


def print_result(part: str, result: dict[str, Any], size: Size) -> None:
    if "error" in result:
        print(f"{part:12} failed: {result['error']}", flush=True)
        return
    rate = size.num_prompts * size.group_size * result["length"] / step_s(part, result)
    steps = ", ".join(f"{seconds:.2f}" for seconds in result["seconds"])
    print(
        f"{part:12} {step_s(part, result):8.2f} s a step  {rate:10,.0f} sampled tokens/s"
        f"  {result['length']:6.1f} tokens an answer  sampled by {result['engine']}; all steps: {steps}"
    )
    medians = result.get("medians", {})
    if medians:
        print("    " + ", ".join(f"{key.removeprefix('time/')} {value:.3f}" for key, value in medians.items()))
    sys.stdout.flush()


def print_ratios(results: dict[str, dict[str, Any]]) -> None:
    times = {part: step_s(part, result) for part, result in results.items() if "error" not in result}
    best = min((seconds for part, seconds in times.items() if part.startswith("trl")), default=None)
    for part, seconds in times.items():
        if best is not None and part.startswith("hotseat"):
            prepared = seconds + results[part]["prepare_s"]
            print(
                f"{part}: {best / seconds:.2f} times as fast as TRL (target {TARGET}),"
                f" with preparing images {best / prepared:.2f}"
            )


def parse() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("build/images_vs_trl"))
    parser.add_argument("--size", choices=SIZES, default="3B" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--only", nargs="+", help="hotseat, hotseat-2, and peers such as trl-8")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto", help="Hotseat's")
    parser.add_argument("--trl-engine", choices=("auto", "vllm", "transformers"), default="auto")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_one(name: str, args: argparse.Namespace) -> None:
    """Do one part in this process, and write its result."""
    if name == "model":
        write_model(args.directory, args.size)
        return
    if name.startswith("hotseat"):
        result = run_hotseat(args.directory, args.size, name, args.engine)
    else:
        result = run_trl(args.directory, args.size, name, args.trl_engine)
    (args.directory / f"{args.size}-{name}.json").write_text(json.dumps(result))


def run_part(part: str, args: argparse.Namespace, limit_s: float) -> dict[str, Any] | None:
    """Run one part in a process of its own, so that what it leaves on the device does not burden the next.

    Returns its result, that of the steps that it made if it failed or took too long, or an error; None of the model.
    """
    log, stored = args.directory / f"{args.size}-{part}.log", args.directory / f"{args.size}-{part}.json"
    stored.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--one", part, "--directory", str(args.directory), "--size", args.size]
    command += ["--engine", args.engine, "--trl-engine", args.trl_engine]
    began = time.time()
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            child.wait(limit_s)
            problem = f"exit code {child.returncode}" if child.returncode else None
        except subprocess.TimeoutExpired:
            problem = f"cut off after {limit_s:.0f} s"
        for kill in (signal.SIGTERM, signal.SIGKILL):  # also what a part that ended has left behind
            try:
                os.killpg(child.pid, kill)
                child.wait(GRACE_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
    print(f"== {part}: {problem or 'done'}, {time.time() - began:.0f} s", flush=True)
    if problem is not None:
        print_tails(part, args, log)
    if part == "model":
        return None if problem is None else {"error": problem}
    try:
        if part.startswith("hotseat") and not stored.exists():
            run_dir = max((args.directory / "runs").glob(f"{args.size}-{part}-[0-9]*"))
            return read_run(args.directory, args.size, run_dir)
        result: dict[str, Any] = json.loads(stored.read_text())
        step_s(part, result)
    except (OSError, ValueError, RuntimeError) as error:  # no run, no file, no step after the warm-up
        return {"error": f"{problem or 'no result'}; {error}"}
    return result


def print_tails(part: str, args: argparse.Namespace, log: Path) -> None:
    """Print the ends of the logs of a part that failed."""
    logs = [log]
    if part.startswith("hotseat"):
        logs += sorted((args.directory / "runs").glob(f"{args.size}-{part}-[0-9]*/logs/*.log"))[-4:]
    for each in logs:
        lines = each.read_text(errors="replace").splitlines()[-40:]
        print(f"-- the end of {each.name}:", *(line[:300] for line in lines), sep="\n", flush=True)


def main() -> int:
    args = parse()
    args.directory = args.directory.absolute()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.one:
        run_one(args.one, args)
        return 0
    for note in missing():
        print(note, flush=True)
    size, end = SIZES[args.size], time.monotonic() + args.limit
    has_trl = all(map(has, ("trl", "datasets", "accelerate")))
    first, *others = size.engines
    parts = [first, *(size.peers if has_trl else ()), *others]
    chosen = [part for part in parts if args.only is None or part in args.only]
    if not (args.directory / args.size / "prompts.jsonl").exists():
        problem = run_part("model", args, args.limit)
        if problem is not None:
            return 1
    has_failed = False
    for part in chosen:
        left_s = end - time.monotonic() - GRACE_S
        if left_s < min(LEAST_S, args.limit / 4):
            print(f"== {part}: not begun, {left_s:.0f} s are left", flush=True)
            continue
        result = run_part(part, args, left_s)
        assert result is not None
        has_failed |= "error" in result
        (args.directory / f"{args.size}-{part}.json").write_text(json.dumps(result))
        print_result(part, result, size)
    files = {part: args.directory / f"{args.size}-{part}.json" for part in parts}
    results = {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}
    for part in results.keys() - set(chosen):
        print_result(part, results[part], size)
    print_ratios(results)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
