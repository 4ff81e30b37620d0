"""The Ray runtime. This folder alone imports Ray, and only when a Ray cluster is used.

One placement group reserves the devices of all groups, one bundle per node. Actors ask Ray for no device of their
own: they sit in their node's bundle and see the devices that their process was given, through CUDA_VISIBLE_DEVICES,
which is set when the process starts. So several processes can share a device, and one process can have several.

Of a cluster that existed before, only our actors, our placement group and what our workers started are taken down.
"""
