"""Launchers of specs that compare bits between two ways to launch a kernel of the engine."""
