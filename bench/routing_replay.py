"""A mixture of experts in bf16: how far engine and trainer are apart with and without replayed routing, and how long a
training step takes with grouped matmuls, a loop over experts, and a dense model of the same active size.

`gap`: the model samples its own answers at temperature 1; the trainer scores the same tokens, each to the experts that
its own routers choose, and to those that the engine recorded. A gap is the trainer's log-prob of a sampled token minus
the engine's; clipped are tokens whose ratio, exp(gap), is outside 0.8 to 1.2. Moved is the share of a token's experts,
over all layers, that the trainer would not have chosen. `step`: forward, backward and update of some thousand tokens.

    python bench/routing_replay.py gap step                                   tiny, for a CPU
    python bench/routing_replay.py gap --shape qwen3 --layers 8               Qwen3-30B-A3B's shape, cut in depth
    python bench/routing_replay.py gap --shape qwen3 --layers 8 --engine vllm
    python bench/routing_replay.py step --shape qwen3 --layers 4

Weights are random, with a final norm of weight 6, so that logits spread as those of a trained model do.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hotseat.algorithms.routing import ROUTING, RoutingRecorder, RoutingShape, unknown_routing
from hotseat.model_source import ModelSource
from hotseat.rollout.kinds import EngineOptions, EngineProcess, EngineSettings, engine_kind
from hotseat.train.backend import AdamW, TrainOptions
from hotseat.train.make import make_backend
from hotseat.train.packing import split_by_tokens, take
from hotseat.types import Completion, MicroBatch, Request, Sampling

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
NORM_WEIGHT = 6.0
PROMPT, MAX_LENGTH = 32, 512
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 32_768,
    },
    "tiny": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "vocab_size": 1024,
        "initializer_range": 0.1,
    },
}


def mixture_config(shape: str, layers: int) -> Any:
    sizes = SHAPES[shape]
    return transformers.Qwen3MoeConfig(
        **{**sizes, "intermediate_size": sizes["moe_intermediate_size"]},
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )


def dense_config(shape: str, layers: int) -> Any:
    """Return a dense config with as many active parameters as the mixture has."""
    sizes = dict(SHAPES[shape])
    width = sizes.pop("moe_intermediate_size") * sizes.pop("num_experts_per_tok")
    del sizes["num_experts"]
    return transformers.Qwen3Config(
        **sizes,
        intermediate_size=width,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    with DEVICE:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.model.norm.weight.data.fill_(NORM_WEIGHT)
    return model


# --- gap --------------------------------------------------------------------------------------------------------------


def answers(folder: Path, engine: str, num_answers: int, num_tokens: int) -> tuple[list[Request], list[Completion]]:
    settings = EngineSettings(
        ModelSource(str(folder)),
        max_length=MAX_LENGTH,
        num_slots=64,
        eos_token_ids=(),
        dtype="bfloat16",
        num_threads=2,
        engine=engine,
        returns_routing=True,
        options=EngineOptions(prefix_caching=engine == "vllm", memory_share=0.4, logs=str(folder)),
    )
    vocab_size = settings.model.config().vocab_size
    pick = random.Random(0)
    prompts = [tuple(pick.randrange(vocab_size) for _ in range(PROMPT)) for _ in range(num_answers)]
    requests = [Request(str(at), prompt, Sampling(num_tokens), at) for at, prompt in enumerate(prompts)]
    made = engine_kind(engine).make(settings, EngineProcess(0, DEVICE))
    try:
        return requests, made.generate(requests)
    finally:
        made.close()


def batch_of(requests: list[Request], completions: list[Completion]) -> MicroBatch:
    ids, masks, log_probs, routing = [], [], [], []
    for request, completion in zip(requests, completions, strict=True):
        prompt, length = len(request.token_ids), len(request.token_ids) + len(completion.token_ids)
        assert completion.routing is not None, f"{request.id}: no routing"
        assert len(completion.routing) == length - 1, f"{request.id}: routing of {len(completion.routing)} tokens"
        ids.append(torch.tensor([*request.token_ids, *completion.token_ids]))
        masks.append(torch.arange(length) >= prompt)
        log_probs.append(torch.cat([torch.zeros(prompt), torch.tensor(completion.log_probs)]))
        known = torch.from_numpy(completion.routing)
        routing.append(torch.cat([known, unknown_routing(1, known)]))
    fields = {"engine": log_probs, ROUTING: routing}
    return MicroBatch.from_segments(ids, masks, [request.id for request in requests], fields)


def moved_share(recorder: RoutingRecorder, backend: Any, batch: MicroBatch, shape: RoutingShape) -> float:
    """Return the share of recorded experts that the trainer's routers do not choose, of the first 16 answers."""
    moved = total = 0
    plain = replace(batch, fields={})
    for segment in range(min(16, batch.num_segments)):
        backend.log_probs([take(plain, [segment])], 1.0)
        begin, end = batch.offsets[segment : segment + 2].tolist()
        recorded, own = (
            rows.cpu().long().view(len(rows), shape.num_layers, shape.num_chosen)
            for rows in (batch.fields[ROUTING][begin : end - 1], recorder.last()[: end - begin - 1])
        )
        is_same = (recorded[..., :, None] == own[..., None, :]).any(-1)
        moved, total = moved + int((~is_same).sum()), total + is_same.numel()
    return moved / total


def gaps(shape: str, layers: int, engine: str, num_answers: int, num_tokens: int) -> None:
    table = Table(title=f"{shape}, {layers} layers, {engine}, bf16, {num_answers} answers of {num_tokens} tokens")
    for name in ("routing", "mean |gap|", "p99 |gap|", "largest", "clipped", "moved"):
        table.add_column(name)
    with tempfile.TemporaryDirectory() as folder:
        config = mixture_config(shape, layers)
        model = random_model(config)
        model.save_pretrained(folder)
        del model
        free()
        # In a process of its own, which takes with it what vLLM leaves behind.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            requests, completions = child.submit(answers, Path(folder), engine, num_answers, num_tokens).result()
        batch = batch_of(requests, completions)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)
    recorder = RoutingRecorder(model)
    options = TrainOptions(optimizer=None, precision="bf16", replays_routing=True, compile=False)
    backend = make_backend(model, options, device=DEVICE)
    moved = moved_share(recorder, backend, batch, RoutingShape.of(config))
    for name, fields in (("own", {"engine": batch.fields["engine"]}), ("replayed", batch.fields)):
        parts = split_by_tokens(replace(batch, fields=fields), 8192)
        scores = backend.log_probs(parts, 1.0)
        pairs = zip(parts, scores, strict=True)
        gap = torch.cat([(score.cpu() - part.fields["engine"])[part.mask] for part, score in pairs]).double()
        clipped = ((gap.exp() - 1).abs() > 0.2).double().mean()
        row = gap.abs().mean(), gap.abs().quantile(0.99), gap.abs().max()
        table.add_row(
            name, *(f"{value:.4f}" for value in row), f"{clipped:.2%}", f"{moved:.2%}" if name == "own" else "0"
        )
    backend.close()
    Console(width=110).print(table)


# --- step -------------------------------------------------------------------------------------------------------------


class Likelihood:
    """A loss whose cost is that of a policy's."""

    def __call__(self, outputs: Any, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        return -(outputs.log_probs * batch.mask).sum() / max(1, int(batch.num_tokens)), {}


def steps(shape: str, layers: int, num_tokens: int, length: int) -> None:
    pick = torch.Generator().manual_seed(0)
    count = num_tokens // length
    vocab_size = SHAPES[shape]["vocab_size"]
    ids = [torch.randint(vocab_size, (length,), generator=pick) for _ in range(count)]
    batch = MicroBatch.from_segments(ids, [torch.arange(length) >= 8] * count, list(map(str, range(count))))
    batch = replace(batch, weights=batch.mask.float())
    table = Table(title=f"{shape}, {layers} layers, bf16, {num_tokens} tokens in segments of {length}, full update")
    for name in ("model", "ms per step", "tokens/s", "peak GiB"):
        table.add_column(name)
    compiled = DEVICE.type == "cuda"
    cases: list[tuple[str, Any, str | None, dict[str, Any]]] = [
        ("loop over experts", mixture_config(shape, layers), "eager", {}),
        ("grouped", mixture_config(shape, layers), None, {}),
        ("grouped, replayed", mixture_config(shape, layers), None, {"replays_routing": True}),
        ("dense of the active size", dense_config(shape, layers), None, {}),
    ]
    if compiled:
        cases += [
            ("grouped, replayed, compiled", cases[2][1], None, {"compile": True, "replays_routing": True}),
            ("dense, compiled", cases[3][1], None, {"compile": True}),
        ]
    for name, config, experts, change in cases:
        there = batch
        if change.get("replays_routing"):
            routing = RoutingShape.of(config)
            chosen = torch.rand(batch.num_tokens, routing.num_layers, routing.num_experts, generator=pick)
            chosen = chosen.topk(routing.num_chosen).indices.flatten(1).to(torch.uint8)
            there = replace(batch, fields={ROUTING: chosen})
        model = random_model(config)
        if experts is not None:
            model.set_experts_implementation(experts)
        options = TrainOptions(optimizer=AdamW(), precision="bf16", gradient_checkpointing=True, **change)
        backend = make_backend(model, options, device=DEVICE)
        del model
        backend.update([there], Likelihood(), 1.0)
        if compiled:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(5):
            synchronize()
            begin = time.perf_counter()
            backend.update([there], Likelihood(), 1.0)
            synchronize()
            times.append(time.perf_counter() - begin)
        median = sorted(times)[2]
        peak = torch.cuda.max_memory_allocated() / 2**30 if compiled else 0.0
        table.add_row(name, f"{median * 1e3:.1f}", f"{num_tokens / median:,.0f}", f"{peak:.1f}" if compiled else "-")
        backend.close()
        del backend
        free()
    Console(width=110).print(table)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["gap", "step"])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    if "gap" in arguments.what:
        gaps(arguments.shape, arguments.layers, arguments.engine, arguments.answers, arguments.answer_tokens)
    if "step" in arguments.what:
        steps(arguments.shape, arguments.layers, arguments.tokens, arguments.length)


if __name__ == "__main__":
    main()
