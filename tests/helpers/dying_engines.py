"""Groups of engines in this process, of which one dies with requests open, as a process does."""

import math
import threading

from hotseat.cluster import local
from hotseat.errors import WorkerError

SHARED = "{runtime: local, inventory: 1x1, component_placement: {actor: 0, rollout: '@actor'}}"
PROMPTS_PER_STEP = SAMPLES_PER_PROMPT = 4


class Engines(local.LocalGroup):
    """Engines that record their requests. The last one dies from its `fatal`-th `deadly` call on, with requests open.

    From then on every call to it fails, as do those under way, until it is restarted. For requests to be open at every
    pause, however late threads run, one that is to die at a pause answers no more prompts than a step takes until the
    first pause, and as many more until the next; the last of these answers waits until another prompt has come.
    """

    def __init__(self, launch, rank_env, fatal: int, deadly: str = "fetch"):
        self.fatal = fatal
        self.deadly = deadly
        self.num_groups = PROMPTS_PER_STEP if deadly == "pause" else math.inf  # answered until the next pause
        self._groups: dict[str, int] = {}  # the place of each
        self._num_answered = 0
        self._withheld: list = []  # completions
        self.dead: set[int] = set()
        self.submitted: list[tuple[int, str]] = []  # the rank, and the sample and turn
        self.log: list[str] = []
        self._num_deadly = 0
        self._num_open = 0  # requests that the last engine has, and has not answered
        self._lock = threading.Lock()
        super().__init__(launch, rank_env)

    def alive(self) -> list[bool]:
        return [rank not in self.dead for rank in self.ranks]

    def restart(self, rank, *, timeout_s=None):
        super().restart(rank)
        self.dead.discard(rank)

    def _run(self, rank, called, method, args, *more, **kwargs):
        with self._lock:
            if called is self._objects[rank]:  # or its process is gone, and it reaches none
                self._record(rank, method, args)
        self._raise_if_dead(rank)
        if method == "fetch" and self._withheld:
            args = (args[0], 0.01)  # seconds in which another completion may come
        result = super()._run(rank, called, method, args, *more, **kwargs)
        self._raise_if_dead(rank)
        if method == "fetch" and rank == len(self.ranks) - 1:
            with self._lock:
                result = self._answers(result)
                self._num_open -= len(result)
        return result

    def _answers(self, completions: list) -> list:
        """Choose what may be answered by now among these and those withheld."""
        if self.num_groups == math.inf:
            return completions
        num_answers = self.num_groups * SAMPLES_PER_PROMPT - (len(self._groups) <= self.num_groups)
        answers: list = []
        completions, self._withheld = self._withheld + completions, []
        for each in completions:
            is_due = self._groups[group_of(each.request_id)] < self.num_groups and self._num_answered < num_answers
            self._num_answered += is_due
            (answers if is_due else self._withheld).append(each)
        return answers

    def _record(self, rank: int, method: str, args: tuple) -> None:
        if rank in self.dead:
            return
        if method == "submit":
            self.submitted += [(rank, each.id.partition("#")[0]) for each in args[1]]
            for each in args[1]:
                self._groups.setdefault(group_of(each.id), len(self._groups))
            self._num_open += len(args[1]) if rank == len(self.ranks) - 1 else 0
        if method in ("submit", "finish_load"):
            self.log.append(f"{method} {rank}")
        if method == self.deadly and rank == len(self.ranks) - 1:
            self._num_deadly += 1
            if method == "pause":
                self.num_groups += PROMPTS_PER_STEP
            if self.fatal and self._num_deadly >= self.fatal and self._num_open > 0:
                self.fatal = 0
                self.dead.add(rank)
                self._withheld, self.num_groups = [], math.inf
                self.log.append("died")

    def _raise_if_dead(self, rank: int) -> None:
        if rank in self.dead:
            error = WorkerError(f"{self.name} rank {rank} died")
            error.is_death = True
            raise error


def group_of(request_id: str) -> str:
    """Name the group of a request, whose id is pass/prompt/sample/turn#number."""
    return request_id.rpartition("#")[0].rsplit("/", 2)[0]
