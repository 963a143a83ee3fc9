"""MicroVM fleets that speak the E2B protocol, through the `e2b` package."""
