"""Running somebody else's verifier where what it says can be believed. In: an agent's dead sandbox, tests. Out: what tests came to."""
