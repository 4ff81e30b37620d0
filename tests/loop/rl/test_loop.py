import gc
import sys

import preloaded

from hotseat.loop.rl.loop import sparing_collector

CODE = """
import gc
from hotseat.loop.rl.loop import sparing_collector
gc.unfreeze()
with sparing_collector():
    print(gc.get_freeze_count() > 0)
print(gc.get_freeze_count())
"""


def test_what_is_there_is_no_garbage_while_steps_are_made_and_can_be_afterwards():
    done = preloaded.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["True", "0"], done.stderr


def test_what_the_process_has_exempted_itself_stays_exempted(monkeypatch):
    gc.freeze()
    called: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: called.append(name))
    with sparing_collector():
        assert gc.get_freeze_count() > 0
    assert called == []
