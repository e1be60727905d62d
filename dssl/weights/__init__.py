"""Weights in and out: loaded with a report of what matched, exported and verified by the program that reads them."""
