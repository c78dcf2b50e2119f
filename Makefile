# Every target makes its own .venv first; the stamps make the second time quick.
.PHONY: help setup demo test check ui bench bench-docs train clean

PY := .venv/bin/python
CORE := .venv/.core
DEV := .venv/.dev
PYTEST_ARGS ?=
BENCH_ARGS ?=
TRAIN = $(PY) -m replayscope.model.train $(TRAIN_ARGS)
TRAIN_ARGS ?=

# The first interpreter that is new enough; `make PYTHON=/path/to/python` overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# On Linux without an NVIDIA driver torch's own index has a wheel a tenth of the size. It is used where it answers.
TORCH_CPU := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(shell [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null \
	&& curl -fsIm 5 -o /dev/null $(TORCH_CPU)/torch/ 2>/dev/null && echo "--extra-index-url $(TORCH_CPU)")

help:
	@echo "make demo    set up, run the main job on the embedded model and texts, write demo/"
	@echo "make test    set up and run the tests"
	@echo "make check   lint, format, types, and the tests of the repository itself"
	@echo "make ui      the browser page on the demo's traces"
	@echo "make bench   speed, as ratios in one run; make bench-docs writes them into docs/performance.md"
	@echo "make train   train the embedded models again, into build/mini.safetensors and build/mini-replay.safetensors"
	@echo "make setup   only .venv"

setup: $(DEV)

$(CORE): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.11 or newer found; install one or run make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check $(TORCH_INDEX) -c constraints.txt -e .
	@touch $@

$(DEV): $(CORE)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,check,hf]'
	@touch $@

demo: $(CORE)
	.venv/bin/replayscope demo -o demo --force

test: $(DEV)
	$(PY) -m pytest $(PYTEST_ARGS)

check: $(DEV)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	$(PY) -m pytest -q tests/test_repo_architecture.py tests/test_repo_docs.py

ui: $(CORE)
	@[ -d demo ] || $(MAKE) demo
	.venv/bin/replayscope ui --root demo

bench: $(CORE)
	@mkdir -p build
	$(PY) benchmarks/run.py --out build/bench.jsonl $(BENCH_ARGS)

bench-docs: bench
	$(PY) benchmarks/table.py build/bench.jsonl --write

train: $(CORE)
	@mkdir -p build
	$(TRAIN) --recipe mini -o build/crowded.safetensors
	$(TRAIN) --recipe thin --from build/crowded.safetensors -o build/thin.safetensors
	$(TRAIN) --recipe far --from build/thin.safetensors -o build/mini.safetensors
	$(TRAIN) --recipe replay --from build/mini.safetensors -o build/mini-replay.safetensors

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
