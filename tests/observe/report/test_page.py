"""What goes into a report: how runs are read, thinned and packed. The page itself is tested in a browser."""

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from made_runs import ATTACK, make_run, sample, write_lines

from hotseat.cli.main import main
from hotseat.errors import UserError
from hotseat.observe.report import write_report
from hotseat.observe.report.curves import (
    make_curves,
    make_heat_maps,
    make_phases,
    read_distributions,
    read_table,
    thin,
    without_surplus,
)
from hotseat.observe.report.key_figures import duration, num_restarts
from hotseat.observe.report.page import MAX_RUNS, SCRIPTS, label_runs, make_page, read_run
from hotseat.observe.report.reading import encoded, read_config, read_events, significant
from hotseat.observe.report.samples import MAX_TOKENS, covering_order, halving_order, in_runs, pack, read_samples
from hotseat.observe.report.timeline_view import Span, choose_windows, read_timeline

SIZE_LIMIT = 5_000_000
FILES = (
    "config.yaml",
    "plan.json",
    "metrics.jsonl",
    "distributions.jsonl",
    "samples.jsonl",
    "ledger.jsonl",
    "timeline.json",
    "events.jsonl",
)


def data_of(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def run_of(run_dir: Path) -> dict:
    return data_of(write_report([run_dir], run_dir / "report.html"))["runs"][0]


def metrics_run(tmp_path: Path, records) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    write_lines(path / "metrics.jsonl", records)
    return path


# --- the whole page ---------------------------------------------------------------------------------------------------


def test_a_report_holds_every_part_of_a_run(tmp_path):
    run = run_of(make_run(tmp_path / "carry", num_steps=20))
    assert (run["label"], run["task"], run["headline"]) == ("carry", "rl", "eval/accuracy")
    assert run["plan"]["roles"][1] == {"name": "rollout", "on": "@actor", "processes": 2, "tensor_parallel": 1}
    assert run["counts"]["states"] == {"trained": 7 * 20, "failed": 20}
    assert [event["kind"] for event in run["events"]["shown"]] == ["note", "warning", "fault"]
    assert len(run["timeline"]["windows"]) == 20
    assert set(run["distributions"]) == {"reward", "length", "engine_gap"}
    assert len(run["samples"]["shown"]) == run["samples"]["num_recorded"] == 5 * 6
    assert run["curves"]["series"]["kl"]["not_finite"] == 1


def test_a_config_that_names_no_task_has_the_usual_one(tmp_path):
    from hotseat.config import Config
    from hotseat.observe.report.page import DEFAULT_TASK

    assert Config().task == DEFAULT_TASK
    path = metrics_run(tmp_path, [{"step": 1, "loss": 2.0}])
    assert run_of(path)["task"] is None
    (path / "config.yaml").write_text("seed: 1\n")
    assert run_of(path)["task"] == DEFAULT_TASK


def test_a_page_is_written_through_no_link_and_leaves_nothing_where_it_fails(tmp_path):
    path = metrics_run(tmp_path, [{"step": 1, "loss": 2.0}])
    (tmp_path / "precious").write_text("mine")
    for name in ("report.html", ".report.html.unfinished"):
        (path / name).symlink_to(tmp_path / "precious")
    write_report([path], path / "report.html")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (path / "report.html").is_symlink()
    before = set(path.iterdir())
    (path / "folder").mkdir()
    with pytest.raises(UserError, match="folder cannot be written: Is a directory; choose another --output"):
        write_report([path], path / "folder")
    assert set(path.iterdir()) - before == {path / "folder"}


def test_the_policy_allows_these_scripts_and_nothing_else(tmp_path):
    text = write_report([make_run(tmp_path / "run", num_steps=5)], tmp_path / "out.html").read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split(";")[1]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_text_of_a_model_cannot_leave_the_data(tmp_path):
    path = make_run(tmp_path / "run", num_steps=5, attack=ATTACK)
    page = write_report([path], tmp_path / "out.html")
    text = page.read_text(encoding="utf-8")
    assert text.count("</script>") == 3
    assert "<img src=x" not in text
    assert ATTACK in data_of(page)["runs"][0]["samples"]["shown"][0]["prompt_text"]


def test_text_that_looks_like_a_placeholder_stays_text(tmp_path):
    path = make_run(tmp_path / "run", num_steps=5, attack="{{LIBRARY}}{{DATA}}")
    assert run_of(path)["samples"]["shown"][0]["label"].endswith("{{LIBRARY}}{{DATA}}")


@pytest.mark.parametrize(("label", "shown"), [({"a": ["é", 2]}, '{"a": ["é", 2]}'), (4, "4"), ("", None), (None, None)])
def test_a_label_of_any_type_is_shown_as_text(label, shown):
    assert pack({"label": label})["label"] == shown


def test_half_a_surrogate_pair_can_be_written():
    assert json.loads(encoded(["a\ud83db"])) == ["a?b"]


def test_own_scripts_never_make_elements_from_text():
    assets = Path(__file__).parents[3] / "hotseat" / "observe" / "report" / "assets"
    assert {path.stem for path in assets.glob("*.js")} == set(SCRIPTS)
    for name in SCRIPTS:
        text = (assets / f"{name}.js").read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
        assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(", text), name


@pytest.mark.parametrize("name", FILES)
def test_a_run_without_a_file_is_reported_without_it(tmp_path, name):
    path = make_run(tmp_path / "run", num_steps=5)
    (path / name).unlink()
    run = run_of(path)
    key = name.split(".")[0]
    if key == "metrics":
        assert run["curves"] == {"grids": [], "series": {}, "num_left_out": 0}
        assert run["headline"] is None
    elif key == "ledger":
        assert run["counts"] is None
        assert {"label": "Samples trained on", "value": "1,280"}.items() <= run["facts"][4].items()
    else:
        assert not run[key]


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("jsonl")])
def test_a_last_line_that_was_cut_short_is_left_out(tmp_path, name):
    path = make_run(tmp_path / "run", num_steps=5)
    whole = run_of(path)
    with (path / name).open("a") as file:
        file.write('{"step": 6, "rew')
    assert run_of(path) == whole


def test_a_line_behind_one_that_was_cut_short_does_no_harm(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1, "loss": 3}\n{"step": 2, "lo{"step": 2, "loss": 2}\n{"step": 3}\n')
    table = read_table(path)
    assert table.steps.tolist() == [1, 3]


def test_a_directory_that_is_no_run_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty holds no run"):
        write_report([tmp_path / "empty"], tmp_path / "out.html")
    with pytest.raises(UserError, match="nowhere is no directory"):
        write_report([tmp_path / "nowhere"], tmp_path / "out.html")
    with pytest.raises(UserError, match="at least one"):
        write_report([], tmp_path / "out.html")
    with pytest.raises(UserError, match="25 runs are too many"):
        write_report([tmp_path] * (MAX_RUNS + 1), tmp_path / "out.html")


def test_an_output_that_cannot_be_written_is_the_users_mistake(tmp_path):
    path = make_run(tmp_path / "run", num_steps=2)
    with pytest.raises(UserError, match="choose another --output"):
        write_report([path], tmp_path / "nowhere" / "out.html")


def test_several_runs_are_told_apart_by_their_labels(tmp_path):
    paths = [tmp_path / "a" / "rl", tmp_path / "b" / "rl", tmp_path / "b" / "sft"]
    assert label_runs(paths) == ["a/rl", "b/rl", "sft"]
    assert label_runs([paths[0], paths[0]]) == ["a/rl (1)", "a/rl (2)"]


def test_the_command_writes_beside_one_run_or_here_for_several(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    paths = [str(make_run(tmp_path / name, num_steps=3)) for name in ("one", "two")]
    assert main(["report", paths[0]]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'one' / 'report.html'}\n"
    assert main(["report", *paths]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert [run["label"] for run in data_of(tmp_path / "report.html")["runs"]] == ["one", "two"]
    assert main(["report", paths[0], "--output", "other.html"]) == 0
    assert (tmp_path / "other.html").is_file()
    assert main(["report", str(tmp_path / "three")]) == 2
    assert "three is no directory" in capsys.readouterr().err


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_long_run_with_long_samples_stays_below_the_limit(tmp_path):
    path = make_run(tmp_path / "long", num_steps=20_000, samples_every=1_000, num_tokens=4_000, attack="<<<")
    page = write_report([path], tmp_path / "out.html")
    assert page.stat().st_size < SIZE_LIMIT
    run = data_of(page)["runs"][0]
    assert max(len(grid["steps"]) for grid in run["curves"]["grids"]) <= 1_500
    assert len(run["timeline"]["windows"]) < run["timeline"]["num_windows"] == 20_000
    assert {1, 20_000} <= {window["step"] for window in run["timeline"]["windows"]}
    shown = run["samples"]["shown"]
    assert 20 < len(shown) < run["samples"]["num_recorded"]
    assert {1, 20_000} <= {shown_sample["step"] for shown_sample in shown}


@pytest.mark.long
def test_the_most_runs_and_very_many_metrics_stay_below_the_limit(tmp_path):
    path = make_run(tmp_path / "wide", num_steps=12, samples_every=2, num_tokens=300)
    write_lines(
        path / "metrics.jsonl", [{f"extra/{n}": step / 7 for n in range(900)} | {"step": step} for step in range(12)]
    )
    write_lines(path / "events.jsonl", [{"kind": "note", "text": "x" * 3_000}] * 200)
    page = write_report([path] * MAX_RUNS, tmp_path / "out.html")
    assert page.stat().st_size < SIZE_LIMIT
    run = data_of(page)["runs"][0]
    assert run["curves"]["num_left_out"] + len(run["curves"]["series"]) == 900
    assert run["samples"]["shown"]


# --- curves -----------------------------------------------------------------------------------------------------------


def test_thinning_keeps_means_and_extremes():
    values = np.array([1.0, 3.0, 5.0, 99.0, np.nan, 2.0, np.nan, np.nan])
    means, lows, highs = thin(values, 4)
    np.testing.assert_array_equal(means, [2, 52, 2, np.nan])
    np.testing.assert_array_equal(lows, [1, 5, 2, np.nan])
    np.testing.assert_array_equal(highs, [3, 99, 2, np.nan])


def test_short_curves_are_not_thinned_and_share_their_steps(tmp_path):
    records = [{"step": step, "a": step / 2, "b": 1} for step in range(4)]
    records[2]["eval/c"] = 0.25
    curves = make_curves(read_table(metrics_run(tmp_path, records)), 4)
    assert curves["grids"] == [{"steps": [0, 1, 2, 3], "num_steps": 4}, {"steps": [2], "num_steps": 1}]
    assert curves["series"]["a"] == {"grid": 0, "mean": [0, 0.5, 1, 1.5]}
    assert curves["series"]["b"]["grid"] == 0
    assert curves["series"]["eval/c"] == {"grid": 1, "mean": [0.25]}


def test_long_curves_become_means_with_a_band(tmp_path):
    records = [{"step": step, "loss": step, "step_s": 2.0} for step in range(1, 9)]
    curves = make_curves(read_table(metrics_run(tmp_path, records)), 4)
    assert curves["grids"][0] == {"steps": [2, 6], "num_steps": 8, "seconds": [4, 12]}
    assert curves["series"]["loss"] == {"grid": 0, "mean": [2.5, 6.5], "low": [1, 5], "high": [4, 8]}


def test_values_that_are_not_finite_are_gaps_and_words_are_no_metrics(tmp_path):
    records = [{"step": 1, "loss": 1.5, "note": "hello"}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": "-inf"}]
    curves = make_curves(read_table(metrics_run(tmp_path, records)), 100)
    assert curves["series"] == {"loss": {"grid": 0, "mean": [1.5, None, None], "not_finite": 2}}


def test_metrics_that_do_not_fit_are_counted():
    curves = {"grids": [], "series": {"a": {"mean": [1]}, "b": {"mean": [2]}}}
    assert without_surplus(curves, 30) == {"grids": [], "series": {"a": {"mean": [1]}}, "num_left_out": 1}


def test_phases_and_the_time_between_them_add_up_to_the_step(tmp_path):
    records = [
        {"step": 0, "time/evaluate": 5.0},
        {"step": 1, "time/rollout": 3.0, "time/update": 1.0, "time/driver_cpu": 9.0, "step_s": 5.0},
        {"step": 2, "time/rollout": 2.0, "time/update": 1.0, "time/evaluate": 2.0, "step_s": 5.0},
    ]
    phases = make_phases(read_table(metrics_run(tmp_path, records)))
    assert phases["steps"] == [[1, 1], [2, 2]]
    found = {phase["name"]: (phase["seconds"], phase["share"]) for phase in phases["phases"]}
    assert found == {
        "evaluate": ([0, 2], 0.2),
        "rollout": ([3, 2], 0.5),
        "update": ([1, 1], 0.2),
        "between phases": ([1, 0], 0.1),
    }


def test_a_run_of_examples_has_no_phases(tmp_path):
    assert make_phases(read_table(metrics_run(tmp_path, [{"step": 1, "loss": 2.0}]))) is None


# --- facts ------------------------------------------------------------------------------------------------------------


def test_the_facts_are_those_of_all_steps(tmp_path):
    records = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "step_s": 30.0, "tokens_per_s": 100.0, "eval/accuracy": 0.75, "engine_restarts": 1.0},
        {"step": 2, "step_s": 60.0, "tokens_per_s": 400.0, "eval/accuracy": 0.5, "engine_restarts": 2.0},
    ]
    facts = {fact["label"]: (fact["value"], fact["note"]) for fact in run_of(metrics_run(tmp_path, records))["facts"]}
    assert facts == {
        "Steps": ("2", "45 s each (median)"),
        "Time in steps": ("1 min 30 s", "without start, evaluations and end"),
        "eval/accuracy": ("0.25 \u2192 0.5", "best 0.75 at step 1"),
        "Tokens per second": ("300", "mean over the run"),  # (30 * 100 + 60 * 400) / 90
        "Engine restarts": ("2", ""),
    }


def test_of_a_loss_the_lowest_is_told(tmp_path):
    records = [{"step": step, "loss": loss} for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0))]
    fact = run_of(metrics_run(tmp_path, records))["facts"][1]
    assert (fact["label"], fact["value"], fact["note"]) == ("loss", "3 \u2192 2", "lowest 1 at step 2")


@pytest.mark.parametrize(
    ("values", "value", "note"),
    [
        ([0.25, 0.5, 1.0], "0.25 \u2192 1", "best at the end"),
        ([1.0, 0.5, 1.0], "1 \u2192 1", "as at the beginning"),
        ([0.5], "0.5", "at step 0, measured once"),
    ],
)
def test_a_tile_says_from_what_to_what(tmp_path, values, value, note):
    records = [{"step": step, "eval/accuracy": accuracy} for step, accuracy in enumerate(values)]
    fact = run_of(metrics_run(tmp_path, records))["facts"][1]
    assert (fact["label"], fact["value"], fact["note"]) == ("eval/accuracy", value, note)


def test_without_scripts_the_page_has_a_table_of_the_facts(tmp_path):
    made = metrics_run(tmp_path, [{"step": 0, "eval/loss": 3.0}, {"step": 1, "eval/loss": 2.0}])
    page = make_page([made.rename(tmp_path / "a<b")]).decode()
    shown = page[page.index("<noscript>") : page.index("</noscript>")]
    assert "<caption>a&lt;b</caption>" in shown
    assert '<tr><th scope="row">eval/loss</th><td>3 \u2192 2</td><td>lowest at the end</td></tr>' in shown


def test_the_time_in_all_is_that_of_the_commands_from_their_beginning(tmp_path):
    """Two commands: 36 s to the last event, and 10 s to the end of a phase that said nothing, an hour later."""
    run = metrics_run(tmp_path, [{"step": 1, "step_s": 4.6}])
    events = [
        {"time": 1000.0, "kind": "start", "text": "started"},
        {"time": 1030.0, "kind": "note", "text": "colocated"},
        {"time": 1036.0, "kind": "note", "text": "model: m"},
        {"time": 4600.0, "kind": "start", "text": "resumed after step 1"},
        {"time": 4601.0, "kind": "note", "text": "going on"},
    ]
    write_lines(run / "events.jsonl", events[:3])

    def facts() -> dict:
        return {fact["label"]: (fact["value"], fact["note"]) for fact in run_of(run)["facts"]}

    assert facts()["Time in all"] == ("36.0 s", "from the command to the end")
    assert facts()["Time in steps"][0] == "4.6 s"
    write_lines(run / "events.jsonl", events)
    phase = {"name": "update", "ph": "X", "ts": 4_604e6, "dur": 6e6, "pid": 1, "tid": 1, "args": {"step": 2}}
    (run / "timeline.json").write_text("[\n" + json.dumps(phase) + ",\n")
    assert facts()["Time in all"] == ("46.0 s", "of 2 commands, each to its end")
    write_lines(run / "events.jsonl", events[1:3])  # of a version that did not record it
    assert "Time in all" not in facts()


def test_runs_side_by_side_are_known_by_the_same_metrics(tmp_path):
    """One is evaluated, the other is not: what both have is there for both."""
    records = [{"step": step, "reward": step / 10} for step in (1, 2, 3)]
    evaluated = [{**record, "eval/accuracy": 0.5} for record in records]
    paths = []
    for name, lines in (("one", records), ("two", evaluated)):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "metrics.jsonl", lines)
        paths.append(tmp_path / name)
    runs = data_of(write_report(paths, tmp_path / "both.html"))["runs"]
    facts = [{fact["label"]: fact["value"] for fact in run["facts"]} for run in runs]
    assert facts[0]["reward"] == facts[1]["reward"] == "0.1 \u2192 0.3"
    assert "eval/accuracy" not in facts[0]
    assert facts[1]["eval/accuracy"] == "0.5 \u2192 0.5"
    alone = data_of(write_report([tmp_path / "two"], tmp_path / "two.html"))["runs"][0]
    assert "reward" not in {fact["label"] for fact in alone["facts"]}


def test_changes_are_read_with_their_place_on_both_axes(tmp_path):
    run = metrics_run(tmp_path, [{"step": step, "step_s": 2.0} for step in (1, 2, 3)])
    assert run_of(run)["changes"] == []
    write_lines(
        run / "changes.jsonl",
        [
            {"step": 3, "time": 1.0, "key": "actor.optimizer.learning_rate", "from": 1e-6, "to": 5e-7},
            {"step": 3, "key": "reward.url", "from": None, "to": "http://me:secret@host/x", "is_allowed": True},
            {"text": "no change"},
        ],
    )
    first, second = run_of(run)["changes"]
    assert first == {
        "step": 3,
        "seconds": 4.0,
        "key": "actor.optimizer.learning_rate",
        "from": "1e-06",
        "to": "5e-07",
        "is_allowed": False,
    }
    assert (second["from"], second["to"], second["is_allowed"]) == ("null", "http://***@host/x", True)


def test_restarts_are_counted_across_a_resume():
    assert num_restarts(np.array([0.0, 1, 1, 2, 0, 0, 1])) == 3
    assert num_restarts(np.array([2.0, 1.0])) == 3


def test_durations_and_digits():
    assert [duration(s) for s in (4.25, 61, 3700, 90_000)] == ["4.2 s", "1 min 01 s", "1 h 01 min", "1 d 1 h"]
    assert [significant(value) for value in (0.123456789, 3.0, 123456.7)] == [0.12346, 3, 123460]


# --- distributions ----------------------------------------------------------------------------------------------------


def test_few_values_are_rows_of_their_own(tmp_path):
    write_lines(
        tmp_path / "distributions.jsonl",
        [{"step": 1, "reward": [[0.0, 3], [1.0, 1]]}, {"step": 2, "reward": [[1.0, 4], ["nan", 2]]}],
    )
    assert make_heat_maps(read_distributions(tmp_path), 160)["reward"] == {
        "steps": [[1, 1], [2, 2]],
        "rows": [0, 1],
        "is_discrete": True,
        "cells": [[0, 0, 0.75], [0, 1, 0.25], [1, 1, 1]],
    }


def test_many_values_are_binned_and_steps_joined(tmp_path):
    write_lines(
        tmp_path / "distributions.jsonl", [{"step": step, "length": [[n, 1] for n in range(65)]} for step in (1, 2, 3)]
    )
    found = make_heat_maps(read_distributions(tmp_path), 1)["length"]
    assert found["steps"] == [[1, 3]]
    assert found["rows"] == [2 * n for n in range(33)]
    # 65 values in 32 rows of two, and the last value belongs to the last row.
    assert [cell[2] for cell in found["cells"]] == [0.0308] * 31 + [0.0462]


# --- samples ----------------------------------------------------------------------------------------------------------


def test_halves_come_before_quarters():
    assert halving_order(5) == [4, 0, 2, 1, 3]
    assert [sorted(halving_order(count)) for count in range(7)] == [list(range(count)) for count in range(7)]


def test_samples_are_chosen_across_steps_and_states():
    places = [(0, step, state) for step in (1, 2, 3) for state in ("trained", "trained", "dropped")]
    order = [(places[index][1:]) for index in covering_order(places)]
    assert order[:4] == [(3, "trained"), (3, "dropped"), (1, "trained"), (1, "dropped")]
    assert sorted(covering_order(places)) == list(range(9))


def test_samples_beyond_the_budget_are_left_out_but_counted(tmp_path):
    path = make_run(tmp_path / "run", num_steps=50)
    found = read_samples(path, 30_000)
    assert found["num_recorded"] == 11 * 6
    assert len(encoded(found["shown"])) < 31_000
    assert {shown["state"] for shown in found["shown"]} == {"trained", "dropped", "failed"}


def test_a_sample_is_packed_without_loss():
    record = {
        "step": 12, "epoch": 0, "prompt": 17, "sample": 3, "source": "gsm8k", "state": "trained", "reason": "",
        "reward": 1.0, "score": 1.0, "is_truncated": False, "label": "42", "prompt_text": "?", "extra": {"format": 1.0},
        "segments": [{
            "text": ["The", " answer", "."], "sampled": [False, True, True], "engine_log_probs": [None, -0.31, -1.5],
            "trainer_log_probs": [None, -0.3, None], "advantages": [None, 0.7, 0.7],
            "fates": [None, "learned", "clipped"], "versions": [None, 11, 11],
        }],
    }  # fmt: skip
    packed = pack(record)
    assert (packed["key"], packed["num_tokens"], packed["label"]) == ([0, 17, 3], 3, "42")
    assert packed["segments"] == [
        {
            "text": ["The", " answer", "."],
            "sampled": [[False, 1], [True, 2]],
            "engine": [None, -3100, -15000],
            "gap": [None, 1000, None],
            "advantage": [[None, 1], [0.7, 2]],
            "fate": [[None, 1], ["learned", 1], ["clipped", 1]],
            "version": [[None, 1], [11, 2]],
            "turn": [[None, 3]],
            "first": 0,
            "segment": 0,
            "shared": [0, 0],
        }
    ]


def test_turns_are_packed_with_their_tokens_and_branches_with_what_they_share():
    times = {"asked_s": 0.5, "answered_s": 1.25}
    packed = pack(
        {
            "waited_s": 0.1,
            "took_s": 4.0,
            "turns": [
                {"length": 2, "reward": 1.0, "tool_calls": ["add(1)"], **times},
                {"length": 1, "reward": None, "tool_calls": [], "asked_s": None, "answered_s": None},
                {"length": 1, "reward": 0.5, "tool_calls": [], **times},
            ],
            "segments": [
                {"text": ["q", "a", "b", "r", "c"], "sampled": [False, True, True, False, True]},
                {"text": ["q", "a", "b", "s", "d"], "sampled": [False, False, False, False, True]},
            ],
        }
    )
    assert (packed["waited_s"], packed["took_s"]) == (0.1, 4.0)
    assert packed["turns"][0] == {"length": 2, "reward": 1.0, "tool_calls": ["add(1)"], **times}
    assert packed["turns"][1]["asked_s"] is None
    assert [segment["turn"] for segment in packed["segments"]] == [
        [[None, 1], [0, 2], [None, 1], [1, 1]],
        [[None, 4], [2, 1]],
    ]
    assert [segment["shared"] for segment in packed["segments"]] == [[0, 0], [3, 0]]


def test_a_branch_begins_with_the_first_token_that_it_sampled_even_if_it_is_the_same_again():
    first = {"text": ["q", "a", "b"], "sampled": [False, True, True]}
    packed = pack({"segments": [first, {"text": ["q", "a", "c"], "sampled": [False, True, True]}]})
    assert [segment["shared"] for segment in packed["segments"]] == [[0, 0], [1, 0]]


def test_a_sample_with_missing_or_short_lists_is_packed():
    packed = pack({"segments": [{"text": ["a", "b"], "sampled": [True]}, {}, None]})
    assert packed["segments"][0]["sampled"] == [[True, 1], [False, 1]]
    assert packed["segments"][0]["engine"] == [None, None]
    assert pack({"state": "failed"})["segments"] == []


def test_the_middle_of_a_long_sample_is_left_out():
    segments = [{"text": [str(position) for position in range(first, first + 1_000)]} for first in (0, 1_000, 2_000)]
    packed = pack({"segments": segments})
    kept = [text for segment in packed["segments"] for text in segment["text"]]
    assert packed["num_tokens"] == 3_000
    assert kept == [str(position) for position in [*range(1_200), *range(2_600, 3_000)]]
    assert len(kept) == MAX_TOKENS
    assert [segment["first"] for segment in packed["segments"]] == [0, 1_000, 2_600]


def test_runs_of_a_value():
    assert in_runs([None, None, 1, 2, 2]) == [[None, 2], [1, 1], [2, 2]]


# --- timeline ---------------------------------------------------------------------------------------------------------


def events_of_two_steps():
    yield {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "phases"}}
    yield {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "devices"}}
    yield {"ph": "M", "name": "thread_name", "pid": 2, "tid": 0, "args": {"name": "device 0"}}
    yield {"ph": "X", "name": "rollout", "pid": 2, "tid": 0, "ts": 1_000_000, "dur": 400}
    yield {
        "ph": "X",
        "name": "offload",
        "cat": "hand-over",
        "pid": 2,
        "tid": 0,
        "ts": 1_000_010,
        "dur": 5,
        "args": {"bytes": 64},
    }
    yield {"ph": "X", "name": "rollout", "pid": 1, "tid": 0, "ts": 1_000_000, "dur": 100, "args": {"step": 1}}
    yield {"ph": "X", "name": "update", "pid": 1, "tid": 0, "ts": 1_000_100, "dur": 50, "args": {"step": 1}}
    yield {"ph": "X", "name": "rollout", "pid": 1, "tid": 0, "ts": 1_000_200, "dur": 300, "args": {"step": 2}}


LINES = [json.dumps(event) for event in events_of_two_steps()]


@pytest.mark.parametrize("end", [",\n", ',\n{"ph": "X", "na'])
def test_a_timeline_is_read_up_to_an_event_that_was_cut_short(tmp_path, end):
    (tmp_path / "timeline.json").write_text("[\n" + ",\n".join(LINES) + end)
    found = read_timeline(tmp_path, 10_000)
    assert found["lanes"] == [("phases", "phases"), ("devices", "device 0")]
    assert found["names"] == ["offload", "rollout", "update"]
    assert [(window["step"], window["start"], window["end"]) for window in found["windows"]] == [
        (1, 0, 150),
        (2, 200, 500),
    ]
    assert [window["is_slowest"] for window in found["windows"]] == [False, True]
    assert sorted(found["spans"]) == [
        [0, 1, 0, 100, 0],
        [0, 1, 200, 300, 0],
        [0, 2, 100, 50, 0],
        [1, 0, 10, 5, 1, 64],
        [1, 1, 0, 400, 0],
    ]


def test_a_timeline_without_steps_is_none(tmp_path):
    (tmp_path / "timeline.json").write_text("[\n")
    assert read_timeline(tmp_path, 10_000) is None


def test_first_slowest_and_newest_steps_are_chosen():
    windows = [Span((0, 0), "", 10.0 * step, 10.0 * step + (9 if step == 40 else 5), step) for step in range(100)]
    assert choose_windows(windows, [10] * 100, 100) == [0, 1, 2, 40, *range(94, 100)]
    assert choose_windows(windows, [500] * 100, 100) == [99]


def test_a_step_made_again_after_a_resume_is_there_twice(tmp_path):
    phases = [(1, 0), (2, 100), (3, 200), (2, 900), (3, 1_000)]
    events = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "phases"}}]
    events += [
        {"ph": "X", "name": "update", "pid": 1, "tid": 0, "ts": at, "dur": 50, "args": {"step": step}}
        for step, at in phases
    ]
    (tmp_path / "timeline.json").write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in events))
    assert [window["step"] for window in read_timeline(tmp_path, 10_000)["windows"]] == [1, 2, 3, 2, 3]


# --- config and events ------------------------------------------------------------------------------------------------


def test_a_config_has_dotted_keys_or_only_its_text(tmp_path):
    (tmp_path / "config.yaml").write_text("task: rl\nactor: {model: m, layers: [1, 2]}\nlog: {}\n")
    assert read_config(tmp_path)["keys"] == {"task": "rl", "actor.model": "m", "actor.layers": "[1, 2]", "log": "{}"}
    (tmp_path / "config.yaml").write_text("a: [1\n")
    assert read_config(tmp_path) == {"text": "a: [1\n", "keys": {}}


def test_notes_are_the_first_events_to_be_left_out(tmp_path):
    kinds = ["warning", "note", "note", "fault", "note"]
    write_lines(
        tmp_path / "events.jsonl", [{"step": step, "kind": kind, "text": ""} for step, kind in enumerate(kinds)]
    )
    found = read_events(tmp_path, 3)
    assert [event["step"] for event in found["shown"]] == [0, 3, 4]
    assert found["counts"] == {"warning": 1, "note": 3, "fault": 1}


def test_a_plan_of_another_version_is_left_out(tmp_path):
    path = make_run(tmp_path / "run", num_steps=2)
    (path / "plan.json").write_text('{"label": "colocated"}')
    assert run_of(path)["plan"] is None


def test_a_made_sample_has_the_documented_keys():
    """The runs these tests are made of must stay what docs/run-directory.md describes."""
    import random

    text = (Path(__file__).parents[3] / "docs" / "run-directory.md").read_text()
    documented = json.loads(re.search(r"```json[^\n]*\n(.*?)```", text, re.DOTALL)[1])
    made = sample(random.Random(0), 1, 0, 5)
    assert set(made) == set(documented)
    assert set(made["segments"][0]) == set(documented["segments"][0])


def test_the_use_of_the_machine_is_drawn_over_the_time_of_the_whole_run(tmp_path):
    """Each value is worked by hand: of a bucket of two lines, the mean share and the most memory."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("task: rl\n")
    lines = [
        {"time": 100.0 + 2 * n, "step": n, "over_s": 2.0, "machine/cpu": n / 1000, "machine/memory": float(n)}
        for n in range(800)
    ]
    (run / "machine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"time": 5')
    machine = read_run(run, "run", 1_000_000)["machine"]
    assert machine["seconds"][:2] == [2, 6]
    assert machine["seconds"][-1] == 2 * 799
    assert machine["shares"]["cpu"][:2] == [0.0005, 0.0025]
    assert machine["gib"]["memory"][:2] == [1, 3]
    assert machine["gib"]["memory"][-1] == 799
    (run / "machine.jsonl").unlink()
    assert read_run(run, "run", 1_000_000)["machine"] is None
