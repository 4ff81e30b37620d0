"""An agent with a calculator: it offers the tool, computes what it is asked for, and compares the last answer."""

import json
import re

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Compute a sum or product of two whole numbers, in four digits.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def calculator(expression: str) -> str:
    parts = re.fullmatch(r"(\d{1,4})([+*])(\d{1,4})", expression)
    if parts is None:
        return "error"
    a, b = int(parts[1]), int(parts[3])
    return f"{a + b if parts[2] == '+' else a * b:04d}"


async def play(prompt, client):
    messages = [{"role": "user", "content": prompt.text}]
    num_calls = 0
    # The gateway is on loopback: without certificates to read, making a client takes no time.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=http) as policy:
        for _ in range(3):
            reply = await policy.chat.completions.create(model=client.model, messages=messages, tools=TOOLS)
            answer = reply.choices[0].message
            messages.append(answer)
            for call in answer.tool_calls or ():
                num_calls += 1
                arguments = json.loads(call.function.arguments)
                result = calculator(str(arguments.get("expression"))) if isinstance(arguments, dict) else "error"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not answer.tool_calls:
                return {"reward": float(answer.content == prompt.label), "extra": {"tool_calls": num_calls}}
    return {"reward": 0.0, "extra": {"tool_calls": num_calls}}
