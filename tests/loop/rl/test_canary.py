"""What the canary makes of gaps between engines and trainer, with workers that answer as they are told."""

import json
import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from hotseat.errors import WeightError
from hotseat.loop.rl.canary import ANSWER_TOKENS, CanaryGuard, CanarySettings
from hotseat.loop.rl.sync import PushReport
from hotseat.loop.workers.weight_check import Canary
from hotseat.train.exact import NO_FP8, ExactScores, Fp8Parts
from hotseat.types import Prompt

SETTINGS = CanarySettings(
    num_tokens=1024, rounding_factor=4.0, drift_factor=4.0, dtype="bf16", temperature=1.0, max_length=256, seed=0
)
OF_FP8 = 0.15  # size of the gaps that they make
PROMPTS = [Prompt(index, "", (5,) * (3 + index)) for index in range(40)]


def noise(canary: Canary, size: float, salt: int = 0) -> list[float]:
    """Gaps of both signs, whose |gap| has the median `size` and the 90th percentile 1.8 · size."""
    draw = random.Random(f"{canary.sequences[0][-1]}/{salt}")
    return [draw.uniform(0, 2 * size) * draw.choice((-1, 1)) for _ in range(canary.num_sampled)]


class FakeWorkers:
    """A group whose ranks have gaps of these sizes, one for each set of answers that is sampled, the last for all."""

    def __init__(self, *sizes: float, num_ranks: int = 1, lacks_bytes: int = 0):
        self.sizes, self.num_ranks, self.lacks_bytes = sizes, num_ranks, lacks_bytes
        self.requests: list = []
        self.num_sets = 0

    def size(self) -> float:
        return self.sizes[min(max(self.num_sets, 1), len(self.sizes)) - 1]

    def on(self, rank: int):
        return SimpleNamespace(call=lambda method, *args: [getattr(self, method.__name__)(*args)])

    def call(self, method, *args):
        return [getattr(self, method.__name__)(*args)] * self.num_ranks

    def answer(self, requests):
        self.num_sets += 1
        self.requests.append(requests)
        return [(self.num_sets,) * request.sampling.max_new_tokens for request in requests]

    def score_canary(self, canary):
        return [-1.0 + gap for gap in noise(canary, self.size())]


class FakeActor(FakeWorkers):
    """A trainer without gaps, whose rounding has these sizes."""

    def score_canary(self, canary):
        return [-1.0] * canary.num_sampled

    def lacks_bytes_for_exact(self, longest):
        return self.lacks_bytes

    def score_exactly(self, canary, is_merged=True, fp8=NO_FP8):
        self.num_sets += 1
        exact = [-1.0 - gap for gap in noise(canary, self.size(), salt=1)]
        if fp8 == NO_FP8:
            return ExactScores(exact, exact)
        coarse = noise(canary, OF_FP8, salt=2)
        return ExactScores(exact, exact, [each + gap for each, gap in zip(exact, coarse, strict=True)])


class Case:
    """A guard with fake workers, the turns that it took and the warnings that it gave."""

    def __init__(self, actor: FakeActor, engines: FakeWorkers, inference: FakeWorkers | None = None, **changes):
        from dataclasses import replace

        self.turns: list[str] = []
        self.warnings: list[str] = []
        self.actor, self.engines = actor, engines
        self.guard = CanaryGuard(
            replace(SETTINGS, **changes), PROMPTS, actor, engines, inference, self.turn, self.warnings.append
        )

    @contextmanager
    def turn(self, phase, role):
        self.turns.append(f"{phase}/{role}")
        yield

    def push(self, size: float, version: int = 1, is_owed: bool = False) -> None:
        """A later push, after which engine 0 has gaps of this size."""
        canary = self.guard.canary
        assert canary is not None
        expected = [-1.0] * canary.num_sampled
        answers = [[-1.0 + gap for gap in noise(canary, size, salt=version)]]
        report = PushReport(version, 1, 1, 1.0, 1.0, frozenset(), expected, None if is_owed else answers)
        self.guard.check(report)


def test_a_first_push_within_rounding_is_good_and_its_numbers_are_known():
    case = Case(FakeActor(0.02), FakeWorkers(0.02, num_ranks=2))
    case.guard.start(0)
    metrics = case.guard.metrics()
    assert metrics["canary_alarms"] == 0
    assert metrics["canary_gap"] == pytest.approx(0.02, rel=0.1)
    assert metrics["canary_gap_median"] == pytest.approx(0.02, rel=0.1)
    assert metrics["canary_gap_p90"] == pytest.approx(0.036, rel=0.1)
    assert abs(metrics["canary_gap_mean"]) < 0.004
    assert metrics["canary_use"] == pytest.approx(0.25, rel=0.2)  # rounding times one, of four that are allowed
    assert case.turns == ["rollout/rollout", "sync/actor"]
    assert case.warnings == []


def test_a_first_push_far_beyond_rounding_ends_the_run_and_says_what_to_look_at():
    case = Case(FakeActor(0.02), FakeWorkers(0.2))
    with pytest.raises(WeightError) as raised:
        case.guard.start(0)
    text = str(raised.value)
    assert text.startswith("engine 0 and the trainer disagree on version 0: over 1,024 tokens of the policy's own")
    assert "of |gap| is 0." in text
    assert "allowed (4 times what rounding alone does, by a float32 forward of the same weights)" in text
    assert "confirmed on 1,024 other tokens" in text
    assert "positions, epsilon of norms" in text
    assert case.engines.num_sets == 2


def test_an_alarm_that_other_tokens_do_not_confirm_is_a_warning():
    case = Case(FakeActor(0.02), FakeWorkers(0.2, 0.02))
    case.guard.start(0)
    [warning] = case.warnings
    assert "New answers do not confirm it" in warning
    assert case.guard.metrics()["canary_alarms"] == 1
    assert case.guard.metrics()["canary_use"] < 0.5
    case.push(0.02)
    assert len(case.warnings) == 1


def test_a_later_push_is_compared_with_the_first_too():
    # Four times rounding would be 0.2; four times the first gap are 0.04.
    case = Case(FakeActor(0.05), FakeWorkers(0.01, 0.06))
    case.guard.start(0)
    case.push(0.02)
    with pytest.raises(WeightError, match=r"disagree on version 7: .*4 times the gap after the first push.*no digest"):
        case.push(0.06, version=7)


def test_old_answers_that_the_policy_no_longer_gives_stop_no_run():
    # On old answers the gap has grown tenfold; new answers show that rounding has too.
    case = Case(FakeActor(0.02, 0.2), FakeWorkers(0.02, 0.2))
    case.guard.start(0)
    old = case.guard.canary
    case.push(0.2)
    assert len(case.warnings) == 1
    assert case.guard.canary != old
    case.push(0.2, version=2)  # judged by the new answers and their rounding
    assert len(case.warnings) == 1
    assert case.guard.metrics()["canary_alarms"] == 1


def test_an_engine_that_owes_its_answer_is_asked_in_its_turn():
    case = Case(FakeActor(0.02), FakeWorkers(0.02, 0.5))
    case.guard.start(0)
    case.guard.ask()  # nothing is owed
    assert len(case.turns) == 2
    case.push(0.0, is_owed=True)
    case.engines.sizes = (0.5,)
    with pytest.raises(WeightError, match="engine 0 and the trainer disagree on version 1"):
        case.guard.ask()
    assert case.turns[2:] == ["rollout/rollout", "rollout/rollout", "sync/actor"]


def test_before_the_first_push_was_judged_nothing_is():
    case = Case(FakeActor(0.02), FakeWorkers(0.02))
    case.guard.check(PushReport(0, 1, 1, 1.0, 1.0, frozenset(), None, None))
    assert case.guard.canary is None
    assert case.guard.metrics() == {"canary_alarms": 0}


def test_inference_ranks_are_judged_as_engines_are():
    case = Case(FakeActor(0.02), FakeWorkers(0.02), FakeWorkers(0.5, num_ranks=2))
    with pytest.raises(WeightError, match="inference rank 0 and the trainer disagree on version 3"):
        case.guard.start(3)


def test_without_memory_for_a_float32_forward_usual_rounding_is_the_measure():
    case = Case(FakeActor(0.0, lacks_bytes=3 << 30), FakeWorkers(0.03))
    case.guard.start(0)
    assert "could be made (3.0 GiB of device memory are lacking), so engines" in case.warnings[0]
    assert case.guard.metrics()["canary_use"] < 0.5
    with pytest.raises(WeightError, match=r"4 times what rounding to bf16 usually does \(it was not measured\)"):
        Case(FakeActor(0.0, lacks_bytes=1), FakeWorkers(0.3)).guard.start(0)


def test_fp8_engines_are_judged_by_what_fp8_does():
    case = Case(FakeActor(0.02), FakeWorkers(OF_FP8), fp8=Fp8Parts(weights=True))
    case.guard.start(0)
    assert case.guard.metrics()["canary_use"] == pytest.approx(0.25, rel=0.2)
    with pytest.raises(
        WeightError, match="4 times what rounding to 16 bits and to FP8 alone does, by float32 forwards of"
    ):
        Case(FakeActor(0.02), FakeWorkers(5 * OF_FP8), fp8=Fp8Parts(cache=True)).guard.start(0)
    with pytest.raises(WeightError, match="4 times what rounding alone does, by a float32 forward"):
        Case(FakeActor(0.02), FakeWorkers(OF_FP8)).guard.start(0)
    with pytest.raises(WeightError, match=r"4 times what rounding to FP8 usually does \(it was not measured\)"):
        Case(FakeActor(0.0, lacks_bytes=1), FakeWorkers(0.5), fp8=Fp8Parts(weights=True)).guard.start(0)


def test_in_fp32_limits_are_small_and_no_forward_is_needed_to_know_them():
    actor = FakeActor(0.0)
    case = Case(actor, FakeWorkers(1e-6, 1e-3), dtype="fp32")
    case.guard.start(0)
    assert actor.num_sets == 0
    case.push(1e-5)
    with pytest.raises(WeightError, match="4 times the gap after the first push"):
        case.push(3e-4)
    with pytest.raises(WeightError, match="4 times the smallest gap that can be an error in fp32"):
        Case(FakeActor(0.0), FakeWorkers(2e-3), dtype="fp32").guard.start(0)


def test_every_set_of_answers_has_requests_of_its_own_that_fit_the_engine():
    case = Case(FakeActor(0.02), FakeWorkers(0.2, 0.02))
    case.guard.start(0)
    one, other = case.engines.requests
    assert len({request.id for request in one + other}) == len(one + other)
    assert len({request.seed for request in one + other}) == len(one + other)
    assert {request.token_ids for request in one}.isdisjoint(request.token_ids for request in other)
    assert sum(request.sampling.max_new_tokens for request in one) >= 1024
    assert all(request.sampling.max_new_tokens == ANSWER_TOKENS and request.sampling.ignore_eos for request in one)


@pytest.mark.parametrize("max_length", [3, 16, 40])
def test_long_prompts_leave_room_for_an_answer_and_its_scoring(max_length):
    case = Case(FakeActor(0.02), FakeWorkers(0.02), max_length=max_length, num_tokens=64)
    case.guard.start(0)
    canary = case.guard.canary
    assert canary is not None
    assert canary.num_sampled >= 64
    assert all(
        0 < start < len(sequence) < max_length
        for sequence, start in zip(canary.sequences, canary.num_prompt, strict=True)
    )


def test_the_gaps_of_a_step_are_measured_by_the_same_limits():
    from hotseat.algorithms.agreement import GapStatistics

    case = Case(FakeActor(0.02), FakeWorkers(0.02))
    assert case.guard.use(GapStatistics(0.02, 0.03, 0.0)) is None
    case.guard.start(0)
    inside, beyond = (case.guard.use(GapStatistics(size, 0.03, 0.0)) for size in (0.02, 0.2))
    assert inside is not None
    assert inside < 1
    assert beyond == pytest.approx(2.5, rel=0.2)


def test_scores_of_prompts_are_left_out():
    canary = Canary(((1, 2, 3, 4), (5, 6)), (2, 1), 1.0)
    assert canary.num_sampled == 3
    assert canary.sampled([[0.0, -1.0, -2.0, -3.0], [0.0, -4.0]]) == [-2.0, -3.0, -4.0]


def test_a_resumed_run_has_the_same_canary_and_judges_new_answers_as_at_first():
    case = Case(FakeActor(0.02), FakeWorkers(0.02))
    assert case.guard.state() is None
    case.guard.start(0)
    case.push(0.015, version=1)
    state = json.loads(json.dumps(case.guard.state()))  # as a file has it

    resumed = Case(FakeActor(0.02), FakeWorkers(0.02))
    resumed.guard.restore(state)
    assert resumed.guard.canary == case.guard.canary
    assert not resumed.guard.is_started
    resumed.push(0.015, version=1)
    resumed.guard.start(1)
    assert resumed.engines.num_sets == 1
    assert resumed.guard.state() == case.guard.state()
    assert resumed.guard.limits == case.guard.limits

    wrong = Case(FakeActor(0.02), FakeWorkers(0.2))
    wrong.guard.restore(state)
    wrong.push(0.2, version=1)  # judged by `start`, on new answers
    with pytest.raises(WeightError, match="disagree on version 1.*positions, epsilon of norms"):
        wrong.guard.start(1)


def test_a_run_that_resumes_on_a_machine_that_rounds_more_is_compared_with_that_machine():
    case = Case(FakeActor(0.05), FakeWorkers(0.01))
    case.guard.start(0)
    resumed = Case(FakeActor(0.05), FakeWorkers(0.05))
    resumed.guard.restore(case.guard.state())
    resumed.push(0.05, version=1)  # five times the gap before
    resumed.guard.start(1)
    resumed.push(0.05, version=2)
    assert resumed.warnings == []


@pytest.mark.parametrize(
    ("before", "after"), [(Fp8Parts(weights=True), NO_FP8), (NO_FP8, Fp8Parts(weights=True, cache=True))]
)
def test_a_run_that_resumes_with_other_things_in_fp8_starts_new_limits(before, after):
    sizes = {each: 0.02 if each == NO_FP8 else OF_FP8 for each in (before, after)}
    case = Case(FakeActor(0.02), FakeWorkers(sizes[before]), fp8=before)
    case.guard.start(0)
    state = json.loads(json.dumps(case.guard.state()))
    same = Case(FakeActor(0.02), FakeWorkers(sizes[before]), fp8=before)
    same.guard.restore(state)
    assert same.guard.limits == case.guard.limits

    resumed = Case(FakeActor(0.02), FakeWorkers(sizes[after]), fp8=after)
    resumed.guard.restore(state)
    assert resumed.guard.limits == ()
    resumed.guard.start(1)
    assert resumed.guard.limits[0].basis.count("to FP8") == (after != NO_FP8)
    assert (resumed.guard.limits[0].median < case.guard.limits[0].median / 2) == (after == NO_FP8)
    assert resumed.guard.state()["num_sets"] == 2
    if after == NO_FP8:
        resumed.engines.sizes = (0.02, OF_FP8)
        with pytest.raises(WeightError, match="disagree on version 2"):
            resumed.push(OF_FP8, version=2)


def test_limits_of_engines_without_fp8_hold_for_no_others():
    case = Case(FakeActor(0.02), FakeWorkers(0.02))
    case.guard.start(0)
    state = case.guard.state()
    for fp8, is_kept in ((NO_FP8, True), (Fp8Parts(cache=True), False)):
        resumed = Case(FakeActor(0.02), FakeWorkers(0.02), fp8=fp8)
        resumed.guard.restore(state)
        assert (resumed.guard.limits == case.guard.limits) == is_kept


def test_a_run_that_resumes_without_a_canary_starts_one():
    case = Case(FakeActor(0.02), FakeWorkers(0.02))
    case.guard.restore(None)
    case.guard.start(4)
    assert case.guard.canary is not None


def test_an_alarm_after_a_resume_is_confirmed_on_other_answers():
    case = Case(FakeActor(0.02), FakeWorkers(0.02))
    case.guard.start(0)
    resumed = Case(FakeActor(0.02), FakeWorkers(0.2, 0.02))
    resumed.guard.restore(case.guard.state())
    resumed.guard.start(1)
    assert len(resumed.warnings) == 1
    one, other = resumed.engines.requests
    assert {request.seed for request in one}.isdisjoint(request.seed for request in other)


class UnlikeEngines(FakeWorkers):
    """Two engines whose gaps, one for each set of answers, differ."""

    def __init__(self, *sizes: tuple[float, float]):
        super().__init__(0.0, num_ranks=2)
        self.pairs = sizes

    def call(self, method, *args):
        if method.__name__ != "score_canary":
            return super().call(method, *args)
        pair = self.pairs[min(self.num_sets, len(self.pairs)) - 1]
        return [[-1.0 + gap for gap in noise(args[0], size, salt=rank)] for rank, size in enumerate(pair)]


def test_an_alarm_is_confirmed_by_the_engine_that_it_is_about():
    case = Case(FakeActor(0.02), UnlikeEngines((0.02, 0.3), (0.3, 0.02), (0.02, 0.02)))
    case.guard.start(0)  # each was beyond the limits once
    assert len(case.warnings) == 1
    assert "engine 1 seemed to disagree" in case.warnings[0]
    case = Case(FakeActor(0.02), UnlikeEngines((0.02, 0.3), (0.3, 0.02), (0.3, 0.02)))
    with pytest.raises(WeightError, match="engine 0 and the trainer disagree on version 0"):
        case.guard.start(0)


def test_limits_follow_the_factors_of_the_config_that_a_run_resumes_with():
    case = Case(FakeActor(0.02), FakeWorkers(0.02))
    case.guard.start(0)
    resumed = Case(FakeActor(0.02), FakeWorkers(0.02), rounding_factor=8.0)
    resumed.guard.restore(case.guard.state())
    assert resumed.guard.limits[0].median == 2 * case.guard.limits[0].median


class BrokenActor(FakeActor):
    """A trainer whose float32 forward fails, or whose own log-probs are not finite."""

    log_prob = -1.0

    def score_canary(self, canary):
        return [self.log_prob] * canary.num_sampled

    def score_exactly(self, canary, is_merged=True, fp8=NO_FP8):
        return "CUDA out of memory"


def test_a_float32_forward_that_fails_ends_no_run():
    case = Case(BrokenActor(0.0), FakeWorkers(0.03))
    case.guard.start(0)
    assert "no float32 forward of the policy could be made (CUDA out of memory)" in case.warnings[0]
    assert case.guard.metrics()["canary_use"] < 0.5


def test_a_trainer_without_log_probs_is_named_instead_of_an_engine():
    actor = BrokenActor(0.0)
    actor.log_prob = float("nan")
    with pytest.raises(WeightError, match="the trainer's own log-probs of 1,024 of 1,024 tokens are not finite"):
        Case(actor, FakeWorkers(0.03)).guard.start(0)


def test_on_a_gpu_float32_products_may_round_to_ten_bits():
    Case(FakeActor(0.0), FakeWorkers(2e-3), dtype="fp32", on_gpu=True).guard.start(0)
    with pytest.raises(WeightError):
        Case(FakeActor(0.0), FakeWorkers(2e-2), dtype="fp32", on_gpu=True).guard.start(0)
