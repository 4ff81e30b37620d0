from hypothesis import given
from hypothesis import strategies as st
from placement_cases import refused

from hotseat.errors import PlacementError
from hotseat.placement.selection import (
    CpuProcesses,
    DeviceBlocks,
    Elsewhere,
    InPools,
    NumberRange,
    RankSegment,
    RankSelection,
    SameAs,
    parse_placement,
    parse_selection,
)


def ranks(*segments: RankSegment) -> RankSelection:
    return RankSelection(segments)


def test_every_form():
    assert parse_selection("3") == ranks(RankSegment(NumberRange(3, 3)))
    assert parse_selection(3) == ranks(RankSegment(NumberRange(3, 3)))
    assert parse_selection(" 0-3 , 6 ") == ranks(RankSegment(NumberRange(0, 3)), RankSegment(NumberRange(6, 6)))
    assert parse_selection("0-3:0-7") == ranks(RankSegment(NumberRange(0, 3), NumberRange(0, 7)))
    assert parse_selection("all") == ranks(RankSegment(None))
    assert parse_selection("all:0-15") == ranks(RankSegment(None, NumberRange(0, 15)))
    assert parse_selection("2x8") == DeviceBlocks(2, 8)
    assert parse_selection("@actor") == SameAs("actor")
    assert parse_selection("cpu*4") == CpuProcesses(4)
    assert parse_selection("none") == Elsewhere()
    assert parse_selection("sim/0-3") == InPools(("sim",), ranks(RankSegment(NumberRange(0, 3))))
    assert parse_selection("4090/2x8") == InPools(("4090",), DeviceBlocks(2, 8))
    assert parse_selection("a,b/cpu*2") == InPools(("a", "b"), CpuProcesses(2))


def test_segments_with_and_without_processes_mix():
    assert parse_selection("0-1:0-3,3-5,7-10:7-14") == ranks(
        RankSegment(NumberRange(0, 1), NumberRange(0, 3)),
        RankSegment(NumberRange(3, 5)),
        RankSegment(NumberRange(7, 10), NumberRange(7, 14)),
    )


def test_node_group_mapping():
    same = InPools(("a800",), ranks(RankSegment(NumberRange(0, 63))))
    assert parse_selection({"node_group": "a800", "placement": "0-63"}) == same
    both = InPools(("a800", "4090"), ranks(RankSegment(NumberRange(0, 8))))
    assert parse_selection({"node_group": ["a800", 4090], "placement": "0-8"}) == both
    assert parse_selection({"node_group": "a800, 4090", "placement": "0-8"}) == both
    assert parse_selection({"node_group": 4090, "placement": 0}).pools == ("4090",)
    assert parse_selection({"placement": "0-8"}) == ranks(RankSegment(NumberRange(0, 8)))


def test_joined_names_place_each_role():
    found = parse_placement({"actor,rollout": "all", "env , reward": "0-1"})
    assert found == {
        "actor": ranks(RankSegment(None)),
        "rollout": ranks(RankSegment(None)),
        "env": ranks(RankSegment(NumberRange(0, 1))),
        "reward": ranks(RankSegment(NumberRange(0, 1))),
    }


numbers = st.integers(0, 30)


@st.composite
def rank_selections(draw):
    if draw(st.booleans()) and draw(st.booleans()):
        return ranks(RankSegment(None, draw(st.one_of(st.none(), st.builds(lambda n: NumberRange(0, n), numbers)))))
    segments, rank, proc = [], 0, 0
    for _ in range(draw(st.integers(1, 4))):
        first = rank + draw(st.integers(0, 3))
        length = draw(st.integers(1, 6))
        rank = first + length
        factor = draw(st.integers(1, 3))
        divisors = [n for n in range(1, length + 1) if length % n == 0]
        count = draw(st.sampled_from([None, length * factor, *divisors]))
        procs = None if count is None else NumberRange(proc, proc + count - 1)
        proc += length if count is None else count
        segments.append(RankSegment(NumberRange(first, first + length - 1), procs))
    return RankSelection(tuple(segments))


inner = st.one_of(
    rank_selections(),
    st.builds(DeviceBlocks, st.integers(1, 9), st.integers(1, 9)),
    st.builds(CpuProcesses, st.integers(1, 9)),
)
selections = st.one_of(
    inner,
    st.sampled_from([SameAs("actor"), SameAs("rollout"), Elsewhere()]),
    st.builds(
        InPools,
        st.lists(st.text("abcxyz0189_.-", min_size=1, max_size=6), min_size=1, max_size=3, unique=True).map(tuple),
        inner,
    ),
)


@given(selections)
def test_text_form_reads_back_as_the_same_selection(selection):
    assert parse_selection(str(selection)) == selection


@given(st.text(alphabet="0123456789-:,x@ alcpu*/none.", max_size=12))
def test_any_text_is_read_or_refused_cleanly(text):
    try:
        selection = parse_selection(text)
    except PlacementError:
        return
    assert parse_selection(str(selection)) == selection


def test_wrong_ranks_are_refused_with_the_fix():
    with refused("actor: cannot read 'zero'", "0-3:0-7"):
        parse_selection("zero", "actor")
    with refused("cannot read ''"):
        parse_selection("0-3,", "actor")
    with refused("ranks 7-0 descend", "write 0-7"):
        parse_selection("7-0", "actor")
    with refused("not in ascending order", "0-1 comes after 5"):
        parse_selection("3-5,0-1", "actor")
    with refused("named twice", "3-5 comes after 3", "each rank once"):
        parse_selection("0-3,3-5", "actor")
    with refused("'all' leaves no ranks", "write all alone"):
        parse_selection("all,3", "actor")


def test_wrong_processes_are_refused_with_the_fix():
    with refused("start at 0", "write 0:0-3, not 0:1-4"):
        parse_selection("0:1-4", "env")
    with refused("continue with 2", "write 1:2, not 1:3"):
        parse_selection("0:0-1,1:3", "env")
    with refused("processes 3-0 descend", "write 0-3"):
        parse_selection("0:3-0", "env")
    with refused("4 processes on 3 devices", "take 3 or 6 processes"):
        parse_selection("0-2:0-3", "env")
    with refused("5 processes on 12 devices", "take 4 or 12 processes"):
        parse_selection("0-11:0-4", "env")
    with refused("makes 1,000,000,000 processes", "at most 65,536"):
        parse_selection("0:0-999999999", "env")
    with refused("makes 999,999,999 processes"):
        parse_selection("cpu*999999999", "env")
    with refused("2 processes on 3 devices", "take 1 or 3 processes"):
        parse_selection("0-2:0-1", "env")


def test_other_wrong_selections_are_refused_with_the_fix():
    with refused("is no selection", "none in quotes"):
        parse_selection(None, "reward")
    with refused("True is no selection"):
        parse_selection(True, "reward")
    with refused("1.5 is no selection"):
        parse_selection(1.5, "reward")
    with refused("rank -1 is negative"):
        parse_selection(-1, "reward")
    with refused("'cpu*0' has no processes", "cpu*1"):
        parse_selection("cpu*0", "reward")
    with refused("'0x8' has no devices", "1x1", "@role"):
        parse_selection("0x8", "reward")
    with refused("@actor cannot be within a pool", "without a800/"):
        parse_selection("a800/@actor", "reward")
    with refused("none cannot be within a pool"):
        parse_selection("a800/none", "reward")
    with refused("'a b' is no pool name"):
        parse_selection("a b/0", "reward")
    with refused("a pool is named twice"):
        parse_selection("a,a/0", "reward")
    with refused("unknown key 'node_grop'", "did you mean 'node_group'?"):
        parse_selection({"node_grop": "a", "placement": 0}, "reward")
    with refused("needs the key placement"):
        parse_selection({"node_group": "a"}, "reward")


def test_unknown_role_gets_the_nearest_known_one():
    with refused("unknown role 'ref'", "did you mean 'reference'?", "inference"):
        parse_placement({"ref": "0"})
    with refused("unknown role 'actr'", "did you mean 'actor'?"):
        parse_placement({"actr,rollout": "0"})
    with refused("unknown role 'zzz'", "the roles are actor"):
        parse_placement({"zzz": "0"})
    with refused("unknown role 'critc'", "did you mean 'critic'?"):
        parse_selection("@critc", "reward")
    with refused("actor is placed twice"):
        parse_placement({"actor": "0", "rollout,actor": "1"})
