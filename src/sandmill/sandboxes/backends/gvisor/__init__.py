"""gVisor on this machine: `runsc`, where it is installed."""
