"""`hotseat serve-rm` under load: many clients against one request at a time, and a server that is killed meanwhile.

The model is the demo's (two layers of width 192, 0.9M weights) with a reward head, on the cores of this machine, which
the clients use, too. A request has one text, as OpenRLHF sends them. Every reward is compared with that of the model
when it is called directly.

1. One client sends a request, waits for its answer, and sends the next.
2. 64 clients do so at the same time.
3. The same 64, by Hotseat's own client, while the server is killed (SIGKILL) and started again, several times.

    python bench/serve_rm.py [--seconds 60] [--clients 64] [--kills 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hotseat.rewards import Score
from hotseat.rewards.posting import RewardService

TOLERANCE = 1e-5  # a text's reward in a batch of any size, against alone


def make_model(folder: Path) -> dict[str, float]:
    """Write the demo's model with a reward head, and return texts with their rewards, computed directly."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from hotseat.demo import answer, make_model, question
    from hotseat.observe.noise import without_log_lines

    make_model(folder, seed=0)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with without_log_lines("transformers.modeling_utils", lambda text: "LOAD REPORT" in text):  # the head is new
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    model.save_pretrained(folder)
    texts = [f"{question(a, b)}{answer(a, b)}<eos>" for a in range(0, 100, 3) for b in range(0, 100, 3)]
    with torch.inference_mode():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    return dict(zip(texts, logits.tolist(), strict=True))


class ServerProcess:
    """`hotseat serve-rm` at a port that is held for it."""

    def __init__(self, folder: Path, port: int, threads: int):
        command = ["-m", "hotseat", "serve-rm", str(folder), "--port", str(port), "--threads", str(threads)]
        self._process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("serving "):
                return
        raise SystemExit(f"the server ended with {self._process.wait()}")

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(60)


class Connection:
    """A client that costs little, because it has to share the cores with the server: one request after another."""

    def __init__(self, port: int):
        self._port = port

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def reward(self, text: str) -> float:
        body = json.dumps({"query": [text], "prompts": [text[:6]], "labels": [None]}).encode()
        head = f"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        status, *headers = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line.split(":")[1]) for line in headers if line.lower().startswith("content-length:"))
        answer = await self._reader.readexactly(length)
        if status != "HTTP/1.1 200 OK":
            raise OSError(status)
        [reward] = json.loads(answer)["rewards"]
        return float(reward)


async def load(port: int, expected: dict[str, float], num_clients: int, seconds: float) -> tuple[Counter, list[float]]:
    """Send requests, one at a time for each client; return counts of what became of them, and their seconds."""
    counts: Counter = Counter()
    latencies: list[float] = []
    texts = list(expected)
    end_s = time.monotonic() + seconds

    async def client(number: int) -> None:
        connection = Connection(port)
        await connection.open()
        while time.monotonic() < end_s:
            text = texts[number % len(texts)]
            number += num_clients
            begun_s = time.monotonic()
            try:
                reward = await connection.reward(text)
                counts["right" if abs(reward - expected[text]) <= TOLERANCE else "wrong"] += 1
            except (OSError, EOFError, ValueError) as error:
                counts[f"error: {error}"] += 1
                await connection.open()
            latencies.append(time.monotonic() - begun_s)

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    return counts, latencies


def under_kills(
    url: str, expected: dict[str, float], num_clients: int, seconds: float, num_kills: int, restart: object
) -> tuple[Counter, float]:
    """Keep `num_clients` groups open while the server is killed and restarted; return counts and seconds."""
    counts: Counter = Counter()
    texts = list(expected)
    is_over = threading.Event()
    begun_s = time.monotonic()
    with RewardService([url], max_open=num_clients, report=lambda line: None) as service:

        def client(number: int) -> None:
            while not is_over.is_set():
                text = texts[number % len(texts)]
                number += num_clients
                [sample] = service.submit([text], [text[:6]], [None], [number]).result()
                if not isinstance(sample, Score):
                    counts[f"error: {sample.reason}"] += 1
                else:
                    counts["right" if abs(sample.reward - expected[text]) <= TOLERANCE else "wrong"] += 1

        threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
        for thread in threads:
            thread.start()
        for _ in range(num_kills):
            time.sleep(seconds / (num_kills + 1))
            restart()  # type: ignore[operator]
        time.sleep(seconds / (num_kills + 1))
        is_over.set()
        for thread in threads:
            thread.join()
    return counts, time.monotonic() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the model")
    arguments = parser.parse_args()
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as directory, socket.socket() as held:
        folder = Path(directory) / "reward_model"
        expected = make_model(folder)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        url = f"http://127.0.0.1:{port}/get_reward"
        server = ServerProcess(folder, port, arguments.threads)
        asyncio.run(load(port, expected, arguments.clients, 2.0))  # the first batches of each size take longer
        table = Table(title=f"one text a request, load {os.getloadavg()[0]:.1f} before, {os.cpu_count()} cores")
        for title in ("clients", "s", "requests", "a second", "ms (50%)", "ms (99%)", "CPU ms", "wrong", "errors"):
            table.add_column(title, justify="right")
        rates = []
        for num_clients in (1, arguments.clients):
            begun_s, cpu_s = time.monotonic(), server.cpu_seconds
            counts, latencies = asyncio.run(load(port, expected, num_clients, arguments.seconds))
            seconds = time.monotonic() - begun_s
            rates.append(len(latencies) / seconds)
            quantiles = statistics.quantiles(latencies, n=100)
            num_errors = sum(count for name, count in counts.items() if name.startswith("error"))
            cpu_ms = 1000 * (server.cpu_seconds - cpu_s) / len(latencies)
            row = (num_clients, f"{seconds:.0f}", len(latencies), f"{rates[-1]:.0f}", f"{1000 * quantiles[49]:.1f}")
            table.add_row(
                *map(str, (*row, f"{1000 * quantiles[98]:.1f}", f"{cpu_ms:.2f}", counts["wrong"], num_errors))
            )
        console.print(table)
        console.print(f"{arguments.clients} clients: {rates[1] / rates[0]:.1f} times one request at a time")

        downs: list[float] = []

        def restart() -> None:
            nonlocal server
            server.kill()
            begun_s = time.monotonic()
            server = ServerProcess(folder, port, arguments.threads)
            downs.append(time.monotonic() - begun_s)

        counts, seconds = under_kills(url, expected, arguments.clients, arguments.seconds, arguments.kills, restart)
        console.print(
            f"killed and restarted {arguments.kills} times under load (away for"
            f" {', '.join(f'{each:.1f}' for each in downs)} s): {dict(counts)} in {seconds:.0f} s"
        )
        console.print(f"SIGTERM: exit code {server.stop()}")


if __name__ == "__main__":
    main()
