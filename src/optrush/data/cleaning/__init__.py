"""Cleaning: what is measured of a row, and which rows are taken out for it."""
