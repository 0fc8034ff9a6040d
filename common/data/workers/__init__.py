"""Worker processes that make batches, and the copy of batches to the device.

`pool` has the class `Workers`, which a loader uses. The other modules each do one part of its work.
"""
