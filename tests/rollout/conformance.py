"""What every rollout engine must do. Plain functions of a `Subject`; a test module per engine runs `CHECKS` through it.

Expected numbers come from the transformers model itself: a full forward, `log_softmax(logits / temperature)`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from hotseat import faults
from hotseat.algorithms.digest import tensor_digest
from hotseat.errors import RunError, UserError, WeightError
from hotseat.rollout import Engine
from hotseat.types import Completion, Request, Sampling

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Subject:
    """One kind of engine.

    engine: starts one for the weights of `model(0)`, version 0, and closes it; takes num_slots, max_length and
        eos_token_ids. An engine that is slow to start may hand out the same one again, with these weights and nothing
        in flight.
    model: the same architecture as a transformers model with random weights number n.
    is_bit_exact: the same request gives the same bits whatever else is in the batch.
    tolerance: of log-probs against the model's own forward.
    """

    engine: Callable[..., AbstractContextManager[Engine]]
    model: Callable[[int], PreTrainedModel]
    is_bit_exact: bool
    tolerance: float = 1e-5

    @property
    def vocab_size(self) -> int:
        return int(self.model(0).config.vocab_size)


# --- helpers ----------------------------------------------------------------------------------------------------------


def request(
    name: str, token_ids: Sequence[int] = (5, 6, 7, 8, 9), seed: int = 1, max_new_tokens: int = 12, **sampling: object
) -> Request:
    return Request(name, tuple(token_ids), Sampling(max_new_tokens=max_new_tokens, **sampling), seed)  # type: ignore[arg-type]


def mixed(count: int, vocab_size: int, longest: int = 24) -> list[Request]:
    """Requests of many lengths and settings, three samples to a prompt."""
    generator = torch.Generator().manual_seed(count)
    requests = []
    for index in range(count):
        prompt = torch.Generator().manual_seed(index // 3)
        length = int(torch.randint(1, 40, (1,), generator=prompt))
        token_ids = torch.randint(0, vocab_size, (length,), generator=prompt).tolist()
        sampling = Sampling(
            max_new_tokens=int(torch.randint(1, longest + 1, (1,), generator=generator)),
            temperature=(1.0, 0.7, 1.0, 0.0)[index % 4],
            top_p=(1.0, 1.0, 0.8)[index % 3],
            top_k=(0, 5)[index % 7 == 0],
        )
        requests.append(Request(f"mixed {index}", tuple(token_ids), sampling, seed=index))
    return requests


@torch.no_grad()
def reference_log_probs(model: PreTrainedModel, token_ids: Sequence[int], temperature: float) -> list[float]:
    """Entry t: of token t given what precedes it."""
    logits = model(torch.tensor([list(token_ids)])).logits[0].double()
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    return [0.0] + [float(log_probs[t - 1, token_ids[t]]) for t in range(1, len(token_ids))]


@torch.no_grad()
def log_probs_with_cache_of(
    old: PreTrainedModel, new: PreTrainedModel, token_ids: Sequence[int], switch: int
) -> list[float]:
    """Score the tokens from `switch` on by `new`, which reads the keys and values that `old` made of those before."""
    cache = old(torch.tensor([list(token_ids[: switch - 1])]), use_cache=True).past_key_values
    logits = new(torch.tensor([list(token_ids[switch - 1 : -1])]), past_key_values=cache).logits[0].double()
    log_probs = torch.log_softmax(logits, dim=-1)
    return [float(log_probs[t, token]) for t, token in enumerate(token_ids[switch:])]


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.state_dict().items()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.002)


@contextmanager
def slowly() -> Iterator[None]:
    """Steps take 10 ms: what has 500 tokens to sample is still at it when a test's thread was held up for seconds."""
    with mock.patch.object(faults, "reach", side_effect=lambda point: time.sleep(0.01)):
        yield


def sample_some(engine: Engine, num_tokens: int = 12) -> None:
    """Let it sample so many more tokens, in all its requests together."""
    before = engine.health().num_sampled
    until(lambda: engine.health().num_sampled > before + num_tokens, "some tokens")


def assert_same(subject: Subject, got: Completion, expected: Completion) -> None:
    if subject.is_bit_exact:
        assert got == expected
    else:
        assert got.token_ids == expected.token_ids
        assert got.log_probs == pytest.approx(expected.log_probs, abs=1e-3)


# --- generation -------------------------------------------------------------------------------------------------------


def token_ids_go_in_and_come_out(subject: Subject) -> None:
    with subject.engine() as engine:
        completions = engine.generate([request("a"), request("b", seed=2, max_new_tokens=5)])
        assert [c.request_id for c in completions] == ["a", "b"]
        assert [len(c.token_ids) for c in completions] == [12, 5]
        for completion in completions:
            assert len(completion.log_probs) == len(completion.versions) == len(completion.token_ids)
            assert set(completion.versions) == {0}
            assert completion.finish == "length"
            assert all(0 <= token < subject.vocab_size for token in completion.token_ids)
        assert engine.generate([]) == []


@slowly()
def each_request_is_delivered_when_it_finishes(subject: Subject) -> None:
    with subject.engine(max_length=600) as engine:
        long = engine.submit(request("long", max_new_tokens=500))
        short = engine.submit(request("short", max_new_tokens=2))
        assert len(short.result(PATIENCE_S).token_ids) == 2
        assert not long.done()
        engine.abort(["long"])
        assert long.result(PATIENCE_S).finish == "abort"


def a_stop_token_ends_it_and_is_included(subject: Subject) -> None:
    with subject.engine() as engine:
        (free,) = engine.generate([request("free", max_new_tokens=20)])
        stop = free.token_ids[7]
        first = free.token_ids.index(stop)
        (stopped,) = engine.generate([request("stopped", max_new_tokens=20, stop_token_ids=(stop,))])
        assert stopped.token_ids == free.token_ids[: first + 1]
        assert stopped.finish == "stop"
    with subject.engine(eos_token_ids=[stop]) as engine:
        (ended,) = engine.generate([request("ended", max_new_tokens=20)])
        assert (ended.token_ids, ended.finish) == (stopped.token_ids, "stop")
        (ignoring,) = engine.generate([request("ignoring", max_new_tokens=20, ignore_eos=True)])
        assert (ignoring.token_ids, ignoring.finish) == (free.token_ids, "length")


class Letters:
    """A tokenizer whose tokens are letters, in pairs."""

    def decode(self, ids: Sequence[int], **options: object) -> str:
        return "".join(f"{chr(97 + token % 26)}{chr(97 + token // 26)}" for token in map(int, ids))


def a_stop_string_ends_it_where_its_last_token_was_sampled(subject: Subject) -> None:
    with subject.engine() as engine:
        (free,) = engine.generate([request("free", max_new_tokens=20)])
        text = Letters().decode(free.token_ids)
        stop = text[9:14]  # it begins and ends within tokens
        num_tokens = (text.index(stop) + len(stop) + 1) // 2
        with pytest.raises(UserError, match="this engine has no tokenizer"):
            engine.submit(request("refused", stop=(stop,)))
        engine.load_tokenizer = Letters
        ours = request("ours", max_new_tokens=20, stop=("never", stop))
        others = [request("other", seed=2, max_new_tokens=20), request("same", max_new_tokens=20)]
        stopped, _, unstopped = engine.generate([ours, *others])
        expected = replace(free, request_id="ours", token_ids=free.token_ids[:num_tokens], finish="stop", stop=stop)
        expected = replace(expected, log_probs=free.log_probs[:num_tokens], versions=free.versions[:num_tokens])
        assert_same(subject, stopped, expected)
        assert (stopped.finish, stopped.stop, len(stopped.log_probs)) == ("stop", stop, num_tokens)
        assert_same(subject, unstopped, replace(free, request_id="same"))
        (again,) = engine.generate([replace(ours, id="again")])  # nothing of the first one is left
        assert again.token_ids == stopped.token_ids
        until(lambda: engine.health().num_running == 0, "the engine to be empty")
        (whole,) = engine.generate([request("whole", max_new_tokens=num_tokens, stop=(stop,))])
        assert (len(whole.token_ids), whole.finish) == (num_tokens, "stop")
        del engine.load_tokenizer


def a_stop_token_in_the_last_place_counts_as_stop(subject: Subject) -> None:
    with subject.engine() as engine:
        (free,) = engine.generate([request("free")])
        num_tokens = free.token_ids.index(free.token_ids[5]) + 1
        (both,) = engine.generate([request("both", max_new_tokens=num_tokens, stop_token_ids=(free.token_ids[5],))])
        assert (len(both.token_ids), both.finish) == (num_tokens, "stop")


def a_full_context_ends_it_with_length(subject: Subject) -> None:
    with subject.engine(max_length=64) as engine:
        (completion,) = engine.generate([request("full", token_ids=[3] * 61, max_new_tokens=100)])
        assert (len(completion.token_ids), completion.finish) == (3, "length")
        (completion,) = engine.generate([request("one", token_ids=[3] * 63, max_new_tokens=100)])
        assert (len(completion.token_ids), completion.finish) == (1, "length")


def log_probs_are_those_of_the_model_at_the_sampling_temperature(subject: Subject) -> None:
    model = subject.model(0)
    with subject.engine() as engine:
        for temperature in (1.0, 0.6, 1.7):
            requests = [
                request(f"{length}", range(1, length + 1), seed=length, temperature=temperature)
                for length in (1, 2, 17, 33)
            ]
            for asked, completion in zip(requests, engine.generate(requests), strict=True):
                tokens = [*asked.token_ids, *completion.token_ids]
                expected = reference_log_probs(model, tokens, temperature)[len(asked.token_ids) :]
                assert completion.log_probs == pytest.approx(expected, abs=subject.tolerance)


def scores_are_those_of_the_model(subject: Subject) -> None:
    model = subject.model(0)
    sequences = [[4], [1, 2], list(range(1, 18)), [7] * 16, list(range(30, 2, -1))]
    with subject.engine() as engine:
        for temperature in (1.0, 0.5):
            for tokens, scores in zip(sequences, engine.score(sequences, temperature), strict=True):
                assert scores == pytest.approx(
                    reference_log_probs(model, tokens, temperature), abs=subject.tolerance / temperature
                )
                assert scores[0] == 0.0
        assert engine.score([]) == []
        if subject.is_bit_exact:
            together = engine.score(sequences)
            assert [engine.score([tokens])[0] for tokens in sequences] == together
        with pytest.raises(UserError, match=r"temperature 0 must be above 0"):
            engine.score([[1, 2]], temperature=0)
        with pytest.raises(UserError, match=r"0 tokens, must be 1 to max_length"):
            engine.score([[]])


def greedy_takes_what_the_model_finds_most_probable(subject: Subject) -> None:
    model = subject.model(0)
    with subject.engine() as engine:
        asked = [request("a", [9, 8, 7], temperature=0.0), request("b", [1] * 20, temperature=0.0)]
        for one, completion in zip(asked, engine.generate(asked), strict=True):
            tokens = model.generate(
                torch.tensor([list(one.token_ids)]),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=None,
                pad_token_id=0,
            )[0].tolist()
            assert [*one.token_ids, *completion.token_ids] == tokens
            expected = reference_log_probs(model, tokens, 1.0)[len(one.token_ids) :]
            assert completion.log_probs == pytest.approx(expected, abs=subject.tolerance)


def samples_follow_the_distribution_that_top_k_and_top_p_leave(subject: Subject) -> None:
    model, prompt, count = subject.model(0), (11, 3, 5), 1500
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt)])).logits[0, -1].double()
    with subject.engine(num_slots=256) as engine:
        for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.8, 7, 1.0), (1.3, 0, 0.6), (1.0, 12, 0.5)):
            probs = torch.softmax(logits / temperature, dim=-1).tolist()
            ranked = sorted(range(len(probs)), key=lambda t: -probs[t])[: top_k or len(probs)]
            total = sum(probs[t] for t in ranked)
            kept, mass = [], 0.0
            for token in ranked:
                if mass >= top_p and top_p < 1:
                    break
                kept.append(token)
                mass += probs[token] / total
            expected = {t: probs[t] / sum(probs[k] for k in kept) for t in kept}
            completions = engine.generate(
                [
                    request(f"{s}", prompt, seed=s, max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
                    for s in range(count)
                ]
            )
            counts = Counter(c.token_ids[0] for c in completions)
            assert set(counts) <= set(expected)
            for completion in completions[:50]:
                log_prob = math.log(expected[completion.token_ids[0]])
                assert completion.log_probs[0] == pytest.approx(log_prob, abs=10 * subject.tolerance)
            # Pearson's statistic has mean dof and variance 2 dof; rare tokens share one bin.
            rare = [t for t in kept if expected[t] * count < 5]
            bins = [(counts[t], expected[t] * count) for t in kept if t not in rare]
            if rare:
                bins.append((sum(counts[t] for t in rare), sum(expected[t] for t in rare) * count))
            chi_square = sum((got - want) ** 2 / want for got, want in bins)
            dof = len(bins) - 1
            assert chi_square < dof + 5 * math.sqrt(2 * dof) + 1, (temperature, top_k, top_p, chi_square, dof)


# --- seeds ------------------------------------------------------------------------------------------------------------


def the_seed_decides(subject: Subject) -> None:
    with subject.engine() as engine:
        first, again, other = engine.generate([request("1", seed=7), request("2", seed=7), request("3", seed=8)])
        assert first.token_ids == again.token_ids != other.token_ids
        (later,) = engine.generate([request("4", seed=7)])
        assert later.token_ids == first.token_ids
        large = request("5", seed=2**63 - 1)
        assert engine.generate([large])[0].token_ids == engine.generate([large])[0].token_ids


def neither_company_nor_order_nor_slots_change_a_completion(subject: Subject) -> None:
    if not subject.is_bit_exact:
        return
    requests = mixed(24, subject.vocab_size, longest=20)
    with subject.engine(num_slots=16) as engine:
        expected = {c.request_id: c for c in engine.generate(requests)}
        reverse = engine.generate(requests[::-1])
        assert {c.request_id: c for c in reverse} == expected
        for one in requests[::5]:
            assert engine.generate([one]) == [expected[one.id]]
    for num_slots in (3, 24):
        with subject.engine(num_slots=num_slots) as engine:
            assert engine.generate(requests) == [expected[r.id] for r in requests]


def many_callers_share_few_slots(subject: Subject) -> None:
    requests = mixed(200, subject.vocab_size, longest=12)
    futures: dict[str, Future[Completion]] = {}
    with subject.engine(num_slots=16) as engine:

        def submit(part: list[Request]) -> None:
            for one in part:
                futures[one.id] = engine.submit(one)

        threads = [threading.Thread(target=submit, args=(requests[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not wait(futures.values(), PATIENCE_S).not_done
        assert engine.health().num_running == engine.health().num_waiting == 0
        completions = [futures[r.id].result() for r in requests]
        assert [c.request_id for c in completions] == [r.id for r in requests]
    if subject.is_bit_exact:
        with subject.engine(num_slots=64) as engine:
            assert engine.generate(requests) == completions


def prompts_that_are_too_much_for_one_step_are_answered_like_others(subject: Subject) -> None:
    # vLLM's CPU build computes 2048 tokens in a step: the seventh prompt is the one that would have to be cut.
    model = subject.model(0)
    asked = [request(f"{n}", [(n + t) % 60 for t in range(330)], seed=n, max_new_tokens=4) for n in range(10)]
    with subject.engine(num_slots=10, max_length=400) as engine:
        completions = engine.generate(asked, timeout_s=PATIENCE_S)
        assert_same(subject, engine.generate([asked[6]])[0], completions[6])
    for one, completion in zip(asked, completions, strict=True):
        expected = reference_log_probs(model, [*one.token_ids, *completion.token_ids], 1.0)[len(one.token_ids) :]
        assert completion.log_probs == pytest.approx(expected, abs=subject.tolerance)


@slowly()
def tokens_are_reported_while_they_are_sampled(subject: Subject) -> None:
    with subject.engine(num_slots=2, max_length=600) as engine:
        futures = engine.submit_many([request("long", max_new_tokens=200), request("other", max_new_tokens=200)])
        reported: list[int] = []
        num_reports = 0
        while not futures[0].done():
            new = engine.sampled({"long": len(reported), "nobody": 0})
            assert set(new) <= {"long"}
            reported += new.get("long", ())
            num_reports += bool(new)
            time.sleep(0.001)
        completion = futures[0].result(PATIENCE_S)
        assert num_reports > 1
        assert tuple(reported) == completion.token_ids[: len(reported)]
        assert engine.sampled({"long": 0}) == {}
        futures[1].result(PATIENCE_S)


# --- abort, pause, close ----------------------------------------------------------------------------------------------


@slowly()
def abort_gives_what_there_is_and_frees_the_slot(subject: Subject) -> None:
    with subject.engine(num_slots=1, max_length=600) as engine:
        long = request("long", max_new_tokens=500)
        running, waiting = engine.submit(long), engine.submit(request("waiting"))
        sample_some(engine)
        assert sorted(engine.abort(["long", "waiting", "nobody"])) == ["long", "waiting"]
        aborted = running.result(PATIENCE_S)
        assert aborted.finish == "abort"
        assert 0 < len(aborted.token_ids) < 500
        assert waiting.result(PATIENCE_S) == Completion("waiting", (), (), (), "abort")
        assert engine.abort() == []
        (next_one,) = engine.generate([request("long", max_new_tokens=4)])
        assert next_one.token_ids == aborted.token_ids[:4]
        running = engine.submit(long)
        assert engine.abort() == ["long"]
        assert running.result(PATIENCE_S).finish == "abort"


def an_id_can_be_used_again_at_once(subject: Subject) -> None:
    with subject.engine(max_length=600) as engine:
        (expected,) = engine.generate([request("same", [4, 4], seed=9)])
        for _ in range(3):
            with slowly():
                running = engine.submit(request("same", max_new_tokens=500))
                sample_some(engine)
                assert engine.abort() == ["same"]
            assert running.result(PATIENCE_S).finish == "abort"
            assert_same(subject, engine.generate([request("same", [4, 4], seed=9)])[0], expected)
        stop = expected.token_ids[3]
        num_tokens = expected.token_ids.index(stop) + 1
        for _ in range(3):
            (stopped,) = engine.generate([request("same", [4, 4], seed=9, stop_token_ids=(stop,))])
            assert stopped.token_ids == expected.token_ids[:num_tokens]
            assert_same(subject, engine.generate([request("same", [4, 4], seed=9)])[0], expected)


def scoring_does_not_disturb_what_is_in_flight(subject: Subject) -> None:
    asked = [request("a", max_new_tokens=100), request("b", [4, 4], max_new_tokens=80)]
    sequences = [list(range(1, 20)), [7] * 16] * 6
    with subject.engine(num_slots=2, max_length=600) as engine:
        expected, scores = engine.generate(asked), engine.score(sequences, 0.7)
        with slowly():
            futures = [engine.submit(r) for r in asked]
            sample_some(engine)
            again = engine.score(sequences, 0.7)
        for found, expected_scores in zip(again, scores, strict=True):
            assert found == pytest.approx(expected_scores, abs=subject.tolerance)
        for future, completion in zip(futures, expected, strict=True):
            assert_same(subject, future.result(PATIENCE_S), completion)


def prefixes_are_forgotten_also_while_the_cache_is_offloaded(subject: Subject) -> None:
    asked = request("a", range(1, 60))
    with subject.engine() as engine:
        engine.load_weights(named_weights(subject.model(1)), version=1)
        (expected,) = engine.generate([asked])
        engine.load_weights(named_weights(subject.model(0)), version=2)
        engine.generate([asked])
        engine.offload(["kv_cache"])
        engine.load_weights(named_weights(subject.model(1)), version=3)
        engine.onload(["kv_cache"])
        (found,) = engine.generate([asked])
        assert_same(subject, replace(found, versions=expected.versions), expected)


def pause_keeps_sequences_and_they_go_on_under_new_weights(subject: Subject) -> None:
    with subject.engine(max_length=600) as engine:
        (undisturbed,) = engine.generate([request("undisturbed", max_new_tokens=60)])
        with slowly():
            future = engine.submit(request("long", max_new_tokens=550))
            sample_some(engine)
            engine.pause()
        sampled = engine.health().num_sampled
        late = engine.submit(request("late"))
        time.sleep(0.05)
        assert engine.health().num_sampled == sampled
        assert engine.health().is_paused
        assert not late.done()
        engine.load_weights(named_weights(subject.model(1)), version=3)
        assert engine.version == 3
        assert not future.done()
        with slowly():
            engine.resume()
            sample_some(engine)
            engine.abort(["long"])
        completion = future.result(PATIENCE_S)
        num_tokens = len(completion.token_ids)
        switch = completion.versions.index(3)
        assert 0 < switch < num_tokens
        assert completion.versions == (0,) * switch + (3,) * (num_tokens - switch)
        assert completion.token_ids[:switch][:60] == undisturbed.token_ids[:switch]
        assert set(late.result(PATIENCE_S).versions) == {3}


def requests_in_flight_keep_or_recompute_their_cache_when_weights_change(subject: Subject) -> None:
    asked = request("long", max_new_tokens=550)
    old, new = subject.model(0), subject.model(1)  # made before an engine draws from the same random numbers
    with subject.engine(max_length=600) as engine, slowly():
        future = engine.submit(asked)
        sample_some(engine)
        engine.load_weights(named_weights(new), version=1)
        engine.score([list(range(1, 20))] * 4)  # as the canary after a push, which must not make them compute again
        sample_some(engine)
        engine.abort(["long"])
        keeps_cache = engine.keeps_cache
    completion = future.result(PATIENCE_S)
    tokens = [*asked.token_ids, *completion.token_ids]
    switch = len(asked.token_ids) + completion.versions.index(1)
    recomputed = reference_log_probs(new, tokens, 1.0)[switch:]
    kept = log_probs_with_cache_of(old, new, tokens, switch)
    assert max(abs(one - other) for one, other in zip(kept, recomputed, strict=True)) > 20 * subject.tolerance
    sampled = completion.log_probs[completion.versions.index(1) :]
    assert list(sampled) == pytest.approx(kept if keeps_cache else recomputed, abs=subject.tolerance)


def pause_and_resume_change_nothing_else(subject: Subject) -> None:
    with subject.engine(max_length=600) as engine:
        asked = [request("a", max_new_tokens=100), request("b", [4, 4], max_new_tokens=80)]
        expected = engine.generate(asked)
        futures = [engine.submit(r) for r in asked]
        for _ in range(5):
            engine.pause()
            engine.resume()
        for future, completion in zip(futures, expected, strict=True):
            assert_same(subject, future.result(PATIENCE_S), completion)


@slowly()
def a_closed_engine_says_so(subject: Subject) -> None:
    with subject.engine(max_length=600) as engine:
        future = engine.submit(request("pending", max_new_tokens=500))
        engine.close()
        with pytest.raises(RunError, match="closed"):
            future.result(PATIENCE_S)
        for call in (lambda: engine.submit(request("a")), lambda: engine.score([[1, 2]]), engine.health, engine.digest):
            with pytest.raises(RunError, match="closed"):
                call()
        engine.close()


# --- weights ----------------------------------------------------------------------------------------------------------


def new_weights_leave_nothing_of_the_old_ones(subject: Subject) -> None:
    asked = request("a", range(1, 30))
    with subject.engine() as engine:
        (old,) = engine.generate([asked])
        assert engine.version == 0
        engine.load_weights(named_weights(subject.model(1)), version=1)
        (new,) = engine.generate([asked])
        assert set(new.versions) == {1}
        tokens = [*asked.token_ids, *new.token_ids]
        expected = reference_log_probs(subject.model(1), tokens, 1.0)
        assert new.log_probs == pytest.approx(expected[len(asked.token_ids) :], abs=subject.tolerance)
        assert engine.score([tokens])[0] == pytest.approx(expected, abs=subject.tolerance)
        engine.load_weights(named_weights(subject.model(0)), version=2)
        (back,) = engine.generate([asked])
        assert_same(subject, replace(back, versions=old.versions), old)


def the_digest_is_of_the_live_weights_and_names_what_changed(subject: Subject) -> None:
    model = subject.model(0)
    with subject.engine() as engine:
        digest = engine.digest()
        assert digest == {name: tensor_digest(tensor) for name, tensor in named_weights(model)}
        engine.generate([request("a")])
        assert engine.digest() == digest
        engine.load_weights(named_weights(model), version=1)
        assert engine.digest() == digest
        changed = next(name for name in digest if "layers.1" in name and name.endswith("weight"))
        with torch.no_grad():
            dict(model.named_parameters())[changed].view(torch.int32).flatten()[5] ^= 1
        engine.load_weights(named_weights(model), version=2)
        assert [name for name, value in engine.digest().items() if value != digest[name]] == [changed]


def a_load_in_buckets_counts_when_it_is_finished(subject: Subject) -> None:
    weights = list(named_weights(subject.model(1)))
    asked = request("a")
    with subject.engine() as engine:
        engine.begin_load(7)
        engine.load_bucket(weights[: len(weights) // 2])
        assert engine.version == 0
        assert engine.health().is_loading
        future = engine.submit(asked)
        time.sleep(0.05)
        assert not future.done()
        engine.load_bucket(iter(weights[len(weights) // 2 :]))
        assert engine.version == 0
        engine.finish_load()
        assert engine.version == 7
        assert not engine.health().is_loading
        assert set(future.result(PATIENCE_S).versions) == {7}
        with pytest.raises(RunError, match="begin_load first"):
            engine.load_bucket([])
        with pytest.raises(RunError, match="begin_load first"):
            engine.finish_load()


def a_load_that_is_not_complete_is_not_served(subject: Subject) -> None:
    weights = list(named_weights(subject.model(1)))
    with subject.engine() as engine:
        name, tensor = weights[3]
        faults: list[tuple[list[tuple[str, torch.Tensor]], str]] = [
            (weights[:3] + weights[4:], f"missing {name}"),
            ([*weights, ("no.such.weight", tensor)], "no weight 'no.such.weight'"),
            ([*weights[:3], (name, torch.zeros(3, 1, 2))], rf"{name}: got shape \[3, 1, 2\]"),
            ([*weights[:4], weights[3]], f"{name} came twice"),
        ]
        for named, message in faults:
            with pytest.raises(WeightError, match=message):
                engine.load_weights(named, version=9)
            assert engine.version == 0
            with pytest.raises(WeightError, match="version 9 were loaded in part"):
                engine.submit(request("a"))
            with pytest.raises(WeightError, match="load them all again"):
                engine.score([[1, 2]])
        engine.load_weights(weights, version=9)
        assert set(engine.generate([request("a")])[0].versions) == {9}


# --- parts ------------------------------------------------------------------------------------------------------------


def parts_are_offloaded_and_onloaded_bit_for_bit(subject: Subject) -> None:
    asked = [request("a"), request("b", range(1, 20), seed=3)]
    with subject.engine() as engine:
        assert engine.can_offload <= engine.parts
        if not engine.can_offload:
            return
        expected, digest = engine.generate(asked), engine.digest()
        for parts in ({"kv_cache"}, {"weights"}, {"weights", "kv_cache"}):
            chosen = engine.can_offload & parts
            resident = engine.health().resident_bytes
            moved = engine.offload(chosen)
            assert moved.num_bytes == sum(resident[part] for part in chosen)
            assert moved.num_bytes_copied == sum(resident[part] for part in chosen if part == "weights")
            assert moved.ms > 0
            for part in engine.parts:
                assert engine.health().resident_bytes[part] == (0 if part in chosen else resident[part])
            assert engine.health().offloaded == chosen
            assert engine.offload(chosen).num_bytes == 0
            for part in sorted(chosen):
                with pytest.raises(RunError, match=f"{part}.* offloaded"):
                    engine.submit(request("refused"))
            if "weights" in chosen:
                for call in (engine.digest, lambda: engine.score([[1, 2]]), lambda: engine.begin_load(1)):
                    with pytest.raises(RunError, match="weights offloaded"):
                        call()
            back = engine.onload(chosen)
            assert 0 < back.num_bytes <= moved.num_bytes
            assert engine.digest() == digest
            for got, completion in zip(engine.generate(asked), expected, strict=True):
                assert_same(subject, got, completion)
        with pytest.raises(UserError, match="this engine has"):
            engine.offload(["gradients"])  # type: ignore[list-item]


def weights_that_are_replaced_anyway_need_not_be_kept(subject: Subject) -> None:
    with subject.engine() as engine:
        if "weights" not in engine.can_offload:
            return
        assert engine.offload(["weights"], keep_weights=False).num_bytes_copied == 0
        engine.onload(["weights"])
        with pytest.raises(WeightError, match="dropped"):
            engine.submit(request("a"))
        engine.load_weights(named_weights(subject.model(1)), version=1)
        assert engine.digest() == {name: tensor_digest(t) for name, t in named_weights(subject.model(1))}
        assert set(engine.generate([request("a")])[0].versions) == {1}


def requests_in_flight_survive_offloading_only_if_paused(subject: Subject) -> None:
    asked = [request("a", max_new_tokens=550), request("b", [4, 4], max_new_tokens=551)]
    with subject.engine(max_length=600) as engine:
        if not engine.can_offload:
            return
        expected = engine.generate([replace(r, sampling=replace(r.sampling, max_new_tokens=60)) for r in asked])
        with slowly():
            futures = [engine.submit(r) for r in asked]
            with pytest.raises(RunError, match="2 requests in flight"):
                engine.offload(engine.can_offload)
            sample_some(engine)
            engine.pause()
        engine.offload(engine.can_offload)
        with pytest.raises(RunError, match="offloaded"):
            engine.resume()
        engine.onload(engine.can_offload)
        with slowly():
            engine.resume()
            sample_some(engine)
            engine.abort()
        for future, completion in zip(futures, expected, strict=True):
            got = future.result(PATIENCE_S)
            num_tokens = min(60, len(got.token_ids))
            assert got.token_ids[:num_tokens] == completion.token_ids[:num_tokens]
            if subject.is_bit_exact:
                assert got.log_probs[:num_tokens] == completion.log_probs[:num_tokens]


# --- what is refused --------------------------------------------------------------------------------------------------


def what_cannot_work_is_refused_with_numbers(subject: Subject) -> None:
    with subject.engine(max_length=64) as engine:
        too_long = request("long", [1] * 64)
        with pytest.raises(UserError, match=r"'long': a prompt of 64 tokens.*max_length 64"):
            engine.submit(too_long)
        with pytest.raises(UserError, match=r"'empty': a prompt of 0 tokens"):
            engine.submit(request("empty", ()))
        with pytest.raises(UserError, match=f"token id {subject.vocab_size} is not in the vocabulary"):
            engine.submit(request("vocabulary", [1, subject.vocab_size]))
        for message, sampling in (
            ("max_new_tokens 0", {"max_new_tokens": 0}),
            ("temperature -1", {"temperature": -1.0}),
            ("temperature nan", {"temperature": math.nan}),
            ("top_p 0", {"top_p": 0.0}),
            ("top_p 1.1", {"top_p": 1.1}),
            ("top_k -2", {"top_k": -2}),
        ):
            with pytest.raises(UserError, match=message):
                engine.submit(request("sampling", **sampling))  # type: ignore[arg-type]
        # One bad request stops the whole list before any of it starts.
        with pytest.raises(UserError, match="'long'"):
            engine.generate([request("fine"), too_long])
        assert engine.health().num_running == engine.health().num_waiting == 0
        with pytest.raises(UserError, match="'same' is already in flight"):
            engine.submit_many([request("fine"), request("same"), request("same")])
        with pytest.raises(UserError, match="'long'"):
            engine.submit_many([request("fine"), too_long])
        assert engine.health().num_running == engine.health().num_waiting == 0
        together = engine.submit_many([request("fine"), request("other")])
        assert [future.result(60).request_id for future in together] == ["fine", "other"]
        assert engine.submit_many([]) == []
        engine.pause()
        future = engine.submit(request("twice"))
        with pytest.raises(UserError, match="'twice' is already in flight"):
            engine.submit(request("twice"))
        engine.resume()
        future.result(PATIENCE_S)
        engine.generate([request("twice")])


CHECKS: list[Callable[[Subject], None]] = [
    token_ids_go_in_and_come_out,
    each_request_is_delivered_when_it_finishes,
    a_stop_token_ends_it_and_is_included,
    a_stop_string_ends_it_where_its_last_token_was_sampled,
    a_stop_token_in_the_last_place_counts_as_stop,
    a_full_context_ends_it_with_length,
    log_probs_are_those_of_the_model_at_the_sampling_temperature,
    scores_are_those_of_the_model,
    greedy_takes_what_the_model_finds_most_probable,
    samples_follow_the_distribution_that_top_k_and_top_p_leave,
    the_seed_decides,
    neither_company_nor_order_nor_slots_change_a_completion,
    many_callers_share_few_slots,
    prompts_that_are_too_much_for_one_step_are_answered_like_others,
    tokens_are_reported_while_they_are_sampled,
    abort_gives_what_there_is_and_frees_the_slot,
    an_id_can_be_used_again_at_once,
    scoring_does_not_disturb_what_is_in_flight,
    prefixes_are_forgotten_also_while_the_cache_is_offloaded,
    pause_keeps_sequences_and_they_go_on_under_new_weights,
    requests_in_flight_keep_or_recompute_their_cache_when_weights_change,
    pause_and_resume_change_nothing_else,
    a_closed_engine_says_so,
    new_weights_leave_nothing_of_the_old_ones,
    the_digest_is_of_the_live_weights_and_names_what_changed,
    a_load_in_buckets_counts_when_it_is_finished,
    a_load_that_is_not_complete_is_not_served,
    parts_are_offloaded_and_onloaded_bit_for_bit,
    weights_that_are_replaced_anyway_need_not_be_kept,
    requests_in_flight_survive_offloading_only_if_paused,
    what_cannot_work_is_refused_with_numbers,
]
