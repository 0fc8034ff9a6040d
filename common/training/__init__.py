"""The parts of training that recipes share: Accelerator, plan, gradients, precision, and stops.

The loop is in the recipe. The stages of a run, which call these modules, are in
`common.lifecycle`.

- gradients: averages gradients over ranks, gathers rows, clips, and scales the loss of fp16.
- launch: checks how the processes were started, and has them find each other.
- sharding: shards networks over ranks by FSDP2.
- evaluation: the state around an evaluation, its rehearsal, the best evaluation, early stopping.
- batch_size: chooses the micro-batch for `--auto-batch-size`.

The modules beside these packages are for the rest: the Accelerator, precision, optimizers and
learning rates, the plan and progress of a run, and what ranks decide together.
"""
