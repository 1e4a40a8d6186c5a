"""Trials of a study under Ray Tune: a supervisor each, and the processes of each node.

Nothing here imports torch, so a supervisor starts in the time that Ray takes for an actor.
"""
