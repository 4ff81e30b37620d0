"""Metrics on disk, the live view, and what is not shown."""

import io
import json
import logging
import re
import threading

import pytest
from rich.console import Console

from hotseat.observe import Journal, JsonLines, LiveView, TensorBoard, read_lines
from hotseat.observe.journal import histogram
from hotseat.observe.noise import without_log_lines


def test_each_step_is_one_line_on_disk_at_once(tmp_path):
    path = tmp_path / "run" / "lines.jsonl"
    with JsonLines(path) as metrics:
        metrics.write({"step": 1, "reward": 0.5, "phase": "x"})
        assert json.loads(path.read_text()) == {"step": 1, "reward": 0.5, "phase": "x"}
        metrics.write({"step": 2, "reward": 0.75})
    assert [record["reward"] for record in read_lines(path)] == [0.5, 0.75]


def test_a_number_that_is_not_finite_is_written_by_name(tmp_path):
    with JsonLines(tmp_path / "m.jsonl") as metrics:
        metrics.write({"step": 1, "loss": float("nan"), "norm": float("inf")})
    assert read_lines(tmp_path / "m.jsonl") == [{"step": 1, "loss": "nan", "norm": "inf"}]


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_lines(path) == [{"step": 1}]


def test_tensorboard_gets_the_numbers_and_not_the_words(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.write(3, {"reward": 0.25, "note": "words"})
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward"]
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(3, 0.25)]


def test_without_a_terminal_every_step_is_a_plain_line():
    out = io.StringIO()
    with LiveView("step", 20, {"reward": "reward {:.3f}", "kl": "kl {:.1e}"}, Console(file=out, width=100)) as view:
        view.phase("rollout")
        view.step(7, {"reward": 0.51234, "other": 1.0})
        view.say("done")
    assert out.getvalue() == "step  7/20  reward 0.512\ndone\n"


def test_a_count_of_failures_is_in_a_steps_line_if_there_are_any():
    out = io.StringIO()
    columns = {"reward": "reward {:.1f}", "samples_failed": "failed {:,.0f}"}
    with LiveView("step", 9, columns, Console(file=out, width=100)) as view:
        view.step(1, {"reward": 0.0, "samples_failed": 0.0})
        view.step(2, {"reward": 0.0, "samples_failed": 8.0})
    assert out.getvalue() == "step 1/9  reward 0.0\nstep 2/9  reward 0.0  failed 8\n"


def test_on_a_terminal_the_phase_and_the_time_to_go_are_shown():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with LiveView("step", 2, {}, console) as view:
        assert view.pace.left() == ""
        view.step(1, {})
        view.phase("update")
        view._live.refresh()
        assert view.pace.left() != ""
    assert "update" in out.getvalue()
    assert "to go" in out.getvalue()


def test_without_a_terminal_a_stage_is_a_dated_line_and_on_one_it_is_not():
    plain, shown = io.StringIO(), io.StringIO()
    LiveView("rl", console=Console(file=plain, width=100)).stage("starting Ray")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  starting Ray\n", plain.getvalue())
    with LiveView("rl", console=Console(file=shown, width=100, force_terminal=True)) as view:
        view.stage("starting Ray")
        view.processes = lambda: ["engine 0: compiling, 23 s"]
        view.progress("actor ready after 3.0 s")
        view._live.refresh()
    assert re.search(r"starting Ray \d+\.\d s", shown.getvalue())
    assert "engine 0: compiling, 23 s" in shown.getvalue()
    assert "actor ready after 3.0 s" in shown.getvalue()
    assert not re.search(r"\d{4}-\d\d-\d\d", shown.getvalue())


def test_without_a_terminal_lines_about_processes_come_now_and_then_until_all_have_started():
    out, asked = io.StringIO(), threading.Event()
    lines = [["engine 0: compiling, 15 s", "actor 0: loading weights, 3 s"], []]

    def processes() -> list[str]:
        if len(lines) == 1:
            asked.set()
            return lines[0]
        return lines.pop(0)

    with LiveView("rl", console=Console(file=out, width=100), every_s=0.01) as view:
        view.processes = processes
        assert asked.wait(60)
    (line,) = out.getvalue().splitlines()
    assert line.endswith("  engine 0: compiling, 15 s; actor 0: loading weights, 3 s")
    assert view.processes is None


def test_phases_are_told_by_name_until_the_first_step_is_done(tmp_path):
    out = io.StringIO()
    view = LiveView("rl", console=Console(file=out, width=100))
    view.expect(2, {"reward": "reward {:.1f}"})
    with Journal(tmp_path, view, num_steps=2) as journal:
        journal.stage("starting Ray", lambda: ["actor 0: loading weights, 3 s"])
        assert view.processes() == ["actor 0: loading weights, 3 s"]
        for name in ("sync", "rollout"):
            journal.phase(name)
        journal.step(1, {"reward": 0.5})
        assert view.processes is None
        journal.phase("rollout")
        journal.step(2, {"reward": 1.0})
    lines = [re.sub(r"^[-\d]+ [:\d]+  ", "DATE ", line) for line in out.getvalue().splitlines()]
    assert lines == [
        "DATE starting Ray",
        "DATE step 1: sending the weights to the engines",
        "DATE step 1: sampling and scoring answers",
        "rl 1/2  reward 0.5",
        "rl 2/2  reward 1.0",
    ]


def test_what_is_not_finite_is_in_no_distribution():
    values = [float("nan"), float("inf"), 1.0, 1.0, *(index / 100 for index in range(200))]
    pairs = histogram(values)
    assert sum(count for _, count in pairs) == 202
    assert len(pairs) <= 64
    assert histogram([float("nan")] * 100) == []


def test_a_file_is_cut_off_before_the_first_later_step(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        for step in range(6):
            lines.write({"step": step, "text": "x" * 50_000})
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(path.read_bytes() + b'{"step": 6, "cut')
    JsonLines(path, last_step=3).close()
    assert path.read_bytes() == b"".join(whole[:4])


@pytest.mark.parametrize("text", ["", "no line at all" * 10_000])
def test_a_file_without_a_whole_line_is_empty(tmp_path, text):
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    JsonLines(path).close()
    assert path.read_text() == ""


def test_brackets_in_what_is_said_are_only_brackets(capsys):
    with LiveView("rl", 1, {}) as view:
        view.say("[/INST] runs[lr=1e-4]")
    assert "[/INST] runs[lr=1e-4]" in capsys.readouterr().out


def test_only_noise_is_unheard(caplog):
    logger = logging.getLogger("a library")
    with without_log_lines("a library", lambda text: text.startswith("by the way")):
        logger.warning("by the way, %s", "hello")
        logger.warning("fire")
    logger.warning("by the way, again")
    assert [record.getMessage() for record in caplog.records] == ["fire", "by the way, again"]
