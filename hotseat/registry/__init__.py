"""Tables of the things that there are several of: an entry has all facts by which other code decides.

To add one, write its file and its entry. Nothing that an entry names is imported before it is used.
"""
