"""docs/scoreboard.md is what bench/scoreboard.py makes of the logs; its figures are those of runs written by hand."""

import importlib
import json
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def scoreboard(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("scoreboard")


def write_run(folder, side, seconds, accuracies, *, is_timed=True, label=None):
    """Write steps of so many seconds and of 4 answers of 10 tokens, and an evaluation before and after each."""
    facts = {
        "side": side,
        "label": label or side,
        "seed": 1,
        "is_timed": is_timed,
        "steps": 4,
        "prompts": 2,
        "group": 2,
    }
    lines, at_s = [{"kind": "run", **facts}], 10.0
    for step, accuracy in enumerate(accuracies):
        if step:
            at_s += seconds
            lines.append({"kind": "step", "at_s": at_s, "step": step, "seconds": seconds, "length": 10.0})
        lines.append({"kind": "evaluation", "at_s": at_s, "step": step, "accuracy": accuracy})
    (folder / f"{label or side}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_page_and_its_curves_are_those_of_the_logs(scoreboard):
    assert [str(path) for path, text in scoreboard.files().items() if path.read_text() != text] == []


def test_a_row_has_medians_and_the_share_of_the_peers_time(scoreboard, tmp_path):
    about = {name: name for name in ("title", "task", "model", "hardware", "date")}
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "about.json").write_text(json.dumps(about | {"commands": [], "missing": [], "slower": []}))
    write_run(tmp_path / "sums", "hotseat", 2.0, [0.1, 0.2, 0.3, 0.4, 0.5])
    write_run(tmp_path / "sums", "trl", 10.0, [0.1, 0.1, 0.2, 0.3, 0.3])
    [comparison] = scoreboard.read_comparisons(tmp_path)
    ours, theirs = comparison.runs
    # 0.3 is reached after 10 + 2 x 2 s, by TRL after 10 + 3 x 10 s; 4 answers of 10 tokens in 2 s are 20 tokens/s.
    assert scoreboard.row(comparison, ours) == "| hotseat, seed 1 | 10.0% | 50.0% | 12 | 18 | 2.00 | 20 | 5.0 | 0.35 |"
    assert scoreboard.row(comparison, theirs) == "| trl, seed 1 | 10.0% | 30.0% | 20 | 50 | 10.00 | 4 |  |  |"


def test_runs_beside_others_have_no_seconds(scoreboard, tmp_path):
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "about.json").write_text("{}")
    write_run(tmp_path / "sums", "hotseat", 2.0, [0.1, 0.2, 0.3, 0.4, 0.5])
    write_run(tmp_path / "sums", "trl", 10.0, [0.1, 0.1, 0.2, 0.3, 0.3], is_timed=False)
    [comparison] = scoreboard.read_comparisons(tmp_path)
    ours, theirs = comparison.runs
    assert scoreboard.row(comparison, theirs) == "| trl, seed 1 | 10.0% | 30.0% |  |  |  |  |  |  |"
    assert scoreboard.row(comparison, ours).endswith("| 20 |  |  |")
    assert "trl" not in scoreboard.curves(comparison.runs)


def test_runs_with_settings_of_their_own_are_not_set_against_the_peers(scoreboard, tmp_path):
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "about.json").write_text("{}")
    write_run(tmp_path / "sums", "trl", 10.0, [0.1, 0.1, 0.2, 0.3, 0.3])
    write_run(tmp_path / "sums", "hotseat", 2.0, [0.1, 0.2, 0.3], label="lora")
    [comparison] = scoreboard.read_comparisons(tmp_path)
    lora = comparison.runs[0]
    row = "| lora, seed 1, to step 2 | 10.0% | 30.0% | 12 | 14 | 2.00 | 20 |  |  |"
    assert scoreboard.row(comparison, lora) == row
    colors = scoreboard.colors_of(comparison.runs)
    assert len({colors[label] for label in ("hotseat", "trl", "lora")}) == 3
    assert colors["lora"] in scoreboard.curves(comparison.runs)


def test_a_task_without_a_peer_has_no_columns_of_it_and_without_seconds_a_curve_over_steps(scoreboard, tmp_path):
    about = {name: name for name in ("title", "task", "model", "hardware", "date")}
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "about.json").write_text(json.dumps(about | {"commands": [], "missing": [], "slower": ["x"]}))
    write_run(tmp_path / "math", "hotseat", 2.0, [0.1, 0.2, 0.3, 0.4, 0.5], is_timed=False)
    [comparison] = scoreboard.read_comparisons(tmp_path)
    section = scoreboard.section(comparison)
    assert "| hotseat, seed 1 | 10.0% | 50.0% |  |  |  |  |\n" in section
    assert "TRL" not in section
    assert "Missing" not in section
    assert "- **Slower than wanted**: x." in section
    assert "Accuracy on the test set over steps" in section
    assert ">5 steps</text>" in scoreboard.curves(comparison.runs)
