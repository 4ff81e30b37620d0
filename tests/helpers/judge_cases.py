"""A judge whose verdicts can be worked out by hand: a model in which each token decides the next alone."""

from pathlib import Path

import torch

RUBRIC = "9={answer}"
GOOD, BAD, END = "+", "=", "<eos>"


def judge_section(task: Path, engine: str = "{max_length: 32, num_slots: 4}", **options: str) -> str:
    """The config of a judge that likes answers whose last character is a digit from 5 on, and fails on an operator."""
    (task / "rubric.txt").write_text(RUBRIC)
    written = {
        "rubric": f"{task}/rubric.txt",
        "model": f"{task}/judge",
        "pattern": "'([+=])'",
        "choices": f"{{'{GOOD}': 10, '{BAD}': 0}}",
        "max_tokens": "4",
        "engine": engine,
    } | options
    return "{" + ", ".join(f"{key}: {value}" for key, value in written.items() if value) + "}"


def expected_verdict(answer: str) -> float | None:
    """Return what the judge gives: 1 or 0, None if it fails."""
    return None if not answer or not answer[-1].isdigit() else float(answer[-1] >= "5")


def make_judge(task: Path) -> None:
    """Write the judge: its embedding is the identity, its layers add nothing, its head maps a token to the next."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model")
    tokenizer.save_pretrained(task / "judge")
    config = transformers.LlamaConfig.from_pretrained(task / "model", tie_word_embeddings=False, num_hidden_layers=1)
    model = transformers.LlamaForCausalLM(config)
    follows = {digit: GOOD if digit >= "5" else BAD for digit in "0123456789"}
    head = torch.zeros(16, 16)
    for token in range(16):
        text = tokenizer.convert_ids_to_tokens(token)
        head[tokenizer.convert_tokens_to_ids(follows.get(text or "", END)), token] = 1.0
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(16))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(head)
    model.save_pretrained(task / "judge")
