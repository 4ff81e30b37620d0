"""A chunk of actions of a large policy that sees: 64 environments, 56 tokens each, through the engine of a run.

    python bench/action_chunk.py                        # a CUDA device: policies of Qwen2-7B's and Llama-2-7B's shape
    python bench/action_chunk.py --shapes qwen2-7b --profile
    python bench/action_chunk.py --tiny                 # anywhere, in seconds: that it works; so without a device

Weights are random, bf16, made on the device. A prompt is an image of 256 tokens, from SigLIP-so400m's shape, and words.
Every round has new frames. The bound is (forward of the prompts' tokens at matmul peak + a read of the language model's
weights for every token at memory bandwidth) / 0.6, with peak and bandwidth measured in the same call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.lib.devices import has_gpu
from bench.lib.tabletop import IMAGE, make_processor
from hotseat.data.frames import FramePreparer
from hotseat.rollout import SlotOptions, TransformersEngine
from hotseat.types import Request, Sampling

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "llama-2-7b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32064,
    },
    "tiny": {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
TINY_SIGLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SHARE = 0.6  # of the device's speed that is to be reached


def say(*columns: object) -> None:
    print(*columns, flush=True)


def make_model(shape: dict[str, Any], pixels: int, patch: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Make a LLaVA with random weights on the device."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config={
            **(SIGLIP if shape["hidden_size"] > 64 else TINY_SIGLIP),
            "model_type": "siglip_vision_model",
            "image_size": pixels,
            "patch_size": patch,
            "vision_use_head": False,
        },
        text_config={**shape, "max_position_embeddings": 1024, "tie_word_embeddings": False},
        image_token_index=3,
        image_seq_length=(pixels // patch) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    with device:
        return LlavaForConditionalGeneration(config).eval().to(dtype)


def frame(random: np.random.Generator, pixels: int) -> np.ndarray:
    """Draw coloured shapes on a table with some grain, as a camera sees it."""
    picture = np.full((pixels, pixels, 3), 170, dtype=np.int64)
    for _ in range(6):
        top, left = random.integers(0, pixels * 3 // 4, 2)
        size = random.integers(pixels // 16, pixels // 4)
        picture[top : top + size, left : left + size] = random.integers(0, 256, 3)
    return (picture + random.integers(-2, 3, picture.shape)).clip(0, 255).astype(np.uint8)


class Chunks:
    """Rounds of requests to an engine, each with new frames."""

    def __init__(self, engine: TransformersEngine, preparer: FramePreparer, words: list[int], pixels: int):
        self._engine, self._preparer, self._words, self._pixels = engine, preparer, words, pixels
        self._random = np.random.default_rng(0)
        self._num_rounds = 0
        self.prepare_s: list[float] = []
        self.num_prompt_tokens = 0

    def play(self, num_envs: int, num_tokens: int) -> float:
        """Return the seconds from the requests of all environments to the last action."""
        frames = [frame(self._random, self._pixels) for _ in range(num_envs)]
        began_s = time.perf_counter()
        prepared = [self._preparer.prepare(each) for each in frames]
        self.prepare_s.append((time.perf_counter() - began_s) / num_envs)
        self._num_rounds += 1
        requests = [
            Request(
                id=f"{self._num_rounds}-{at}",
                token_ids=[*each.token_ids, *self._words],
                sampling=Sampling(max_new_tokens=num_tokens, temperature=1.0, ignore_eos=True),
                seed=self._num_rounds * 1000 + at,
                images=(each.image,),
            )
            for at, each in enumerate(prepared)
        ]
        self.num_prompt_tokens = len(requests[0].token_ids)
        began_s = time.perf_counter()
        for future in self._engine.submit_many(requests):
            future.result()
        return time.perf_counter() - began_s


def seconds(work: Callable[[], object], rounds: int = 10) -> float:
    """Return the median seconds of some work on the device."""
    times = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[2:])


def device_limits(device: torch.device) -> tuple[float, float]:
    """Return FLOP/s of a large bf16 product, and bytes/s of the faster of reading and copying."""
    if device.type != "cuda":
        return 50e9, 10e9  # so that the rest can be tried
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    flops = 2 * 8192**3 / seconds(lambda: torch.mm(left, right))
    source = torch.randn(2**31, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copying = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    reading = source.nbytes / seconds(lambda: source.view(torch.int32).amax())
    say(f"matmul {flops / 1e12:.0f} TFLOP/s; memory: copying {copying / 1e12:.2f}, reading {reading / 1e12:.2f} TB/s")
    return flops, max(copying, reading)


def num_weights(module: Any) -> int:
    return sum(each.numel() for each in module.parameters() if each.ndim > 1)


def measure(name: str, arguments: argparse.Namespace, device: torch.device, limits: tuple[float, float]) -> None:
    pixels, patch = (224, 14) if name != "tiny" else (64, 16)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    began_s = time.perf_counter()
    model = make_model(SHAPES[name], pixels, patch, device, dtype)
    layers, head = num_weights(model.model.language_model.layers), model.lm_head.weight.numel()
    vision = num_weights(model.model.vision_tower) + num_weights(model.model.multi_modal_projector)
    num_images = (pixels // patch) ** 2
    processor = make_processor(bins=16, pixels=pixels, patch=patch)
    words = processor.tokenizer("push the red puck onto the green disc", add_special_tokens=False)["input_ids"]
    engine = TransformersEngine(
        model,
        max_length=num_images + len(words) + arguments.tokens,
        num_slots=arguments.envs,
        options=SlotOptions(device=device),
        num_threads=None,
    )
    assert processor.tokenizer.convert_tokens_to_ids(IMAGE) == model.config.image_token_index
    chunks = Chunks(engine, FramePreparer(processor), words, pixels)
    say(
        f"\n{name}: {(layers + head) / 1e9:.2f}B weights to read for a token, {vision / 1e9:.2f}B to see; made in"
        f" {time.perf_counter() - began_s:.0f} s"
    )
    try:
        warm = [chunks.play(arguments.envs, tokens) for tokens in (arguments.tokens, 1, arguments.tokens)]
        say(f"first rounds: {', '.join(f'{each:.2f}' for each in warm)} s; {chunks.num_prompt_tokens} tokens a prompt")
        one = statistics.median(chunks.play(arguments.envs, 1) for _ in range(arguments.rounds))
        whole = [chunks.play(arguments.envs, arguments.tokens) for _ in range(arguments.rounds)]
        chunk_s = statistics.median(whole)
        token_s = (chunk_s - one) / (arguments.tokens - 1)
        peak, bandwidth = limits
        num_prompt = arguments.envs * chunks.num_prompt_tokens
        forward_s = 2 * (layers * num_prompt + vision * arguments.envs * num_images) / peak
        read_s = (layers + head) * dtype.itemsize / bandwidth
        bound_s = (forward_s + arguments.tokens * read_s) / SHARE
        say(
            f"prefill {(one - token_s) * 1e3:.0f} ms ({forward_s * 1e3:.0f} at matmul peak),"
            f" decode {token_s * 1e3:.2f} ms a token ({read_s * 1e3:.2f} to read the weights)"
        )
        say(
            f"chunk {chunk_s * 1e3:.0f} ms ({min(whole) * 1e3:.0f} to {max(whole) * 1e3:.0f});"
            f" bound {bound_s * 1e3:.0f} ms: {chunk_s / bound_s:.2f} of it"
        )
        say(f"frames were prepared before, in {statistics.median(chunks.prepare_s) * 1e3:.2f} ms each")
        if arguments.profile and device.type == "cuda":
            profile(chunks, arguments)
    finally:
        engine.close()


def profile(chunks: Chunks, arguments: argparse.Namespace) -> None:
    """Print where the device's time goes in a chunk."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    with recorded(activities=[ProfilerActivity.CUDA]) as record:
        chunks.play(arguments.envs, arguments.tokens)
    events = sorted(record.key_averages(), key=lambda each: -each.self_device_time_total)
    for each in events[:18]:
        say(f"  {each.self_device_time_total / 1e3:8.1f} ms {each.count:6} x {each.key[:110]}")
    say(f"  {sum(each.self_device_time_total for each in events) / 1e3:8.1f} ms in all kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen2-7b", "llama-2-7b"])
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=56, help="7 numbers x 8 actions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest")
    parser.add_argument("--tiny", action="store_true", help="a tiny policy, for a CPU")
    arguments = parser.parse_args()
    if arguments.tiny or not has_gpu():
        arguments.shapes, arguments.envs = ["tiny"], min(arguments.envs, 20)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    limits = device_limits(device)
    failed = []
    for name in arguments.shapes:
        try:
            measure(name, arguments, device, limits)
        except Exception:  # the other shape is measured all the same
            traceback.print_exc()
            failed.append(name)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
