"""What is wrong with data, tokenizer or sizes is said when a run starts, before a model loads or anything is made."""

import json
from pathlib import Path

import pytest
from loop_cases import make_task, rl_yaml
from model_shells import NO_WEIGHTS

from hotseat.config import loads
from hotseat.errors import BatchError, DataError, UserError
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow


@pytest.fixture
def task(tmp_path) -> Path:
    task = make_task(tmp_path)
    # A model that cannot be loaded: whoever gets so far fails in another way.
    (task / "weights").write_bytes((task / "model" / "model.safetensors").read_bytes())
    (task / "model" / "model.safetensors").write_bytes(NO_WEIGHTS)
    return task


def refused(kind: type[UserError], task: Path, *overrides: str) -> str:
    with pytest.raises(kind) as caught:
        start(loads(rl_yaml(task), overrides))
    assert not (task / "runs").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "1+1="', "prompts.jsonl:9: not JSON: "),
        ('{"inptu": "1+1=", "label": "1"}', "prompts.jsonl:9: input: missing; did you mean 'inptu'?"),
        ('{"input": "1+1="}', "prompts.jsonl:9: label: missing"),
        ('{"input": 7, "label": "1"}', "prompts.jsonl:9: input: a number, not a string"),
        ('{"input": null, "label": "1"}', "prompts.jsonl:9: input: null"),
        ('{"input": "", "label": "1"}', "prompts.jsonl:9: input: empty"),
        ("[1, 2]", "prompts.jsonl:9: a list, not an object with keys"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(task, line, message):
    """Scenarios 34 and 36: by file, line and key."""
    with (task / "prompts.jsonl").open("a") as file:
        file.write(line + "\n")
    assert message in refused(DataError, task)


def test_a_file_without_rows_is_named(task):
    """Scenario 34."""
    (task / "prompts.jsonl").write_text("")
    assert "prompts.jsonl is empty" in refused(DataError, task)
    (task / "prompts.jsonl").write_text("\n\n")
    assert "prompts.jsonl: no rows" in refused(DataError, task)


def test_a_tokenizer_without_a_chat_template_is_named_with_what_to_set(task):
    """Scenario 35."""
    message = refused(DataError, task, "data.apply_chat_template=true")
    assert f"the tokenizer of {task}/model has no chat template: set data.chat_template" in message


def test_prompts_at_the_limit_are_used_and_those_above_are_dropped_and_counted(task, capsys):
    """Scenario 36: a token per character here, so `1+2=` has four."""
    rows = [{"input": "1" * length + "=", "label": "1"} for length in (3, 3, 3, 3, 4, 5, 14)]
    (task / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task / "model" / "model.safetensors").write_bytes((task / "weights").read_bytes())
    start(loads(rl_yaml(task), ["data.prompt_max_length=4", "data.max_lost_fraction=1"]))
    out = capsys.readouterr().out
    assert "4 prompts, 3 dropped as too long" in out
    assert "warning: data.path: 3 of 7 rows (43%) do not fit data.prompt_max_length 4: 3 dropped" in out
    assert len(read_lines(task / "runs" / "run" / "metrics.jsonl")) == 2


def test_where_every_prompt_is_too_long_nothing_starts(task):
    """Scenario 36."""
    assert "prompt" in refused(DataError, task, "data.prompt_max_length=3")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.batch_size=16", "train.batch_size=64"], "8 rows in 1 pass are fewer than the 16 of one step"),
        (["train.batch_size=5"], "train.batch_size 5 does not divide the 16 samples of a step"),
        (["train.micro_batch_size=3"], "train.batch_size 16 is not a multiple of 1 rank x train.micro_batch_size 3"),
    ],
)
def test_sizes_that_do_not_fit_are_given_with_their_numbers(task, overrides, message):
    """Scenario 39."""
    assert message in refused(BatchError, task, *overrides)
