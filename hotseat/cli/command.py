"""Entry point of the `hotseat` command, which handles signals before `hotseat.cli.main` and its imports are loaded."""

from __future__ import annotations

import sys

from hotseat import interrupts


def entry() -> None:
    """Handle signals, load `hotseat.cli.main`, and let it run the command."""
    interrupts.handle_until_exit()
    try:
        with interrupts.handled():
            from hotseat.cli import main
    except KeyboardInterrupt:
        print("hotseat: stopped", file=sys.stderr)
        sys.exit(interrupts.STOPPED)
    main.entry()
