"""`recipes prove`: checks that a recipe keeps the guarantees of this library.

It launches the recipe under observation. The modules of this folder lead from the command to the
receipt. Its packages import only packages that are above them in this list:

- records: what an observed process writes, and how the checks read it.
- recomputation: computes logged figures again.
- reach: finds the values that a recipe's loop can reach.
- observation: runs the recipe under observation, in each process of a launch.
- instruments: observe more, for single checks.
- proof_runs: launches the runs of a proof, and keeps their records.
- exact_comparison: compares runs that must give the same bits, and finds the causes of differences.
- layouts: compares runs that make the same updates in different layouts.
- checks: each module checks a guarantee. `training_samples`, `evaluation_samples` and
  `samples_in_words` are parts of `samples`.

A proof runs its checks one after the other. A check asks the bench for observed runs, reads their
records, and returns a verdict. The words of this package:

- bench: launches observed runs, and keeps their records, so that several checks can use one run.
- launch: one start of a run, on one process or several. A run that is interrupted and resumed has
  several launches. Each process of a launch is a rank.
- probe: the script that runs the recipe in each process of a launch, under observation.
- session: the observation of one process, as the observer and the instruments share it.
- observer: `RunObserver`. It records the batches, losses and states of each observed run.
- instrument: a module that observes more, for single checks, such as memory.
- record: one observation, such as a batch or a save. The observer and the instruments write it.
- reference run: the uninterrupted run on one process, with which other runs are compared.
- verdict: what a check returns: passed, failed, or does not apply. A `judge_` function makes it.
- cause: a mistake in the recipe that explains a failed check, and the change that it needs.
- reach: a recipe's loop reaches a value if its variables contain it. State that is within reach,
  changes and is in no checkpoint is a likely cause of a difference after a resume.
- holder: the variable of the recipe that holds tensors whose number keeps growing.
- layout: the division of an update into micro-batches and processes.
- step: the number of updates before a record. So update n has the step n - 1, and an evaluation or
  a save after update n has the step n.
- micro-batch: a batch of training on one rank. Its number counts from 0 within its update.
- phase: whether an evaluation is the rehearsal, a validation, or the final one.
- sample index: the number of a sample in its split. A position is its place in a batch. Both count
  from 0.
- row: what `metrics.jsonl` has for one step. A row of a tensor is an entry of its first dimension.
- figure: a number that the recipe logs, such as the accuracy of an evaluation.
- metric: a number by its name, such as accuracy: in training for each micro-batch, in an evaluation
  as a figure.
- loss: the mean over elements, if the text does not say otherwise. A recorded loss is what the loop
  passes to `run.record`. A computed loss is what a loss function of torch returns.
- outcome: how well the model did on one sample, such as the sample's loss.
"""
