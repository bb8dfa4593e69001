"""Synchronous MLX: each lane is one checked way to run rows at one geometry."""
