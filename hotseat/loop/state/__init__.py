"""Files of a run: its directory and checkpoints; and the watchdog of its processes."""
