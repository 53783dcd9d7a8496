"""Operators, one a file: X.py has the plain reference and the dispatch, X_triton.py and X_quack.py the kernels."""
