"""Programs that run inside grading sandboxes, under whatever Python is there: the standard library only, nothing newer than 3.6."""
