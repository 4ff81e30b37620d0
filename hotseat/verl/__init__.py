"""Compatibility with verl: its command line, its data, and its reward functions.

The core imports nothing from here; `hotseat.extensions` has the names by which it finds what it needs. The module that
users type, `hotseat.cli.main_ppo`, calls this folder.

keys         every key: its kind, verl's default, the config fields it sets, or why it has no effect or is refused
overrides    the parser: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b` and their values become a command line
derive       config fields that depend on several keys, or on more than a key's own value
translate    the whole translation: a checked `Config`, and keys without effect, missing keys, unbuilt features
run_command  the command: print the config or start the run
help         the text of `--help`
keys_table   the counts and the list of keys in the documentation, rendered from the above
data_sources what a run's data must have, or not have, found before anything else is loaded
reward_form  reward functions of verl's form, called for each answer by names
scores       verl's built-in scoring, which is used where the command names no reward function
shim         a package `verl` for PYTHONPATH, whose command is ours
"""
