import gc

from hotseat.loop.rl.loop import sparing_collector


def test_what_is_there_is_no_garbage_while_steps_are_made_and_can_be_afterwards():
    with sparing_collector():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
