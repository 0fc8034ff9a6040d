"""Copies drawn from a grammar; tests compare what they log, save and resume with what they did."""
