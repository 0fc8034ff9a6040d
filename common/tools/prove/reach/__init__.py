"""Finds the values that a recipe's loop can reach, such as local variables and objects in lists.

The search runs in the observed process, and leaves all values as they are. `own_code` tells the
user's own code, whose variables are searched, from libraries.
"""
