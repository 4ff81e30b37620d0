"""How wrong log-probs of a 16-bit model are: the errors of trainer and engine against an fp32 forward of the same bf16
weights, with logits rounded to bf16 (before) and kept in fp32 (after), and the share of each cause.

The model samples its own answers at temperature 1 through the engine, once with each head; trainer and truth score the
same tokens. A gap is the engine's log-prob of a sampled token minus the trainer's. Causes are taken apart on the
trainer's side, layer by layer with transformers' own operations; their shares are of squared errors, which add up for
causes that know nothing of each other. Then the head alone: speed, peak memory, and the error of its gradients.

    python bench/log_prob_error.py --model smollm2 --engine vllm        a checkpoint, about 4,096 sampled tokens
    python bench/log_prob_error.py --shape 1.5b --engine vllm           random weights in Qwen2.5-1.5B's shape
    python bench/log_prob_error.py --model smollm2 --tokens 512         the small form, for a CPU

A model with random weights has a final norm of weight 6: its logits then spread as those of a trained model do, up to
about 20. With `--engine none` nothing is reported of the engine. On a GPU the trainer runs compiled, as it does in
runs, unless `--eager`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from lib.checkpoint import SMOLLM2, existing
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from hotseat.model_source import ModelSource
from hotseat.train import logprobs
from hotseat.types import MicroBatch, Request, Sampling

MAX_NEW_TOKENS = 64
MAX_LENGTH = 192
SHAPES = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
}
VOCAB_SIZES = {"1.5b": 151_936, "tiny": 1024}
NORM_WEIGHT = 6.0
HEADS = {"bf16": False, "fp32": True}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Sample:
    """An answer: prompt and sampled tokens, and the engine's log-probs of the latter."""

    token_ids: list[int]
    log_probs: list[float]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - len(self.log_probs)


# --- model and answers ------------------------------------------------------------------------------------------------


def save_random_model(shape: str, path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[shape],
        vocab_size=VOCAB_SIZES[shape],
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config)
    model.model.norm.weight.data.fill_(NORM_WEIGHT)
    model.to(torch.bfloat16).save_pretrained(path)


def load(path: Path, dtype: torch.dtype) -> Any:
    """The checkpoint's weights as bf16 has them, in this type."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE).eval()
    for weight in model.parameters():  # not buffers: frequencies of positions keep their bits
        weight.data = weight.data.bfloat16().to(dtype)
    return model


def make_prompts(path: Path, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    pick = random.Random(0)
    if not (path / "tokenizer.json").is_file():
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        return [[pick.randrange(2, vocab_size) for _ in range(32)] for _ in range(count)]
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = []
    for _ in range(count):
        terms = [str(pick.randrange(1, 100)) for _ in range(pick.randrange(2, 4))]
        text = f"What is {' + '.join(terms)}? Explain briefly, then give the result."
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
        prompts.append(list(encoded["input_ids"]))
    return prompts


# --- the engine, in a process of its own ------------------------------------------------------------------------------


def run_engine(path: Path, kind: str, num_tokens: int, out: Path) -> None:
    """Sample with each head, and write what came to a file."""
    prompts = make_prompts(path, max(4, num_tokens // 36))
    config = json.loads((path / "config.json").read_text())
    eos = config.get("eos_token_id")
    eos_token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    sampled = {}
    for name, set_up in (vllm_heads if kind == "vllm" else transformers_heads)(path, eos_token_ids):
        requests = [
            Request(str(index), tuple(prompt), Sampling(max_new_tokens=MAX_NEW_TOKENS), index)
            for index, prompt in enumerate(prompts)
        ]
        completions = set_up.generate(requests)
        sampled[name] = [
            {"token_ids": [*prompt, *done.token_ids], "log_probs": list(done.log_probs)}
            for prompt, done in zip(prompts, completions, strict=True)
        ]
        if kind == "vllm" and name == "fp32":
            torch.save(vllm_states(set_up, sampled[name]), out.with_suffix(".states"))
    out.write_text(json.dumps(sampled))


def transformers_heads(path: Path, eos_token_ids: Sequence[int]) -> Iterator[tuple[str, Any]]:
    from hotseat.rollout import SlotOptions, TransformersEngine

    for name, fp32_head in HEADS.items():
        engine = TransformersEngine(
            load(path, torch.bfloat16),
            max_length=MAX_LENGTH,
            eos_token_ids=eos_token_ids,
            num_threads=torch.get_num_threads(),
            options=SlotOptions(device=DEVICE, fp32_head=fp32_head),
        )
        yield name, engine
        engine.close()


def vllm_heads(path: Path, eos_token_ids: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """One start of vLLM with an fp32 head; without one it is the same core with its own logits back in place."""
    from hotseat.rollout.kinds import EngineOptions, EngineSettings
    from hotseat.rollout.vllm_engine import VllmEngine, weight_names
    from hotseat.rollout.vllm_versions import Core

    core = Core(
        EngineSettings(
            model=ModelSource(str(path)),
            max_length=MAX_LENGTH,
            num_slots=256,
            eos_token_ids=(),
            dtype="bfloat16",
            num_threads=1,
            engine="vllm",
            options=EngineOptions(memory_share=0.3, enforce_eager=True),
        )
    )
    engine = VllmEngine(
        core,
        weight_names(ModelSource(str(path))),
        max_length=MAX_LENGTH,
        num_slots=256,
        eos_token_ids=eos_token_ids,
        num_threads=torch.get_num_threads() if DEVICE == "cpu" else None,
    )
    yield "fp32", engine
    core.call(_round_logits)  # type: ignore[arg-type]
    yield "bf16", engine
    engine.close()


def _round_logits(worker: Any) -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    for module in worker.model_runner.model.modules():
        if isinstance(module, LogitsProcessor):
            vars(module).pop("_get_logits", None)
            if hasattr(module, "head_dtype"):
                module.head_dtype = None


def vllm_states(engine: Any, samples: list[dict[str, Any]]) -> list[list[Tensor]]:
    """Hidden states of the first sequences, after each quarter of the layers and after the final norm."""
    collected: list[list[Tensor]] = []
    engine._core.call(lambda worker: _collect(worker.model_runner.model.model, collected))
    found = []
    for sample in samples[:NUM_TRACED]:
        collected.clear()
        engine.score([sample["token_ids"]], 1.0)
        found.append([part[: len(sample["token_ids"])].cpu() for part in collected[0]])
    return found


def _collect(body: Any, collected: list[list[Tensor]]) -> None:
    current: list[Tensor] = []

    def layer(_module: Any, _inputs: Any, output: Any) -> None:
        hidden, residual = output  # the sum is what the next layer reads
        current.append(hidden.float() + residual.float())

    def norm(_module: Any, _inputs: Any, output: Any) -> None:
        current.append((output[0] if isinstance(output, tuple) else output).float())
        collected.append(list(current))
        current.clear()

    for index in quarters(len(body.layers)):
        body.layers[index].register_forward_hook(layer)
    body.norm.register_forward_hook(norm)


NUM_TRACED = 16


def quarters(num_layers: int) -> list[int]:
    """Indices of the layers that end each quarter."""
    return [num_layers * (part + 1) // 4 - 1 for part in range(4)]


# --- truth, and what each cause does ----------------------------------------------------------------------------------


@dataclass
class Causes:
    """Log-probs of all sampled tokens, each with one thing rounded, or several."""

    log_probs: dict[str, list[Tensor]]
    states: list[list[Tensor]]  # relative errors of hidden states, [tokens] for each quarter and the norm
    hidden: list[Tensor]  # after the norm, bf16
    targets: list[Tensor]


@torch.no_grad()
def trace(path: Path, samples: Sequence[Sample]) -> Causes:
    exact, rounded = load(path, torch.float32), load(path, torch.bfloat16)
    head = exact.get_output_embeddings().weight
    found = Causes({}, [], [], [])
    for sample in samples:
        tokens = torch.tensor([sample.token_ids], device=DEVICE)
        places = slice(sample.num_prompt_tokens - 1, len(sample.token_ids) - 1)
        targets = tokens[0, sample.num_prompt_tokens :]
        true_states, states = hidden_states(exact, tokens), hidden_states(rounded, tokens)
        found.states.append(
            [relative(mine, true)[places].cpu() for mine, true in zip(states, true_states, strict=True)]
        )
        true, mine = true_states[-1][places], states[-1][places]
        logits = true @ head.t()
        here = {
            "truth": log_prob(logits, targets),
            "layers": log_prob(mine @ head.t(), targets),
            "input of the head": log_prob(true.bfloat16().float() @ head.t(), targets),
            "results of the head": log_prob(logits.bfloat16(), targets),
            "layers and head": log_prob(
                functional.linear(mine.bfloat16(), rounded.get_output_embeddings().weight), targets
            ),
            "log-softmax in fp32": logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].double(),
            "log-softmax in bf16 (done nowhere)": log_prob_in_bf16(logits, targets),
        }
        for name, values in here.items():
            found.log_probs.setdefault(name, []).append(values.cpu())
        found.hidden.append(mine.bfloat16())
        found.targets.append(targets)
    return found


def hidden_states(model: Any, tokens: Tensor) -> list[Tensor]:
    """[tokens, hidden_size] in fp32 after each quarter of the layers, and after the final norm."""
    kept: list[Tensor] = []
    modules = [*(model.model.layers[index] for index in quarters(len(model.model.layers))), model.model.norm]
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output: kept.append((output[0] if isinstance(output, tuple) else output).float())
        )
        for module in modules
    ]
    model.model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [each.view(tokens.shape[1], -1) for each in kept]


def relative(mine: Tensor, true: Tensor) -> Tensor:
    return (mine - true).norm(dim=-1) / true.norm(dim=-1)


def log_prob(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def log_prob_in_bf16(logits: Tensor, targets: Tensor) -> Tensor:
    """Exact but for the last step: the normalizer and the result in bf16."""
    normalizer = logits.double().logsumexp(-1).bfloat16()
    return (logits.gather(-1, targets[:, None])[:, 0].bfloat16() - normalizer).double()


# --- the trainer ------------------------------------------------------------------------------------------------------


@contextmanager
def rounded_logits(is_compiled: bool) -> Iterator[None]:
    """Logits as a 16-bit product gives them."""

    def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = functional.linear(hidden, weight, bias)
        return logits if is_compiled else logits.float()

    project, logprobs.project = logprobs.project, linear  # type: ignore[assignment]
    try:
        yield
    finally:
        logprobs.project = project


def score_by_trainer(path: Path, samples: Sequence[Sample], is_compiled: bool) -> dict[str, Tensor]:
    """Log-probs of the sampled tokens, with each head."""
    from hotseat.train.backend import TrainOptions
    from hotseat.train.make import make_backend
    from hotseat.train.packing import split_by_tokens

    lengths = [len(sample.token_ids) for sample in samples]
    batch = MicroBatch(
        token_ids=torch.tensor([token for sample in samples for token in sample.token_ids]),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        mask=torch.cat([torch.arange(n) >= s.num_prompt_tokens for n, s in zip(lengths, samples, strict=True)]),
        weights=torch.ones(sum(lengths)),
        sample_ids=tuple(map(str, range(len(samples)))),
    )
    options = TrainOptions(precision="bf16", optimizer=None, compile=is_compiled)
    backend = make_backend(path, options, device=DEVICE)
    batches = split_by_tokens(batch, 8192 if DEVICE == "cuda" else 1024)

    def scores() -> Tensor:
        by_sample = {}  # batches are cut in an order of their own
        for each, found in zip(batches, backend.log_probs(batches, 1.0), strict=True):
            for index, sample_id in enumerate(each.sample_ids):
                part = slice(int(each.offsets[index]), int(each.offsets[index + 1]))
                by_sample[sample_id] = found[part][each.mask[part]]
        return torch.cat([by_sample[sample_id] for sample_id in batch.sample_ids]).double()

    found = {"fp32": scores()}
    with rounded_logits(is_compiled):
        found["bf16"] = scores()
    backend.close()
    return found


# --- the head alone ---------------------------------------------------------------------------------------------------


def measure_head(weight: Tensor, num_rows: int, compiler: str | None) -> dict[str, float]:
    """Milliseconds of forward and of forward with backward, and the peak of memory on top of the inputs, in GiB."""
    torch.manual_seed(0)
    vocab_size, hidden_size = weight.shape
    hidden = torch.randn(num_rows, hidden_size, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = weight.detach().requires_grad_()
    targets = torch.randint(0, vocab_size, (num_rows,), device=DEVICE)

    def forward() -> None:
        with torch.no_grad():
            logprobs.token_log_probs(hidden, weight, targets, compiler=compiler)

    def both() -> None:
        log_probs, _ = logprobs.token_log_probs(hidden, weight, targets, compiler=compiler)
        torch.autograd.grad(log_probs.sum(), [hidden, weight])

    found = {}
    for name, run in (("forward", forward), ("forward and backward", both)):
        run()
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        times = []
        for _ in range(5 if DEVICE == "cuda" else 1):
            start = time.perf_counter()
            run()
            synchronize()
            times.append(time.perf_counter() - start)
        found[name] = min(times) * 1e3
        if DEVICE == "cuda":
            found[f"{name}, GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found


def gradient_errors(weight: Tensor, hidden: Tensor, targets: Tensor, compiler: str | None) -> dict[str, float]:
    """Relative errors of the gradients of the head's inputs, against the same in fp32."""
    upstream = torch.randn(len(targets), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))

    def gradients(*inputs: Tensor) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        log_probs, _ = logprobs.token_log_probs(leaves[0], leaves[1], targets, compiler=compiler)
        return [each.float() for each in torch.autograd.grad((log_probs * upstream).sum(), leaves)]

    true = gradients(hidden.float(), weight.float())
    mine = gradients(hidden, weight)
    return {
        name: float((here - there).norm() / there.norm())
        for name, here, there in zip(("of hidden states", "of the weight"), mine, true, strict=True)
    }


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# --- tables -----------------------------------------------------------------------------------------------------------


def statistics(errors: Tensor) -> list[str]:
    size = errors.abs()
    numbers = [size.mean(), size.median(), size.quantile(0.99), size.max(), errors.mean()]
    return [f"{float(number):.5f}" for number in numbers]


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left")
    return made


def error_table(sides: dict[str, Tensor], truth: Tensor) -> Table:
    made = table("error against fp32", "", "mean", "median", "p99", "max", "signed mean")
    for name, log_probs in sides.items():
        made.add_row(name, *statistics(log_probs - truth))
    return made


def gap_table(engine: dict[str, Tensor], trainer: dict[str, dict[str, Tensor]]) -> Table:
    made = table("engine minus trainer", "", "mean", "median", "p99", "max", "signed mean")
    for name, log_probs in engine.items():
        for head in HEADS:
            made.add_row(f"engine {name} head, trainer {head} head", *statistics(log_probs - trainer[name][head]))
    return made


def cause_table(causes: dict[str, Tensor]) -> Table:
    truth = causes["truth"]
    total = float((causes["layers and head"] - truth).square().mean())
    made = table("what each rounding does alone", "", "mean", "median", "p99", "max", "signed mean", "share")
    for name, log_probs in causes.items():
        if name != "truth":
            share = float((log_probs - truth).square().mean()) / total
            made.add_row(name, *statistics(log_probs - truth), f"{100 * share:.1f}%")
    return made


def layer_table(num_layers: int, states: dict[str, list[Tensor]]) -> Table:
    ends = [f"layer {index + 1}" for index in quarters(num_layers)]
    made = table("relative error of hidden states", "", *ends, "final norm")
    for name, parts in states.items():
        made.add_row(name, *(f"{float(part.mean()):.5f}" for part in parts))
    return made


def head_tables(weight: Tensor, hidden: Tensor, targets: Tensor, is_compiled: bool) -> Iterator[Table]:
    num_rows = 16384 if DEVICE == "cuda" else 128
    speed = table(f"head: {num_rows} tokens", "", "forward ms", "and backward ms", "forward GiB", "and backward GiB")
    errors = table("head: relative error of gradients", "", "of hidden states", "of the weight")
    for compiler in (None, "inductor") if is_compiled else (None,):
        for name in HEADS:
            context: Any = rounded_logits(compiler is not None) if name == "bf16" else rounded_nothing()
            with context:
                found = measure_head(weight, num_rows, compiler)
                wrong = gradient_errors(weight, hidden[:4096], targets[:4096], compiler)
            label = f"{name} logits, {'compiled' if compiler else 'operation by operation'}"
            memory = [
                f"{found[key]:.2f}" if key in found else "" for key in ("forward, GiB", "forward and backward, GiB")
            ]
            speed.add_row(label, f"{found['forward']:.1f}", f"{found['forward and backward']:.1f}", *memory)
            errors.add_row(label, *(f"{wrong[key]:.5f}" for key in ("of hidden states", "of the weight")))
    yield speed
    yield errors


@contextmanager
def rounded_nothing() -> Iterator[None]:
    yield


# --- all of it --------------------------------------------------------------------------------------------------------


def sample_apart(path: Path, kind: str, num_tokens: int, out: Path) -> dict[str, list[Sample]]:
    command = [sys.executable, __file__, "--model", str(path), "--engine", kind, "--tokens", str(num_tokens)]
    subprocess.run([*command, "--sample-to", str(out)], check=True)
    return {name: [Sample(**each) for each in samples] for name, samples in json.loads(out.read_text()).items()}


def report(path: Path, kind: str, num_tokens: int, is_compiled: bool, show: Callable[[object], None]) -> None:
    clock = Clock(show)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "samples.json"
        samples = sample_apart(path, "transformers" if kind == "none" else kind, num_tokens, out)
        clock.lap(f"sampled by the {kind} engine")
        states_file = out.with_suffix(".states")
        engine_states = torch.load(states_file) if states_file.is_file() else None
    everything = [sample for name in HEADS for sample in samples[name]]
    sizes = [sum(len(sample.log_probs) for sample in samples[name]) for name in HEADS]
    causes = trace(path, everything)
    joined = {name: torch.cat(parts) for name, parts in causes.log_probs.items()}
    clock.lap("forwards in fp32 and bf16")
    trainer = score_by_trainer(path, everything, is_compiled)
    clock.lap("trainer")
    truth = joined["truth"]
    show(f"{sum(sizes):,} tokens of {len(everything)} answers, mean log-prob {float(truth.mean()):.3f}")
    sides = {f"trainer, {name} head": trainer[name] for name in HEADS}
    show(error_table(sides, truth))
    parts = dict(zip(HEADS, truth.split(sizes), strict=True))
    sampled = {
        name: torch.tensor([value for sample in samples[name] for value in sample.log_probs]).double() for name in HEADS
    }
    if kind != "none":
        for name in HEADS:
            show(error_table({f"{kind} engine, {name} head": sampled[name]}, parts[name]))
        split = {head: dict(zip(HEADS, trainer[head].split(sizes), strict=True)) for head in HEADS}
        show(gap_table(sampled, {name: {head: split[head][name] for head in HEADS} for name in HEADS}))
    show(cause_table(joined))
    first = load(path, torch.bfloat16)
    relatives = {"trainer": [torch.cat(part) for part in zip(*causes.states, strict=True)]}
    if engine_states is not None:
        relatives["vLLM"] = engine_errors(path, samples["fp32"], engine_states)
    show(layer_table(len(first.model.layers), relatives))
    weight = first.get_output_embeddings().weight
    for each in head_tables(weight, torch.cat(causes.hidden), torch.cat(causes.targets), is_compiled):
        show(each)
    clock.lap("head")
    if DEVICE == "cpu":
        show(f"peak of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


@torch.no_grad()
def engine_errors(path: Path, samples: Sequence[Sample], states: list[list[Tensor]]) -> list[Tensor]:
    exact = load(path, torch.float32)
    errors = []
    for sample, mine in zip(samples[:NUM_TRACED], states, strict=True):
        true = hidden_states(exact, torch.tensor([sample.token_ids], device=DEVICE))
        first = sample.num_prompt_tokens - 1
        errors.append(
            [relative(here.to(DEVICE), there)[first:-1].cpu() for here, there in zip(mine, true, strict=True)]
        )
    return [torch.cat(parts) for parts in zip(*errors, strict=True)]


class Clock:
    """Says how long each part took."""

    def __init__(self, show: Callable[[object], None]):
        self._show, self._last = show, time.perf_counter()

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        self._show(f"{what}: {now - self._last:.1f} s")
        self._last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, default=SMOLLM2, help="folder of a checkpoint")
    which.add_argument("--shape", choices=SHAPES, help="random weights instead")
    parser.add_argument("--engine", choices=("vllm", "transformers", "none"), default="transformers")
    parser.add_argument("--tokens", type=int, default=4096, help="to sample with each head, about")
    parser.add_argument("--eager", action="store_true", help="run the trainer without torch.compile")
    parser.add_argument("--sample-to", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if args.sample_to is not None:
        run_engine(args.model, args.engine, args.tokens, args.sample_to)
        return
    is_compiled = DEVICE == "cuda" and not args.eager
    show = Console(width=130).print
    with tempfile.TemporaryDirectory() as directory:
        path = existing(args.model) if args.shape is None else Path(directory)
        if args.shape is not None:
            save_random_model(args.shape, path)
        show(f"{args.shape or path.name}, {args.engine} engine, {DEVICE}, torch {torch.__version__}")
        report(path, args.engine, args.tokens, is_compiled, show)


if __name__ == "__main__":
    main()
