"""The stages of a run: set up, started, evaluated, saved and ended; `common.run` calls them."""
