"""What happened, for people: reading a run folder, intervals, breakdowns, the terminal summary and the self-contained page."""
