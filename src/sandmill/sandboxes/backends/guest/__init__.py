"""Sandboxes whose agent runs as a guest on some backend's machine, behind the same class as those of this machine's namespaces."""
