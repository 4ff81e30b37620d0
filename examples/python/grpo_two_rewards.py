"""GRPO with two rewards in a script: a tiny model learns to write numbers as words, in a minute on two CPU cores.

hotseat new rl first                        # a tiny model; a checkpoint folder or a hub name would do as well
python examples/python/grpo_two_rewards.py
"""

import hotseat

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
QUESTIONS = ("How do you write {}?", "{} as a word, please.")
ROWS = [{"prompt": question.format(n), "word": word} for n, word in enumerate(WORDS) for question in QUESTIONS] * 4


def is_right(completions, word, **columns):
    return [float(text.strip().lower() == right) for text, right in zip(completions, word, strict=True)]


def is_one_word(completions, **columns):
    return [float(len(text.split()) == 1) for text in completions]


if __name__ == "__main__":
    run = hotseat.run(
        {
            "actor": {"model": "first/tiny_model", "optimizer": {"learning_rate": 2e-3}},
            "data": {"input_key": "prompt", "apply_chat_template": True, "max_length": 64},
            "rollout": {"batch_size": 16, "samples_per_prompt": 8, "max_new_tokens": 8},
            "train": {"batch_size": 128, "num_episodes": 10},
        },
        train=ROWS,
        reward=[(is_right, 1.0), (is_one_word, 0.2)],
        callbacks=[hotseat.StopAt("extra/is_right", 0.95)],
    )
    print(run.frame()[["reward", "extra/is_right", "extra/is_one_word"]])
