"""A plan on the terminal: whether it fits, what would make it fit, then what is on which device in each phase.

Lines have at most `MAX_WIDTH` columns, also in a pipe; cells that are wider are folded, never cut.
"""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotseat.config import Config
from hotseat.placement.inventory import Inventory, format_ranges, format_ranks, ranges
from hotseat.placement.memory_terms import FITS_BELOW, SNAPSHOTS, UNSHARDED_GRADIENTS, total
from hotseat.placement.plan_types import DeviceGroup, GroupStep, Plan, PlannedRole, Route
from hotseat.placement.residency import HandOver, Holding
from hotseat.placement.role_names import Part
from hotseat.planning.advisor import MAX_SEARCHED, Advice, as_overrides, as_yaml
from hotseat.planning.budgets import ChosenBudgets, describe
from hotseat.registry.roles import role_entry

_LEGEND = (
    "W weights  G gradients  O optimizer  K kv cache  S simulator\n"
    "CAPITAL in use   small resident, not in use   (offloaded to the host)   [dropped, made again later]"
)
MAX_WIDTH = 100
_STYLES = {"fits": "green", "tight": "yellow", "does_not_fit": "bold red", "unknown": "dim"}
_WORDS = {"fits": "fits", "tight": "tight", "does_not_fit": "does not fit", "unknown": "not checked"}
_HEADS = {
    "fits": "Fits",
    "tight": "Fits, but is tight",
    "does_not_fit": "Does not fit",
    "unknown": "Memory not checked (the warnings say why)",
}
_MOVES = {  # with - parts leave a device, with + they come
    "copied": "- {} to host",
    "dropped": "- {} dropped",
    "restored": "+ {} from host",
    "allocated": "+ {} allocated",
    "pushed": "+ {} pushed by actor",
}


def make_console() -> Console:
    """Make a console as wide as the terminal, `MAX_WIDTH` columns at most and where there is no terminal."""
    return Console(width=min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH))


def render(
    plan: Plan,
    console: Console,
    explain: bool = False,
    advise: Callable[[], Sequence[Advice]] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Print a plan, the verdict first.

    explain: add every memory term with its arithmetic. advise: finds settings that would make the plan fit. notes:
    assumptions and choices that this plan is based on.
    """
    _verdict(plan, console)
    if plan.verdict == "does_not_fit" and advise is not None:
        _advice(advise(), plan, console)
    _bullets(console, Text("Warnings", style="bold yellow"), plan.warnings)
    _bullets(console, Text("Notes", style="bold"), notes)
    _section(console, "Roles", _roles(plan))
    if plan.groups:
        for table in _device_tables(plan, console.width):
            _section(console, "Memory on the devices, phase by phase" if table.title is None else "", table)
        console.print(Text(_LEGEND, style="dim"))
        if any(group.hand_overs for group in plan.groups):
            _section(console, "What moves between phases, and who has the device then", _hand_overs(plan))
        console.print(Text(_traffic(plan), style="dim"))
    if plan.routes:
        _section(console, "How weights reach the engines", _routes(plan))
    _section(console, "Memory on the hosts", _hosts(plan))
    if explain:
        _explain(plan, console)


def notes(config: Config, placed: Config, chosen: ChosenBudgets, plan: Plan) -> list[str]:
    """List what `hotseat plan` chose itself: the placement where none is set, and the size of micro-batches."""
    lines = []
    if placed != config:
        lines.append(
            f"placement: none is set, so this is the plan for all {plan.inventory.num_devices} devices; a run without"
            " one uses one device. To run as planned: cluster: {component_placement: {actor: all}}"
        )
    if chosen.is_priced or not chosen.notes:  # without notes their sizes are set
        return [*lines, *chosen.notes]
    lacking = "without the devices: give --inventory, such as 1x8xH100-80G, or set cluster.inventory"
    if all(group.memory_gib is not None for group in plan.groups):
        lacking = "without the shape of every model: name one that is at hand, or set actor.shape"
    return [
        *lines,
        f"micro-batches: their size is not known {lacking}. A run chooses it when it starts; the figures below are for"
        f" {describe(chosen.config)}",
        *chosen.notes[1:],
    ]


def _bullets(console: Console, title: Text, lines: Sequence[str]) -> None:
    if lines:
        console.print()
        console.print(title)
    for line in lines:
        wrapped = textwrap.wrap(line, console.width - 2, break_long_words=False, break_on_hyphens=False)
        console.print("- " + "\n  ".join(wrapped), markup=False, highlight=False, soft_wrap=True)


def _section(console: Console, title: str, body: Table) -> None:
    console.print()
    if title:
        console.print(Text(title, style="bold"))
    console.print(body)


def _table(*headers: str, gap: int = 2) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _verdict(plan: Plan, console: Console) -> None:
    """Print whether the plan fits, with its tightest device and phase; if it does not fit, all that are too small."""
    text = Text(_HEADS[plan.verdict], style=_STYLES[plan.verdict])
    text.append(f": {plan.label} on {plan.inventory}", style="bold")
    overlap = plan.flow.overlap
    if overlap.is_on:
        text.append(f", overlapped (queue {overlap.queue}, staleness {overlap.staleness})")
    console.print(text)
    if plan.verdict == "does_not_fit":
        _too_large(plan, console)
        return
    priced = [
        (step.used_gib / group.memory_gib, step, group, group.memory_gib)
        for group in plan.groups
        for step in group.steps
        if group.memory_gib is not None and step.verdict != "unknown"
    ]
    if priced:
        share, step, group, memory_gib = max(priced, key=lambda each: each[0])
        where = _place(plan.inventory, group.devices)
        console.print(
            Text(f"The tightest is {step.step} on {where}: {step.used_gib:.1f} of {memory_gib:g} GiB ({share:.0%})")
        )
        cached = [holding.role for holding in step.holdings if holding.part == Part.KV_CACHE and holding.is_resident]
        engine = next((role for role in map(plan.role, cached) if role.share is not None), None)
        if step.verdict == "tight" and engine is not None:
            own = f"{role_entry(engine.name).section}.memory_share {engine.share:g}"
            console.print(Text(f"An engine fills its share ({own}) with KV cache; a smaller share leaves more room"))
    if plan.verdict == "tight":
        console.print(
            Text(
                f"Tight means that more than {FITS_BELOW:.0%} of a memory is planned for: it should run, but little is"
                " left for fragmentation and for what else runs there"
            )
        )


def _place(inventory: Inventory, spans: Sequence[tuple[int, int]]) -> str:
    """Format devices with their nodes: `node 0: 0-7`, `nodes 0-3: 0-31`."""
    nodes = sorted({inventory.node_of(device) for first, last in spans for device in range(first, last + 1)})
    return f"node{'s' * (len(nodes) > 1)} {format_ranks(nodes)}: {format_ranges(spans)}"


def _roles(plan: Plan) -> Table:
    table = _table("role", "on", "processes", "devices", "notes")
    for role in plan.roles:
        if role.where == "elsewhere":
            table.add_row(role.name, role.on, "served elsewhere", "", "")
            continue
        where = _place(plan.inventory, ranges(sorted(role.devices)))
        if role.where == "cpu":
            nodes = sorted({process.node for process in role.processes})
            where = f"no devices, node{'s' * (len(nodes) > 1)} {format_ranks(nodes)}"
        notes = {
            f"{role.share or 0:.0%} of memory": role.share is not None,
            f"tensor parallel {role.tensor_parallel}": role.tensor_parallel > 1,
            f"assumed {role.model_assumed}": bool(role.model_assumed),
        }
        shown = ", ".join(note for note, is_shown in notes.items() if is_shown)
        table.add_row(role.name, role.on, _processes(role), where, shown)
    return table


def _processes(role: PlannedRole) -> str:
    count = len(role.processes)
    widths = {len(process.devices) for process in role.processes}
    fractions = {process.fraction for process in role.processes}
    text = f"{count} engine{'s' * (count > 1)}" if role.is_engine else str(count)
    if max(widths, default=0) > 1:
        text += f" x {max(widths)} devices"
    if min(fractions, default=1.0) < 1:
        text += f", {round(1 / min(fractions))} per device"
    return text


def _device_tables(plan: Plan, width: int) -> list[Table]:
    """Make tables with a row for each group of devices and a column for each step; two if one is too wide."""
    places = [_place(plan.inventory, group.devices) for group in plan.groups]
    first = min(max(len(place) for place in places), 24) + 2
    lines = [str(_cell(step, group)) for group in plan.groups for step in group.steps]
    cell = 1 + max(len(line) for text in [*lines, *(step.name for step in plan.steps)] for line in text.split("\n"))
    at_once = max(1, (width - first) // cell)
    num_tables = -(-len(plan.steps) // at_once)
    per_table = -(-len(plan.steps) // num_tables)
    tables = []
    for start in range(0, len(plan.steps), per_table):
        table = _table("devices", *(step.name for step in plan.steps[start : start + per_table]), gap=1)
        table.title = None if start == 0 else ""
        table.columns[0].max_width = first
        for place, group in zip(places, plan.groups, strict=True):
            cells = [_cell(step, group) for step in group.steps[start : start + per_table]]
            table.add_row(place, *cells, end_section=True)
        tables.append(table)
    return tables


def _cell(step: GroupStep, group: DeviceGroup) -> Text:
    """Format one cell: a line for each role, those at work first, then the memory in use."""
    text = Text()
    for role in sorted(group.roles, key=lambda role: (role not in step.roles, group.roles.index(role))):
        held = [holding for holding in step.holdings if holding.role == role]
        text.append(f"{role} {_letters(held)}\n", style="bold cyan" if role in step.roles else "dim")
    if group.memory_gib is None and {term.role for term in step.terms} == set(group.roles):
        text.append(f"{step.used_gib:.1f}G of ?", style="dim")
    elif group.memory_gib is None or step.verdict == "unknown":
        text.append("not checked", style="dim")
    else:
        percent = step.used_gib / group.memory_gib
        text.append(f"{step.used_gib:.1f}G {percent:.0%}", style=_STYLES[step.verdict])
    return text


def _letters(holdings: Sequence[Holding]) -> str:
    """Format the state of parts, each by the first letter of its name, as the legend explains."""
    forms = {"needed": "{}", "kept": "{}", "offloaded": "({})", "dropped": "[{}]"}
    letters = {state: "".join(held.part[0] for held in holdings if held.state == state) for state in forms}
    letters["needed"] = letters["needed"].upper()
    return "".join(form.format(letters[state]) for state, form in forms.items() if letters[state])


def _hand_overs(plan: Plan) -> Table:
    table = _table("phases", "device goes", "moves (- leaves the device, + comes to it)")
    for group in plan.groups:
        if len(plan.groups) > 1 and group.hand_overs:
            table.add_row(Text(_place(plan.inventory, group.devices), style="bold"), "", "")
        for hand_over in group.hand_overs:
            table.add_row(*_hand_over(hand_over))
    return table


def _hand_over(hand_over: HandOver) -> tuple[str, str, str]:
    steps = f"{hand_over.from_step} -> {hand_over.to_step}" + (" (next)" if hand_over.is_next_iteration else "")
    before, after = "+".join(hand_over.from_roles), "+".join(hand_over.to_roles)
    lease = f"{before} -> {after}" if before != after else f"stays with {before}"
    moves = []
    for move in (*hand_over.leaves, *hand_over.comes):
        size = "" if move.gib is None else f" {move.gib:.1f}G"
        moves.append(_MOVES[move.how].format(f"{move.role} {move.part.replace('_', ' ')}{size}"))
    return steps, lease, "\n".join(moves)


def _traffic(plan: Plan) -> str:
    """Describe how much an iteration copies between a device and its host, at most."""
    copied = [
        sum(move.gib or 0.0 for hand_over in group.hand_overs for move in hand_over.leaves if move.how == "copied")
        for group in plan.groups
    ]
    if not any(group.hand_overs for group in plan.groups):
        return "No device passes from role to role, and nothing moves."
    if not any(copied):
        return "Nothing is copied to the host and back."
    return f"At most {max(copied):.1f} GiB per device are copied to the host and back in an iteration."


def _routes(plan: Plan) -> Table:
    """List routes of weights; engines that get them in the same way share a line."""
    table = _table("engines", "from an actor on", "actor ranks")
    kinds: dict[tuple[str, str], list[Route]] = {}
    for route in plan.routes:
        kinds.setdefault((route.role, route.kind), []).append(route)
    for (role, kind), routes in kinds.items():
        sources = {source for route in routes for source in route.sources}
        each = {len(route.sources) for route in routes}
        note = " (each from its own)" if kind == "same_device" and len(routes) > 1 else ""
        note = f" ({max(each)} each)" if kind == "same_device" and max(each) > 1 else note
        table.add_row(
            f"{role} {format_ranks(route.rank for route in routes)}",
            kind.replace("_", " "),
            f"{format_ranges(ranges(sorted(sources)))}{note}",
        )
    return table


def _hosts(plan: Plan) -> Table:
    snapshots = [sum(term.gib for term in host.terms if term.name == SNAPSHOTS) for host in plan.hosts]
    also = [SNAPSHOTS] if any(snapshots) else []
    table = _table("nodes", "processes", "offloaded between phases", *also, "always on the host", "total", "")
    for host, gib in zip(plan.hosts, snapshots, strict=True):
        process = sum(term.gib for term in host.terms if term.name == "process")
        offloaded = sum(term.gib for term in host.terms if "offloaded (pinned)" in term.name)
        total = f"{host.used_gib:.0f} GiB" + (f" of {host.memory_gib:.0f}" if host.memory_gib else "")
        verdict = Text(_WORDS[host.verdict] if host.memory_gib else "", style=_STYLES[host.verdict])
        table.add_row(
            format_ranges(host.nodes),
            f"{process:.0f} GiB",
            f"{offloaded:.0f} GiB",
            *(f"{gib:.0f} GiB" for _ in also),
            f"{host.used_gib - process - offloaded - gib:.0f} GiB",
            total,
            verdict,
        )
    return table


def _explain(plan: Plan, console: Console) -> None:
    for group in plan.groups:
        console.print()
        of = f" of {group.memory_gib:g} GiB" if group.memory_gib else ""
        console.print(Text(f"Memory on {_place(plan.inventory, group.devices)} ({group.kind}{of})", style="bold"))
        table = _table("phase", "role", "term", "GiB", "arithmetic")
        table.columns[3].justify = "right"
        for step in group.steps:
            for index, term in enumerate(step.terms):
                at_work = "bold" if term.role in step.roles else "dim"
                name = step.step if index == 0 else ""
                table.add_row(name, Text(term.role, style=at_work), term.name, f"{term.gib:.2f}", term.formula)
            verdict = Text(f"{step.used_gib:.2f}", style=_STYLES[step.verdict])
            table.add_row("", "", "total", verdict, _WORDS[step.verdict], end_section=True)
        console.print(table)
    for host in plan.hosts:
        console.print()
        console.print(Text(f"Host memory of node {format_ranges(host.nodes)}", style="bold"))
        table = _table("role", "term", "GiB", "arithmetic")
        table.columns[2].justify = "right"
        for term in host.terms:
            table.add_row(term.role, term.name, f"{term.gib:.2f}", term.formula)
        console.print(table)


def _too_small_a_share(plan: Plan, group: DeviceGroup, step: GroupStep) -> str:
    """Describe by how much an engine's memory share is too small, although the device itself has room."""
    assert group.memory_gib is not None
    engine = next(role for role in map(plan.role, step.roles) if role.is_engine and role.share is not None)
    assert engine.share is not None
    has = engine.share * group.memory_gib
    # The cache counts with one sequence only, since there was no room for more.
    needs = sum(term.gib for term in step.terms if term.role == engine.name)
    return (
        f"the engine's memory share has no room for its weights and one sequence: they take {needs:.1f} GiB,"
        f" {engine.share:g} of {group.memory_gib:g} GiB is {has:.1f} GiB, {needs - has:.1f} GiB too little"
    )


def _too_large(plan: Plan, console: Console) -> None:
    """Print the phases that do not fit and by how much, the tightest first."""
    failing = [
        (step.used_gib - group.memory_gib, step, group, group.memory_gib)
        for group in plan.groups
        for step in group.steps
        # Phases in which no role works are left out: the same parts are too much in their own phase, too.
        if step.verdict == "does_not_fit" and group.memory_gib is not None and step.roles
    ]
    for over, step, group, memory_gib in sorted(failing, key=lambda each: -each[0]):
        where = _place(plan.inventory, group.devices)
        takes = f"it takes {step.used_gib:.1f} of {memory_gib:g} GiB, {over:.1f} GiB too much"
        if over <= 0:
            takes = _too_small_a_share(plan, group, step)
        unsharded = total(term for term in step.terms if term.name == UNSHARDED_GRADIENTS)
        if unsharded:
            takes += f"; {unsharded:.1f} GiB of it are unsharded fp32 gradients"
        console.print(Text(f"- {step.step} does not fit on {where}: {takes}", style="red"))
    if any(term.name == UNSHARDED_GRADIENTS for _, step, *_ in failing for term in step.terms):
        text = (
            "FSDP2 keeps gradients unsharded while it adds up the micro-batches of an optimizer step. Without them:"
            " train.backend=deepspeed with train.deepspeed.zero_stage=3 (or 2), which shards the gradients of every"
            " micro-batch; or optimizer steps of one micro-batch on each rank, by more ranks, a larger"
            " train.micro_batch_size or, which changes what is learned, a smaller train.batch_size"
        )
        console.print(Text(text))
    for host in plan.hosts:
        if host.verdict == "does_not_fit":
            largest = sorted(host.terms, key=lambda term: -term.gib)[:2]
            text = (
                f"- the host memory of node{'s' * (host.nodes[0][0] != host.nodes[-1][1])} {format_ranges(host.nodes)}"
                f" does not fit: {host.used_gib:.0f} of {host.memory_gib:.0f} GiB on a node, most of it for"
                f" {' and '.join(f'{term.role} {term.name}, {term.gib:.0f}' for term in largest)}. Offload less: a"
                " smaller rollout.memory_share leaves more on the devices"
            )
            console.print(Text(text, style="red"))


def _advice(advice: Sequence[Advice], plan: Plan, console: Console) -> None:
    console.print()
    if not advice:
        text = (
            "No setting that was tried makes it fit, nor do more devices of this sort: use a smaller model, adapters"
            " (train.lora.rank), shorter sequences (data.max_length) or larger devices"
        )
        if plan.inventory.num_devices > MAX_SEARCHED:
            text = f"What would make it fit is searched for up to {MAX_SEARCHED:,} devices: plan fewer nodes to see it"
        console.print(Text(text, style="bold"))
        return
    for index, each in enumerate(advice):
        where = f" --inventory {each.inventory} and" if each.inventory is not None else ""
        host = max(host.used_gib for host in each.plan.hosts)
        how = f"(at most {each.used:.0%} of a device, {host:,.0f} GiB of host memory on a node)"
        console.print(Text(f"{'Or' if index else 'It fits'} with{where} this {how}:", style="bold"))
        for form in (as_yaml(each.settings), f"as arguments: {shlex.join(as_overrides(each.settings))}"):
            console.print(form.rstrip(), markup=False, highlight=False, soft_wrap=True)
