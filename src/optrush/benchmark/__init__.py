"""The ladder: each optimisation measured alone, in a fresh process, against what was there before it."""
