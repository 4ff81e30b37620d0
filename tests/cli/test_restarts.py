"""How a command judges the ends of its driver, and when it starts it again."""

import pytest

from hotseat.cli.restarts import RestartBook, exit_code, is_kept, judge
from hotseat.processes.kept_driver import DriverEnd

RUN = {"run": "runs/x", "max_restarts": 2}
KILLED = "its driver was ended by SIGKILL (if nobody did that, memory may have run out)"


@pytest.mark.parametrize(
    ("code", "facts", "kind", "text"),
    [
        (0, {"over": 0}, "over", ""),
        (2, {"over": 2}, "over", ""),
        (130, {"over": 130}, "over", ""),
        (130, RUN, "over", ""),  # a second Ctrl-C ended it at once
        (2, {}, "over", ""),  # a wrong command line
        (1, {"error": "no data", "comes_again": True}, "comes again", "no data"),
        (1, {"error": "rank 1 died", "comes_again": False}, "death", "rank 1 died"),
        (-9, RUN, "death", KILLED),
        (-11, RUN, "death", "its driver was ended by SIGSEGV"),
        (-9, {}, "death", KILLED),
        (3, RUN, "death", "its driver exited with code 3, without an error"),
        (0, RUN, "death", "its driver exited with code 0, without an error"),
    ],
)
def test_ends_of_a_driver(code, facts, kind, text):
    verdict = judge(DriverEnd(code, facts))
    assert (verdict.kind, verdict.text) == (kind, text)


def test_what_is_refused_at_a_restart_may_be_accepted_later():
    """A cluster that has lost a node, or its head, may have it again a little later, or where a scheduler starts it."""
    verdict = judge(DriverEnd(2, {"over": 2}), is_restart=True)
    assert (verdict.kind, verdict.text) == ("death", "it could not begin again")
    assert judge(DriverEnd(0, {"over": 0}), is_restart=True).kind == "over"
    assert judge(DriverEnd(1, {"error": "no data", "comes_again": True}), is_restart=True).kind == "comes again"


def test_exit_codes_are_those_of_a_shell():
    assert [exit_code(DriverEnd(code, {})) for code in (0, 2, 130, -9)] == [0, 2, 130, 137]


def test_restarts_are_counted_from_the_last_new_checkpoint():
    book = RestartBook()
    book.note({**RUN, "allowed": ["seed"]})
    assert book.problem() is None
    assert book.count("it died").endswith(
        "started again, begins at its first step (restart 1 of 2 without a new checkpoint)"
    )
    assert (book.pause_s, book.arguments) == (0.0, ["resume", "runs/x", "--allow-change", "seed"])
    book.note({**RUN, "saved": 4})
    assert book.count("it died").endswith("resumes after step 4 (restart 1 of 2 without a new checkpoint)")
    book.note({**RUN, "saved": 4})
    assert book.problem() is None
    assert book.count("it died").endswith("resumes after step 4 (restart 2 of 2 without a new checkpoint)")
    assert book.pause_s > 0
    book.note({})  # it died before it had read anything
    assert book.problem() == (
        "it was started again 2 times without a new checkpoint (run.max_restarts), and is given up; resume it with:"
        " hotseat resume runs/x"
    )
    book.note({**RUN, "saved": 5})
    assert book.problem() is None
    assert len(book.restarts) == 3


def test_restarts_of_groups_without_a_new_checkpoint_count_too():
    book = RestartBook()
    book.note({**RUN, "saved": 4, "in_vain": 2})
    assert book.problem() is not None
    book.note({**RUN, "saved": 5, "in_vain": 1})
    assert book.problem() is None
    assert "restart 2 of 2" in book.count("it died")


def test_a_driver_that_dies_before_a_run_has_begun_is_not_started_again():
    book = RestartBook()
    book.note({})
    assert book.problem() == "no run had begun: start it again with the same command"


def test_only_commands_that_train_are_kept():
    kept = [["run", "x.yaml"], ["resume", "runs/x"]]
    others = [[], ["plan", "run"], ["run", "--help"], ["resume", "runs/x", "-h"], ["demo"], ["--version"]]
    assert [is_kept(argv) for argv in [*kept, *others]] == [True, True, *[False] * len(others)]
