"""The grammar of a role's placement. Text in, a small tree out; `locate` in locate.py finds the devices.

    selection := RANKS[:PROCS]{,RANKS[:PROCS]} | all | NxG | @role | cpu*K | none | POOL{,POOL}/SELECTION
    RANKS     := a | a-b | all         ascending and unique over the whole text, counted from 0 within the pool
    PROCS     := a | a-b               contiguous from 0 over the whole text; left out: one per device

The number of ranks and of processes must divide one another in each segment: more processes than devices share the
devices, fewer have several devices each.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hotseat.errors import PlacementError
from hotseat.placement.role_names import check_role, did_you_mean

MAX_PROCESSES = 65_536  # of one role; a larger number is a typing error

FORMS = "0-3,6 or 0-3:0-7 (ranks), all, 2x8 (blocks of devices), @actor, cpu*4, none, or pool/0-3"


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Consecutive whole numbers from first to last, both included."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class RankSegment:
    """One `RANKS[:PROCS]` of a selection. ranks None: all of them. procs None: one process per rank."""

    ranks: NumberRange | None
    procs: NumberRange | None = None

    def __str__(self) -> str:
        ranks = "all" if self.ranks is None else str(self.ranks)
        return ranks if self.procs is None else f"{ranks}:{self.procs}"


@dataclass(frozen=True, slots=True)
class RankSelection:
    """Devices selected by number (or nodes, in a pool without devices)."""

    segments: tuple[RankSegment, ...]
    from_int: bool = field(default=False, compare=False)  # YAML gave a number, which it may have made of 1:30

    def __str__(self) -> str:
        return ",".join(str(segment) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """`count` blocks of `size` devices each, shared with no other role."""

    count: int
    size: int

    def __str__(self) -> str:
        return f"{self.count}x{self.size}"


@dataclass(frozen=True, slots=True)
class SameAs:
    """The devices of another role."""

    role: str

    def __str__(self) -> str:
        return f"@{self.role}"


@dataclass(frozen=True, slots=True)
class CpuProcesses:
    """Processes without a device."""

    count: int

    def __str__(self) -> str:
        return f"cpu*{self.count}"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """No placement: the role is served by something outside this run."""

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class InPools:
    """A selection within named pools; ranks are numbered through from one pool to the next."""

    pools: tuple[str, ...]
    selection: RankSelection | DeviceBlocks | CpuProcesses

    def __str__(self) -> str:
        return f"{','.join(self.pools)}/{self.selection}"


Selection = RankSelection | DeviceBlocks | SameAs | CpuProcesses | Elsewhere | InPools


def parse_selection(written: object, role: str = "placement", components: Collection[str] = ()) -> Selection:
    """Parse the selection of a role in a config: text, a bare rank, or RLinf's `{node_group, placement}`.

    components: names besides those of roles that may follow an @.
    """
    if isinstance(written, Mapping):
        return _parse_mapping(written, role, components)
    if isinstance(written, bool) or written is None:
        fix = "write none in quotes for a role served elsewhere" if written is None else f"write {FORMS}"
        raise PlacementError(f"{role}: {written!r} is no selection: {fix}")
    if isinstance(written, int):
        if written < 0:
            raise PlacementError(f"{role}: rank {written} is negative: ranks count from 0")
        return RankSelection((RankSegment(NumberRange(written, written)),), from_int=True)
    if not isinstance(written, str):
        raise PlacementError(f"{role}: {written!r} is no selection: write {FORMS}")
    return _parse_text(written.strip(), role, components)


def parse_placement(placement: Mapping[str, object], components: Collection[str] = ()) -> dict[str, Selection]:
    """Parse the selections of all roles, and of these custom components.

    `actor,rollout: all` places both; each may be placed only once.
    """
    selections: dict[str, Selection] = {}
    for names, written in placement.items():
        for name in str(names).split(","):
            role = check_role(name.strip(), components)
            if role in selections:
                raise PlacementError(f"{role} is placed twice: keep one of the two entries")
            selections[role] = parse_selection(written, role, components)
    return selections


def _parse_mapping(written: Mapping[object, object], role: str, components: Collection[str]) -> Selection:
    keys = ("node_group", "placement")
    for key in written:
        if key not in keys:
            hint = did_you_mean(str(key), keys)
            raise PlacementError(f"{role}: unknown key {key!r}: {hint}the keys are node_group and placement")
    if "placement" not in written:
        raise PlacementError(f"{role}: a placement by node group needs the key placement, for instance placement: 0-7")
    inner = parse_selection(written["placement"], role, components)
    group = written.get("node_group")
    if group is None:
        return inner
    labels = group if isinstance(group, Sequence) and not isinstance(group, str) else str(group).split(",")
    return _in_pools(tuple(str(label).strip() for label in labels), inner, role)


def _parse_text(text: str, role: str, components: Collection[str] = ()) -> Selection:
    if "/" in text:
        pools, _, rest = text.partition("/")
        inner = _parse_text(rest.strip(), role, components)
        return _in_pools(tuple(label.strip() for label in pools.split(",")), inner, role)
    if text == "none":
        return Elsewhere()
    if text.startswith("@"):
        return SameAs(check_role(text[1:].strip(), components))
    if match := re.fullmatch(r"cpu\s*\*\s*(\d+)", text):
        if int(match[1]) < 1:
            raise PlacementError(f"{role}: {text!r} has no processes: write cpu*1 or more, or none")
        _check_number(int(match[1]), text, role)
        return CpuProcesses(int(match[1]))
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        if int(match[1]) < 1 or int(match[2]) < 1:
            raise PlacementError(
                f"{role}: {text!r} has no devices: write at least 1x1, @role to share another role's devices, or none"
            )
        return DeviceBlocks(int(match[1]), int(match[2]))
    return RankSelection(_parse_segments(text, role))


def _in_pools(pools: tuple[str, ...], inner: Selection, role: str) -> InPools:
    if not isinstance(inner, RankSelection | DeviceBlocks | CpuProcesses):
        raise PlacementError(f"{role}: {inner} cannot be within a pool: write it without {','.join(pools)}/")
    for label in pools:
        if not re.fullmatch(r"[\w.-]+", label):
            raise PlacementError(f"{role}: {label!r} is no pool name: write pool/{inner}")
    if len(set(pools)) < len(pools):
        raise PlacementError(f"{role}: a pool is named twice in {','.join(pools)}: name each once")
    return InPools(pools, inner)


def _parse_segments(text: str, role: str) -> tuple[RankSegment, ...]:
    segments: list[RankSegment] = []
    last_rank, next_proc = -1, 0
    for item in text.split(","):
        match = re.fullmatch(r"\s*(all|\d+(?:\s*-\s*\d+)?)\s*(?::\s*(\d+(?:\s*-\s*\d+)?)\s*)?", item)
        if match is None:
            raise PlacementError(f"{role}: cannot read {item.strip()!r} in {text!r}: write {FORMS}")
        if match[1] == "all":
            if "," in text:
                raise PlacementError(f"{role}: 'all' leaves no ranks for the rest of {text!r}: write all alone")
            ranks = None
        else:
            ranks = _parse_range(match[1], "ranks", text, role)
            if ranks.first <= last_rank:
                what = "named twice" if ranks.first == last_rank else "not in ascending order"
                raise PlacementError(
                    f"{role}: ranks {what} in {text!r}: {ranks} comes after {last_rank};"
                    f" write each rank once, in ascending order"
                )
            last_rank = ranks.last
        procs = _parse_range(match[2], "processes", text, role) if match[2] else None
        _check_number(0 if procs is None else procs.last + 1, text, role)
        if procs is not None and procs.first != next_proc:
            where = "start at 0" if next_proc == 0 else f"continue with {next_proc}"
            fixed = NumberRange(next_proc, next_proc + len(procs) - 1)
            raise PlacementError(
                f"{role}: process ranks must {where} in {text!r}: write {match[1]}:{fixed}, not {match[1]}:{procs}"
            )
        if ranks is not None:
            if procs is not None:
                check_divides(len(ranks), len(procs), f"{role}: {item.strip()!r}")
            next_proc += len(procs or ranks)
        segments.append(RankSegment(ranks, procs))
    return tuple(segments)


def _check_number(num_procs: int, text: str, role: str) -> None:
    if num_procs > MAX_PROCESSES:
        raise PlacementError(f"{role}: {text!r} makes {num_procs:,} processes: a role has at most {MAX_PROCESSES:,}")


def check_divides(num_devices: int, num_procs: int, what: str) -> None:
    """Check that one of the two numbers divides the other, so that all processes get equally many devices."""
    if num_devices % num_procs and num_procs % num_devices:
        whole = num_procs // num_devices * num_devices
        below = whole or max(n for n in range(1, num_procs) if num_devices % n == 0)
        above = whole + num_devices
        raise PlacementError(
            f"{what} puts {num_procs} processes on {num_devices} devices and neither number divides the other:"
            f" take {below} or {above} processes"
        )


def _parse_range(text: str, what: str, whole: str, role: str) -> NumberRange:
    first, _, last = text.replace(" ", "").partition("-")
    numbers = NumberRange(int(first), int(last or first))
    if numbers.last < numbers.first:
        raise PlacementError(f"{role}: {what} {text} descend in {whole!r}: write {numbers.last}-{numbers.first}")
    return numbers
