"""The command line: one file a group of verbs, `app` puts them together."""
