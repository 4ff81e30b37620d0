"""Experts that tokens took in the transformers engine: those of a plain forward of the same tokens, token by token."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hotseat.algorithms.routing import ROUTING, GrowingRouting, routers
from hotseat.rollout.transformers_engine import SlotOptions, TransformersEngine
from hotseat.train.backend import TrainOptions
from hotseat.train.make import make_backend
from hotseat.types import Completion, MicroBatch, Request, Sampling

MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
    # The first layer has no experts.
    "Qwen3Moe": {"num_experts": 300, "moe_intermediate_size": 8, "num_experts_per_tok": 4, "mlp_only_layers": [0]},
}


def mixture(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50, num_hidden_layers=3, head_dim=16, initializer_range=0.3, **sizes, **MIXTURES[name]
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def taken(model: Any, token_ids: list[int]) -> np.ndarray:
    """[tokens, layers, k] by the router logits of a forward of all tokens; -1 in layers without experts."""
    text = model.config
    chosen = torch.full((len(token_ids), text.num_hidden_layers, text.num_experts_per_tok), -1)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids]), output_router_logits=True).router_logits
    mixed = [layer for layer in range(text.num_hidden_layers) if layer not in getattr(text, "mlp_only_layers", ())]
    for layer, scores in zip(mixed, logits, strict=True):
        chosen[:, layer] = scores.argsort(-1, descending=True)[:, : text.num_experts_per_tok]
    return chosen.numpy()


def recorded(model: Any, completion: Completion) -> np.ndarray:
    assert completion.routing is not None
    ids = completion.routing.astype(np.int64).reshape(
        -1, model.config.num_hidden_layers, model.config.num_experts_per_tok
    )
    return np.where(ids == np.iinfo(completion.routing.dtype).max, -1, ids)


@contextmanager
def engine_of(model: Any, **options: Any) -> Iterator[TransformersEngine]:
    chosen = SlotOptions(returns_routing=True, **options)
    engine = TransformersEngine(copy.deepcopy(model), max_length=48, num_slots=3, num_threads=1, options=chosen)
    try:
        yield engine
    finally:
        engine.close()


def requests(lengths: tuple[int, ...] = (1, 2, 7, 7, 20, 17, 33)) -> list[Request]:
    """Some share a prompt, one has a prompt of one token, and there are more of them than slots."""
    prompts = [tuple((7 * length + 3 * at) % 50 for at in range(length)) for length in lengths]
    return [
        Request(str(index), prompt, Sampling(max_new_tokens=3 + 2 * index), index)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("tokens_at_once", [1, 4])
def test_experts_are_those_of_the_tokens(name: str, tokens_at_once: int) -> None:
    model = mixture(name)
    with engine_of(model, tokens_at_once=tokens_at_once) as engine:
        asked = requests()
        for request, completion in zip(asked, engine.generate(asked), strict=True):
            expected = taken(model, [*request.token_ids, *completion.token_ids[:-1]])
            np.testing.assert_array_equal(np.sort(recorded(model, completion)), np.sort(expected))
        assert completion.routing.dtype == (np.uint8 if name == "Mixtral" else np.int16)


def test_a_conversation_that_goes_on_has_the_experts_of_all_its_tokens() -> None:
    model = mixture("Mixtral")
    with engine_of(model) as engine:
        [first] = engine.generate([Request("a", (1, 2, 3), Sampling(5), 0)])
        context = (1, 2, 3, *first.token_ids, 8, 9)
        [second] = engine.generate([Request("b", context, Sampling(5), 0)])
        np.testing.assert_array_equal(
            np.sort(recorded(model, second)), np.sort(taken(model, [*context, *second.token_ids[:-1]]))
        )
        np.testing.assert_array_equal(recorded(model, second)[: 3 + 4], recorded(model, first))


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_tokens_keep_the_experts_of_the_weights_that_they_were_sampled_with(keeps_cache: bool) -> None:
    old, new = mixture("Mixtral"), mixture("Mixtral", seed=1)
    with engine_of(old, keeps_cache=keeps_cache) as engine:
        future = engine.submit(Request("a", (1, 2, 3, 4), Sampling(40), 0))
        while not (sampled := engine.sampled({"a": 0})):
            pass
        engine.pause()
        num_old = len(engine.sampled({"a": 0}).get("a", sampled["a"]))
        engine.load_weights([(name, weight.detach()) for name, weight in new.named_parameters()], 1)
        engine.resume()
        completion = future.result(60)
    found = recorded(old, completion)
    assert len(found) == 4 + 40 - 1
    assert completion.versions.count(0) == num_old
    tokens = [1, 2, 3, 4, *completion.token_ids[:-1]]
    np.testing.assert_array_equal(np.sort(found[: 3 + num_old]), np.sort(taken(old, tokens[: 3 + num_old])))
    if not keeps_cache:  # what follows was computed as if all before it had been
        np.testing.assert_array_equal(np.sort(found[3 + num_old :]), np.sort(taken(new, tokens)[3 + num_old :]))


def test_an_aborted_request_has_the_experts_of_what_it_has() -> None:
    model = mixture("Mixtral")
    with engine_of(model) as engine:
        future = engine.submit(Request("a", (1, 2, 3, 4), Sampling(40), 0))
        while not engine.sampled({"a": 0}):
            pass
        engine.abort(["a"])
        completion = future.result(60)
        assert len(recorded(model, completion)) == 4 + len(completion.token_ids) - 1
        engine.pause()
        waiting = engine.submit(Request("b", (1, 2), Sampling(4), 0))
        engine.abort(["b"])
        assert waiting.result(60).routing is None


def test_without_being_asked_nothing_is_recorded() -> None:
    engine = TransformersEngine(mixture("Mixtral"), max_length=48, num_slots=3, num_threads=1)
    [completion] = engine.generate([Request("a", (1, 2), Sampling(2), 0)])
    assert completion.routing is None
    engine.close()


def test_replay_closes_the_gap_that_noise_in_routers_opens() -> None:
    """The engine's routers are rounded in another way; near ties its tokens take other experts than the trainer's."""
    model = mixture("Mixtral")
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for router in routers(noisy).values():
        router.weight.data += 0.01 * torch.randn(router.weight.shape, generator=generator)
    asked = [Request(str(at), (at, at + 1, at + 2), Sampling(40), at) for at in range(12)]
    with engine_of(noisy) as engine:
        completions = engine.generate(asked)
    ids = [torch.tensor([*each.token_ids, *done.token_ids]) for each, done in zip(asked, completions, strict=True)]
    masks = [torch.arange(len(each)) >= 3 for each in ids]
    growing = [GrowingRouting() for _ in ids]
    for routing, done, each in zip(growing, completions, ids, strict=True):
        routing.add(done.routing, len(each))
    fields = {
        "engine": [torch.cat([torch.zeros(3), torch.tensor(done.log_probs)]) for done in completions],
        ROUTING: [routing.of(len(each)) for routing, each in zip(growing, ids, strict=True)],
    }
    replayed = MicroBatch.from_segments(ids, masks, [each.id for each in asked], fields)
    backend = make_backend(model, TrainOptions(optimizer=None, replays_routing=True))
    gaps = [
        float((backend.log_probs([batch], 1.0)[0] - replayed.fields["engine"]).abs().mean())
        for batch in (replace(replayed, fields={}), replayed)
    ]
    backend.close()
    assert gaps[1] < 0.6 * gaps[0], f"without and with replay: {gaps}"
