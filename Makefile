# make train    train a small GPT over 4 pipeline ranks, on the source code of Python's standard library
# make compare  a wider model under megatron-core's own 1F1B, interleaved, ZB-H1, ZB-V and V-Half, rehearsed: one table, one picture
# make frameworks train in the loops of frameworks, with their own packages, which are fetched
# make slurm    the batch scripts on a SLURM of two emulated nodes on this machine: needs root, installs SLURM by apt-get
# make versions train with every release of megatron-core that the patches are made for; ARGS=--quick: a few tests with those that tests do not run with; ARGS=--tests: and test
# make test     the product's tests, or some: make test ARGS=tests/schedule
# make test-room the tests of a room, such as make test-room ROOM=planner: what to run after each change there
# make test-rest what make test leaves out: long cases, the device model, the oracle of the planner, all pages, browsers
# make test-all all tests with all of their random examples, and every schedule in every layout: hours
# make gpu      CUDA tests, sanitizers and benchmarks on this machine's GPU, at most 30 minutes; writes the tables of docs/gpu.md
# make docs     the pages as a site that makes no request elsewhere: build/site/index.html
# make setup    only what these share: .venv with all that is needed
# make clean    remove prepared data, runs and caches; .venv stays
#
# Own text:      make train TEXT=my_file_or_directory
# Own .bin/.idx: make train DATA_PATH=path/to/prefix
# Other flags:   make train ARGS="--train-iters 500 --pipeline-schedule 1f1b"

PYTHON ?= python3
TORCH := $(shell grep ^torch== constraints.txt)
CONFIG ?= configs/tiny.yaml
RANKS ?= 4
RUN ?= runs/$(shell date +%Y%m%d-%H%M%S)
RUN := $(RUN)

# Two texts of the same name are two corpora: the name of the prepared one has a checksum of the whole path.
ifdef TEXT
ifeq ($(wildcard $(TEXT)),)
$(error TEXT=$(TEXT): no such file or directory; give one path without spaces)
endif
DATA_PATH ?= data/own/$(notdir $(patsubst %/,%,$(TEXT)))-$(firstword $(shell echo $(abspath $(TEXT)) | cksum))_text_document
endif
DATA_PATH ?= data/stdlib_text_document

venv := .venv/bin/python
ready := .venv/.ready
export OMP_NUM_THREADS := 1
# Compiled modules are kept: tests and torchrun start hundreds of processes that import them.
export PYTHONDONTWRITEBYTECODE :=
export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup docs train compare versions frameworks slurm test test-room test-rest test-all gpu clean

setup: $(ready)

train: $(ready) $(DATA_PATH).idx
	$(venv) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) pretrain_gpt.py \
		--config $(CONFIG) --data-path $(DATA_PATH) --save $(RUN)/checkpoints --metrics $(RUN)/metrics.jsonl \
		--tensorboard-dir $(RUN)/tensorboard --pipeline-trace $(RUN)/trace $(ARGS)

# The last bits of a gradient norm depend on the placement, and clipping would carry them into the weights.
compare: CONFIG = configs/compare.yaml
compare: $(ready) $(DATA_PATH).idx
	$(venv) scripts/compare.py --ranks $(RANKS) --iterations 12 --output runs/compare -- \
		--config $(CONFIG) --data-path $(DATA_PATH) --clip-grad 0 --pipeline-costs profile $(ARGS)

docs: $(ready)
	$(venv) -m pip install -q -e '.[docs]' -c constraints.txt
	$(venv) scripts/docs_site.py

versions: $(ready)
	$(venv) scripts/check_core_versions.py $(ARGS)

frameworks: $(ready)
	$(venv) scripts/check_frameworks.py

slurm: $(ready)
	scripts/slurm/local_cluster.sh

# Three at a time, for two cores: ranks wait for each other and for clocks, and while they do, another test computes.
pytest = -m pytest -n 3 --dist worksteal --durations 30 --durations-min 1

test: $(ready)
	$(venv) $(pytest) $(or $(ARGS),-m "not whole and not rest")

test-room: $(ready)
	$(venv) scripts/room_tests.py $(ROOM) $(ARGS)

test-rest: $(ready)
	$(venv) $(pytest) $(or $(ARGS),-m "rest and not whole")

test-all: $(ready)
	$(venv) $(pytest) -m '' --hypothesis-profile all $(or $(ARGS),tests)

# With what is installed, so that it needs no network: the environment's Python if there is one.
gpu:
	$(or $(wildcard $(venv)),$(PYTHON)) scripts/gpu.py $(ARGS)

clean:
	rm -rf runs data build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

data/stdlib_text_document.idx: | $(ready)
	$(venv) scripts/preprocess_data.py --stdlib --append-eod --output-prefix data/stdlib

data/own/%_text_document.idx: $(if $(TEXT),$(shell find $(TEXT) -type f)) | $(ready)
	$(venv) scripts/preprocess_data.py --input $(TEXT) --append-eod --output-prefix data/own/$*

# torch goes first and by its exact version: any other one would be replaced, at the price of gigabytes.
.venv/.torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(venv) -m pip install $(TORCH) -c constraints.txt
	touch $@

$(ready): .venv/.torch setup.py constraints.txt
	$(venv) -m pip install -e '.[train,pictures,dev]' -c constraints.txt
	$(venv) -m megatron.pipeline.cli plan --schedule v-auto --pp 4 --microbatches 9 --memory-limit 2.5 --cost F=1,B=1.3,W=0.9,comm=0.1,RS=3,AG=2,OPT=0.1 > /dev/null
	$(venv) -m megatron.pipeline.cli plan --schedule zb-auto --pp 4 --microbatches 9 --memory-limit 2.5 --cost F=1,B=1.3,W=0.9,comm=0.1,RS=3,AG=2,OPT=0.1 > /dev/null
	touch $@
