"""Tokens per second of the transformers engine against `model.generate`, on a batch of mixed lengths.

The same Llama of about 1M parameters, the same prompts and the same number of new tokens (8 to 128 per request, end of
sequence ignored), in one run. `model.generate` takes the requests in batches of as many as the engine has slots and
runs each batch to its longest request; only tokens that were asked for count. Each is run several times in turn and
the best time counts, since other work on the machine only ever adds to it.

Threads share one matrix product only where nobody else wants the cores: OpenBLAS waits for a thread that has lost its
core by spinning, and a step then takes ten times as long. Engines of one thread each, in processes of their own, do not
wait for each other.

    python bench/engine_throughput.py [--threads 1] [--slots 64 128 256] [--repeats 3]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from lib.shapes import dimensions
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from hotseat.rollout import SlotOptions, TransformersEngine
from hotseat.types import Request, Sampling

MAX_LENGTH = 160
VOCAB_SIZE = 256


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LENGTH, **dimensions(128, 384, 4, 4, 4))
    return LlamaForCausalLM(config).eval()


def mixed_requests(num_prompts: int, num_samples: int) -> list[Request]:
    rng = random.Random(0)
    requests = []
    for prompt in range(num_prompts):
        token_ids = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(8, 24)))
        for sample in range(num_samples):
            sampling = Sampling(max_new_tokens=rng.randint(8, 128), ignore_eos=True)
            requests.append(Request(f"{prompt}-{sample}", token_ids, sampling, seed=len(requests)))
    return requests


def run_generate(model: LlamaForCausalLM, requests: list[Request], batch_size: int) -> None:
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        length = max(len(r.token_ids) for r in batch)
        pads = [length - len(r.token_ids) for r in batch]
        tokens = torch.tensor([[0] * pad + list(r.token_ids) for pad, r in zip(pads, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (length - pad) for pad in pads])
        model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=max(r.sampling.max_new_tokens for r in batch),
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )


def run_several(engines: list[TransformersEngine], requests: list[Request]) -> None:
    futures = [engines[index % len(engines)].submit(request) for index, request in enumerate(requests)]
    for future in futures:
        future.result(timeout=3600)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    torch.get_num_threads()  # Else the first parallel operation takes the number that was set last, by an engine.
    torch.set_num_threads(args.threads)
    requests = mixed_requests(num_prompts=32, num_samples=8)
    num_tokens = sum(r.sampling.max_new_tokens for r in requests)
    runs: dict[tuple[str, int], Callable[[], object]] = {}
    engines: list[TransformersEngine] = []

    def engine(slots: int, threads: int, own_layers: bool = True) -> TransformersEngine:
        engines.append(
            TransformersEngine(
                small_llama(),
                max_length=MAX_LENGTH,
                num_slots=slots,
                num_threads=threads,
                options=SlotOptions(own_layers=own_layers),
            )
        )
        return engines[-1]

    model = small_llama()
    for slots in args.slots:
        runs["model.generate", slots] = lambda n=slots: run_generate(model, requests, n)
        theirs, ours = engine(slots, args.threads, own_layers=False), engine(slots, args.threads)
        runs["engine, model's own forward", slots] = lambda e=theirs: e.generate(requests)
        runs["engine", slots] = lambda e=ours: e.generate(requests)
        if args.threads > 1:
            several = [engine(slots // args.threads, 1) for _ in range(args.threads)]
            runs[f"{args.threads} engines of 1 thread", slots] = lambda e=several: run_several(e, requests)
    best: dict[tuple[str, int], float] = {}
    for _ in range(args.repeats):
        for key, run in runs.items():
            best[key] = min(best.get(key, float("inf")), seconds(run))
    for one in engines:
        one.close()

    num_parameters = sum(p.numel() for p in model.parameters())
    table = Table(
        title=f"{len(requests)} requests, {num_tokens} tokens, {num_parameters / 1e6:.2f}M parameters,"
        f" {args.threads} threads, best of {args.repeats}"
    )
    for column in ("", "slots", "seconds", "tokens/s", "against generate"):
        table.add_column(column, justify="left" if not column else "right")
    for (name, slots), time_s in best.items():
        ratio = best["model.generate", slots] / time_s
        table.add_row(name, str(slots), f"{time_s:.2f}", f"{num_tokens / time_s:,.0f}", f"{ratio:.2f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
