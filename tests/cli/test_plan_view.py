import io
import re
from collections import Counter
from dataclasses import replace

import pytest
from placement_cases import actor, bare, make_plan, rollout, scorer
from rich.console import Console

from hotseat.cli.plan_view import render
from hotseat.placement import Inventory, Part, Plan
from hotseat.placement.flow import Overlap, default_flow
from hotseat.placement.memory_settings import EngineMemory, SimulatorMemory, TrainMemory
from hotseat.placement.plan import plan
from hotseat.placement.plan_types import RoleSpec


def printed(found: Plan, explain=False, width=100, terminal=False) -> str:
    out = io.StringIO()
    system = "standard" if terminal else "auto"
    render(found, Console(file=out, width=width, force_terminal=terminal, color_system=system, _environ={}), explain)
    return out.getvalue()


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def hybrid() -> Plan:
    sleep = frozenset({Part.GRADIENTS, Part.OPTIMIZER})
    roles = [
        actor("0-7", offload="always", can_offload=sleep),
        scorer("reference"),
        rollout("4-7", share=0.6, offload="always"),
    ]
    return make_plan("1x8xA100-80G", roles)


def everything() -> list[Plan]:
    """One plan of each sort."""
    engine = EngineMemory(2048, slots=1024)
    return [
        hybrid(),
        make_plan("1x8xA100-80G", [actor(), scorer("reference"), scorer("reward"), rollout(share=0.5)]),
        make_plan("5x8", bare(reference="1x8", reward="1x8", critic="1x8", actor="1x8", rollout="2x4")),
        make_plan("1x8xA100-80G", [actor("0-5"), rollout("6-7", share=0.9)], overlap=Overlap(1, 1)),
        make_plan("1x8xA100-80G", [actor("0-3"), rollout("4-7", share=0.1)]),
        make_plan("1x2x8G", [actor(model="Llama-2-70B")], task="sft"),
        make_plan("cpu", bare(actor="cpu*1", rollout="cpu*2", reward="none")),
        make_plan(
            "1x4xH200",
            [
                actor("all", model="SmolLM2-135M"),
                RoleSpec("env", "0-1:0-3", memory=SimulatorMemory(4.0)),
                rollout("2-3", model="SmolLM2-135M", memory=engine, tensor_parallel=2),
            ],
            task="rl",
        ),
        make_plan(
            "512x8xH100-80G", [actor("256x8"), scorer("reference", "0-1023"), rollout("512x2", tensor_parallel=2)]
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("explain", [False, True])
def test_every_plan_prints_within_the_width_as_plain_text(explain):
    for found in everything():
        text = printed(found, explain)
        assert "\x1b" not in text
        assert max(len(line) for line in lines(text)) <= 100
        assert f": {found.label} on {found.inventory}" in lines(text)[0]
        for role in found.roles:
            assert role.name in text


def test_a_terminal_gets_colour():
    assert "\x1b[" in printed(hybrid(), terminal=True)


def test_the_device_table_shows_what_is_at_work_kept_aside_and_dropped():
    text = lines(printed(hybrid()))
    start = text.index("Memory on the devices, phase by phase")
    assert text[start + 1].split() == ["devices", "rollout", "prepare.0", "prepare.1", "update", "sync"]
    body = [line.split("  ") for line in text[start + 3 : start + 12]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in body]
    assert cells[0][:3] == ["node 0: 0-3", "actor w(o)[g]", "reference W"]
    assert cells[0][3:] == ["actor W(o)[g]", "actor WGO", "actor W(o)[g]"]
    assert cells[4][:2] == ["node 0: 4-7", "rollout WK"]
    assert cells[4][-1] == "actor W(o)[g]"
    assert cells[5][-1] == "rollout W[k]"
    assert any("CAPITAL in use" in line for line in text)


def test_roles_hand_overs_routes_and_host_memory_are_listed():
    text = printed(hybrid())
    for part in (
        "4 engines",
        "60% of memory",
        "rollout -> prepare.0",
        "- rollout kv cache",
        "dropped",
        "+ actor optimizer 11.2G from host",
        "+ rollout weights 15.0G pushed by actor",
        "sync -> rollout (next)",
        "stays with actor",
        "At most 11.2 GiB per device are copied to the host and back",
        "rollout 0-3   same device        4-7 (each from its own)",
        "90 GiB",  # the optimizer of eight devices on the host
    ):
        assert part in text, part


def test_devices_that_never_change_hands():
    text = printed(make_plan("1x8xA100-80G", [actor("0-3"), rollout("4-7", share=0.9)]))
    assert "No device passes from role to role, and nothing moves." in text
    assert "What moves between phases" not in text
    shared = printed(make_plan("1x8xA100-80G", [actor("all"), rollout("4-7", share=0.4)]))
    assert "Nothing is copied to the host and back." in shared


def test_steps_that_do_not_fit_side_by_side_make_a_second_table():
    roles = [*bare(actor="all"), *bare(critic="@actor", reference="@actor", reward="@actor", rollout="@actor")]
    text = printed(make_plan("1x8", roles))
    assert sum(line.startswith("devices") for line in lines(text)) == 2
    assert "not checked" in text
    assert "27.6G of ?" in printed(make_plan("1x4", [actor(), rollout("none")]))


def test_what_does_not_fit_says_by_how_much():
    text = printed(make_plan("1x8xA100-80G", [actor(memory=TrainMemory(8192, micro_batch=64))], task="sft"))
    assert lines(text)[0] == "Does not fit: colocated on 1 node x 8 A100-80G"
    assert "update does not fit on node 0: 0-7: it takes" in text
    assert re.search(r"it takes ([\d.]+)\s+of\s+80\s+GiB,\s+([\d.]+)\s+GiB\s+too\s+much", text)
    engine = printed(make_plan("1x8xA100-80G", [actor("0-3"), rollout("4-7", share=0.1)]))
    assert "the engine's memory share has no room for its weights and one" in engine
    short = r"they take ([\d.]+) GiB, 0.1 of 80 GiB is 8.0 GiB, ([\d.]+) GiB too little"
    found = re.search(short, " ".join(engine.split()))
    assert float(found[1]) - 8.0 == pytest.approx(float(found[2]), abs=0.11)


def test_host_memory_that_does_not_fit():
    roles = [actor(offload="always"), rollout(share=0.5)]
    inventory = Inventory.parse("1x8xA100-80G+64G")
    text = printed(plan(inventory, roles, default_flow("rl", ["actor", "rollout"])))
    assert "the host memory of node 0 does not fit" in text


def test_explain_shows_the_arithmetic():
    text = printed(hybrid(), explain=True)
    assert "8,030,261,248 parameters x 2 B / 8 ranks" in text
    assert "Memory on node 0: 4-7 (A100-80G of 80 GiB)" in text
    assert "total" in text
    assert "Host memory of node 0" in text


def test_warnings_are_listed():
    roles = [replace(actor("0-3"), model_assumed="Llama-3-8B"), rollout("0-3", share=0.4)]
    text = printed(make_plan("1x8xA100-80G", roles))
    assert "Warnings" in text
    assert "assumed to be that of Llama-3-8B" in text
    assert "4 of 8 devices are used by no role: 4-7" in text


def test_roles_of_one_model_share_a_warning_about_its_assumed_shape():
    roles = [replace(actor("all"), model_assumed="Llama-3-8B"), replace(rollout("all"), model_assumed="Llama-3-8B")]
    text = printed(make_plan("1x8xA100-80G", roles))
    assert text.count("is assumed to be that of") == 1
    assert "- actor, rollout: the model's shape is assumed to be that of Llama-3-8B, from its name" in text


def test_the_page_begins_with_the_verdict_and_the_tightest_phase():
    text = lines(printed(hybrid()))
    assert text[0] == "Fits: hybrid on 1 node x 8 A100-80G"
    memory = [line for line in text if "%" in line and "G " in line]
    shares = [int(share) for line in memory for share in re.findall(r"G (\d+)%", line)]
    tightest = re.fullmatch(r"The tightest is (\S+) on node 0: (\S+): ([\d.]+) of 80 GiB \((\d+)%\)", text[1])
    assert int(tightest[4]) == max(shares)
    assert float(tightest[3]) / 80 == pytest.approx(int(tightest[4]) / 100, abs=0.006)


def test_a_tight_plan_says_what_tight_means():
    text = " ".join(printed(make_plan("1x8xA100-80G", [actor("0-3"), rollout("4-7", share=0.97)])).split())
    assert text.startswith("Fits, but is tight: disaggregated on 1 node x 8 A100-80G The tightest is ")
    assert "Tight means that more than 90% of a memory is planned for" in text
    assert "An engine fills its share (rollout.memory_share 0.97) with KV cache; a smaller share leaves more" in text


def test_a_plan_without_known_memory_is_not_called_fitting():
    assert lines(printed(everything()[2]))[0].startswith("Memory not checked (the warnings say why): ")


def test_notes_stand_before_the_tables():
    out = io.StringIO()
    long = "micro-batches: " + "many words " * 20
    render(hybrid(), Console(file=out, width=100, _environ={}), notes=[long])
    text = out.getvalue()
    assert text.index("Notes\n- micro-batches: many words") < text.index("Roles")
    assert " ".join(text.split()).count("many words") == 20


def test_nothing_is_cut_on_a_narrow_terminal():
    """At 40 columns cells are folded, so that every character of the wide page is there at least as often."""
    for found in everything():
        wide, narrow = (Counter(printed(found, width=width)) for width in (100, 40))
        for drawn in " ─\n":
            del wide[drawn]
        assert wide <= narrow
