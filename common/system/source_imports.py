"""Finds the modules that the source of a Python file imports, without importing them."""

import ast


def absolute_imports(tree: ast.AST) -> list[str]:
    """Return the full names of the modules that a file imports, also in functions.

    Relative imports are left out. A name occurs as often as the file imports it.
    """
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.append(node.module)
    return names
