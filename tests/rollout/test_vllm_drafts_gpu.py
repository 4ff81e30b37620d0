"""n-gram drafts of vLLM on a CUDA device: sampled log-probs are the model's, and so is the distribution of samples."""

from __future__ import annotations

import importlib.util
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .conformance import reference_log_probs, request
from .test_vllm_engine import MODEL, Shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
METHOD = "ngram" if importlib.util.find_spec("numba") is not None else "ngram_gpu"
DRAFTS = {"method": METHOD, "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
EVERY_TOKEN = tuple(range(67))  # so that whatever is sampled occurred before, and a draft follows


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with tempfile.TemporaryDirectory() as directory:
        made = Shared(Path(directory), MODEL, engine_args={"speculative_config": DRAFTS})
        yield made
        made.end()


def test_log_probs_of_drafted_tokens_are_the_models(shared: Shared) -> None:
    several: list[int] = []  # tokens of each step of a request that gave more than one
    step = shared.core.step

    def counted() -> list:
        sampled = step()
        several.extend(len(each.token_ids) for each in sampled if len(each.token_ids) > 1)
        return sampled

    shared.core.step = counted  # type: ignore[method-assign]
    asked = [request(f"{n}", EVERY_TOKEN, seed=n, max_new_tokens=120, temperature=0.6) for n in range(8)]
    asked += [request(f"greedy {n}", EVERY_TOKEN[n:], max_new_tokens=120, temperature=0.0) for n in range(4)]
    with shared.engine(max_length=300) as engine:
        completions, again = engine.generate(asked), engine.generate(asked)
    print(f"{METHOD}: {sum(several)} tokens came in {len(several)} steps of more than one")
    assert several
    for sent, completion, repeated in zip(asked, completions, again, strict=True):
        sequence, start = [*sent.token_ids, *completion.token_ids], len(sent.token_ids)
        temperature = sent.sampling.temperature or 1.0
        expected = reference_log_probs(shared.model(0), sequence, temperature)[start:]
        # Products in TF32 differ by up to 0.011 here; another token's log-prob, or temperature's, by 0.1 and more.
        assert list(completion.log_probs) == pytest.approx(expected, abs=2e-2)
        assert completion.token_ids == repeated.token_ids  # the seed decides


def test_samples_with_drafts_follow_the_distribution_of_the_model(shared: Shared) -> None:
    count, model = 4000, shared.model(0)
    asked = [request(f"{n}", EVERY_TOKEN, seed=n, max_new_tokens=2) for n in range(count)]
    with shared.engine(num_slots=200) as engine:
        seen = Counter(completion.token_ids[1] for completion in engine.generate(asked, timeout_s=120))
    with torch.no_grad():
        first = model(torch.tensor([EVERY_TOKEN])).logits[0, -1].softmax(-1)  # [vocab_size]
        after = torch.tensor([[*EVERY_TOKEN, token] for token in range(67)])
        second = first @ model(after).logits[:, -1].softmax(-1)  # of the second token, whatever the first
    share = torch.tensor([seen[token] / count for token in range(67)])
    # 67 shares of 4,000 draws: half of the summed differences is 0.05 on average for the right distribution.
    print(f"total variation {0.5 * (share - second).abs().sum():.3f}")
    assert 0.5 * (share - second).abs().sum() < 0.09
