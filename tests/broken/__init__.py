"""Kernels that are broken on purpose, each in one way. The judge must say which."""
