"""The stages of a run, which `common.run` calls: set-up, start, loop, evaluations, saves, end."""
