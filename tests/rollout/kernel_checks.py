"""Checks of the kernels of Llama-like layers, on a CUDA device or, by Triton's interpreter, on a CPU.

TRITON_INTERPRET=1 python -m tests.rollout.kernel_checks      # on a CPU: Triton reads it when it is imported
TRITON_INTERPRET=1 python -m tests.rollout.kernel_checks part

The interpreter takes 25 ms for every program of a kernel. So a part of the cases is chosen that reaches every branch of
the kernels. Transformers is not imported for it, and models are computed with `PlainKernels` elsewhere.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the interpreter truncates bfloat16, a device rounds it
SHAPE = {
    "vocab_size": 67,  # no multiple of anything
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    "initializer_range": 0.15,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}


@functools.cache
def kernels(name: str = "llama_kernels") -> Any:
    """Import a module of kernels without its package, which would import transformers."""
    package = importlib.util.find_spec("hotseat")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "rollout" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def randn(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(actual: Tensor, expected: Tensor, roundings: float, scale: float = 1e-3) -> None:
    """Compare with an allowance in roundings of the type; numbers below `scale` are allowed as much as `scale` is."""
    assert actual.dtype == expected.dtype
    eps = torch.finfo(actual.dtype).eps
    # Sums of float32 differ by their order.
    roundings = roundings if actual.dtype != torch.float32 else 16 * roundings
    torch.testing.assert_close(actual, expected, rtol=roundings * eps, atol=roundings * eps * scale)


def norms_are_those_of_torch(device: torch.device) -> None:
    for dtype in DTYPES:
        for rows, size in ((1, 64), (5, 100), (3, 3584)):
            x = randn(rows, size, device=device, dtype=dtype)
            weight = 1 + 0.1 * randn(size, device=device, dtype=dtype, seed=1)
            # A norm on the edge between two numbers may be rounded to either before the product.
            actual, expected = (
                kernels().rms_norm(x, weight, 1e-5),
                weight * functional.rms_norm(x, x.shape[-1:], None, 1e-5),
            )
            assert_close(actual, expected, 2)
            if dtype == torch.float16 or (dtype == torch.bfloat16 and device.type == "cuda"):
                assert (actual != expected).double().mean() < 0.02


def a_large_norm_does_not_overflow_in_sixteen_bits(device: torch.device) -> None:
    x = torch.full((2, 64), 1000.0, dtype=torch.float16, device=device)
    assert torch.equal(kernels().rms_norm(x, torch.ones_like(x[0]), 1e-5), torch.ones_like(x))


def products_of_gate_and_up_are_those_of_torch(device: torch.device) -> None:
    for dtype in DTYPES:
        for rows, size in ((1, 8), (3, 72), (2, 1500), (5, 2048)):
            gate_up = 3 * randn(rows, 2 * size, device=device, dtype=dtype)
            gate_up[0, 0] = -1000.0  # its exponential is infinite
            gate, up = gate_up.chunk(2, dim=1)
            assert_close(kernels().silu_product(gate_up), functional.silu(gate) * up, 2)


def turned(x: Tensor, cos: Tensor, sin: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    """Compute rotated heads in float64, [rows, heads, dim] with [rows, dim], rounded once."""
    if norm is not None:
        weight, eps = norm
        scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
        x = weight * (x.double() * scale).to(x.dtype)
    low, high = x.double().chunk(2, dim=-1)
    (cos_low, cos_high), (sin_low, sin_high) = (t.double()[:, None].chunk(2, dim=-1) for t in (cos, sin))
    return torch.cat([low * cos_low + high * sin_low, high * cos_high + low * sin_high], dim=-1).to(x.dtype)


def heads_are_rotated_and_written(device: torch.device, is_whole: bool = True) -> None:
    """Check rotation in place, and with keys and values into a cache; both with norms of heads and without."""
    shapes = ((3, 3, 64), (6, 2, 80), (7, 1, 128), (4, 2, 20), (18, 2, 8))
    # The last shape as if there were many rows: two programs of 16 heads for each.
    for dtype in DTYPES if is_whole else (torch.float32, torch.float16):
        # The interpreter takes milliseconds for every program, and a device's compiler longer for every shape and type.
        has_all = dtype == (torch.bfloat16 if device.type == "cuda" else torch.float32)
        for index, (num_heads, num_kv, dim) in enumerate(shapes if has_all else shapes[1:2]):
            rows, max_keys = 3 if is_whole else 2, 48
            many_rows = 1 if num_heads > 16 else 1024
            fresh = randn(rows, num_heads + 2 * num_kv, dim, device=device, dtype=dtype, seed=index)
            cos, sin = (randn(max_keys, dim, device=device, dtype=dtype, seed=seed).clamp(-1, 1) for seed in (1, 2))
            positions = torch.tensor([3, 47, 0], device=device)[:rows]
            weights = [1 + 0.1 * randn(dim, device=device, dtype=dtype, seed=seed) for seed in (3, 4)]
            query, key, value = fresh.split([num_heads, num_kv, num_kv], dim=1)
            both = [None, (weights[0], 1e-5, weights[1], 1e-6)]
            for norms in both if is_whole or dim == 80 else both[index % 2 :][:1]:
                of_query, of_key = (norms[:2], norms[2:]) if norms is not None else (None, None)
                angles = (cos[positions], sin[positions])
                expected_query, expected_key = turned(query, *angles, of_query), turned(key, *angles, of_key)
                roundings = 1 if norms is None else 4

                qkv = fresh.clone()
                with patch.object(kernels(), "_MANY_ROWS", many_rows):
                    kernels().rotate(qkv, num_heads, positions, (cos, sin), norms)
                assert_close(qkv[:, :num_heads], expected_query, roundings, scale=1.0)
                assert_close(qkv[:, num_heads : num_heads + num_kv], expected_key, roundings, scale=1.0)
                assert torch.equal(qkv[:, num_heads + num_kv :], value)

                qkv = fresh.clone()
                cache = [torch.zeros(rows + 1, num_kv, max_keys, dim, dtype=dtype, device=device) for _ in range(2)]
                with patch.object(kernels(), "_MANY_ROWS", many_rows):
                    kernels().rotate(qkv, num_heads, positions, (cos, sin), norms, tuple(cache))
                assert_close(qkv[:, :num_heads], expected_query, roundings, scale=1.0)
                assert torch.equal(qkv[:, num_heads:], fresh[:, num_heads:])
                at = (torch.arange(rows, device=device), slice(None), positions)
                assert_close(cache[0][at], expected_key, roundings, scale=1.0)
                assert torch.equal(cache[1][at], value)
                for part in cache:  # nothing else was written
                    part[at] = 0
                    assert not part.any()


def attended(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attend in float64, rounded once: [rows, heads, dim] to the keys of each row's slot -> [rows, heads * dim]."""
    rows = []
    for row, position in enumerate(positions.tolist()):
        groups = query.shape[1] // keys.shape[1]
        key, value = (part[row, :, : position + 1].double().repeat_interleave(groups, 0) for part in (keys, values))
        weights = torch.softmax(torch.einsum("hd,hkd->hk", query[row].double(), key) * query.shape[2] ** -0.5, dim=-1)
        rows.append(torch.einsum("hk,hkd->hd", weights, value).flatten())
    return torch.stack(rows).to(query.dtype)


def attention_reads_keys_up_to_the_position(device: torch.device, is_whole: bool = True) -> None:
    """Check attention with the keys of a row in one program, and split over several."""
    shapes = ((4, 2, 64), (7, 1, 128), (3, 3, 20), (14, 2, 64))
    for dtype in DTYPES if is_whole else (torch.float32, torch.float16):
        for index, (num_heads, num_kv, dim) in enumerate(shapes if is_whole else shapes[:1]):
            max_keys = 208
            positions = torch.tensor([0, 63, 64, 207, 130], device=device)
            rows = len(positions)
            qkv = randn(rows, num_heads + 2 * num_kv, dim, device=device, dtype=dtype, seed=index)
            cache = [randn(rows + 1, num_kv, max_keys, dim, device=device, dtype=dtype, seed=seed) for seed in (7, 8)]
            for row, position in enumerate(positions.tolist()):  # nothing beyond is read
                for part in cache:
                    part[row, :, position + 1 :] = torch.nan
            expected = attended(qkv[:, :num_heads], *cache, positions)
            for many in (1, 64):  # programs: of one split each, and of several
                with patch.object(kernels(), "_MANY_PROGRAMS", many):
                    actual = kernels().attend(qkv, num_heads, positions, tuple(cache))
                assert_close(actual, expected, 4, scale=1.0)


def tokens_are_sampled_as_by_torch(device: torch.device, is_whole: bool = True) -> None:
    """Compare tokens and log-probs with the inverse CDF in float64, in rows of one block and of several."""
    for vocab_size in (5, 2048, 5000) if is_whole else (5, 5000):
        rows = 6
        logits = 3 * randn(rows, vocab_size, device=device, dtype=torch.float32)
        logits[1, ::2] = -torch.inf
        logits[2] = -torch.inf
        logits[2, vocab_size - 2] = 1.0
        temperatures = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 0.7], device=device)
        is_greedy = torch.tensor([False, False, False, False, True, True], device=device)
        mass = torch.softmax(logits.double() / temperatures.double()[:, None], dim=-1)
        for uniform in (0.0, 0.3, 0.999, 1 - 2**-52):
            uniforms = torch.full((rows,), uniform, dtype=torch.float64, device=device)
            tokens, log_probs = kernels("sampling_kernels").sample(logits, temperatures, uniforms, is_greedy)
            sampled_alone, _ = kernels("sampling_kernels").sample(logits, temperatures, uniforms, None)
            assert tokens[:4].tolist() == sampled_alone[:4].tolist()
            assert tokens[4:].tolist() == logits[4:].argmax(-1).tolist()
            upto = mass.cumsum(-1)
            for row in range(4):
                token = int(tokens[row])
                assert float(mass[row, token]) > 0
                before = float(upto[row, token - 1]) if token else 0.0
                assert before - 1e-6 <= uniform <= float(upto[row, token]) + 1e-6
            expected = mass.gather(1, tokens[:, None])[:, 0].log().float()
            torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)


def no_token_without_probability_is_sampled(device: torch.device) -> None:
    """Flat and peaked rows, tokens without probability in front, in between and at the end, and the ends of [0, 1)."""
    rows = 300 if device.type == "cuda" else 24  # the interpreter takes long
    for vocab_size in (7, 256, 5000):
        generator = torch.Generator().manual_seed(vocab_size)
        logits = torch.randn(rows, vocab_size, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
        logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
        logits[::3, : vocab_size // 2] = -torch.inf
        logits[1::3, vocab_size // 2 :] = -torch.inf
        logits[:, vocab_size // 3] = 0.5
        logits[:, -1 - vocab_size // 3] = 0.25
        logits = logits.to(device)
        mass = torch.softmax(logits.double(), dim=-1)
        upto = mass.cumsum(-1)
        for uniform in (torch.rand(rows, generator=generator).double(), torch.zeros(rows).double(), None):
            at_end = torch.full((rows,), 1 - 2.0**-52, dtype=torch.float64)
            uniforms = (at_end if uniform is None else uniform).to(device)
            ones = torch.ones(rows, device=device)
            tokens = kernels("sampling_kernels").sample(logits, ones, uniforms, None)[0][:, None]
            assert bool((mass.gather(1, tokens) > 0).all())
            after = upto.gather(1, tokens)[:, 0]
            before = after - mass.gather(1, tokens)[:, 0]
            assert bool(((before - 1e-6 <= uniforms) & (uniforms <= after + 1e-6)).all())


def rows_without_a_distribution_get_no_log_prob(device: torch.device) -> None:
    logits = torch.zeros(4, 3000, device=device)
    logits[0, 2500] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = -torch.inf
    ones, uniforms = torch.ones(4, device=device), torch.full((4,), 0.9, dtype=torch.float64, device=device)
    tokens, log_probs = kernels("sampling_kernels").sample(logits, ones, uniforms, None)
    assert log_probs.isfinite().tolist() == [False, False, False, True]
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 3000


class PlainKernels:
    """Functions of torch that compute what the kernels do, on any device."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * functional.rms_norm(x, x.shape[-1:], None, eps)

    @staticmethod
    def rotate(
        qkv: Tensor,
        num_heads: int,
        positions: Tensor,
        angles: tuple[Tensor, Tensor],
        norms: tuple[Tensor, float, Tensor, float] | None = None,
        cache: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        num_kv = (qkv.shape[1] - num_heads) // 2
        query, key, value = qkv.split([num_heads, num_kv, num_kv], dim=1)
        of_query, of_key = (None, None) if norms is None else (norms[:2], norms[2:])
        cos, sin = (each[positions] for each in angles)
        query.copy_(turned(query, cos, sin, of_query))
        if cache is None:
            key.copy_(turned(key, cos, sin, of_key))
            return
        for part, new in zip(cache, (turned(key, cos, sin, of_key), value), strict=True):
            part[torch.arange(len(qkv)), :, positions] = new

    @staticmethod
    def attend(qkv: Tensor, num_heads: int, positions: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        return attended(qkv[:, :num_heads], *cache, positions)

    @staticmethod
    def silu_product(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate) * up


def random_models() -> dict[str, Any]:
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        MistralConfig,
        PreTrainedConfig,
        Qwen2Config,
        Qwen3Config,
    )

    configs: dict[str, PreTrainedConfig] = {
        "llama": LlamaConfig(**SHAPE),
        "llama, biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
        "mistral": MistralConfig(**GROUPED, sliding_window=None, head_dim=20),
        "qwen2": Qwen2Config(**GROUPED),
        "qwen3": Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=True),
    }
    torch.manual_seed(0)
    models: dict[str, Any] = {}
    for name, config in configs.items():
        models[name] = AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in models[name].parameters():
            if parameter.dim() == 1:  # biases and norms too, so that a mistake with them shows
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return models


def results(slots: Any, tokens: Tensor, lengths: list[int], times: int) -> list[Tensor]:
    """Return hidden states, prefixes and logits of a step, which is decoded some times."""
    prefixes = slots.prefill(tokens, lengths)
    for slot, prefix in enumerate(prefixes):
        slots.cache.write([slot], prefix)
    for _ in range(times):
        step = slots.decode(tokens[:, 0], torch.tensor(lengths, device=tokens.device), 32).clone()
    keys, values = slots.cache.read(len(lengths), 32, tokens.device)
    hidden = slots.hidden(tokens)
    return [hidden, step, keys, values, *(part for p in prefixes for part in (p.keys, p.values))]


@torch.no_grad()
def models_compute_the_same_with_kernels(device: torch.device, module: Any = None) -> None:
    """Compare models: equal to last bits in float32; in 16 bits about as far from float32 as without kernels."""
    from hotseat.rollout.llama_slots import LlamaSlots

    module = module or kernels()
    generator = torch.Generator().manual_seed(0)
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # which it rounds
    for name, model in random_models().items():
        tokens = torch.randint(67, (2, 4), generator=generator).to(device)
        made: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        for dtype in (torch.float32, half):
            slots = LlamaSlots(copy.deepcopy(model).to(device, dtype), 16, 64, device, fp32_head=False)
            slots._is_lean = True
            for has_kernels in (False, True):
                slots.cache.allocate()
                slots.release()
                slots._kernels = module if has_kernels else None
                # A CUDA graph is recorded the third time, and replayed from then on.
                made[dtype, has_kernels] = results(slots, tokens, [4, 3], times=5 if device.type == "cuda" else 1)
        exact = made[torch.float32, False]
        for of_float, of_kernels in zip(exact, made[torch.float32, True], strict=True):
            torch.testing.assert_close(of_kernels, of_float, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        for of_float, plain, of_kernels in zip(exact, made[half, False], made[half, True], strict=True):
            assert of_kernels.dtype == plain.dtype
            errors = [float((t.float() - of_float).square().mean().sqrt()) for t in (plain, of_kernels)]
            assert errors[1] < 3 * errors[0], f"{name}: {errors}"


CHECKS: list[Callable[..., None]] = [
    norms_are_those_of_torch,
    a_large_norm_does_not_overflow_in_sixteen_bits,
    products_of_gate_and_up_are_those_of_torch,
    heads_are_rotated_and_written,
    attention_reads_keys_up_to_the_position,
    tokens_are_sampled_as_by_torch,
    no_token_without_probability_is_sampled,
    rows_without_a_distribution_get_no_log_prob,
    models_compute_the_same_with_kernels,
]


def main(is_whole: bool) -> None:
    began_s = time.perf_counter()
    part = [
        *CHECKS[:3],
        *(functools.partial(check, is_whole=False) for check in CHECKS[3:6]),
        rows_without_a_distribution_get_no_log_prob,
    ]
    for check in CHECKS if is_whole else part:
        check(torch.device("cpu"))
        print(f"checked after {time.perf_counter() - began_s:.1f} s", flush=True)


if __name__ == "__main__":
    main(is_whole="part" not in sys.argv[1:])
