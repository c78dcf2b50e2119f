# Kernels are written in a language of their own that only looks like Python: the type checker is told nothing of it.
from typing import Any

def __getattr__(name: str) -> Any: ...
