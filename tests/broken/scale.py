"""The smallest operation that can be judged: y = x * factor, computed by host code.

Copies to and from the device are all it needs, so that it runs on a GPU and in the simulator, and
tests can put any fault into three lines.
"""

import numpy as np

SPEC = """
stage     = "kernel"
kernel    = "broken.scale:scale"
reference = "broken.scale"

[axes]
columns = 8

[scalars]
factor = 3.0

[inputs]
x = { shape = ["rows", "columns"], dtype = "float32" }

[outputs]
y = { shape = ["rows", "columns"], dtype = "float32", match = { ulp = 1 } }

[cases]
small = { rows = 3, sim = true }
"""


def inputs(rng, *, rows, columns):
    return {"x": rng.uniform((rows, columns)).astype(np.float32)}


def reference(*, x, factor):
    return {"y": x.astype(np.float64) * factor}


def scale(x, *, factor, y, stream=None):
    y.copy_to_device(x.copy_to_host() * np.float32(factor))
