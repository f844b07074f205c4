"""Imported once by the server that forks the ranks."""

import train  # noqa: F401
