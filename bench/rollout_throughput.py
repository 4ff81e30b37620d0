"""Tokens per second of rollout engines on one GPU, beside vLLM alone, and as a share of the memory bandwidth.

A model of a real shape with random weights answers 128 prompts of 60 to 180 tokens, 8 answers of 124 to 400 tokens to
each (262 on average), with a seed each, at temperature 1. Each engine runs in a process of its own, the first run warms
it up, and the best of the others counts. "vllm*3" are three engines with a third of the prompts each. The bound is the
time in which the device could read the weights once per step, and the keys and values of every sequence in each of its
steps.

    python bench/rollout_throughput.py                                  # the transformers engine, 0.5B
    python bench/rollout_throughput.py --models 135M 0.5B 1.5B --engines transformers vllm "vllm*3" vllm-alone
    python bench/rollout_throughput.py --profile                        # kernels by time, too
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lib.devices import has_gpu
from rich.console import Console
from rich.table import Table

from hotseat.model_source import ModelSource
from hotseat.registry.engines import engine_entry
from hotseat.types import Request, Sampling

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llama", {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}),
    "135M": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "0.5B": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
    "1.5B": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
    ),
    "8B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
}
MAX_LENGTH = 640
READY = "the engine is ready"


def make_checkpoint(model: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = SHAPES[model]
    config = AutoConfig.for_model(kind, **{"tie_word_embeddings": True, "max_position_embeddings": 4096} | sizes)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if has_gpu() else "cpu"):
        made = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    made.save_pretrained(folder)


def make_requests(vocab_size: int, num_sequences: int) -> list[Request]:
    rng = random.Random(0)
    requests = []
    for prompt in range(num_sequences // 8):
        token_ids = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(60, 180)))
        for sample in range(8):
            sampling = Sampling(max_new_tokens=rng.randint(124, 400), ignore_eos=True, stop_token_ids=(vocab_size - 1,))
            requests.append(Request(f"{prompt}/{sample}", token_ids, sampling, seed=len(requests)))
    return requests


def key_bytes(model: str) -> int:
    """Return the bytes of a token's keys and values in 16 bits."""
    sizes = SHAPES[model][1]
    heads = sizes.get("num_key_value_heads", sizes["num_attention_heads"])
    return 2 * 2 * sizes["num_hidden_layers"] * heads * (sizes["hidden_size"] // sizes["num_attention_heads"])


def bound_s(model: str, requests: list[Request], bytes_per_s: float) -> float:
    """Return the time in which the device reads what decoding reads: keys and values, and weights once per step."""
    from transformers import AutoConfig

    kind, sizes = SHAPES[model]
    config = AutoConfig.for_model(kind, **sizes)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    inner = 3 * config.hidden_size * config.intermediate_size
    attention = (2 + 2 * heads / config.num_attention_heads) * config.hidden_size**2
    weights = 2 * (config.num_hidden_layers * (inner + attention) + config.vocab_size * config.hidden_size)
    num_steps = max(request.sampling.max_new_tokens for request in requests)
    keys = sum(
        request.sampling.max_new_tokens * (len(request.token_ids) + request.sampling.max_new_tokens / 2)
        for request in requests
    )
    return (num_steps * weights + keys * key_bytes(model)) / bytes_per_s


def read_bandwidth() -> float:
    """Measure how many bytes of its memory the device reads and writes in a second, by a copy."""
    if not has_gpu():
        return float("nan")
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return 2 * source.nbytes / min(times)


# --- a process for each engine ----------------------------------------------------------------------------------------


def run_ours(args: argparse.Namespace, engine: str, count: int) -> dict[str, Any]:
    """Start one of `count` engines, and generate whenever a line comes in."""
    from hotseat.rollout.kinds import EngineOptions, EngineProcess, EngineSettings, engine_kind

    folder, [model], [slots] = Path(args.folder), args.models, args.slots
    device = torch.device("cuda", 0) if has_gpu() else torch.device("cpu")
    entry = engine_entry(engine)
    sequences = entry.num_slots or slots
    share = None if entry.memory_share is None else entry.memory_share / count
    options = EngineOptions(
        logs=str(folder / "logs"),
        prefix_caching=True,
        memory_share=share,
        cache_gib=None if share is None or count == 1 else 2 * sequences * MAX_LENGTH * key_bytes(model) / 2**30,
    )
    settings = EngineSettings(
        model=ModelSource(str(folder)),
        max_length=MAX_LENGTH,
        num_slots=sequences,
        eos_token_ids=(),
        dtype="bfloat16" if has_gpu() else "float32",
        num_threads=2,
        num_kept_prompts=256,
        engine=engine,
        options=options,
    )
    made = engine_kind(engine).make(settings, EngineProcess(0, device, is_own=True))
    requests = requests_of(args)
    num_tokens = answer_lines(lambda: sum(len(each.token_ids) for each in made.generate(requests)))
    if args.profile:
        print(profile(lambda: made.generate(requests)))
    made.close()
    return {"tokens": num_tokens, "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if has_gpu() else 0.0}


def requests_of(args: argparse.Namespace) -> list[Request]:
    """Return every `count`-th prompt's requests, from the `part`-th on."""
    vocab_size = json.loads((Path(args.folder) / "config.json").read_text())["vocab_size"]
    part, count = args.part
    requests = make_requests(vocab_size, args.sequences[0])
    return [request for index, request in enumerate(requests) if index // 8 % count == part]


def answer_lines(work: Callable[[], int]) -> int:
    """Work for each line that comes in, and answer it; return what the last work returned."""
    result = 0
    print(READY, flush=True)
    for _ in sys.stdin:
        result = work()
        print(READY, flush=True)
    return result


def profile(work: Any) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)[:18]
    total = sum(row.self_device_time_total for row in recorded.key_averages())
    lines = [f"kernels: {total / 1e6:.2f} s in all"]
    lines += [f"{row.self_device_time_total / 1e6:8.3f} s {row.count:7d} {row.key[:90]}" for row in rows]
    return "\n".join(lines)


def run_vllm_alone(args: argparse.Namespace) -> dict[str, Any]:
    """Run vLLM's own front end with the settings that its documentation recommends for throughput."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.folder,
        skip_tokenizer_init=True,
        max_model_len=MAX_LENGTH,
        max_num_seqs=args.slots[0],
        gpu_memory_utilization=0.85,
        max_num_batched_tokens=16384,
        enable_prefix_caching=True,
        generation_config="vllm",
    )
    requests = requests_of(args)
    parameters = [
        SamplingParams(
            temperature=1.0,
            seed=None if args.unseeded else request.seed,
            max_tokens=request.sampling.max_new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]

    def work() -> int:
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return {"tokens": answer_lines(work), "memory_gib": float("nan")}


@dataclass(frozen=True)
class Case:
    """A cell of the table. engine: by name, `*` and a number if there are several."""

    model: str
    engine: str
    sequences: int
    slots: int

    def measure(self, directory: str, num_repeats: int, flags: Sequence[str]) -> dict[str, Any] | None:
        """Return tokens, seconds of the start and of each repetition; None if a process ended."""
        name, _, several = self.engine.partition("*")
        count, began_s = int(several or 1), time.perf_counter()
        command = [sys.executable, __file__, "--folder", directory, "--models", self.model, "--engines", name]
        command += ["--slots", str(self.slots), "--sequences", str(self.sequences), *flags]
        with ExitStack() as stack:
            engines = [
                stack.enter_context(
                    subprocess.Popen(
                        [*command, "--part", str(part), str(count)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                        bufsize=1,
                    )
                )
                for part in range(count)
            ]
            if not all(_wait(engine) for engine in engines):
                return None
            start_s, times = time.perf_counter() - began_s, []
            for _ in range(num_repeats):
                began_s = time.perf_counter()
                for engine in engines:
                    assert engine.stdin is not None
                    engine.stdin.write("again\n")
                if not all(_wait(engine) for engine in engines):
                    return None
                times.append(time.perf_counter() - began_s)
            texts = [engine.communicate()[0].splitlines() for engine in engines]
        if any(engine.returncode for engine in engines):
            return None
        print("\n".join(texts[0][:-1]))
        return {"tokens": sum(json.loads(lines[-1])["tokens"] for lines in texts), "times": times, "start_s": start_s}


def _wait(engine: subprocess.Popen[str]) -> bool:
    """Wait until a process is ready; return whether it still runs."""
    assert engine.stdout is not None
    return any(line.strip() == READY for line in iter(engine.stdout.readline, ""))


def run_case(args: argparse.Namespace) -> None:
    """Run an engine in this process."""
    [engine] = args.engines
    made = run_vllm_alone(args) if engine == "vllm-alone" else run_ours(args, engine, args.part[1])
    print(json.dumps(made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small = not has_gpu()
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["tiny" if small else "0.5B"])
    parser.add_argument("--engines", nargs="+", default=["transformers"], help="transformers, vllm, vllm*3, vllm-alone")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16 if small else 1024])
    parser.add_argument("--slots", type=int, nargs="+", help="sequences at a time; as many as there are unless given")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--unseeded", action="store_true", help="vllm-alone samples with one generator for all requests"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # in the process of an engine
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        run_case(args)
        return
    bandwidth = read_bandwidth()
    torch.cuda.empty_cache()
    flags = ["--profile"] * args.profile + ["--unseeded"] * args.unseeded
    table = Table(title=f"Rollout on {torch.cuda.get_device_name() if has_gpu() else 'a CPU'}")
    for column in ("model", "engine", "sequences", "slots", "start s", "first s", "best s", "tokens/s", "of the bound"):
        table.add_column(column, justify="right")
    for model in args.models:
        with tempfile.TemporaryDirectory() as directory:
            make_checkpoint(model, Path(directory))
            if has_gpu():
                torch.cuda.empty_cache()
            for case in (
                Case(model, engine, sequences, slots)
                for sequences in args.sequences
                for engine in args.engines
                for slots in (args.slots or [sequences])
            ):
                result = case.measure(directory, args.repeats, flags)
                if result is None:
                    print(f"{case}: a process ended")
                    continue
                best = min(result["times"][1:])
                bound = bound_s(model, make_requests(100, case.sequences), bandwidth)
                row = [
                    model,
                    case.engine,
                    str(case.sequences),
                    str(case.slots),
                    f"{result['start_s']:.1f}",
                    f"{result['times'][0]:.2f}",
                    f"{best:.2f}",
                    f"{result['tokens'] / best:,.0f}",
                    f"{bound / best:.1%}",
                ]
                print(*row, flush=True)
                table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
