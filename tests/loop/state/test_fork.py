"""Runs that continue beside another one: two commands at once do not harm each other."""

import pytest

from hotseat.config import loads, to_saved
from hotseat.errors import UserError
from hotseat.loop.state.fork import fork, forked


def test_a_run_that_another_command_has_begun_meanwhile_is_left_alone(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_saved(loads("")))
    first, second = forked(run, "try", 0, ()), forked(run, "try", 0, ())
    assert first.name == second.name == "run-try-1"
    with fork(run, 0, first):
        (tmp_path / "run-try-1" / "metrics.jsonl").write_text("{}")
        refused = pytest.raises(UserError, match="run-try-1 could not be made: File exists; if another command has")
        with refused, fork(run, 0, second):
            raise AssertionError("it was made")
        assert (tmp_path / "run-try-1" / "metrics.jsonl").exists()


def test_what_ends_before_it_wrote_anything_leaves_nothing(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_saved(loads("")))
    with pytest.raises(KeyboardInterrupt), fork(run, 0, forked(run, "try", 0, ())):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
