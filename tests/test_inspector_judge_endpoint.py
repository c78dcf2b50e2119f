"""A running engine judged from outside: hits are proven or void, requests are bounded, nothing is sent twice."""

import itertools
import json
import math

import pytest

from replayscope.inspector.cli import main
from replayscope.inspector.judge_endpoint import coarse_kl
from replayscope.inspector.judge_results import read
from tests import engines

CONTRACT = """
name = "engine"
[evidence]
samples = 12
budget = 0.25
resamples = 100
[[limit]]
metric = "kl"
at_most = 0.1
[[matrix]]
tasks = ["passkey.before"]
lengths = [128]
"""
CELL = "passkey.before/n128/suffix-short/out-short/x1/engine/paper/task"


def run(tmp_path, url, *more, contract=CONTRACT):
    path = tmp_path / "engine.toml"
    path.write_text(contract)
    words = ["judge", "run", str(path), "--endpoint", url, "--engine-model", "tiny", "--engine-semantics", "paper"]
    return main([*words, "-o", str(tmp_path / "r.jsonl"), "--json", *more])


def cells(capsys):
    told = json.loads(capsys.readouterr().out)
    return told, {cell["cell"]: cell for cell in told["cells"]}


def test_an_engine_whose_hits_are_proven_and_right_is_accepted(tmp_path, capsys):
    cache = engines.Cache()
    with engines.served(cache) as url:
        assert run(tmp_path, url, "--salt") == 0
    told, found = cells(capsys)
    assert told["verdict"] == "accept" and len(found) == 3 and all(not c["blind"] for c in found.values())
    # Three probes, and for each prompt one cold request, and two for each cut: none is sent twice.
    assert len(cache.requests) == 3 + 12 * (1 + 3 * 2)
    for line in read(tmp_path / "r.jsonl").prompts:
        full, *hits = line["runs"]
        assert full["cached"] == 0 and all(hit["cached"] > 60 and "void" not in hit for hit in hits)
        assert [b["cached"] - a["cached"] for a, b in itertools.pairwise(hits)] == [1, 1]
    # A second run finds everything there and asks only what the server takes.
    with engines.served(engines.Cache()) as again:
        assert run(tmp_path, again) == 2, "another address is another run"


def test_a_regression_at_one_cut_is_named(tmp_path, capsys):
    with engines.served(engines.Cache(forget="paper/task+1")) as url:
        assert run(tmp_path, url, "--salt") == 1
    told, found = cells(capsys)
    assert told["verdict"] == "refuse"
    assert [name for name, cell in found.items() if cell["state"] == "fail"] == [CELL + "+1"]
    assert found[CELL + "+1"]["worse"] == 12 and found[CELL + "+1"]["kl"]["value"] > 0


@pytest.mark.parametrize(
    ("cache", "options", "says"),
    [
        (engines.Cache(counts=False), ["--salt"], "does not say how many tokens were cached"),
        (engines.Cache(), [], "127 tokens were cached where the hit should end"),
        (engines.Cache(block=16), ["--salt"], "tokens were cached where the hit should end"),
    ],
    ids=["no-count", "one-cache-for-all", "coarse-blocks"],
)
def test_a_hit_that_is_not_proven_is_void_and_no_evidence(tmp_path, capsys, cache, options, says):
    with engines.served(cache) as url:
        assert run(tmp_path, url, *options) == 1
    told, found = cells(capsys)
    assert told["verdict"] == "not enough evidence"
    assert all(cell["state"] == "open" for cell in found.values())
    assert any(says in why for cell in found.values() for why in cell["why"])


def test_the_blocks_of_a_cache_may_shorten_a_hit(tmp_path, capsys):
    with engines.served(engines.Cache(block=16)) as url:
        assert run(tmp_path, url, "--salt", "--cache-block", "16") == 0
    assert cells(capsys)[0]["verdict"] == "accept"


def test_what_fails_voids_its_pair_and_what_is_refused_is_left_out(tmp_path, capsys):
    cache = engines.Cache(refuses=("logprobs",), fails=(6,))
    with engines.served(cache) as url:
        assert run(tmp_path, url, "--salt") == 1
    told, _ = cells(capsys)
    voids = [r["void"] for line in read(tmp_path / "r.jsonl").prompts for r in line["runs"] if "void" in r]
    assert len(voids) == 1 and "HTTP 500" in voids[0]
    assert told["verdict"] == "not enough evidence" and any("limit mean kl" in reason for reason in told["reasons"])
    assert not any("logprobs" in body for body in cache.requests[3:])


def test_requests_are_bounded_and_the_rest_runs_later(tmp_path, capsys):
    cache = engines.Cache()
    with engines.served(cache) as url:
        assert run(tmp_path, url, "--salt", "--max-requests", "20") == 2
        assert len(cache.requests) == 20 and "raise --max-requests" in capsys.readouterr().err
        assert main(["judge", "verdict", str(tmp_path / "r.jsonl")]) == 1
        assert "partial" in capsys.readouterr().out
        assert run(tmp_path, url, "--salt") == 0
    done = [line["seed"] for line in read(tmp_path / "r.jsonl").prompts]
    assert done == sorted(set(done)) and len(done) == 12


def test_nobody_there_is_one_line(tmp_path, capsys):
    assert run(tmp_path, "http://127.0.0.1:9/v1") == 2
    said = capsys.readouterr().err
    assert "does not answer: connection refused;" in said and "urlopen" not in said
    assert run(tmp_path, "ftp://here") == 2
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("host", ["[::1", "", "h:0", "h:65536", "h:-1", "h:port", "a b", "h\n"])
def test_what_is_no_address_is_one_line(tmp_path, capsys, host):
    assert run(tmp_path, f"http://{host}/v1") == 2
    said = capsys.readouterr().err
    assert "is no address" in said and said.count("\n") == 1 and not (tmp_path / "r.jsonl").exists()


def test_a_task_that_does_not_fit_is_said_before_anything_is_asked(tmp_path, capsys):
    cache = engines.Cache()
    with engines.served(cache) as url:
        assert run(tmp_path, url, contract=CONTRACT.replace("[128]", "[3]")) == 2
    assert not cache.requests and not (tmp_path / "r.jsonl").exists()
    assert "passkey.before/n3/" in capsys.readouterr().err


def test_kl_from_outside_is_a_lower_bound():
    p, q = [0.6, 0.3, 0.06, 0.04], [0.5, 0.1, 0.3, 0.1]
    whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    names = "abcd"
    for seen in (1, 2, 3):
        sides = [{n: math.log(v) for n, v in zip(names[:seen], side, strict=False)} for side in (p, q)]
        assert 0 < coarse_kl(*sides) <= whole
    assert coarse_kl(sides[0], sides[0]) == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
def test_a_real_server_that_counts_no_cached_tokens_gives_void_cells(tmp_path, capsys):
    """transformers serve speaks the protocol and streams, but tells no cached tokens: nothing can be proven."""
    for package in ("transformers", "openai"):
        pytest.importorskip(package, reason="transformers serve needs transformers and openai")
    folder = engines.tiny_model(tmp_path / "model")
    contract = CONTRACT.replace("samples = 12", "samples = 1")
    with engines.transformers_serve(folder) as url:
        words = ["--engine-model", str(folder), "--cells", "*/task"]
        assert run(tmp_path, url, *words, contract=contract) == 1
    told, found = cells(capsys)
    assert told["verdict"] == "not enough evidence" and list(found) == [CELL]
    assert "does not say how many tokens were cached" in found[CELL]["why"][0]
    (line,) = read(tmp_path / "r.jsonl").prompts
    assert line["tokens"] == 128 and line["runs"][0]["text"], "the server counted the prompt and produced something"
