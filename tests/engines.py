"""Servers for the tests of `judge run --endpoint`: one in this process with a prefix cache, a real one beside it."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Cache:
    """Byte tokens; the cache of a salt holds whole blocks of every prompt seen under it. Answers repeat what stands
    behind 'passkey = ', as a model that solves the task would.

    forget: bytes by which an answer over a hit is wrong in the cells whose salt holds this text. counts: whether cached
    tokens are told. refuses: fields answered with 422. fails: requests (by number) that bring a 500.
    """

    def __init__(self, block=1, counts=True, refuses=(), fails=(), forget=None):
        self.block, self.counts, self.refuses, self.fails, self.forget = block, counts, refuses, fails, forget
        self.seen: dict[str, list[str]] = {}
        self.requests: list[dict] = []

    def answer(self, body: dict) -> tuple[int, dict]:
        self.requests.append(body)
        if len(self.requests) in self.fails:
            return 500, {"detail": "out of luck"}
        if refused := [field for field in self.refuses if field in body]:
            return 422, {"detail": f"unsupported: {refused[0]}"}
        prompt, salt = body["prompt"], body.get("cache_salt", "")
        seen = self.seen.setdefault(salt, [])
        cached = max((_common(prompt, other) for other in seen), default=0)
        cached = min(cached, len(prompt) - 1) // self.block * self.block
        seen.append(prompt)
        text = (prompt.rpartition("passkey = ")[2][:4] + ";;")[: body["max_tokens"]]
        wrong = self.forget is not None and cached > 0 and self.forget in salt
        text = "9999;;"[: len(text)] if wrong else text
        usage: dict = {"prompt_tokens": len(prompt)}
        if self.counts:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        top = [{token: -0.01 - wrong, "~": -4.7 + wrong} for token in text]
        told = {"tokens": list(text), "top_logprobs": top} if "logprobs" in body else None
        choice = {"text": text, "index": 0, "logprobs": told}
        return 200, {"choices": [choice], "usage": usage}


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@contextmanager
def served(cache: Cache) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            status, reply = cache.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            data = json.dumps(reply)
            self.wfile.write((f"data: {data}\n\ndata: [DONE]\n\n" if status == 200 else data).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def tiny_model(folder: Path) -> Path:
    """A Llama of random weights with a byte-level tokenizer, written as Hugging Face loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<eos>"])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>").save_pretrained(folder)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                    max_position_embeddings=512, bos_token_id=None, eos_token_id=256)
    ).save_pretrained(folder)  # fmt: skip
    return folder


@contextmanager
def transformers_serve(folder: Path, seconds: float = 120.0) -> Iterator[str]:
    """`transformers serve` on the CPU, from another process; ended with the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(folder), "--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
    code = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = (folder / "serve.log").open("wb")
    process = subprocess.Popen([sys.executable, "-c", code, *words], env=env, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        began = time.monotonic()
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                told = (folder / "serve.log").read_text()[-2000:]
                assert process.poll() is None and time.monotonic() - began < seconds, told
                time.sleep(0.3)
        yield f"{url}/v1"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()
