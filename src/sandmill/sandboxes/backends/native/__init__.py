"""The native backend: sandboxes made by the warden, a small C program, on this machine."""
