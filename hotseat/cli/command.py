"""Entry point of the `hotseat` command: signals are heard before anything else is imported."""

from __future__ import annotations

import sys

from hotseat import interrupts


def entry() -> None:
    """Run the command that the arguments of this process name, and exit."""
    interrupts.hear_to_the_end()
    try:
        with interrupts.heard():
            from hotseat.cli import main
    except KeyboardInterrupt:
        print("hotseat: stopped", file=sys.stderr)
        sys.exit(interrupts.STOPPED)
    main.entry()
