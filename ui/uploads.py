"""What a visitor sends is text and numbers: no file is taken, kept or fetched from an address.

Gradio offers to every page what file and media components need: uploads, recordings and saved states that stay on the
disk, and values that name a file or a URL, which the server then copies or fetches. This page has no such component.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import gradio as gr
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_WRITES = ("/gradio_api/upload", "/gradio_api/process_recording", "/gradio_api/deep_link")
_DEEPEST = 64  # lists in lists: what a page sends has three


class NoFiles:
    """ASGI middleware that answers 403 to what would write a file, or have the server fetch one from an address."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _asks_for_file(scope["path"]):
            await PlainTextResponse("this page takes no files\n", status_code=403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class Blocks(gr.Blocks):
    """Blocks whose events take no value that names a file, and tell a program which values it left out."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], state: Any, explicit_call: bool = False) -> Any:
        """Raises gr.Error, one line that the caller reads."""
        if _names_file(inputs):
            raise gr.Error("this page takes no files: give text and numbers", print_exception=False)
        if len(inputs) < len(block_fn.inputs) and block_fn.fn is not None:
            named = ", ".join(signature(block_fn.fn).parameters)
            said = f"{block_fn.api_name} takes {len(block_fn.inputs)} values, {named}; {len(inputs)} were given"
            raise gr.Error(said, print_exception=False)
        return await super().preprocess_data(block_fn, inputs, state, explicit_call)


def _asks_for_file(path: str) -> bool:
    return path.rstrip("/").endswith(_WRITES) or ("/gradio_api/file" in path and ":/" in path)


def _names_file(value: Any, depth: int = 0) -> bool:
    """Whether a value holds what Gradio would take for a file; one too deep to look through counts as one."""
    if not isinstance(value, dict | list):
        return False
    if depth > _DEEPEST or (isinstance(value, dict) and {"path", "meta"} <= value.keys()):
        return True
    return any(_names_file(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value))
