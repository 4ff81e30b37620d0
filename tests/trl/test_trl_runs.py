"""A translated run learns the weights that TRL's own trainer learns, from the same rows.

A batch is the whole data, so that its random order does not matter.
"""

import importlib
import json

import pytest
from trl_cases import trl_config

import hotseat

pytestmark = pytest.mark.slow

NUM_ROWS, NUM_STEPS = 8, 4
CASES = {  # file of the task, columns of TRL, values of TRL's config, overrides of ours
    "SFT": ("examples.jsonl", {"input": "prompt", "output": "completion"}, {"completion_only_loss": True}, []),
    "DPO": ("pairs.jsonl", {}, {"beta": 0.2}, []),
    "Reward": (
        *("pairs.jsonl", {}, {"lr_scheduler_type": "cosine"}),
        ["algorithm.reward_modelling.margin=true"],  # the pairs have margins
    ),
}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", CASES)
def test_a_translated_run_learns_trls_weights(task, kind):
    from datasets import load_dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    trl = importlib.import_module("trl")
    file, columns, values, overrides = CASES[kind]
    lines = (task / file).read_text().splitlines()[:NUM_ROWS]
    rows = [{columns.get(name, name): value for name, value in json.loads(line).items()} for line in lines]
    data = written(task / "rows.jsonl", rows)
    model = task / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    if kind == "Reward":  # with the same head
        model = task / "scored"
        AutoModelForSequenceClassification.from_pretrained(task / "model", num_labels=1).save_pretrained(model)
        tokenizer.save_pretrained(model)
    args = trl_config(
        *(f"{kind}Config",),
        output_dir=str(task / "out" / kind),
        per_device_train_batch_size=NUM_ROWS // 2,
        gradient_accumulation_steps=2,
        num_train_epochs=NUM_STEPS,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.05,  # all steps are clipped
        max_length=16,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        **values,
    )
    config = hotseat.from_trl(args, model=model).config
    trainer = getattr(trl, f"{kind}Trainer")(
        model=str(model),
        args=args,
        train_dataset=load_dataset("json", data_files=data, split="train", cache_dir=str(task / "cache")),
        processing_class=tokenizer,
    )
    trainer.train()
    run = hotseat.run(config, f"data.path={data}", "cluster.runtime=local", *overrides)

    theirs = [line for line in trainer.state.log_history if "loss" in line]
    assert run.curve("learning_rate")[1] == pytest.approx([line["learning_rate"] for line in theirs])
    assert run.curve("loss")[1] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)
    ours = type(trainer.model).from_pretrained(run.model).float().state_dict()
    before = type(trainer.model).from_pretrained(model).float().state_dict()
    for name, weights in trainer.model.state_dict().items():
        assert float((weights - before[name]).abs().max()) > 5e-3
        assert float((weights - ours[name]).abs().max()) < 1e-5
