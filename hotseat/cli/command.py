"""Entry point of the `hotseat` command: handles signals, keeps drivers alive, then loads `hotseat.cli.main`."""

from __future__ import annotations

import sys

from hotseat import interrupts
from hotseat.cli import restarts


def entry() -> None:
    """Handle signals, load `hotseat.cli.main`, and let it run the command.

    A command that trains goes on in a child of this process, which starts it again when it dies.
    """
    interrupts.handle_until_exit()
    try:
        with interrupts.handled():
            if restarts.is_kept(sys.argv[1:]):
                sys.argv[1:] = restarts.keep(sys.argv[1:])
            from hotseat.cli import main
    except KeyboardInterrupt:
        print("hotseat: stopped", file=sys.stderr)
        sys.exit(interrupts.STOPPED)
    main.entry()
