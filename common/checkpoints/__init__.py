"""Checkpoints and finished models: how a run's state is saved, verified, chosen and restored.

Which run may resume from a directory is decided in `common.run_directory`, and when a checkpoint is
due in `common.training.plan` and `common.training.rank_decisions`.
"""
