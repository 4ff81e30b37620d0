"""Tokens per second of vLLM in 16 bits and in FP8, and with n-gram drafts, on one GPU, and what FP8 changes.

The same weights are pushed to engines that start at the same time and are measured one after another:

    bf16         as ever
    fp8          rollout.quantization: fp8, the weights of linear layers
    fp8+cache    also rollout.kv_cache_dtype: fp8
    ngram        bf16, with drafts taken from earlier in the answer (rollout.engine_args.speculative_config)

Each samples its requests twice, and the faster time counts. `greedy` is temperature 0: a model of random weights then
repeats itself, which is the best case of drafts; at temperature 1 it never does, which is the worst. The gap is between
an engine's log-probs and those of the bf16 engine that sampled the tokens. Random weights make nearly flat
distributions, of which rounding changes little: for the gap of a trained model, name one by --model.

    python bench/rollout_precision.py [--shapes 1.5B 8B] [--engines bf16 fp8 fp8+cache ngram] [--samples 256]
    python bench/rollout_precision.py --model ~/smol --engines bf16 fp8 fp8+cache
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lib.devices import need_gpu
from lib.shapes import VOCAB_SIZES, make_weights, shape

from hotseat.model_source import ModelSource

PROMPT_LENGTH = 64
NUM_SCORED = 32  # answers
NUM_DRAFTED = 4
THINGS = ("the sea", "a violin", "snow", "a library", "a bicycle", "bread", "an eclipse", "a map")
TEMPERATURES = {"bf16": (1.0, 0.0), "ngram": (1.0, 0.0)}  # others: 1 alone


@dataclass(frozen=True)
class Load:
    """Load of an engine: the model, and the answers that it is asked for."""

    model: str  # a shape, or a folder
    num_samples: int
    num_tokens: int

    @property
    def max_length(self) -> int:
        return PROMPT_LENGTH + self.num_tokens + 8

    def requests(self, directory: str, temperature: float) -> list[Any]:
        from hotseat.types import Request, Sampling

        sampling = Sampling(max_new_tokens=self.num_tokens, temperature=temperature, ignore_eos=True)
        prompts = self._prompts(directory)
        return [Request(str(index), tuple(prompt), sampling, index) for index, prompt in enumerate(prompts)]

    def _prompts(self, directory: str) -> list[list[int]]:
        """Tokens at random for a model of random weights, questions for a trained one."""
        if self.model in VOCAB_SIZES:
            draw = random.Random(0)
            number = range(self.num_samples)
            return [[draw.randrange(3, VOCAB_SIZES[self.model]) for _ in range(PROMPT_LENGTH)] for _ in number]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory)
        asked = [f"What should a person who has never seen {thing} know about it?" for thing in THINGS]
        texts = [f"Question: {question}\nAnswer:" for question in asked]
        return [tokenizer(texts[index % len(texts)]).input_ids[:PROMPT_LENGTH] for index in range(self.num_samples)]


def serve(pipe: Any, load: Load, kind: str, directory: str, is_dummy: bool) -> None:
    """Start an engine, and measure it when the parent says so. Runs in a process of its own."""
    try:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        started = time.perf_counter()
        engine = make_engine(load, kind, directory, is_dummy)
        pipe.send({"start_s": time.perf_counter() - started})
        for ask, argument in iter(pipe.recv, None):
            pipe.send(measure(engine, load, kind, directory) if ask == "measure" else engine.score(argument))
        engine.close()
    except BaseException:  # vLLM ends processes by SystemExit, too; the parent prints it
        pipe.send({"error": traceback.format_exc()})
        raise


def make_engine(load: Load, kind: str, directory: str, is_dummy: bool) -> Any:
    import torch
    from transformers import AutoConfig

    from hotseat.placement.memory import kv_bytes_per_token
    from hotseat.placement.shapes import from_hf_config
    from hotseat.rollout.kinds import EngineOptions, EngineSettings
    from hotseat.rollout.vllm_engine import VllmEngine, weight_names
    from hotseat.rollout.vllm_versions import Core

    has_gpu = torch.cuda.is_available()
    cache = kind == "fp8+cache"
    model_shape = from_hf_config(AutoConfig.from_pretrained(directory).to_dict())
    num_tokens = (load.num_samples + 16) * (load.max_length + 16)
    arguments: dict[str, Any] = {"load_format": "dummy"} if is_dummy else {}
    if has_gpu:  # few graphs, so that it starts sooner
        sizes = [1, 8, 32, 64, 128, load.num_samples, load.num_samples + 8]
        drafted = [(1 + NUM_DRAFTED) * size for size in (1, 8, 32, 128, load.num_samples)] if kind == "ngram" else []
        arguments["compilation_config"] = {"cudagraph_capture_sizes": sorted({*sizes, *drafted})}
    if kind == "ngram":
        method = "ngram" if find_spec("numba") is not None else "ngram_gpu"
        lookup = {"prompt_lookup_min": 3, "prompt_lookup_max": 4}
        arguments["speculative_config"] = {"method": method, "num_speculative_tokens": NUM_DRAFTED, **lookup}
    settings = EngineSettings(
        model=ModelSource(directory),
        max_length=load.max_length,
        num_slots=load.num_samples,
        eos_token_ids=(),
        dtype="bfloat16",
        num_threads=1,
        engine="vllm",
        options=EngineOptions(
            memory_share=0.2,
            cache_gib=num_tokens * kv_bytes_per_token(model_shape, 1 if cache else 2) / 2**30 + 0.25,
            fp8_weights=kind.startswith("fp8"),
            fp8_cache=cache,
            engine_args=arguments,
        ),
    )
    names = weight_names(ModelSource(directory))
    core = Core(settings)
    return VllmEngine(core, names, max_length=load.max_length, num_slots=load.num_samples, call_timeout_s=120.0)


def measure(engine: Any, load: Load, kind: str, directory: str) -> dict[str, Any]:
    """Push weights, sample, and return what it took."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hotseat.placement.role_names import Part

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(directory)
    if load.model in VOCAB_SIZES:
        model = make_weights(config, device)
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)
    weights = dict(model.state_dict())
    del model
    engine.load_weights(weights.items(), 1)
    started = time.perf_counter()
    engine.load_weights(weights.items(), 2)
    result: dict[str, Any] = {"push_s": time.perf_counter() - started}
    del weights
    if device == "cuda":
        torch.cuda.empty_cache()
    result["weights_gib"] = engine.health().resident_bytes[Part.WEIGHTS] / 2**30
    num_tokens = load.num_samples * load.num_tokens
    for temperature in TEMPERATURES.get(kind, (1.0,)):
        requests = load.requests(directory, temperature)
        times = []
        for _ in range(2):
            started = time.perf_counter()
            completions = engine.generate(requests, timeout_s=300)
            times.append(time.perf_counter() - started)
        result["greedy" if temperature == 0 else "sampled"] = num_tokens / min(times)
        if temperature == 1.0:
            result["sequences"] = [
                [*request.token_ids, *completion.token_ids]
                for request, completion in zip(requests[:NUM_SCORED], completions[:NUM_SCORED], strict=True)
            ]
            result["log_probs"] = [list(completion.log_probs) for completion in completions[:NUM_SCORED]]
            result["starts"] = [len(request.token_ids) for request in requests[:NUM_SCORED]]
    return result


def ask(pipe: Any, question: Any, seconds: float) -> Any:
    if question is not None:
        pipe.send(question)
    if not pipe.poll(max(1.0, seconds)):
        return {"error": f"no answer in {seconds:.0f} s"}
    return pipe.recv()


def gaps_in_words(scores: list[list[float]], sampled: dict[str, Any]) -> str:
    """Describe the gaps between scores of whole sequences and the log-probs that their tokens were sampled with."""
    from hotseat.algorithms.agreement import gap_statistics

    rows = zip(scores, sampled["starts"], sampled["log_probs"], strict=True)
    pairs = [pair for row, start, log_probs in rows for pair in zip(row[start:], log_probs, strict=True)]
    found = gap_statistics([mine - theirs for mine, theirs in pairs])
    return f"median {found.median:.2e}, p90 {found.p90:.2e}, mean {found.mean:+.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["1.5B", "8B"], choices=list(VOCAB_SIZES))
    parser.add_argument("--model", type=Path, help="a checkpoint, instead of shapes with random weights")
    parser.add_argument("--engines", nargs="+", default=["bf16", "fp8", "fp8+cache"])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=240.0, help="all in all; what is not done by then is left out")
    args = parser.parse_args()
    need_gpu()
    end = time.monotonic() + args.seconds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        cases = {}
        for model in [str(args.model.expanduser())] if args.model else args.shapes:
            directory = model
            if not args.model:
                directory = f"{folder}/{model}"
                shape(model, eos_token_id=VOCAB_SIZES[model] - 1).save_pretrained(directory)
            for kind in args.engines:
                here, there = context.Pipe()
                load = Load(model, args.samples, args.tokens)
                arguments = (there, load, kind, directory, args.model is None)
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                cases[model, kind] = here, process
        print(f"{args.samples} samples of {args.tokens} tokens", flush=True)
        starts = {case: ask(pipe, None, end - time.monotonic()) for case, (pipe, _) in cases.items()}
        references: dict[str, dict[str, Any]] = {}
        for (model, kind), (pipe, process) in cases.items():
            label = f"{Path(model).name:>6} {kind:<10}"
            started = starts[model, kind]
            result = started if "error" in started else ask(pipe, ("measure", None), end - time.monotonic())
            if "error" in result:
                print(f"{label} failed: {result['error']}", flush=True)
            else:
                line = f"{label} {result['sampled']:>9,.0f} tokens/s"
                if "greedy" in result:
                    line += f", greedy {result['greedy']:>9,.0f}"
                line += f"; weights {result['weights_gib']:.2f} GiB, push {1e3 * result['push_s']:.0f} ms"
                print(f"{line}, started in {started['start_s']:.0f} s", flush=True)
                references.setdefault(model, result)
                scores = ask(pipe, ("score", references[model]["sequences"]), end - time.monotonic())
                if "error" not in scores:
                    gaps = gaps_in_words(scores, references[model])
                    print(f"{label} gap of scores to {next(iter(args.engines))}'s samples: {gaps}", flush=True)
                    own = ask(pipe, ("score", result["sequences"]), end - time.monotonic())
                    if "error" not in own:
                        print(f"{label} gap of scores to its own samples: {gaps_in_words(own, result)}", flush=True)
                pipe.send(None)
            process.join(20 if "error" not in result else 1)
            if process.is_alive():
                process.kill()


if __name__ == "__main__":
    main()
