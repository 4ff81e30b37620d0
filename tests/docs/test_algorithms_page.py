"""docs/algorithms.md is complete and names only tests that exist."""

import ast
import inspect
import re
from pathlib import Path
from typing import get_args

from hotseat.algorithms import (
    advantages,
    aggregation,
    baselines,
    corrections,
    distillation,
    filtering,
    kl,
    policy_loss,
    shaping,
    supervised_loss,
    time_steps,
    turns,
    value_loss,
)
from hotseat.registry.correction_kinds import CORRECTIONS
from hotseat.registry.divergences import DIVERGENCES
from hotseat.registry.estimators import ESTIMATORS
from hotseat.registry.lookup import names_that
from hotseat.registry.policy_losses import POLICY_LOSSES

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "algorithms.md"


def _rows():
    _, _, table = PAGE.read_text().partition("## The table")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert [cell.strip("| ") for cell in header] == ["name", "formula", "equal to", "different from", "tested by"]
    return rows


MODULES = (
    *(advantages, aggregation, baselines, corrections, distillation, filtering, kl),
    *(policy_loss, shaping, supervised_loss, value_loss),
)
FUNCTIONS = {"step_starts": time_steps.step_starts, "turn_ends": turns.turn_ends} | {
    name: function
    for module in MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith(("_", "call_"))  # those call one of the others
}


def _code(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_every_row_is_filled_and_names_tests_that_exist():
    existing = {
        node.name
        for file in (TESTS / "algorithms").glob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    for row in _rows():
        assert len(row) == 5, row[0]
        assert all(row), row[0]
        tests = [name for name in _code(row[4]) if name.startswith("test_")]
        assert tests, f"{row[0]} names no test"
        assert set(tests) <= existing, f"{row[0]} names tests that do not exist: {set(tests) - existing}"


def test_every_public_function_and_estimator_has_a_row():
    named = {name for row in _rows() for name in _code(row[0])}
    assert FUNCTIONS.keys() | {"FixedKl", "AdaptiveKl"} | set(ESTIMATORS) == named


def _table(header, rows):
    lines = [header, "| " + " | ".join("---" for _ in header.strip("| ").split(" | ")) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(cell or "–" for cell in row) + " |" for row in rows)])


def test_the_page_has_the_tables_of_estimators_losses_and_divergences():
    divisors = {
        None: "",
        "batch": "the step",
        "group": "the group",
        "episodes": "the group, then the step's episodes",
    }
    estimators = _table(
        "| estimator | in words | formula | source | samples | critic | γ | normalised over | aggregation |",
        (
            (
                f"`{entry.name}`",
                entry.summary,
                entry.formula,
                entry.source,
                "2 or more" if entry.needs_group else "any",
                entry.needs_critic and "yes",
                entry.discounts and "yes",
                divisors[entry.normalisation],
                entry.aggregation and f"`{entry.aggregation}`",
            )
            for entry in ESTIMATORS.values()
        ),
    )
    losses = _table(
        "| policy loss | in words | formula | source | dual clip | ratio of steps | ratio per episode | aggregation |",
        (
            (
                f"`{entry.name}`",
                entry.summary,
                entry.formula,
                entry.source,
                entry.has_dual_clip and "yes",
                entry.has_steps and "yes",
                entry.has_episode_ratio and "yes",
                entry.aggregation and f"`{entry.aggregation}`",
            )
            for entry in POLICY_LOSSES.values()
        ),
    )
    divergences = _table(
        "| divergence | in words | formula | source |",
        ((f"`{entry.name}`", entry.summary, entry.formula, entry.source) for entry in DIVERGENCES.values()),
    )
    for table in (estimators, losses, divergences):
        assert table in PAGE.read_text(), f"docs/algorithms.md has to have this table:\n{table}"


def test_every_variant_is_in_the_row_of_its_function():
    text = {name: row[1] for row in _rows() for name in _code(row[0])}
    for function, variants in (
        ("estimate_kl", kl.KlEstimator),
        ("rejection_weights", corrections.Rejection),
        ("loss_weights", aggregation.Aggregation),
    ):
        assert set(get_args(variants)) <= set(_code(text[function]))
    assert set(names_that(CORRECTIONS, "function")) <= set(_code(text["correction_weights"]))


def test_every_public_function_says_what_it_does():
    for name, function in FUNCTIONS.items():
        assert function.__doc__, name
