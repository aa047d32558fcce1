"""The laboratory: what trains, compares and shows models. The library does without it.

The commands, and most of these packages, need the extra `lab`.
"""
