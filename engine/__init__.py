"""The engine under test: kernels, layers, model, decode loop; imports nothing of ours outside."""
