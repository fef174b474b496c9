"""What scripts for agentlightning 0.2 and 0.3 expect and this version calls otherwise, or does otherwise.

table      THE TABLE: every old name with where it leads, or why it is not kept
finder     serves the old module paths; adds old names to modules and classes, and old arguments to their callables
lookup     what an old name means today
notice     the one notice that a script gets
the rest   thin adapters, a module for each area; each is imported when something in it is used

Nothing of the package imports this but its front door, which puts the finder in place and asks `lookup` for names that
it does not have itself. A script that uses no old name loads the four files named above, and none of the adapters.
"""
