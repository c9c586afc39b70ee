# make demo    set up and watch two real training runs diverge, be explained, and agree again; CASE=config … for others
# make demo-mindspore    the same with MindSpore as the second backend
# make test    set up, lint, type-check, run every test
# The rest: lint chromium fast minutes mindspore mindspeed long full-disk kill-matrix fuzz layouts bench memory framework-free oldest newest compat-quick compat wheels matrix clean. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
.DEFAULT_GOAL := help

VENV := .venv
MCORE := .mcore
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
# Set it to PyTorch's index of CPU builds where pip would otherwise take the build with CUDA (gigabytes).
TORCH_INDEX ?=

# Tests at a time.
JOBS ?= 2

DEMO_MCORE := 0.17.1
# `mindspeed-precision demo --list` names them.
CASE ?= glm4
MCORE_VERSIONS := 0.12.1 0.16.1 0.17.1 0.18.2 0.19.2
MCORE_TREES := $(MCORE_VERSIONS:%=$(MCORE)/%/megatron/core/package_info.py)

# A name on PATH need not run (a version manager's shim of a version that is switched off), so each is tried.
RUNS := -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
PYTHON ?= $(shell for python in python3.11 python3 python; do if $$python $(RUNS); then echo $$python; break; fi; done)
# Python $(1): from PATH, or one that pyenv has and has not switched on; else the plain name, for messages.
found = $(shell for python in python$(1) "$$(PYENV_VERSION=$(1) pyenv which python 2>/dev/null)"; do \
  if "$$python" $(RUNS); then echo "$$python"; exit; fi; done; echo python$(1))
PYTHON_OLDEST ?= $(call found,3.10)
PYTHON_NEWEST ?= $(call found,3.13)
# The floors of pyproject.toml, exactly, and for newer Pythons the oldest that has wheels for them; and what needs no framework.
OLDEST := numpy==1.26.0 pandas==2.0.3 omegaconf==2.3.0 wrapt==1.15.0 safetensors==0.4.5
OLDEST_3.10 := $(OLDEST)
OLDEST_3.11 := $(OLDEST)
OLDEST_3.12 := numpy==1.26.0 pandas==2.1.1 omegaconf==2.3.0 wrapt==1.16.0 safetensors==0.4.5
OLDEST_3.13 := numpy==2.1.0 pandas==2.2.3 omegaconf==2.3.0 wrapt==1.17.0 safetensors==0.4.5
NEWEST := --upgrade numpy pandas omegaconf wrapt safetensors
FRAMEWORK_FREE := -m 'not torch and not megatron and not matrix and not long'
# What libraries that change would break first: files written and read, settings, every stage on golden runs, the terminal.
COMPAT_QUICK := $(addprefix tests/,dump record config golden property export certify launches patching samples \
  hostile/test_foreign_yaml.py compare/test_policies.py compare/test_metrics.py align/test_align.py report/test_files.py report/test_console.py)

# MindSpore's wheels are for CPython 3.9 to 3.11, and work with numpy 1 alone.
MINDSPORE_RUNS := -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 12))' >/dev/null 2>&1
MINDSPORE_PYTHON ?= $(shell for python in python3.11 python3.10 python3 python; do if $$python $(MINDSPORE_RUNS); then echo $$python; break; fi; done)
MINDSPORE_NEEDS := 'numpy<2' 'pandas<3' omegaconf wrapt packaging pytest hypothesis
# MindSpore with the torch API and Megatron on it; and a newer one, alone.
MINDSPORE := .venv-mindspore
MINDSPORE_VERSION := 2.7.1
ON_MINDSPORE := mindnlp==0.5.1 megatron-core==0.12.1 ml_dtypes typing_extensions einops
NATIVE := .venv-mindspore-native
NATIVE_VERSION := 2.10.0
DEMO_MINDSPORE_MCORE := 0.12.1

# msprobe, whose dumps are read and written, and of which `make bench` takes the cost beside ours: in an environment
# of its own, before our torch (450 MB; a minute of CPU).
MSPROBE := .venv-msprobe
MSPROBE_VERSION := 26.2.0

# What MindSpeed imports, and what the Makefile of its Megatron-LM calls, out of the way of what all else is tested in.
MINDSPEED_NEEDS := .mindspeed-needs

# A client and a server of S3 (340 MB with what they need).
OBJECT_STORE_NEEDS := .object-store-needs

# nvidia-resiliency-ext, for Megatron's in-process restart. Its wheel names a newer glibc for one compiled module,
# of which the restart needs nothing.
RESTART_NEEDS := .restart-needs
RESTART_VERSION := 0.6.0

# One thread per process: the order of a sum depends on it, and the tests start several processes.
export OMP_NUM_THREADS ?= 1
export PYTHONHASHSEED ?= 1234
export MSP_MCORE ?= $(CURDIR)/$(MCORE)
export MSP_MINDSPORE_PYTHON ?= $(CURDIR)/$(MINDSPORE)/bin/python
export MSP_MINDSPORE_NATIVE_PYTHON ?= $(CURDIR)/$(NATIVE)/bin/python

# Where the tests of report.html find a browser; empty: none is here.
CHROMIUM = $(firstword $(MSP_CHROMIUM) $(foreach name,chromium chromium-browser google-chrome google-chrome-stable,$(shell command -v $(name))))

.PHONY: help demo demo-mindspore test chromium lint fast minutes matrix mindspore mindspeed long layouts object-store inprocess-restart bench memory bench-scale bench-startup calibration tolerance-figures silentbench silentbench-msprobe silentbench-healthy framework-free oldest newest compat-quick compat wheels package sbom clean

help:
	@sed -n 's/^# make/make/p; s/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 21

demo: $(VENV)/.demo $(MCORE)/$(DEMO_MCORE)/megatron/core/package_info.py
	@PYTHONPATH="$(MSP_MCORE)/$(DEMO_MCORE)$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/mindspeed-precision demo $(CASE) $(ARGS)

demo-mindspore: $(VENV)/.demo $(MINDSPORE)/.ready $(NATIVE)/.ready $(MCORE)/$(DEMO_MINDSPORE_MCORE)/megatron/core/package_info.py
	@for environment in $(MINDSPORE) $(NATIVE); do
	  if [[ -e $$environment/.unavailable ]]; then cat $$environment/.unavailable; exit 0; fi
	done
	PYTHONPATH="$(MSP_MCORE)/$(DEMO_MINDSPORE_MCORE)$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/mindspeed-precision demo mindspore $(ARGS)

# MindSpore first: what it installs, the others use.
test: lint package compat-quick chromium mindspore fast minutes

# No error where it cannot be installed: the tests that need it are skipped and say why.
chromium: ## a headless Chromium for the tests of report.html, by apt where that is possible
	@if [[ -n "$(CHROMIUM)" ]]; then
	  echo "Chromium for the tests of report.html: $(CHROMIUM)"
	elif [[ "$$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then
	  echo "no Chromium here, and only root can install it, by apt: the browser tests of report.html are skipped (MSP_CHROMIUM=/path/to/chromium names one)"
	elif ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null; then
	  echo "Chromium could not be installed by apt: the browser tests of report.html are skipped (MSP_CHROMIUM=/path/to/chromium names one)"
	else
	  echo "Chromium for the tests of report.html: $$(command -v chromium)"
	fi

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fast: $(VENV)/.dev $(MCORE_TREES) ## tests that take seconds
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 $(ARGS)

minutes: $(VENV)/.dev $(MCORE_TREES) $(MSPROBE)/.ready ## tests that take minutes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 -m 'matrix and not long' $(ARGS)

# Beside each other, since each is one process; each one's log is whole.
mindspore: $(MINDSPORE)/.ready $(NATIVE)/.ready ## tests that need MindSpore, in two environments of its own
	@logs=$$(mktemp -d)
	trap 'kill $$(jobs -p) 2>/dev/null || true; rm -rf "$$logs"' EXIT
	echo "the tests of $(MINDSPORE) and of $(NATIVE), beside each other; their logs follow"
	{ $(call mindspore_tests,$(MINDSPORE)); } > "$$logs/one" 2>&1 & one=$$!
	{ $(call mindspore_tests,$(NATIVE)); } > "$$logs/two" 2>&1 & two=$$!
	status=0
	wait $$one || status=$$?
	cat "$$logs/one"
	wait $$two || status=$$?
	cat "$$logs/two"
	exit $$status

# MSP_MINDSPEED and MSP_MEGATRON_LM name trees of MindSpeed and of Megatron-LM core_v0.12.1, cloned beside this one.
mindspeed: $(VENV)/.dev $(MINDSPEED_NEEDS)/.ready ## tests behind real MindSpeed on this CPU; see docs/ascend.md
	@if [[ -z "$${MSP_MINDSPEED:-}" || -z "$${MSP_MEGATRON_LM:-}" ]]; then
	  echo "make: set MSP_MINDSPEED and MSP_MEGATRON_LM to trees of MindSpeed and of Megatron-LM core_v0.12.1" >&2
	  exit 1
	fi
	PYTHONPATH="$(CURDIR)/$(MINDSPEED_NEEDS)$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest -m long tests/upstream $(ARGS)

long: $(VENV)/.dev $(MCORE_TREES) ## tests that take longer still: each piece of the CPU layer by ablation, more versions
	$(BIN)/python -m pytest -n $(JOBS) --max-worker-restart 0 -m long $(ARGS)

object-store: $(VENV)/.dev $(OBJECT_STORE_NEEDS)/.ready ## runs behind URLs, also s3:// with a real server of that protocol on this machine
	PYTHONPATH="$(CURDIR)/$(OBJECT_STORE_NEEDS)$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest -m '' tests/dump/test_object_store.py tests/dump/test_object_store_s3.py $(ARGS)

inprocess-restart: $(VENV)/.dev $(MCORE_TREES) $(RESTART_NEEDS)/.ready ## Megatron's in-process restart with the real nvidia-resiliency-ext, recorded (two minutes)
	PYTHONPATH="$(CURDIR)/$(RESTART_NEEDS)$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest -n 0 -m long tests/restart/test_inprocess_restart.py $(ARGS)

full-disk: $(VENV)/.dev ## a disk that is full, read-only, gone or cannot rename while a training records (small tmpfs, where mounting is allowed)
	@$(BIN)/python -m pytest -n 0 -rs tests/disk/test_disk_faults.py $(ARGS)

KILLS ?= 300
kill-matrix: $(VENV)/.dev ## kill a recording training at random moments (KILLS=300 SEED=0), and read what is left
	@$(BIN)/python -W ignore tests/disk/kill_matrix.py $(KILLS) --seed $(SEED)

INPUTS ?= 100000
SEED ?= 0
fuzz: $(VENV)/.dev ## spoilt files for every reader (INPUTS=100000 SEED=0); counts by reader
	@$(BIN)/python -W ignore tests/hostile/fuzz.py $(INPUTS) --seed $(SEED) $(ARGS)

layouts: $(VENV)/.dev $(MCORE_TREES) ## every layout of up to four processes, healthy and with faults, and what was found where
	$(BIN)/python -W ignore -m pytest -n 0 -m long tests/align/test_layout_matrix.py $(ARGS)

bench: $(VENV)/.dev $(MSPROBE)/.ready $(MCORE)/$(DEMO_MCORE)/megatron/core/package_info.py ## what capture costs, beside the bare step and msprobe (a quarter of an hour; ARGS="--only statistics" …)
	@export PYTHONPATH="$(CURDIR):$(MSP_MCORE)/$(DEMO_MCORE)$${PYTHONPATH:+:$$PYTHONPATH}"
	$(BIN)/python -W ignore benchmarks/digest_throughput.py
	MSP_MSPROBE_PYTHON="$(CURDIR)/$(MSPROBE)/bin/python" $(BIN)/python -W ignore benchmarks/step_overhead.py $(ARGS)

memory: $(VENV)/.dev $(MCORE)/$(DEMO_MCORE)/megatron/core/package_info.py ## resident memory over 200 steps, recorded and bare (some minutes; ARGS="--at 20 100 200")
	@export PYTHONPATH="$(CURDIR):$(MSP_MCORE)/$(DEMO_MCORE)$${PYTHONPATH:+:$$PYTHONPATH}"
	$(BIN)/python -W ignore benchmarks/memory.py $(ARGS)

SCRATCH ?= build/scale
bench-scale: $(VENV)/.dev ## compare of 4096 ranks, 3 steps, 2086 records each: time and memory (23 GB of disk; ARGS="--fit --dp 2" …)
	@$(BIN)/python -W ignore benchmarks/scale.py --scratch "$(SCRATCH)" $(ARGS)

bench-startup: $(VENV)/.dev $(MCORE)/$(DEMO_MCORE)/megatron/core/package_info.py ## what starting to record costs at 8, 512 and 4096 ranks (half a minute; ARGS="--ranks 16 --json")
	@export PYTHONPATH="$(CURDIR):$(MSP_MCORE)/$(DEMO_MCORE)$${PYTHONPATH:+:$$PYTHONPATH}"
	$(BIN)/python -W ignore benchmarks/startup.py $(ARGS)

# RUNS keeps what is trained: a second call only measures.
RUNS ?= build/tolerance-runs
calibration: $(VENV)/.dev $(MCORE)/$(DEMO_MCORE)/megatron/core/package_info.py ## healthy pairs against perturbed runs: what docs/tolerance.md says (up to an hour)
	@export PYTHONPATH="$(CURDIR):$(MSP_MCORE)/$(DEMO_MCORE)$${PYTHONPATH:+:$$PYTHONPATH}"
	$(BIN)/python -W ignore benchmarks/tolerance.py ratios $(RUNS)

tolerance-figures: $(VENV)/.dev $(MCORE)/$(DEMO_MCORE)/megatron/core/package_info.py ## docs/figures: error growth by depth and by step (up to an hour)
	@$(PIP) install -e '.[figures]'
	export PYTHONPATH="$(CURDIR):$(MSP_MCORE)/$(DEMO_MCORE)$${PYTHONPATH:+:$$PYTHONPATH}"
	$(BIN)/python -W ignore benchmarks/tolerance.py figures $(RUNS) docs/figures

# The version in which some of the bugs are live.
SILENTBENCH_MCORE := 0.16.1
SILENTBENCH_AS = PYTHONPATH="$(CURDIR):$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -W ignore -m
SILENTBENCH = $(SILENTBENCH_AS) silentbench.run --megatron "$(MSP_MCORE)/$(SILENTBENCH_MCORE)"
silentbench: $(VENV)/.dev $(MCORE)/$(SILENTBENCH_MCORE)/megatron/core/package_info.py ## real bugs, planted: what is found of them (half an hour; ARGS="B009 B012" or --runs DIRECTORY)
	@$(SILENTBENCH) --json build/silentbench.json --card docs/silentbench.md --msprobe docs/silentbench-msprobe.json $(ARGS)

silentbench-msprobe: $(VENV)/.dev $(MSPROBE)/.ready $(MCORE)/$(SILENTBENCH_MCORE)/megatron/core/package_info.py ## the same bugs by msprobe's compare; not in CI (an hour; ARGS="B042 --modes statistics")
	@$(SILENTBENCH_AS) silentbench.msprobe_run --megatron "$(MSP_MCORE)/$(SILENTBENCH_MCORE)" --python $(MSPROBE)/bin/python --json docs/silentbench-msprobe.json $(ARGS)

silentbench-healthy: $(VENV)/.dev $(MCORE)/$(SILENTBENCH_MCORE)/megatron/core/package_info.py ## a hundred healthy trainings over layouts, types and seeds, of which nothing may be said
	@$(SILENTBENCH) --healthy $(ARGS)

framework-free: oldest newest ## both of the next two

oldest: ## tests that need no framework, on the oldest Python and libraries
	@$(call framework_free,$(PYTHON_OLDEST),.venv-oldest,$(OLDEST),PYTHON_OLDEST)

newest: ## the same on the newest
	@$(call framework_free,$(PYTHON_NEWEST),.venv-newest,$(NEWEST),PYTHON_NEWEST)

# Both at once, since each is one process; each one's log is whole.
compat-quick: ## a part of the next two, in a minute, beside each other; a Python that is not here is skipped
	@logs=$$(mktemp -d)
	trap 'kill $$(jobs -p) 2>/dev/null || true; rm -rf "$$logs"' EXIT
	quick() {
	  if ! "$$1" $(RUNS); then echo "skipped: $$1 does not run here"; return; fi
	  echo "$$("$$1" --version) with the $$3 libraries"
	  $(call install_framework_free,"$$1","$$2",$${@:4})
	  "$$2"/bin/python -m pytest -q $(FRAMEWORK_FREE) $(COMPAT_QUICK) $(ARGS)
	}
	quick "$(PYTHON_OLDEST)" .venv-oldest oldest $(OLDEST) > "$$logs/oldest" 2>&1 & one=$$!
	quick "$(PYTHON_NEWEST)" .venv-newest newest $(NEWEST) > "$$logs/newest" 2>&1 & two=$$!
	status=0
	wait $$one || status=$$?
	cat "$$logs/oldest"
	wait $$two || status=$$?
	cat "$$logs/newest"
	exit $$status

# PYTHONS names others, by path where they are not on PATH.
PYTHONS ?= $(foreach version,3.10 3.11 3.12 3.13,$(call found,$(version)))
compat: ## the same on every Python from 3.10 to 3.13, with the oldest and the newest libraries, wheel and editable (eight times; an hour)
	@declare -A oldest=([3.10]="$(OLDEST_3.10)" [3.11]="$(OLDEST_3.11)" [3.12]="$(OLDEST_3.12)" [3.13]="$(OLDEST_3.13)")
	failed=
	made=$$(mktemp -d)
	trap 'rm -rf "$$made"' EXIT
	$(PYTHON) -m pip --quiet --disable-pip-version-check wheel --no-deps --wheel-dir "$$made" .
	for python in $(PYTHONS); do
	  if ! version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); then
	    failed+=" $$python (does not run here)"
	    continue
	  fi
	  for libraries in oldest newest; do
	    environment=.venv-compat-$$version-$$libraries
	    wanted=$${oldest[$$version]}
	    if [[ $$libraries == newest ]]; then wanted="$(NEWEST)"; fi
	    echo "Python $$version with the $$libraries libraries"
	    $(call install_framework_free,"$$python",$$environment,$$wanted)
	    pip="$$environment/bin/python -m pip --quiet --disable-pip-version-check"
	    $$pip install --force-reinstall --no-deps "$$made"/*.whl
	    $$environment/bin/python -I tests/repository/scripts/installed_package.py "$$(basename "$$made"/*.whl)" \
	      || failed+=" $$version with the $$libraries libraries, the wheel;"
	    $$pip install --no-deps -e .
	    $$environment/bin/python -m pytest $(FRAMEWORK_FREE) $(ARGS) || failed+=" $$version with the $$libraries libraries;"
	  done
	done
	if [[ -n $$failed ]]; then echo "make: failed:$$failed" >&2; exit 1; fi

# `make test` has the cheap half: compat-quick, package and minutes.
matrix: compat wheels package minutes ## what works with what: Pythons and libraries, wheel and editable, aarch64, layouts, versions of megatron-core (an hour and a half)

wheels: $(VENV)/.dev ## pip resolves wheels for aarch64 of every hard dependency (asks the package index)
	@$(BIN)/python -m pytest -m long tests/repository/test_wheels.py $(ARGS)

# What a user installs, tried as a user would: built, checked, and installed without this checkout in sight.
RELEASE := build/release
package: $(BIN)/python ## wheel and sdist in dist/, checked and installed in a clean environment
	@rm -rf dist $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/build
	$(RELEASE)/build/bin/python -m pip --quiet --disable-pip-version-check install build twine hatchling
	$(RELEASE)/build/bin/python -m build --no-isolation --outdir dist .
	$(RELEASE)/build/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(RELEASE)/clean
	for made in dist/*.whl dist/*.tar.gz; do
	  $(RELEASE)/clean/bin/python -m pip --quiet --disable-pip-version-check install "$$made"
	  $(RELEASE)/clean/bin/python -I tests/repository/scripts/installed_package.py "$$(basename "$$made")"
	  $(RELEASE)/clean/bin/python -m pip --quiet --disable-pip-version-check uninstall --yes mindspeed-precision
	done

sbom: $(VENV)/.demo ## bill of materials (CycloneDX) of what the demo installs, in dist/
	@mkdir -p dist
	$(PYTHON) -m venv $(RELEASE)/sbom
	$(RELEASE)/sbom/bin/python -m pip --quiet --disable-pip-version-check install cyclonedx-bom
	$(RELEASE)/sbom/bin/cyclonedx-py environment --output-reproducible --validate --pyproject pyproject.toml \
	  --output-file dist/mindspeed-precision.cdx.json $(BIN)/python
	echo "dist/mindspeed-precision.cdx.json: $$(grep -c '"bom-ref"' dist/mindspeed-precision.cdx.json) entries"

clean: ## remove what make has made
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-compat-* $(MSPROBE) $(MINDSPORE) $(NATIVE) $(MINDSPEED_NEEDS) $(OBJECT_STORE_NEEDS) $(RESTART_NEEDS) $(MCORE) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

$(BIN)/python:
	@if [[ -z "$(PYTHON)" ]]; then
	  echo "make: no Python 3.10 or newer was found; install python3.11 or say which: make PYTHON=/path/to/python" >&2
	  exit 1
	fi
	echo "creating $(VENV) with $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing mindspeed-precision and $(TORCH) into $(VENV)"
	$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) install -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing what the tests need into $(VENV)"
	$(PIP) install -e '.[demo,dev]'
	touch $@

# Moved into place when whole, so that an interrupted download is not taken for an installation.
# --ignore-requires-python: the wheels name Python >= 3.12 although they ship for 3.11 and work there.
$(MCORE)/%/megatron/core/package_info.py: | $(BIN)/python
	@echo "installing megatron-core $* into $(MCORE)/$*"
	rm -rf $(MCORE)/.partial-$* $(MCORE)/$*
	$(PIP) install --no-deps --ignore-requires-python --target $(MCORE)/.partial-$* megatron-core==$*
	mv $(MCORE)/.partial-$* $(MCORE)/$*

$(MINDSPEED_NEEDS)/.ready: | $(BIN)/python
	@echo "installing what MindSpeed imports into $(MINDSPEED_NEEDS)"
	rm -rf $(MINDSPEED_NEEDS)
	$(PIP) install --no-deps --target $(MINDSPEED_NEEDS) scipy psutil pybind11
	touch $@

$(OBJECT_STORE_NEEDS)/.ready: | $(BIN)/python
	@echo "installing a client and a server of S3 into $(OBJECT_STORE_NEEDS)"
	rm -rf $(OBJECT_STORE_NEEDS)
	$(PIP) install --target $(OBJECT_STORE_NEEDS) s3fs 'moto[server]'
	touch $@

$(RESTART_NEEDS)/.ready: | $(BIN)/python
	@echo "installing nvidia-resiliency-ext $(RESTART_VERSION) into $(RESTART_NEEDS)"
	rm -rf $(RESTART_NEEDS)
	$(PIP) install --no-deps --target $(RESTART_NEEDS) --only-binary=:all: --platform manylinux_2_39_$$(uname -m) nvidia-resiliency-ext==$(RESTART_VERSION)
	$(PIP) install --no-deps --target $(RESTART_NEEDS) nvidia-ml-py defusedxml
	touch $@

# What is not there costs no benchmark and no test: it says so and goes on.
$(MSPROBE)/.ready: | $(VENV)/.dev
	@echo "installing mindstudio-probe $(MSPROBE_VERSION) into $(MSPROBE)"
	rm -rf $(MSPROBE)
	$(BIN)/python -m venv $(MSPROBE)
	packages() { "$$1"/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
	echo "import site; site.addsitedir('$$(packages $(VENV))')" > "$$(packages $(MSPROBE))/behind.pth"
	$(MSPROBE)/bin/python -m pip --quiet --disable-pip-version-check install mindstudio-probe==$(MSPROBE_VERSION) || echo "mindstudio-probe $(MSPROBE_VERSION) cannot be installed: the benchmark and its tests go without it"
	touch $@

# Each recipe ends with what makes the environment ready, or with the reason why there is none.
$(MINDSPORE)/.ready: pyproject.toml
	@$(call install_mindspore,$(MINDSPORE),$(MINDSPORE_VERSION),$(ON_MINDSPORE))

$(NATIVE)/.ready: pyproject.toml
	@$(call install_mindspore,$(NATIVE),$(NATIVE_VERSION))

# $(1) directory, $(2) version of MindSpore, $(3) what goes on it without its dependencies
define install_mindspore
mkdir -p $(1)
rm -f $(1)/.unavailable
unavailable() {
  echo "MindSpore $(2) is not here: $$1; what needs it is skipped. Remove $(1) to try again." | tee $(1)/.unavailable
  touch $(1)/.ready
  exit 0
}
if [[ -z "$(MINDSPORE_PYTHON)" ]]; then
  unavailable "it needs Python 3.10 or 3.11, and none was found (make MINDSPORE_PYTHON=/path/to/python)"
fi
[[ -x $(1)/bin/python ]] || $(MINDSPORE_PYTHON) -m venv $(1)
echo "installing MindSpore $(2) into $(1) (0.8 GB to fetch, 2.8 GB on disk)"
pip() { $(1)/bin/python -m pip --quiet --disable-pip-version-check install "$$@"; }
log=$$(mktemp)
trap 'rm -f "$$log"' EXIT
if ! pip mindspore==$(2) $(MINDSPORE_NEEDS) 2> "$$log"; then
  # no wheel for this platform; a network that fails says the same, after its own complaints
  if grep -q 'No matching distribution found for mindspore==' "$$log" && ! grep -qi 'connection\|retrying' "$$log"; then
    unavailable "no wheel fits $$($(1)/bin/python -c 'import sys, sysconfig; print(sysconfig.get_platform(), sys.version.split()[0])')"
  fi
  cat "$$log" >&2
  exit 1
fi
$(if $(3),pip --no-deps $(3))
pip -e . 'numpy<2' 'pandas<3'
if ! $(1)/bin/python -c 'import importlib.metadata as m, sys; sys.exit("torch" in {d.metadata["Name"] for d in m.distributions()})'; then
  echo "make: torch is installed in $(1), where MindSpore has to be found under that name; remove $(1)" >&2
  exit 1
fi
touch $(1)/.ready
endef

define mindspore_tests
if [[ -e $(1)/.unavailable ]]; then
  cat $(1)/.unavailable
else
  $(1)/bin/python -m pytest -m 'mindspore and not matrix and not long' $(ARGS)
fi
endef

define framework_free
if ! $(1) $(RUNS); then
  echo "make: $(1) does not run here; say which to use: make $@ $(4)=/path/to/python" >&2
  exit 1
fi
$(call install_framework_free,$(1),$(2),$(3))
$(2)/bin/python -m pytest $(FRAMEWORK_FREE) $(ARGS)
endef

# $(1) interpreter, $(2) directory, $(3) libraries
define install_framework_free
[[ -x $(2)/bin/python ]] || $(1) -m venv $(2)
$(2)/bin/python -m pip --quiet --disable-pip-version-check install -e '.[report]' pytest hypothesis $(3)
endef
