"""What a run will need and how fast it will be: the ledger of memory, the cost of a step, the search. Pure."""
