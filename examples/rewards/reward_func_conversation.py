"""Rewards for conversations: the probability that a classifier gives to its label LABEL_1, halved for short answers.

The classifier is the folder or hub name in QUALITY_MODEL; without it, the folder `classifier` beside this file, which
make_classifier.py writes.
"""

import os
from pathlib import Path

from transformers import pipeline

MIN_WORDS = 10

quality_model = os.environ.get("QUALITY_MODEL") or str(Path(__file__).with_name("classifier"))
quality_scorer = pipeline("text-classification", model=quality_model, device="cpu", top_k=None)


def reward_func(queries, prompts, labels):
    rewards = []
    for scores, query, prompt in zip(quality_scorer(list(queries), truncation=True), queries, prompts, strict=True):
        quality = next(entry["score"] for entry in scores if entry["label"] == "LABEL_1")
        is_short = len(query[len(prompt) :].split()) < MIN_WORDS
        rewards.append(quality * 0.5 if is_short else quality)
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {
            "avg_quality": sum(rewards) / len(rewards),
            "min_quality": min(rewards),
            "max_quality": max(rewards),
        },
    }
