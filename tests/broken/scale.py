"""The smallest operation that can be judged, y = x * factor: oracle, launcher, and faults.

Launchers here are host code: they run in the simulator only, where device arrays are numpy arrays.
"""

import numpy as np

from engine.device import check


def inputs(rng, *, rows, columns, exact=False):
    x = rng.integers(-8, 8, (rows, columns)) if exact else rng.uniform((rows, columns))
    return {"x": x.astype(np.float32)}


def reference(*, x, factor):
    y = x.astype(np.float64) * factor
    return {"y": y, "y.magnitude": np.abs(y)}


def scale(x, *, factor, y, stream=None):
    check("scale", x=(x, "rows columns", "float32"), y=(y, "rows columns", "float32"))
    y._ary[...] = x._ary * np.float32(factor)
