"""Tokens per second of rollout engines on one GPU, beside vLLM alone, and as a share of the memory bandwidth.

A model of a real shape with random weights answers 128 prompts of 60 to 180 tokens, 8 answers of 124 to 400 tokens to
each (262 on average), with a seed each, at temperature 1. Each engine runs in a process of its own, which takes all
numbers of sequences in turn. The best of the runs counts; in the first one kernels are compiled and graphs captured.
"vllm*3" are three engines with a third of the prompts each. The bound is the time in which the device could read the
weights once per step, and the keys and values of every sequence in each of its steps.

    python bench/rollout_throughput.py                                  # the transformers engine, 0.5B
    python bench/rollout_throughput.py --models 135M 0.5B 1.5B --engines transformers vllm "vllm*3" vllm-alone
    python bench/rollout_throughput.py --engines vllm-alone --unseeded --slots 256 512 1024   # vLLM's best settings
    python bench/rollout_throughput.py --engines vllm --sequences 256 1024 --profile          # a decode step's parts
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import product
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
LONGEST_PROMPT = 180
READY = "ready "  # how an engine's process begins an answer; it prints other lines for the reader


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


def max_length(answer_tokens: Sequence[int]) -> int:
    return -(-(LONGEST_PROMPT + answer_tokens[1]) // 64) * 64


def make_requests(vocab_size: int, num_sequences: int, answer_tokens: Sequence[int]) -> list[Request]:
    rng = random.Random(0)
    requests: list[Request] = []
    for prompt in range(num_sequences // 8):
        token_ids = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(60, LONGEST_PROMPT)))
        for sample in range(8):
            length = rng.randint(*answer_tokens)
            sampling = Sampling(max_new_tokens=length, ignore_eos=True, stop_token_ids=(vocab_size - 1,))
            requests.append(Request(f"{prompt}/{sample}", token_ids, sampling, seed=len(requests)))
    return requests


def key_bytes(model: str) -> int:
    """Return the bytes of a token's keys and values in 16 bits."""
    sizes = SHAPES[model][1]
    heads = sizes.get("num_key_value_heads", sizes["num_attention_heads"])
    return 2 * 2 * sizes["num_hidden_layers"] * heads * (sizes["hidden_size"] // sizes["num_attention_heads"])


def bound_s(model: str, num_sequences: int, answer_tokens: Sequence[int], bytes_per_s: float) -> float:
    """Return the time in which the device reads what decoding reads: keys and values, and weights once per step."""
    from transformers import AutoConfig

    kind, sizes = SHAPES[model]
    config = AutoConfig.for_model(kind, **sizes)
    requests = make_requests(config.vocab_size, num_sequences, answer_tokens)
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


def run_ours(args: argparse.Namespace, engine: str, say: Callable[[str], object]) -> None:
    """Start an engine, and generate whenever a line comes in."""
    from hotseat.rollout.kinds import EngineOptions, EngineProcess, EngineSettings, engine_kind

    folder, [slots] = Path(args.folder), args.slots
    device = torch.device("cuda", 0) if has_gpu() else torch.device("cpu")
    is_sized = engine_entry(engine).memory_share is not None
    options = EngineOptions(
        logs=str(folder / "logs"),
        prefix_caching=True,
        memory_share=0.9 / args.beside if is_sized else None,
        cache_gib=cache_bytes(args) / 2**30 if is_sized and args.beside > 1 else None,
    )
    settings = EngineSettings(
        model=ModelSource(str(folder)),
        max_length=max_length(args.answer_tokens),
        num_slots=slots,
        eos_token_ids=(),
        dtype="bfloat16" if has_gpu() else "float32",
        num_threads=2,
        num_kept_prompts=256,
        engine=engine,
        options=options,
    )
    made = engine_kind(engine).make(settings, EngineProcess(0, device, is_own=True))
    if engine == "vllm":
        say(described(made._core._core.vllm_config))  # type: ignore[attr-defined]

    def work(asked: dict[str, Any]) -> int:
        requests = requests_of(args, asked["sequences"])
        if not asked["profile"]:
            return sum(len(each.token_ids) for each in made.generate(requests))
        from lib.step_times import places_of, step_table

        least = args.answer_tokens[0]
        first = max(1, least // 5)
        lines = step_table(made, places_of(made), lambda: made.generate(requests), first, min(first + 100, least - 3))
        for line in lines:
            say(f"    {line}")
        return 0

    answer_lines(work, say)
    made.close()


def cache_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of a KV cache with room for all slots at their longest."""
    return args.slots[0] * max_length(args.answer_tokens) * key_bytes(args.models[0])


def requests_of(args: argparse.Namespace, num_sequences: int) -> list[Request]:
    """Return every `count`-th prompt's requests, from the `part`-th on."""
    vocab_size = json.loads((Path(args.folder) / "config.json").read_text())["vocab_size"]
    part, count = args.part
    requests = make_requests(vocab_size, num_sequences, args.answer_tokens)
    return [request for index, request in enumerate(requests) if index // 8 % count == part]


def answer_lines(work: Callable[[dict[str, Any]], int], say: Callable[[str], object]) -> None:
    """Work for each line that comes in, and answer it with what the work returned."""
    say(f"{READY}0")
    for line in sys.stdin:
        say(f"{READY}{work(json.loads(line))}")


def described(config: Any) -> str:
    """Return what vLLM made of its arguments."""
    scheduler, graphs = config.scheduler_config, config.compilation_config
    chosen = {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": scheduler.async_scheduling,
        "max_cudagraph_capture_size": graphs.max_cudagraph_capture_size,
        "cudagraph_mode": getattr(graphs.cudagraph_mode, "name", None),
        "v2_model_runner": config.use_v2_model_runner,
        "gpu_memory_utilization": round(config.cache_config.gpu_memory_utilization, 3),
    }
    return f"    vLLM: {' '.join(f'{name}={value}' for name, value in chosen.items())}"


def run_vllm_alone(args: argparse.Namespace, say: Callable[[str], object]) -> None:
    """Run vLLM's own front end with the settings that its documentation recommends for throughput."""
    from vllm import LLM, SamplingParams

    chosen: dict[str, Any] = {
        "model": args.folder,
        "skip_tokenizer_init": True,
        "max_model_len": max_length(args.answer_tokens),
        "max_num_seqs": args.slots[0],
        "max_num_batched_tokens": 16384,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "gpu_memory_utilization": 0.85 / args.beside,
    }
    if args.beside > 1 or not has_gpu():
        chosen["kv_cache_memory_bytes"] = cache_bytes(args)
    if not has_gpu():
        chosen |= {"dtype": "float32", "enforce_eager": True}
    llm = LLM(**chosen | args.set)
    say(described(llm.llm_engine.vllm_config))

    def work(asked: dict[str, Any]) -> int:
        requests = requests_of(args, asked["sequences"])
        parameters = [
            SamplingParams(
                temperature=1.0,
                seed=request.seed if asked["seeded"] else None,
                max_tokens=request.sampling.max_new_tokens,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    answer_lines(work, say)


@dataclass(frozen=True)
class Case:
    """Engines of one kind that work together. engine: by name, `*` and a number if there are several."""

    engine: str
    slots: int

    @property
    def count(self) -> int:
        return int(self.engine.partition("*")[2] or 1)

    def start(self, stack: ExitStack, folder: Path, flags: Sequence[str]) -> Started:
        name = self.engine.partition("*")[0]
        command = [sys.executable, __file__, "--folder", str(folder), "--engines", name, "--slots", str(self.slots)]
        processes, logs = [], []
        for part in range(self.count):
            logs.append(folder / f"{self.engine}-{self.slots}-{part}.log".replace("*", "-of-"))
            process = subprocess.Popen(
                [*command, *flags, "--part", str(part), str(self.count)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(logs[-1].open("w")),
                text=True,
                bufsize=1,
            )
            processes.append(stack.enter_context(process))
        return Started(self, processes, logs, time.perf_counter())


@dataclass(frozen=True)
class Started:
    """Processes of a case, which may have ended."""

    case: Case
    processes: list[subprocess.Popen[str]]
    logs: list[Path]
    began_s: float

    def wait(self) -> int | None:
        """Wait until all have answered, and print their rows; return the sum of the answers, None if one ended."""
        answers = []
        for process, log in zip(self.processes, self.logs, strict=True):
            assert process.stdout is not None
            for line in iter(process.stdout.readline, ""):
                if line.startswith(READY):
                    answers.append(int(line.removeprefix(READY)))
                    break
                if process is self.processes[0]:
                    print(line.rstrip(), flush=True)
            else:
                print(f"{self.case}: a process ended", *log.read_text().splitlines()[-25:], sep="\n  ", flush=True)
                return None
        return sum(answers)

    def measure(self, **asked: Any) -> tuple[int, float] | None:
        """Have all processes work once; return tokens and seconds, None if one ended."""
        began_s = time.perf_counter()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"seeded": True, "profile": False} | asked) + "\n")
        tokens = self.wait()
        return None if tokens is None else (tokens, time.perf_counter() - began_s)

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()


def run_case(args: argparse.Namespace) -> None:
    """Run an engine in this process; what libraries print goes where errors go."""
    [engine] = args.engines
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    say = functools.partial(print, file=answers, flush=True)
    if engine == "vllm-alone":
        run_vllm_alone(args, say)
    else:
        run_ours(args, engine, say)


def measure_case(
    args: argparse.Namespace, model: str, started: Started, start_s: float, bandwidth: float
) -> Iterator[list[str]]:
    """Measure every number of sequences, and yield rows."""
    case = started.case
    is_alone = case.engine == "vllm-alone"
    for sequences, seeded in product(args.sequences, [True, False] if is_alone and args.unseeded else [True]):
        runs: list[tuple[int, float]] = []
        for _ in range(args.repeats):
            run = started.measure(sequences=sequences, seeded=seeded)
            if run is None:
                return
            runs.append(run)
        best = min(seconds for _, seconds in runs)
        bound = bound_s(model, sequences, args.answer_tokens, bandwidth)
        name = case.engine if seeded else f"{case.engine}-unseeded"
        times = [f"{start_s:.1f}", f"{runs[0][1]:.2f}", f"{best:.2f}"]
        yield [
            model,
            name,
            str(sequences),
            str(case.slots),
            *times,
            f"{runs[-1][0] / best:,.0f}",
            f"{bound / best:.1%}",
        ]
        if args.profile and not is_alone and case.count == 1:
            print(f"profile of {model} {case.engine}, {sequences} sequences, {case.slots} slots:", flush=True)
            if started.measure(sequences=sequences, profile=True) is None:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small = not has_gpu()
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["tiny" if small else "0.5B"])
    engines = "transformers, vllm, vllm*3 (three of them), vllm-alone, vllm-alone@512 (with so many slots)"
    parser.add_argument("--engines", nargs="+", default=["transformers"], help=engines)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16 if small else 1024])
    parser.add_argument("--slots", type=int, nargs="+", help="sequences at a time; an engine for each number")
    parser.add_argument("--answer-tokens", type=int, nargs=2, default=[124, 400], metavar=("LOW", "HIGH"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--unseeded", action="store_true", help="measure vllm-alone without seeds, too")
    parser.add_argument("--together", action="store_true", help="start all engines of a model before measuring any")
    parser.add_argument("--set", type=json.loads, default={}, help="more arguments of vllm-alone, in JSON")
    parser.add_argument("--profile", action="store_true", help="where the time of steps goes, after each row")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # in the process of an engine
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--beside", type=int, default=1, help=argparse.SUPPRESS)  # engines on the device
    args = parser.parse_args()
    if args.folder:
        run_case(args)
        return
    bandwidth = read_bandwidth()
    torch.cuda.empty_cache()
    table = Table(title=f"Rollout on {torch.cuda.get_device_name() if has_gpu() else 'a CPU'}")
    columns = ("model", "engine", "sequences", "slots", "start s", "first s", "best s", "tokens/s", "of the bound")
    for column in columns:
        table.add_column(column, justify="right")
    print(*columns, sep=", ", flush=True)
    for model in args.models:
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            make_checkpoint(model, Path(directory))
            if has_gpu():
                torch.cuda.empty_cache()
            cases = []
            for engine, _, slots in (each.partition("@") for each in args.engines):
                own = engine_entry("vllm").num_slots if engine.partition("*")[0] == "vllm" else None
                chosen = [int(slots)] if slots else args.slots or [own or max(args.sequences)]
                cases += [Case(engine, number) for number in chosen]
            flags = ["--models", model, "--answer-tokens", *map(str, args.answer_tokens), "--set", json.dumps(args.set)]
            batches = [cases] if args.together else [[case] for case in cases]
            for batch in batches:
                beside = ["--beside", str(sum(case.count for case in batch))]
                every = [case.start(stack, Path(directory), [*flags, *beside]) for case in batch]
                ready = [
                    (started, time.perf_counter() - started.began_s) for started in every if started.wait() is not None
                ]
                for started, start_s in ready:
                    for row in measure_case(args, model, started, start_s, bandwidth):
                        print(*row, flush=True)
                        table.add_row(*row)
                    started.end()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
