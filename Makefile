# `make quickstart` and `make test` do everything on a machine with python3 (3.11 or newer), pip and make.

PYTHON ?= python3
PY := .venv/bin/python
# The engine follows the machine: vLLM's CUDA build where there is an NVIDIA driver, its CPU build elsewhere.
ENGINE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)

.PHONY: setup quickstart test lint

setup: .venv/ready-$(ENGINE)

.venv/ready-$(ENGINE): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tlt-lightning needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --editable ".[$(ENGINE),eagle3,dev]"
	# vLLM asks for these three; next to a CPU build of torch the index's CUDA builds of them break `import transformers`.
	for package in torchvision torchaudio torchcodec; do \
	  $(PY) -c "import $$package" >/dev/null 2>&1 || $(PY) -m pip uninstall --quiet --yes $$package; done
	$(PY) -c 'import transformers, vllm, lightning, peft, torchmetrics'
	touch $@

# One thread, unless you say otherwise: the policy is tiny, and where other programs take a core, threads that wait for
# each other make a rollout ten times as long.
quickstart: setup
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m tlt_lightning fit \
	  -c recipes/base.yaml -c recipes/quickstart.yaml -c recipes/speculation.yaml

# Two workers: most tests keep one core busy. On a GPU one, for they would take each other's memory.
test: setup
	$(PY) -m pytest $(if $(shell command -v nvidia-smi 2>/dev/null),,-m "not gpu" -n 2 --dist loadfile)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
