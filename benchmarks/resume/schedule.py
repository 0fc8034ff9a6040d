"""How long all contestants train, and when they save. This module imports no library."""

BATCH = 32  # samples of an update, over all processes
UPDATES_PER_EPOCH = 20
TRAIN_SAMPLES = BATCH * UPDATES_PER_EPOCH
EPOCHS = 4
UPDATES = UPDATES_PER_EPOCH * EPOCHS
SAVE_EVERY = 8  # updates; the end of the second epoch is a save, those of the others are not
WARMUP_UPDATES = 8
SEED = 7
