"""The command `recipes`: tools that read the directories of runs, or launch recipes.

They may import the library, which never imports a tool. `__main__` lists the tools.
"""
