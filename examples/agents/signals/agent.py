"""A game of two: the speaker sees a colour and says one letter, the listener hears the letter and names a colour.

Both are the policy, in conversations of their own, and both win if the colour is the same.
"""

import openai

LETTERS = "abcde"


async def play(prompt, client):
    # The gateway is on loopback: without certificates to read, making a client takes no time.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=http) as policy:

        async def ask(role: str, text: str) -> str:
            messages = [{"role": "system", "content": role}, {"role": "user", "content": text}]
            reply = await policy.chat.completions.create(model=client.model, messages=messages)
            return reply.choices[0].message.content

        letter = await ask("speaker", prompt.label)
        if len(letter) != 1 or letter not in LETTERS:
            return 0.0
        return float(await ask("listener", letter) == prompt.label)
