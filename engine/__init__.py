"""The engine under test: kernels, layers, model and decode loop; imports nothing of ours outside."""
