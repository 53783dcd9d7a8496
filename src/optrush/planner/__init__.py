"""Predict a run's memory and speed: the ledger of memory, the cost of a step, the search. Pure."""
