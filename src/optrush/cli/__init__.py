"""The command line: one file per group of verbs; `app` registers them."""
