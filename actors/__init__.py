"""Trio tasks with a mailbox: request actors and the owner of the model."""
