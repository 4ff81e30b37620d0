"""How long a run may show no progress: by a clock that the test sets."""

from hotseat.observe import QuietLimits, RunProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[RunProgress, Clock]:
    clock = Clock()
    return RunProgress(10, None, QuietLimits(least_s=30.0, most_s=1800.0), clock), clock


def test_a_phase_that_has_not_ended_yet_may_take_as_long_as_a_call():
    progress, clock = made()
    progress.begin("rollout")
    clock.now += 1700.0
    assert (progress.quiet_s, progress.limit_s) == (1700.0, 1800.0)


def test_one_that_was_seen_may_take_five_times_as_long():
    progress, clock = made()
    for phase, seconds in (("rollout", 20.0), ("update", 0.1), ("rollout", 12.0), ("update", 0.2)):
        progress.begin(phase)
        clock.now += seconds
    progress.end_step(1, {})
    limits = {}
    for phase in ("rollout", "update"):
        progress.begin(phase)
        limits[phase] = progress.limit_s
    assert limits == {"rollout": 5 * 20.0, "update": 30.0}


def test_no_limit_is_above_that_of_a_call():
    progress, clock = made()
    progress.begin("update")
    clock.now += 1000.0
    progress.begin("update")
    assert progress.limit_s == 1800.0


def test_a_process_that_is_replaced_may_take_its_time():
    progress, clock = made()
    progress.begin("rollout")
    clock.now += 1.0
    progress.begin("rollout")
    clock.now += 29.0
    assert progress.limit_s == 30.0
    progress.note("warning")
    assert (progress.quiet_s, progress.limit_s) == (29.0, 30.0)
    progress.note("fault")
    assert (progress.quiet_s, progress.limit_s) == (0.0, 1800.0)
    assert progress.num_events == {"warning": 1, "fault": 1}


def test_only_numbers_of_a_step_are_kept():
    progress, _ = made()
    progress.end_step(3, {"reward": 0.5, "note": "words", "count": 2})
    assert (progress.steps_made, progress.metrics) == (3, {"reward": 0.5, "count": 2})
