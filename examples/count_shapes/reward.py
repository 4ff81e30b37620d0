"""The reward of a count: 1 if the answer is the label, else 0."""


def reward_func(queries, prompts, labels):
    answers = [query[len(prompt) :].removesuffix("<eos>") for query, prompt in zip(queries, prompts, strict=True)]
    return [float(answer == label) for answer, label in zip(answers, labels, strict=True)]
