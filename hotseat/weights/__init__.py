"""Transfer of the policy's weights to the engines: in buckets, versioned, and checked on arrival.

Three transports (`transports` chooses one for each engine): host memory (`bucket`), `device_ipc` on a device that
trainer and engine share, `broadcast` to other devices.
"""
