"""Programs that run inside a package's sandbox, beside it and worker.py: `load(options)` gives an object with describe, tasks and grade.

Each is sent there as its source and imports nothing of this project. On this side nobody imports one, but for OpenEnv's: it also speaks to
servers of the user's own, and runs here then.
"""
