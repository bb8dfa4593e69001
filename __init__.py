"""Paceline: a local, OpenAI-compatible LLM server on MLX, built of actors that step in lockstep.

Layers, each importing only those below it:

    api      the HTTP edge and the command line: bytes in, bytes out
    actors   trio tasks with a mailbox: one per request, and one that owns the model
    lanes    synchronous MLX: one way to run rows at one geometry
    runtime  the ground floor: settings, model files, tokenizer, noise, the device thread
"""

__version__ = "0.1.0"
