"""The tables of TRL's fields against the installed TRL and PEFT, our schema, and the documentation."""

import dataclasses
import importlib
from pathlib import Path

import pytest
from doc_tables import with_table
from trl_table import BEGIN, END, main, render_tables

from hotseat.config.load import valid_keys
from hotseat.trl.conversions import DERIVED
from hotseat.trl.peft_config import NAMES, WITHOUT_EFFECT
from hotseat.trl.trl_fields import CONFIGS, DPO, GRPO, REWARD, SFT, SHARED, VERSION

DOCUMENT = Path(__file__).parents[2] / "docs" / "trl.md"
PARTS = (SHARED, GRPO, SFT, DPO, REWARD)


def defaults_of(config_class) -> dict:
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config_class)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_has_the_fields_and_defaults_of_the_installed_trl(name):
    trl = importlib.import_module("trl")
    entry, theirs = CONFIGS[name], defaults_of(getattr(trl, name))
    assert trl.__version__.startswith(f"{VERSION}.")
    assert {field.name for field in entry.fields} == set(theirs)
    ours = {field.name: entry.default_of(field) for field in entry.fields}
    assert {key: value for key, value in ours.items() if value != theirs[key]} == {}


@pytest.mark.slow
def test_what_all_have_from_transformers_stands_once():
    names = {field.name for field in dataclasses.fields(importlib.import_module("transformers").TrainingArguments)}
    assert {field.name for field in SHARED} == names


@pytest.mark.slow
def test_the_installed_peft_has_the_fields_that_are_taken():
    names = {field.name for field in dataclasses.fields(importlib.import_module("peft").LoraConfig)}
    assert {*NAMES, *WITHOUT_EFFECT} <= names


@pytest.mark.parametrize("name", CONFIGS)
def test_no_field_stands_twice(name):
    names = [field.name for field in CONFIGS[name].fields]
    assert len(names) == len(set(names))


def test_every_field_sets_keys_of_ours_or_says_why_not():
    keys = set(valid_keys())
    for field in (field for part in PARTS for field in part):
        assert set(field.sets) <= keys, field.name
        assert field.sets or field.note, field.name
        assert field.by is None or field.by in DERIVED, field.name
        assert not (field.is_refused and field.sets), field.name
    assert set(NAMES.values()) <= keys


def test_every_function_that_derives_reads_a_field_of_the_table():
    assert {field.by for part in PARTS for field in part} - {None} == set(DERIVED)


def test_the_documented_tables_are_what_the_fields_say():
    document = DOCUMENT.read_text()
    assert document == with_table(document, render_tables(), BEGIN, END), "run: python scripts/trl_table.py docs/trl.md"


def test_the_command_writes_the_tables_into_the_page(tmp_path):
    page = tmp_path / "trl.md"
    page.write_text(with_table(DOCUMENT.read_text(), "old", BEGIN, END))
    main([str(page)])
    assert page.read_text() == DOCUMENT.read_text()


def test_the_tables_name_every_field():
    tables = render_tables()
    assert all(f"| `{field.name}` |" in tables for part in PARTS for field in part)


def test_a_row_has_both_defaults_or_the_reason():
    rows = {line.split("`")[1]: line for line in render_tables().splitlines() if line.startswith("| `")}
    assert rows["adam_epsilon"] == "| `adam_epsilon` | `1e-08` | `actor.optimizer.eps` | `1e-08` |  |"
    assert rows["learning_rate"].startswith(
        "| `learning_rate` | GRPO `1e-06`; SFT `2e-05`; DPO `1e-06`; Reward `0.0001`"
    )
    assert "| `true`; GRPO `false` |" in rows["remove_unused_columns"]
    assert "|  | refused: engines sample by" in rows["min_p"]
    assert "|  | no effect: of the loss `vespo`" in rows["vespo_k_neg"]
