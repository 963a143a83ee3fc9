"""Task sets in the formats of other projects, read as they are."""
