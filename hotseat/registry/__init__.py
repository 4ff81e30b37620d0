"""Tables of the things that there are several of, one entry each. They need neither torch nor a config.

To add one, write its file and its entry, which has all facts by which other code decides.
"""
