"""The canary on a real model, without rollouts: how close healthy pushes come to its limits, and which faults it sees.

Actor and engine are made as a run makes them, in this process, on the GPU if there is one. After the first push the
canary is sampled and judged. Then weights are pushed many times, with one optimizer step between pushes: AdamW with a
learning rate of 1e-6 on the policy's own answers, with advantages drawn at random. No push may raise an alarm, and the
largest statistic should stay below half of its limit.

Then digests are ignored, and each fault is put into what the actor sends: at the first push, and after a good first
push. Two faults of single steps follow: a layer that keeps its weights, and an output embedding that is no longer tied;
for these it counts pushes until the canary sees them. Digests see all of them at once, except positions, which are no
weights. For wrong positions the actor is started again from a folder whose config says another rope theta.

    python bench/canary.py --model DIR --engine vllm --dtype bf16 --pushes 500
    python bench/canary.py --model DIR --engine transformers --dtype fp32 --pushes 20 --tokens 128 --stale-pushes 3
                                                         without a GPU
    python bench/canary.py --model DIR --qwen2 ...      the same weights as a Qwen2 with biases, one of which is lost
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lib.checkpoint import SMOLLM2, existing
from torch import Tensor

from hotseat.algorithms.agreement import STATISTICS
from hotseat.cluster import Cluster
from hotseat.config.schema.rollout_options import CanaryConfig
from hotseat.errors import WeightError
from hotseat.loop.devices.held_memory import device_of_process
from hotseat.loop.rl.canary import CanaryGuard, CanarySettings
from hotseat.loop.rl.sync import PushReport, push_weights
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.model_workers import ActorWorker
from hotseat.loop.workers.objectives import SftObjective
from hotseat.loop.workers.weight_check import Canary, WeightCheck
from hotseat.model_source import ModelSource
from hotseat.rollout.kinds import EngineOptions, EngineSettings
from hotseat.train.backend import TrainOptions
from hotseat.train.schedule import Schedule
from hotseat.types import MicroBatch, Prompt
from hotseat.weights.transfer import Sender
from hotseat.weights.transports import choose_transports

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LEARNING_RATE, MAX_LENGTH = 1e-6, 320
BIASED = ("q_proj", "k_proj", "v_proj")
MOVED_SHARE = 0.5  # of the mean of queries, keys and values: all of it changes what the model says by a nat a token
SENTENCES = (
    "The old mill stands where two brooks meet. In spring the water is high, and the wheel turns day and night. Grain"
    " comes from eleven farms; 7 of them pay with money, 4 with flour. Children ask how it works, and the miller says:"
    " water pushes the wheel, the wheel turns the stone, and 3 stones make 20 sacks a day."
)
Weights = dict[str, Tensor]


class BenchActor(ActorWorker):
    """An actor that learns from the canary's answers, and can be made to send something else than it holds.

    The engine's model is not tied, so that the head can be wrong alone; it is sent the embedding twice.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._fault: str | None = None
        self._first: Weights = {}
        self._sender = Sender(self._stream, device_of_process())

    def inject(self, fault: str | None) -> None:
        self._fault = fault
        if fault is not None and not self._first:
            self._first = self._whole()

    def names(self) -> list[str]:
        return [name for name, _ in self._backend.weights(dtype=self._dtype)]

    def step(self, canary: Canary, seed: int) -> float:
        """One optimizer step on the canary's answers with random advantages; its gradient norm."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.tensor([0, *map(len, canary.sequences)])
        mask, weights = [], []
        for sequence, start in zip(canary.sequences, canary.num_prompt, strict=True):
            mask.append(torch.arange(len(sequence)) >= start)
            weights.append(mask[-1] * (torch.randn(1, generator=generator) / canary.num_sampled))
        names = tuple(f"{seed}/{index}" for index in range(len(canary.sequences)))
        tokens = torch.tensor([token for sequence in canary.sequences for token in sequence])
        batch = MicroBatch(tokens, lengths.cumsum(0), torch.cat(mask), torch.cat(weights), sample_ids=names)
        return self._backend.update([batch], SftObjective().loss, canary.temperature).grad_norm

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        if self._fault is not None:
            weights = self._whole()
            FAULTS[self._fault](weights, self._first)
            yield from weights.items()
            return
        for name, tensor in self._backend.weights(dtype=self._dtype):
            yield name, tensor
            if name == EMBEDDING:
                yield HEAD, tensor

    def _whole(self) -> Weights:
        weights = {name: tensor.detach().clone() for name, tensor in self._backend.weights(dtype=self._dtype)}
        weights.setdefault(HEAD, weights[EMBEDDING].clone())
        return weights


class BenchEngine(EngineWorker):
    """An engine whose digests can be switched off."""

    is_blind = False

    def go_blind(self, is_blind: bool) -> None:
        self.is_blind = is_blind

    def finish_load(self, version: int, canary: Canary | None) -> WeightCheck:
        proof = super().finish_load(version, canary)
        return replace(proof, undigested=frozenset(proof.digests)) if self.is_blind else proof


# --- faults -----------------------------------------------------------------------------------------------------------


def _middle(weights: Weights) -> int:
    return max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers.")) // 2


def swap_layers(weights: Weights, first: Weights) -> None:
    one = f"model.layers.{_middle(weights)}."
    other = f"model.layers.{_middle(weights) + 1}."
    for name in [name for name in weights if name.startswith(one)]:
        twin = other + name.removeprefix(one)
        weights[name], weights[twin] = weights[twin], weights[name]


def halve_norm(weights: Weights, first: Weights) -> None:
    name = f"model.layers.{_middle(weights)}.post_attention_layernorm.weight"
    weights[name] = weights[name] / 2


def lose_bias(weights: Weights, first: Weights) -> None:
    """Lose the biases of queries, keys and values, which are one tensor in vLLM, in one layer."""
    for name in (f"model.layers.{_middle(weights)}.self_attn.{each}.bias" for each in BIASED):
        weights[name] = torch.zeros_like(weights[name])


def keep_layer(weights: Weights, first: Weights) -> None:
    prefix = f"model.layers.{_middle(weights)}."
    weights |= {name: tensor for name, tensor in first.items() if name.startswith(prefix)}


def keep_head(weights: Weights, first: Weights) -> None:
    weights[HEAD] = first[HEAD]


FAULTS: dict[str, Callable[[Weights, Weights], None]] = {
    "two layers swapped": swap_layers,
    "a norm's weight halved": halve_norm,
    "a bias not loaded": lose_bias,
    "one layer stale": keep_layer,
    "head no longer tied": keep_head,
}
AT_ONCE = ("two layers swapped", "a norm's weight halved", "a bias not loaded")
IN_TIME = ("one layer stale", "head no longer tied")


# --- models -----------------------------------------------------------------------------------------------------------


def make_folders(source: Path, directory: Path, is_qwen2: bool) -> tuple[Path, Path, Path]:
    """Folders of the actor's model, of the engine's with a head of its own, and of one with wrong positions."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    actor, engine, turned = directory / "actor", directory / "engine", directory / "turned"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = _as_qwen2(model, tokenizer) if is_qwen2 else model
    model.save_pretrained(actor)
    tokenizer.save_pretrained(actor)
    for folder in (engine, turned):
        shutil.copytree(actor, folder)
    config = json.loads((actor / "config.json").read_text())
    weights = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    for file in engine.glob("model*.safetensors*"):
        file.unlink()
    save_file(weights, engine / "model.safetensors", metadata={"format": "pt"})
    (engine / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    rope = config.get("rope_parameters") or config
    rope["rope_theta"] = 10 * rope["rope_theta"]
    (turned / "config.json").write_text(json.dumps(config))
    return actor, engine, turned


def _as_qwen2(llama: Any, tokenizer: Any) -> Any:
    """A Qwen2 that computes about the same: half of the mean of queries, keys and values is moved into biases.

    Trained models of this family have it there too. W x + b with b = s W m and W less b mᵀ / |m|², where m is the
    mean of the inputs x: what lies along m varies little from token to token.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {key: value for key, value in llama.config.to_dict().items() if key not in ("model_type", "architectures")}
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    model.load_state_dict(llama.state_dict(), strict=False)
    means = _mean_inputs(llama, tokenizer)
    for layer, mean in zip(model.model.layers, means, strict=True):
        for name in BIASED:
            linear = getattr(layer.self_attn, name)
            bias = MOVED_SHARE * (linear.weight.data @ mean)
            linear.weight.data -= torch.outer(bias, mean) / mean.square().sum()
            linear.bias.data.copy_(bias)
    return model


@torch.no_grad()
def _mean_inputs(llama: Any, tokenizer: Any) -> list[Tensor]:
    """[hidden] for each layer: the mean of what its attention gets, over some sentences without their first token."""
    means: list[Tensor] = []
    layers = llama.model.layers
    hooks = [
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, inputs: means.append(inputs[0][0, 1:].mean(0)))
        for layer in layers
    ]
    llama(tokenizer(SENTENCES, return_tensors="pt").input_ids)
    for hook in hooks:
        hook.remove()
    return means


def make_prompts(model: Path, num_prompts: int = 64) -> list[Prompt]:
    """Sums in the model's chat format."""
    from transformers import AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(model), random.Random(0)
    prompts = []
    for index in range(num_prompts):
        terms = [draw.randint(1, 99) for _ in range(draw.randint(2, 3))]
        message = {"role": "user", "content": f"State the final answer: {' + '.join(map(str, terms))} ="}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append(Prompt(index, text, token_ids))
    return prompts


# --- the measurements -------------------------------------------------------------------------------------------------


class Bench:
    """An actor and an engine, and pushes from one to the other."""

    def __init__(self, cluster: Cluster, model: Path, engine: Any, prompts: list[Prompt], dtype: str, num_tokens: int):
        self.model, self.dtype, self.num_tokens = model, dtype, num_tokens
        self._cluster, self._prompts = cluster, prompts
        self.engines = engine
        self.actor: Any = None
        self.version = 0
        device = device_of_process()
        self._lanes = choose_transports([[0]], [[0]], is_cuda=device.type == "cuda")

    def start_actor(self, model: Path, *, compiles: bool = False) -> None:
        if self.actor is not None:
            self.actor.close()
        options = TrainOptions(
            precision="fp32" if self.dtype == "fp32" else "bf16_master",
            schedule=Schedule(peak=LEARNING_RATE),
            compile=compiles,
        )
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[self.dtype]
        name = f"actor {model.name}"
        self.actor = self._cluster.launch(name, BenchActor, args=(str(model), options, dtype), num_threads=2)

    def guard(self) -> CanaryGuard:
        default = CanaryConfig()
        settings = CanarySettings(
            num_tokens=self.num_tokens,
            rounding_factor=default.rounding_factor,
            drift_factor=default.drift_factor,
            dtype=self.dtype,
            temperature=1.0,
            max_length=MAX_LENGTH,
            seed=0,
            on_gpu=device_of_process().type == "cuda",
        )
        turn = lambda phase, role: nullcontext()  # noqa: E731
        return CanaryGuard(settings, self._prompts, self.actor, self.engines, None, turn, lambda text: say(text))

    def push(self, guard: CanaryGuard) -> PushReport:
        self.version += 1
        pushed = push_weights(self.actor, self.engines, self.version, guard.canary, self._lanes)
        guard.check(pushed)
        return pushed

    def start(self) -> CanaryGuard:
        """A good first push."""
        guard = self.guard()
        self.push(guard)
        guard.start(self.version)
        return guard


def healthy(bench: Bench, num_pushes: int) -> None:
    started_s = time.monotonic()
    guard = bench.start()
    say(f"first push judged in {time.monotonic() - started_s:.1f} s; {_limits(guard)}")
    assert guard.canary is not None
    lengths = [len(sequence) for sequence in guard.canary.sequences]
    say(f"canary: {guard.canary.num_sampled} tokens in {len(lengths)} answers, {max(lengths)} positions at most")
    answers = guard.canary
    records, proofs, steps = [guard.metrics()], [], []
    for number in range(num_pushes):
        started_s = time.monotonic()
        bench.actor.call(BenchActor.step, answers, number)
        steps.append(time.monotonic() - started_s)
        pushed = bench.push(guard)
        proofs.append((pushed.transfer_s, pushed.proof_s))
        records.append(guard.metrics())
        if (number + 1) % max(1, num_pushes // 10) == 0:
            use = max(record["canary_use"] for record in records)
            say(f"push {number + 1}: largest use of a limit so far {use:.3f}")
    say(f"\n{num_pushes} healthy pushes, {int(records[-1]['canary_alarms'])} alarms, no false stop")
    say(f"{'statistic':10} {'first':>10} {'median':>10} {'p99':>10} {'largest':>10} {'limit':>10} {'use':>6}")
    for statistic in STATISTICS:
        name = f"canary_gap_{statistic}"
        values = sorted(abs(record[name]) for record in records)
        limit = min(each.of(statistic) for each in guard.limits)
        p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
        say(
            f"{statistic:10} {abs(records[0][name]):10.2e} {statistics.median(values):10.2e} {p99:10.2e}"
            f" {values[-1]:10.2e} {limit:10.2e} {values[-1] / limit:6.3f}"
        )
    transfer, proof = (statistics.median(each) * 1e3 for each in zip(*proofs, strict=True))
    step = statistics.median(steps)
    say(f"per push: transfer {transfer:.1f} ms, digests and canary {proof:.1f} ms; an optimizer step {step:.2f} s")


def faulty(bench: Bench) -> None:
    names = bench.actor.call(BenchActor.names)[0]
    say(f"\n{'fault':28} {'digests on':12} {'first push':34} {'later push':34}")
    for fault in AT_ONCE:
        if fault == "a bias not loaded" and not any(name.endswith(".bias") for name in names):
            say(f"{fault:28} this model has no bias")
            continue
        by_digest = _try_digest(bench, fault)
        bench.actor.call(BenchActor.inject, fault)
        at_first = _try(bench, bench.guard(), is_first=True)
        bench.actor.call(BenchActor.inject, None)
        guard = bench.start()
        bench.actor.call(BenchActor.inject, fault)
        later = _try(bench, guard, is_first=False)
        bench.actor.call(BenchActor.inject, None)
        say(f"{fault:28} {by_digest:12} {at_first:34} {later:34}")


def stale(bench: Bench, num_pushes: int) -> None:
    say("")
    for fault in IN_TIME:
        guard = bench.start()
        answers = guard.canary
        bench.actor.call(BenchActor.inject, fault)
        largest = 0.0
        for number in range(1, num_pushes + 1):
            bench.actor.call(BenchActor.step, answers, 10_000 + number)
            seen = _try(bench, guard, is_first=False)
            largest = max(largest, guard.metrics()["canary_use"])
            if seen.startswith("caught"):
                say(f"{fault:28} seen by the canary alone after {number} pushes ({seen})")
                break
        else:
            say(f"{fault:28} not seen by the canary alone in {num_pushes} pushes: largest use {largest:.3f}")
        bench.actor.call(BenchActor.inject, None)


def turned(bench: Bench, model: Path) -> None:
    bench.start_actor(model)
    seen = _try(bench, bench.guard(), is_first=True)
    say(f"{'rope theta times 10':28} {'(no weight)':12} {seen}")


def _try_digest(bench: Bench, fault: str) -> str:
    bench.engines.call(BenchEngine.go_blind, False)
    bench.actor.call(BenchActor.inject, fault)
    try:
        bench.push(bench.guard())
        return "NOT SEEN"
    except WeightError as error:
        return "named" if "serves other values of model.layers." in str(error) else str(error)
    finally:
        bench.actor.call(BenchActor.inject, None)
        bench.engines.call(BenchEngine.go_blind, True)


def _try(bench: Bench, guard: CanaryGuard, is_first: bool) -> str:
    """Push what the actor sends now, and say what the canary makes of it."""
    try:
        bench.push(guard)
        if is_first:
            guard.start(bench.version)
    except WeightError as error:
        if "disagree" not in str(error):
            raise
        return f"caught, {guard.metrics()['canary_use']:.1f} times the limit"
    return f"not seen, {guard.metrics()['canary_use']:.2f} of the limit"


def _limits(guard: CanaryGuard) -> str:
    each = ", ".join(f"{name} {min(limit.of(name) for limit in guard.limits):.2e}" for name in STATISTICS)
    return f"limits: {each}"


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="a folder with a Llama such as SmolLM2")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--pushes", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=1024, help="of the canary; fewer where there is no GPU")
    parser.add_argument("--stale-pushes", type=int, default=30, help="after which the canary gives up on a stale layer")
    parser.add_argument("--qwen2", action="store_true", help="as a Qwen2 with biases")
    parser.add_argument("--compile", action="store_true", help="compile the actor's layers, as runs on a GPU do")
    parser.add_argument("--memory-share", type=float, default=0.3, help="of the GPU, for vLLM")
    chosen = parser.parse_args(arguments)
    chosen.model = existing(chosen.model)
    started_s = time.monotonic()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        actor_model, engine_model, turned_model = make_folders(chosen.model, directory, chosen.qwen2)
        prompts = make_prompts(actor_model)
        options = EngineOptions(1, chosen.memory_share, False, True, str(directory))
        slots = 64 if chosen.engine == "vllm" else 8
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[chosen.dtype]
        settings = EngineSettings(
            ModelSource(str(engine_model)), MAX_LENGTH, slots, (), dtype, 2, engine=chosen.engine, options=options
        )
        cluster = stack.enter_context(Cluster("local", num_devices=1))
        engine = cluster.launch("rollout", BenchEngine, args=(settings,), num_threads=2)
        bench = Bench(cluster, actor_model, engine, prompts, chosen.dtype, chosen.tokens)
        bench.start_actor(actor_model, compiles=chosen.compile)
        say(f"{chosen.model.name}, {chosen.engine}, {chosen.dtype}: started in {time.monotonic() - started_s:.1f} s")
        healthy(bench, chosen.pushes)
        engine.call(BenchEngine.go_blind, True)
        faulty(bench)
        stale(bench, chosen.stale_pushes)
        turned(bench, turned_model)
        say(f"\n{time.monotonic() - started_s:.0f} s in all")


if __name__ == "__main__":
    main(sys.argv[1:])
