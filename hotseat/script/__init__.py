"""Training from a script or a notebook: its objects where a config has paths, callbacks, and a handle of the run."""
