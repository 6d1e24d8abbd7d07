"""The judge, in reading order: spec, golden, run, compare, report."""
