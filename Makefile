# Two commands do everything for a newcomer: `make run` and `make test`.
# Needs Python >= 3.11, make and a package index; everything else is installed into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.runs

.DEFAULT_GOAL := help
.PHONY: compiled test-compiled pictures bench bench-accounts bench-core bench-ledger bench-prefix bench-replicas bench-replicas-profile bench-relay bench-trim bench-turns fuzz help run test test-vllm test-litellm lock-litellm proof venv check unit search-dispatch simulate-ha mutants lock lock-vllm system-deps clean evaluate round-trip dist site test-dist

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

run: $(DEMO) ## the demo: two engines, a gateway, two teams; Ctrl-C ends it
	$(BIN)/fairshare demo

test: check unit ## everything that must hold before a change lands

venv: $(STAMP) ## the virtual environment with what the project and its tests need

# The environment, with the versions of a list (the first prerequisite) and the project itself.
define install
	$(PYTHON) -c 'import sys; sys.exit("fairshare needs Python 3.11 or newer, found " + sys.version.split()[0] + "; try: make PYTHON=python3.12 venv") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
endef

# What the tests need is ten times what the program needs: who looks at the demo first does not wait for it.
$(DEMO): requirements/run.txt pyproject.toml
	$(install)
	touch $@

$(STAMP): requirements/check.txt pyproject.toml
	$(install)
	touch $(DEMO) $@

check: $(STAMP) ## format, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# A file's tests share what they start (engines, browsers), so one process runs them all. In the order of their names
# those that wait for real processes come in the middle, and something quick is left to fill the end.
unit: $(STAMP) ## the tests, in a process for each core; those that were left out are named at the end
	$(BIN)/python -m pytest -rs -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

dist: $(STAMP) ## the wheel and the source distribution, in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/check-wheel-contents dist/*.whl

test-dist: dist ## install both in fresh environments, outside the checkout, and use them there (minutes)
	$(BIN)/python -m pytest -m dist tests/deploy/test_dist.py

COMPILED       := build/compiled
COMPILED_STAMP := $(COMPILED)/.unpacked
COMPILED_FROM  := $(wildcard $(addprefix src/fairshare/,core/*.py gateway/*.py wire/*.py)) hatch_build.py pyproject.toml

compiled: $(COMPILED_STAMP) ## the wheel with the hot path compiled ahead of time, in dist/compiled/ (needs a C compiler; minutes)

# Unpacked as well: with this folder in PYTHONPATH the tools of .venv run the compiled build.
$(COMPILED_STAMP): $(STAMP) $(COMPILED_FROM)
	rm -rf dist/compiled $(COMPILED)
	HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/python -m hatchling build -t wheel -d dist/compiled
	$(BIN)/python -m zipfile -e dist/compiled/*.whl $(COMPILED)
	touch $@

test-compiled: $(COMPILED_STAMP) ## the tests of what is compiled, over the compiled build
	PYTHONPATH=$(CURDIR)/$(COMPILED) $(BIN)/fairshare --version | grep -F '(compiled)'
	PYTHONPATH=$(CURDIR)/$(COMPILED) $(BIN)/python -m pytest tests/core tests/wire tests/gateway

SITE_STAMP := .venv-docs/.installed

site: $(SITE_STAMP) ## the documentation as a site, in build/site/; a broken link or anchor is an error
	.venv-docs/bin/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going -n -c docs/site -d build/site-cache -b dirhtml docs build/site
	@echo "build/site/index.html"

$(SITE_STAMP): requirements/docs.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/docs.txt
	touch $@

VLLM_STAMP := .venv-vllm/.installed

test-vllm: $(STAMP) $(VLLM_STAMP) ## the tests against a real vLLM on this CPU (minutes; the first time it downloads 2.5 GB)
	$(BIN)/python -m pytest -m real_vllm tests/real_vllm

proof: $(STAMP) $(VLLM_STAMP) ## measure the burst on a real vLLM again and write it into docs/proof.md
	$(BIN)/python -m pytest -m real_vllm tests/real_vllm/test_burst.py --write-proof

# The engine's virtual environment holds nothing of ours. `--no-deps`: the list is complete, and leaves out what text
# models on a CPU do not need (triton, torchvision, torchaudio, torchcodec).
$(VLLM_STAMP): requirements/vllm.txt requirements/vllm.in
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^torch==' requirements/vllm.in)" \
	|| { echo "test-vllm: no package source has $$(grep '^torch==' requirements/vllm.in); add PyTorch's index of CPU wheels to pip's extra-index-url (or a folder that holds the wheel to find-links)"; exit 1; }
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/vllm.txt
	touch $@

LITELLM_STAMP := .venv-litellm/.installed

test-litellm: $(STAMP) $(LITELLM_STAMP) ## the tests with the real LiteLLM proxy (minutes; the first time it downloads 150 MB)
	$(BIN)/python -m pytest -m real_litellm tests/real_litellm

# LiteLLM's virtual environment, with fairshare in it as a site would install it.
$(LITELLM_STAMP): requirements/litellm.txt
	test -x .venv-litellm/bin/python || $(PYTHON) -m venv .venv-litellm
	.venv-litellm/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/litellm.txt
	.venv-litellm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

lock-litellm: ## renew requirements/litellm.txt from requirements/litellm.in and our own ranges (needs uv)
	uv pip compile pyproject.toml requirements/litellm.in --generate-hashes --no-emit-index-url --no-header --no-annotate --python-version 3.11 -o requirements/litellm.txt

PEERS_STAMP := .venv-peers/.installed
BENCH ?=

bench: $(STAMP) $(PEERS_STAMP) ## what the gateway costs beside vllm-router and the direct path (minutes); BENCH="--help"
	$(BIN)/python bench/gateway.py $(BENCH)

test-replicas: $(STAMP) ## two machines that share their pools: killed, stopped, cut off, without a store (minutes)
	$(BIN)/python -m pytest -m replicas --timeout=300 -s tests/end_to_end

bench-replicas: $(STAMP) ## what a decision costs that another process makes, and requests/s of 1, 2 and 4 workers (minutes)
	$(BIN)/python bench/replicas.py $(BENCH)

bench-replicas-profile: $(STAMP) ## where the time of a decision goes, and that of a request with more workers (minutes)
	$(BIN)/python bench/replicas_profile.py $(BENCH)

bench-core: $(STAMP) ## what one decision costs
	$(BIN)/python bench/core.py $(BENCH)

bench-accounts: $(STAMP) ## what a change of the accounts costs a site with 100,000 keys
	$(BIN)/python bench/accounts.py $(BENCH)

bench-ledger: $(STAMP) ## what the account of requests costs, and reports over a million of them (minutes)
	$(BIN)/python bench/ledger.py $(BENCH)

bench-relay: $(STAMP) ## the Python on the way of one request: microseconds, and instructions by file
	$(BIN)/python bench/relay.py $(BENCH)

bench-turns: $(STAMP) ## what ran in the longest stretches of the gateway's event loop: what requests wait for
	$(BIN)/python bench/turns.py $(BENCH)

bench-prefix: $(STAMP) ## hit rates and time to first token of `balance: prefix`, in virtual time (minutes)
	$(BIN)/python bench/prefix.py --write $(BENCH)

bench-trim: $(STAMP) ## what adaptive capacity brings on the stand-in engine, in real time (five minutes)
	PYTHONPATH=tests $(BIN)/python bench/trim.py $(BENCH)

$(PEERS_STAMP): requirements/peers.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/peers.txt
	touch $@

peers-litellm: $(PEERS_STAMP) ## LiteLLM beside them, for BENCH="--litellm" (large)
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check "litellm[proxy]==1.108.*"

search-dispatch: $(STAMP) ## look for a pool and load in which a flooding team gets less than it owns, SEEDS=1000 FROM=0
	SEEDS=$(or $(SEEDS),100) FROM=$(FROM) $(BIN)/python -m pytest --timeout=0 -s tests/core/test_dispatch_search.py tests/core/test_hold_properties.py

FROM ?= 0

simulate-ha: $(STAMP) ## replicas under every fault in virtual time, SEEDS=1000 of them; FROM=17 SEEDS=1 TRACE=400 replays one
	PYTHONPATH=tests $(BIN)/python -m replicas.simulated $(or $(SEEDS),100) $(FROM) $(TRACE)

SECONDS ?= 60

fuzz: $(STAMP) ## random clients, engines and bytes for SECONDS=60; what fails is printed with the line that replays it
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(SECONDS)

mutants: $(STAMP) ## plant small faults in the decision core and show which the tests miss (an hour and more; docs/mutants.md)
	PYTHONPATH=src $(BIN)/mutmut run
	$(BIN)/mutmut results

round-trip: $(STAMP) $(VLLM_STAMP) ## measure on a real vLLM what holding requests costs, and write it into docs/evaluation.md
	$(BIN)/python -m pytest -m real_vllm tests/real_vllm/test_round_trip.py --write-proof

pictures: $(STAMP) ## the pictures of the status page in docs/pictures, from the demo under load (minutes; needs Chromium)
	PYTHONPATH=tests $(BIN)/python docs/pictures/make.py

evaluate: $(STAMP) ## every scenario under every policy: docs/evaluation.md and its pictures (minutes; ONLY=name for one)
	$(BIN)/python scenarios/evaluate.py $(ONLY)

lock: ## renew requirements/*.txt from the ranges in pyproject.toml (needs uv)
	uv pip compile pyproject.toml --all-extras --group check --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11 -o requirements/check.txt
	uv pip compile pyproject.toml --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11 -c requirements/check.txt -o requirements/run.txt
	uv pip compile pyproject.toml --extra kubernetes --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11 -c requirements/check.txt -o requirements/image.txt
	uv pip compile --group pyproject.toml:docs --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11 -o requirements/docs.txt

lock-vllm: ## renew requirements/vllm.txt from requirements/vllm.in (needs uv, and UV_FIND_LINKS or UV_INDEX for the CPU torch)
	uv pip compile requirements/vllm.in --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	$(addprefix --no-emit-package ,torch torchaudio torchcodec torchvision triton) -o requirements/vllm.txt

# Debian packages that tests use beyond Python (as root). None is needed for the gateway itself.
SYSTEM_PACKAGES := chromium iproute2 systemd
# Only its programs are used: nothing that it recommends, and no service that its installation starts.
WITHOUT_SERVICE := prometheus

system-deps: ## Debian packages that the fullest test run uses (root)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(SYSTEM_PACKAGES)
	for package in $(WITHOUT_SERVICE); do \
		dpkg-query --show --showformat='$${Status}' $$package 2>/dev/null | grep -q ' installed' && continue; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$package || exit 1; \
		if [ -d /run/systemd/system ]; then systemctl disable --now $$package || exit 1; fi; \
	done

clean: ## remove what was built
	rm -rf $(VENV) .venv-* build dist mutants .pytest_cache .ruff_cache .hypothesis
