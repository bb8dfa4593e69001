"""The HTTP edge and the command line: bytes in, bytes out."""
