"""Copies drawn from a grammar: what they log, keep and resume is held against what they did."""
