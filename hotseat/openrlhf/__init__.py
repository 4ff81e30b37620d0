"""Compatibility with OpenRLHF: its command lines, agent files, reward files and names of metrics.

The core imports nothing from here; `hotseat.extensions` has the names by which it finds what it needs. The modules that
users type, such as `hotseat.cli.train_sft`, call this folder.

flag       the record of a flag: its values, its default, the config fields it sets
flags      every flag of the commands
argv       the parser: splits a command line into flags and values
config_draft  a config under construction
derive     config fields that depend on several flags: placement, overlap, rewards, lengths
translate  the whole translation: a checked `Config`, and flags without effect, missing flags, unbuilt features
run_command  the commands: print the config or start the run
help       the text of `--help`: an example, and every flag in groups
flags_table  the table of all flags in the documentation, rendered from the above
inference_command, merge_command, serve_command: `batch_inference`, `lora_combiner`, `serve_rm`, with flags of their own
shim       a package `openrlhf` for PYTHONPATH, whose commands are ours
agents     agent files: what they import, and agents of all their forms
helpers    what reward files and agent files import from `openrlhf.utils`
metric_aliases  OpenRLHF's names of metrics, for trackers
"""
