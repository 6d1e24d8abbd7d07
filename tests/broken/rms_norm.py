"""RMSNorm with one thread a row: right, and broken in six ways. Oracle: y = x / rms(x) * weight."""

import math

import numpy as np

from engine.device import check, cuda, f32, kernel, ptr, u32

FAULTS = (
    "wrong_tail",
    "unwritten_column",
    "past_the_end",
    "input_changed",
    "alias_returned",
    "nan",
)


def inputs(rng, *, tokens, hidden):
    return {
        "x": rng.uniform((tokens, hidden)).astype(np.float32),
        "weight": (1 + rng.uniform(hidden) / 4).astype(np.float32),
    }


def reference(*, x, weight, eps):
    x = x.astype(np.float64)
    return {"y": x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight}


def launcher(fault=None):
    """A launcher whose kernel has this fault; None: it is right."""

    @kernel(threads=1)
    def rms_norm(
        x: ptr[f32],  # [tokens, hidden]
        weight: ptr[f32],  # [hidden]
        eps: f32,
        hidden: u32,
        y: ptr[f32],  # [tokens, hidden]
    ):
        row = u32(u32(cuda.blockIdx.x) * hidden)
        squares = f32(0)
        for i in range(hidden):
            squares = f32(squares + x[u32(row + u32(i))] * x[u32(row + u32(i))])
        scale = f32(f32(1) / f32(math.sqrt(f32(squares / f32(hidden) + eps))))
        end = hidden
        if fault == "unwritten_column":
            end = u32(hidden - u32(1))
        if fault == "past_the_end":
            end = u32(hidden + u32(1))
        for i in range(end):
            at = u32(row + u32(i))
            value = f32(x[at] * scale)
            if fault == "wrong_tail":  # the last, partial vector of 64 elements is not scaled
                if u32(i) >= hidden // u32(64) * u32(64):
                    value = x[at]
            if fault == "past_the_end":
                y[at] = value
            else:
                y[at] = f32(value * weight[u32(i)])
            if fault == "input_changed":
                x[at] = value
        if fault == "nan":  # 0 / 0, as in a row whose mean square underflows
            y[row] = f32(f32(0) / f32(scale - scale))

    def rms_norm_launcher(x, weight, *, eps, y, stream=None):
        dims = check(
            "rms_norm",
            x=(x, "tokens hidden", "float32"),
            weight=(weight, "hidden", "float32"),
            y=(y, "tokens hidden", "float32"),
        )
        rms_norm.launch(dims["tokens"], x, weight, eps, dims["hidden"], y, stream=stream)
        return x if fault == "alias_returned" else None

    return rms_norm_launcher


rms_norm = launcher()
