"""The verbs, a file a subject; each imports what it needs inside, so that --help answers at once."""
