"""Sandboxes on a Sandmill server, behind the same class as those of this machine."""
