"""A game of several turns that talks to the policy by an OpenAI client, as to any endpoint.

The prompts ask for a number between 1 and 100, the label is the number. Run it with

    agent:
      path: examples/agents/guess_with_openai.py
    data:
      label_key: label

The program keeps its messages itself. The policy learns from the tokens that it sampled, not from the messages.
"""

import re

import openai


async def play(prompt, client):
    secret = int(prompt.label)
    messages = [{"role": "user", "content": prompt.text}]
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as policy:
        for turn in range(7):
            reply = await policy.chat.completions.create(model=client.model, messages=messages)
            answer = reply.choices[0].message
            found = re.search(r"\d+", answer.content)
            guess = int(found[0][:9]) if found else 0
            if guess == secret:
                return {"reward": 1.0, "extra": {"num_guesses": turn + 1}}
            hint = f"It is {'higher' if guess < secret else 'lower'}. Guess:"
            messages += [answer, {"role": "user", "content": hint}]
    return {"reward": 0.0, "extra": {"num_guesses": 7}}
