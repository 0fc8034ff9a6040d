"""`recipes prove`: checks that a recipe keeps the guarantees of this library.

It launches the recipe under observation. Each check is a module in `checks`.
"""
