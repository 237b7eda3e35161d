# The commands of this project; `make help` lists them. Everything runs in .venv, which `make setup` makes.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
IN_VENV = PATH="$(VENV)/bin:$$PATH" VIRTUAL_ENV="$(VENV)"
PYTEST = $(IN_VENV) python -m pytest
FOLDERS := $(sort $(foreach file,$(wildcard tests/*/test_*.py tests/*/*/test_*.py),tests/$(word 2,$(subst /, ,$(file)))/))
# Where all tests start several processes, and where some do (tests/conftest.py holds others to that): every part of a
# run imports only what it may run.
ALL_SEVERAL := tests/examples/ tests/distributed/
SOME_SEVERAL := tests/benchmarks/ tests/docs/
UNITS := $(filter-out $(ALL_SEVERAL),$(FOLDERS))
SEVERAL := $(foreach folder,$(SOME_SEVERAL) $(ALL_SEVERAL),$(filter $(folder),$(FOLDERS)))
SOURCES := $(wildcard smp_tf smdistributed ops partition pipeline docs examples benchmarks tests tools setup.py)
# mypy looks at folders, not at setup.py: links give it the package as it is installed.
TYPED := .setup/typed
CXX_SOURCES = $(shell find $(wildcard ops tests tools) -name '*.cc' -o -name '*.h')
# What `make test` hands to pytest besides, such as ARGS="-k transport -x".
ARGS ?=
# Tests of one process share the cores; those that start several have them to themselves. Every part runs, also after one
# that failed, so that one run tells all; an interrupt, or -x in ARGS, ends it (pytest's exit status 2). That ARGS leaves
# nothing to a part (5) is no failure. Files begin in the order of their names, the longest before (tests/conftest.py): by
# numbers of tests, as pytest-xdist would have it, long ones with few tests came last, and a core was idle.
AT_ONCE := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Launches of several processes often wait, for one rank's imports or for a rank to be missed: three files at a time.
IN_THREES := -n 3 --dist loadfile --no-loadscope-reorder
part = $(PYTEST) $(1) $(ARGS) || { status=$$?; [ $$status -ne 2 ] || exit 2; [ $$status -eq 5 ] || failed=1; }
define all_parts
failed=0; \
$(call part,$(AT_ONCE) -m "not distributed" $(1) $(UNITS)); \
$(call part,$(IN_THREES) -m "distributed and not alone" $(1) $(2) $(SEVERAL)); \
$(call part,-m "distributed and alone" $(1) $(SEVERAL)); \
exit $$failed
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo docs pictures test test-quick test-all test-oldest sanitize bazel lint format clean

help: ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 14

setup: ## Set everything up in .venv (does nothing when it is done)
	@$(PYTHON) tools/setup_env.py

DEMO := smp-tf run -np 2 examples/digits.py --epochs 5
demo: setup ## Train a split model on two processes, then load it in one without smp_tf
	$(IN_VENV) $(DEMO)
	$(IN_VENV) python examples/load_digits.py

docs: setup ## Build the documentation in build/docs/index.html (a warning is an error)
	$(IN_VENV) python -m sphinx -W --keep-going -q -b html docs build/docs

# From real runs of an example: its losses and the plan of its model.
PICTURES := docs/pictures
pictures: setup ## Draw the pictures of the documentation anew
	@mkdir -p build/pictures
	$(IN_VENV) horovodrun --gloo -np 3 python examples/fit.py --partitions 3 --csv build/pictures/split.csv \
		--plan build/pictures/plan.json
	$(IN_VENV) python examples/fit.py --csv build/pictures/one.csv
	$(IN_VENV) python $(PICTURES)/draw_loss.py build/pictures/split.csv build/pictures/one.csv $(PICTURES)/loss.svg
	$(IN_VENV) python $(PICTURES)/draw_plan.py build/pictures/plan.json $(PICTURES)/plan.svg
	$(IN_VENV) python $(PICTURES)/draw_terminal.py $(PICTURES)/terminal_run.svg \
		$(DEMO)
	$(IN_VENV) python $(PICTURES)/draw_terminal.py $(PICTURES)/terminal_failure.svg smp-tf run -np 2 $(PICTURES)/fault.py
	$(IN_VENV) python $(PICTURES)/draw_terminal.py $(PICTURES)/terminal_plan.svg \
		smp-tf plan examples/fit.py:build --partitions 2 --microbatches 4 --batch-size 64

test: setup ## Run the tests (ARGS="-k name" hands options to pytest)
	$(call all_parts)

test-quick: setup ## Run the unit tests but for the longest, about 3 minutes
	$(PYTEST) $(AT_ONCE) -m "not distributed and not large" $(UNITS) $(ARGS) || [ $$? -eq 5 ]

test-all: setup ## Run all tests, the whole grid of models and settings included
	$(call all_parts,--full,--results=$(CURDIR)/tests/distributed/RESULTS.md)

# TensorFlow's oldest supported version, in an environment and a copy of the sources of its own: the
# ops that are compiled in a source tree fit one TensorFlow only.
OLDEST := .setup/oldest
# Also where the command line names another: that one has another TensorFlow.
test-oldest: override VENV := $(CURDIR)/.venv-oldest
test-oldest: ## Run the tests on the oldest supported TensorFlow (in .venv-oldest)
	@mkdir -p $(OLDEST)
	@find $(OLDEST) -name '*.py' -delete
	@tar $(addprefix --exclude=,./.git './.venv*' ./.setup './.*_cache' ./.hypothesis ./build './bazel-*' \
		'*.so' _build.json __pycache__) -cf - . \
		| tar -xf - -C $(OLDEST)
	@$(PYTHON) $(OLDEST)/tools/setup_env.py --tensorflow=oldest --venv=$(VENV)
	cd $(OLDEST) || exit; $(call all_parts)

sanitize: setup ## Run the transport's C++ tests under sanitizers: memory, undefined behaviour, races
	$(IN_VENV) python -m tests.ops.sanitize $(ARGS)

# As checked with Debian's bazel-bootstrap. That is Bazel 4, which has the rules built in and asks for
# these repositories only to find the same rules in them; this way it downloads nothing. For another
# Bazel that may download its rules: make bazel BAZEL_FLAGS=
BAZEL_FLAGS ?= $(foreach name,rules_cc rules_java remote_coverage_tools,\
	--override_repository=$(name)=$(CURDIR)/tools/bazel/$(name))
bazel: setup ## Build the C++ libraries with Bazel and run their tests (apt-get install bazel-bootstrap)
	bazel test $(BAZEL_FLAGS) //:all

lint: setup ## Check style, types and formatting
	$(IN_VENV) ruff check $(SOURCES)
	$(IN_VENV) ruff format --check $(SOURCES)
	$(IN_VENV) clang-format --dry-run --Werror $(CXX_SOURCES)
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/smp_tf
	@ln -s $(filter-out %/__pycache__,$(wildcard $(CURDIR)/smp_tf/*)) \
		$(addprefix $(CURDIR)/,ops partition pipeline) $(TYPED)/smp_tf/
	@ln -s $(addprefix $(CURDIR)/,smdistributed benchmarks docs examples setup.py) $(TYPED)/
	cd $(TYPED) && $(IN_VENV) mypy --config-file $(CURDIR)/pyproject.toml --package smp_tf \
		--package smdistributed
	cd $(TYPED) && $(IN_VENV) MYPYPATH=benchmarks:docs/pictures:. mypy --config-file $(CURDIR)/pyproject.toml \
		benchmarks docs/pictures setup.py
	@# Written without annotations, as scripts of Keras are; what they ask of smp_tf is checked.
	cd $(TYPED) && $(IN_VENV) MYPYPATH=examples:. mypy --config-file $(CURDIR)/pyproject.toml --allow-untyped-defs \
		--allow-incomplete-defs --no-warn-unused-ignores examples
	$(IN_VENV) mypy tools

format: setup ## Format the Python and C++ sources
	$(IN_VENV) ruff check --fix-only --quiet $(SOURCES)
	$(IN_VENV) ruff format $(SOURCES)
	$(IN_VENV) clang-format -i $(CXX_SOURCES)

clean: ## Remove what was built; .venv stays (rm -r .venv to be rid of it)
	rm -rf build dist bazel-* *.egg-info ops/*.so ops/_build.json .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
