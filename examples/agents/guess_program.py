"""The game of guess_with_openai.py as a program of its own, which knows nothing of Hotseat:

    agent:
      command: [python, examples/agents/guess_program.py]

It reads its task from standard input, plays, and writes its result to the file that $HOTSEAT_RESULT names.
"""

import json
import os
import re
import sys

import openai

task = json.loads(sys.stdin.readline())
secret = int(task["label"])
policy = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are set
messages = [{"role": "user", "content": task["prompt"]}]
result = {"reward": 0.0}
for turn in range(7):
    answer = policy.chat.completions.create(model="policy", messages=messages).choices[0].message
    found = re.search(r"\d+", answer.content)
    guess = int(found[0][:9]) if found else 0
    if guess == secret:
        result = {"reward": 1.0, "extra": {"num_guesses": turn + 1}}
        break
    hint = f"It is {'higher' if guess < secret else 'lower'}. Guess:"
    messages += [answer, {"role": "user", "content": hint}]
with open(os.environ["HOTSEAT_RESULT"], "w") as file:
    json.dump(result, file)
