"""The parts of training that recipes share: Accelerator, plan, gradients, precision, and stops.

The loop is in the recipe. The stages of a run, which call these modules, are in
`common.lifecycle`.
"""
