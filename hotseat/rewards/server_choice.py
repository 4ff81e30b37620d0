"""The choice among several reward servers, by what became of earlier requests. Neither clock nor I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_REST_S, _LONGEST_REST_S = 0.5, 5.0


@dataclass
class Server:
    """One server, and what is known of it."""

    url: str
    num_open: int = 0  # requests without an answer yet
    num_failures: int = 0  # in a row
    is_reachable: bool = True
    away_since_s: float | None = None  # since then it could not be reached, as far as requests have tried
    rests_until_s: float = 0.0  # others are preferred until then
    last_use: int = 0  # number of the request, over all servers
    problem: str = ""  # of the last failure


class Servers:
    """Chooses the server of each request: of those that work, the one with the fewest open requests.

    A server that failed rests, longer after each failure in a row, while others work. One that cannot be reached gets
    nothing meanwhile; after the rest one request tries it, and others follow when it has answered.
    """

    def __init__(self, urls: Sequence[str]):
        self.all = [Server(url) for url in urls]
        self._num_requests = 0

    def choose(self, now_s: float, avoid: Server | None = None) -> Server | None:
        """Return the server for a request, which counts as open from now on; None if none can take it now.

        avoid: is chosen only if nothing else is left.
        """
        able = [each for each in self.all if each.is_reachable or (now_s >= each.rests_until_s and each.num_open == 0)]
        if not able:
            return None
        chosen = min(able, key=lambda each: (now_s < each.rests_until_s, each is avoid, each.num_open, each.last_use))
        self._num_requests += 1
        chosen.last_use = self._num_requests
        chosen.num_open += 1
        return chosen

    @property
    def away_since_s(self) -> float | None:
        """The time since which no server could be reached; None if one can, or nothing has tried."""
        times = [each.away_since_s for each in self.all]
        return None if None in times else max(time for time in times if time is not None)

    def begin(self) -> None:
        """Count anew how long servers are away: nothing has tried them for a while."""
        for each in self.all:
            each.away_since_s = None

    def answered(self, server: Server) -> None:
        """Note that a request was answered."""
        server.num_open -= 1
        server.num_failures = 0
        server.is_reachable = True
        server.away_since_s = None
        server.rests_until_s = 0.0
        server.problem = ""

    def failed(self, server: Server, now_s: float, problem: str) -> None:
        """Note that a server took a request and gave no usable answer."""
        self._note_failure(server, now_s, problem, is_reachable=True)

    def unreachable(self, server: Server, now_s: float, problem: str) -> None:
        """Note that a server took no request."""
        self._note_failure(server, now_s, problem, is_reachable=False)

    def released(self, server: Server) -> None:
        """Note that a request ended without telling anything about the server."""
        server.num_open -= 1

    def problems(self) -> str:
        """Return the last problem of every server that has one."""
        return "; ".join(f"{each.url}: {each.problem}" for each in self.all if each.problem)

    def _note_failure(self, server: Server, now_s: float, problem: str, *, is_reachable: bool) -> None:
        server.num_open -= 1
        server.is_reachable = is_reachable
        server.away_since_s = None if is_reachable else now_s if server.away_since_s is None else server.away_since_s
        server.problem = problem
        server.rests_until_s = now_s + min(_LONGEST_REST_S, _FIRST_REST_S * 2.0**server.num_failures)
        server.num_failures = min(server.num_failures + 1, 30)
