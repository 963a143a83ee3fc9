"""Programs that run inside a package's sandbox, beside it and worker.py: `load(options)` gives an object with describe, tasks and grade.

Each is sent there as its source: it imports nothing of this project, and on this side nobody imports it.
"""
