"""A first request of the package openai, to a stand-in: it imports parts of itself at its first use.

Loaded from its path by `interpreter_process.py`, before it forks: needs nothing but openai and Python's own library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket

ANSWER = {
    "id": "none",
    "object": "chat.completion",
    "created": 0,
    "model": "none",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_LIMIT_S = 30


def warm() -> None:
    """Have a client make two requests. What fails here is left to the script, which fails in the same way."""
    import openai

    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = os.fork()  # no thread, since a process with threads cannot be forked off whole
        if answering == 0:
            _answer(server)
        try:
            with contextlib.suppress(Exception):
                openai.OpenAI(api_key="none").close()
                client = openai.OpenAI(
                    api_key="none",
                    base_url=f"http://127.0.0.1:{server.getsockname()[1]}/v1",
                    max_retries=0,
                    timeout=_LIMIT_S,
                    http_client=openai.DefaultHttpxClient(trust_env=False),  # a proxy does not lead to this process
                )
                reply = client.chat.completions.create(model="none", messages=[{"role": "user", "content": "here?"}])
                client.chat.completions.create(model="none", messages=[reply.choices[0].message])
                client.close()
        finally:
            os.kill(answering, signal.SIGKILL)
            os.waitpid(answering, 0)


def _answer(server: socket.socket) -> None:
    """Answer every request of one connection alike; this does not return."""
    try:
        body = json.dumps(ANSWER).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection, _ = server.accept()
        received = b""
        while part := connection.recv(1 << 16):
            received += part
            start, separator, rest = received.partition(b"\r\n\r\n")
            lengths = [
                line.split(b":")[1] for line in start.lower().split(b"\r\n") if line.startswith(b"content-length:")
            ]
            if separator and len(rest) >= int(lengths[0] if lengths else 0):
                connection.sendall(head + body)
                received = b""
    finally:
        os._exit(0)
