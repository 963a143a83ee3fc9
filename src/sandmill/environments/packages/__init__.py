"""Other people's environments, each in a sandbox of its own. In: an adapter and an installed package. Out: descriptions, tasks, scores."""
