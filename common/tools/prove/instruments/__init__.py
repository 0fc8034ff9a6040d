"""Instruments: observers for single checks, in addition to `RunObserver`.

See `Session` in `prove.observation.session` for the form of an instrument.

Eight modules are no instruments. `allocator_statistics`, `graphs`, `holders`, `recipe_containers`
and `recipe_variables` are parts of `memory`. `loss_calls` is a part of `losses`, and
`host_storages` of `waits`. Both `waits` and `changed_gradients` use `wait_frames`.
"""
