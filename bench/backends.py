"""FSDP2 against DeepSpeed's ZeRO stages 2 and 3 on the same updates: tokens/s and peak memory.

With a GPU: a model of Qwen2.5-1.5B's shape without biases, with random weights, in pure bf16 and in bf16 with fp32
masters, packed and with compiled layers; an update is 64 sequences of 535 tokens in two micro-batches. Beside it FSDP2
with Liger's kernels and with neither, and ZeRO stage 3 with optimizer state in host memory on a 3B shape, for two
updates. Only if named: ZeRO with the whole model compiled by DeepSpeed, which takes minutes. Without a GPU: a tiny
model in fp32 and four sequences.

Each case runs in a fresh process; the best update after the first counts.

    python bench/backends.py                              every case
    python bench/backends.py --only fsdp-bf16 deep2-bf16  some
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

LENGTH, PROMPT_LENGTH = 535, 23
SHAPES = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
VOCAB_SIZES = {"1.5B": 151_936, "3B": 151_936, "tiny": 1024}


@dataclass(frozen=True)
class Case:
    model: str
    precision: str
    stage: int | None  # of ZeRO; None: FSDP2
    num_updates: int = 5
    num_sequences: int = 64  # of an update, which is two micro-batches
    adam_offload: bool = False
    gradient_checkpointing: bool = False
    layers: str = "compiled"  # or "eager", or with Liger's kernels: "liger"; or "whole": DeepSpeed compiles the model


BACKENDS = {"fsdp": None, "zero2": 2, "zero3": 3}
GPU_CASES = {
    f"{backend}-{name}": Case("1.5B", precision, stage)
    for name, precision in (("bf16", "bf16"), ("master", "bf16_master"))
    for backend, stage in BACKENDS.items()
} | {
    "liger-bf16": Case("1.5B", "bf16", None, layers="liger"),
    "eager-bf16": Case("1.5B", "bf16", None, layers="eager"),
    "offload-3B": Case("3B", "bf16_master", 3, num_updates=2, adam_offload=True, gradient_checkpointing=True),
}
NAMED_CASES = {
    # Passes of its own come with the sixth update.
    f"deep{stage}-{name}": Case("1.5B", precision, stage, num_updates=9, layers="whole")
    for name, precision in (("bf16", "bf16"), ("master", "bf16_master"))
    for stage in (1, 2, 3)
}
CPU_CASES = {f"{backend}-tiny": Case("tiny", "fp32", stage, num_sequences=4) for backend, stage in BACKENDS.items()}

ALL_CASES = GPU_CASES | NAMED_CASES | CPU_CASES


def make_model(name: str, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[name],
        vocab_size=VOCAB_SIZES[name],
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.device(device):  # random weights are made where that is fast
        return LlamaForCausalLM(config)


def make_batch(vocab_size: int, num_sequences: int) -> Any:
    import torch

    from hotseat.types import MicroBatch

    offsets = torch.tensor([0, *itertools.accumulate([LENGTH] * num_sequences)])
    num_tokens = int(offsets[-1])
    return MicroBatch(
        token_ids=torch.randint(0, vocab_size, (num_tokens,)),
        offsets=offsets,
        mask=torch.arange(num_tokens) % LENGTH >= PROMPT_LENGTH,
        weights=torch.full((num_tokens,), 1 / num_tokens),
        sample_ids=tuple(map(str, range(num_sequences))),
    )


def measure(case: Case) -> dict[str, Any]:
    import torch

    from hotseat.loop.workers.objectives import SftObjective
    from hotseat.train.backend import TrainOptions, ZeroOptions
    from hotseat.train.make import make_backend
    from hotseat.train.packing import split_by_tokens

    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_compiled = {"compiled": True, "eager": False, "liger": None, "whole": None}
    zero = ZeroOptions(case.stage or 0, adam_offload=case.adam_offload, deepcompile=case.layers == "whole")
    options = TrainOptions(
        precision=case.precision,  # type: ignore[arg-type]
        compile=is_compiled[case.layers] if device == "cuda" else False,
        liger_kernel=case.layers == "liger",
        gradient_checkpointing=case.gradient_checkpointing,
        backend="fsdp" if case.stage is None else "deepspeed",
        zero=None if case.stage is None else zero,
    )
    backend = make_backend(make_model(case.model, device), options, device=device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    batch = make_batch(VOCAB_SIZES[case.model], case.num_sequences)
    cut = split_by_tokens(batch, case.num_sequences // 2 * LENGTH)
    for _ in range(case.num_updates):
        start = time.perf_counter()
        losses.append(backend.update(cut, SftObjective().loss, 1.0).loss)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    backend.close()
    return {
        **asdict(case),
        "tokens_per_s": batch.num_tokens / min(seconds[1:]),
        "peak_gib": peak,
        "seconds": seconds,
        "losses": losses,
    }


def print_table(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"updates of sequences of {LENGTH} tokens")
    for column in ("case", "model", "precision", "tokens/s", "to FSDP2's", "peak GiB", "to FSDP2's", "s per update"):
        table.add_column(column, justify="left" if column in ("case", "model", "precision") else "right")
    for name, found in results.items():
        beside = results.get(f"fsdp-{name.split('-')[1]}")
        speed = f"{found['tokens_per_s'] / beside['tokens_per_s']:.2f}" if beside else ""
        memory = f"{found['peak_gib'] / beside['peak_gib']:.2f}" if beside else ""
        row = [name, found["model"], found["precision"], f"{found['tokens_per_s']:,.0f}", speed]
        table.add_row(*row, f"{found['peak_gib']:.1f}", memory, f"{min(found['seconds'][1:]):.3f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help=", ".join(ALL_CASES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measure(ALL_CASES[arguments.one])))
        return
    import torch

    cases = GPU_CASES if torch.cuda.is_available() else CPU_CASES
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.only or cases:
        ended = subprocess.run([sys.executable, __file__, "--one", name], stdout=subprocess.PIPE, text=True)
        if ended.returncode:
            print(f"{name}: exit {ended.returncode}", flush=True)
            continue
        line = ended.stdout.strip().splitlines()[-1]
        results[name] = json.loads(line)
        print(json.dumps({"case": name, **results[name]}), flush=True)
    print_table(results)


if __name__ == "__main__":
    main()
