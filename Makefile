# `make demo` and `make test` need Python 3.11 or newer and make, nothing else: they set up .venv themselves.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
# Much of the time of the tests is spent in waiting for real deadlines. Which tests stay together, and
# their order, is in tests/support/spreading.py, in the place of `loadfile`.
SIDE_BY_SIDE ?= -n 4 --dist loadfile --no-loadscope-reorder
ELSEWHERE = not containers and not peers and not dist
# Many tests start processes of their own: each would compile every module again.
export PYTHONDONTWRITEBYTECODE =
RELEASED ?= protos/released.binpb
IMAGES ?= breadbox/server:local breadbox/rollout-worker:local breadbox/learner:local
# The plugin of Docker where it is installed, else the older program of its own.
COMPOSE ?= $(shell docker compose version > /dev/null 2>&1 && echo docker compose || echo docker-compose)

.DEFAULT_GOAL := help
.PHONY: attacks docs verify-reference reference help setup demo test test-long test-quick test-core test-service test-integration test-containers test-peers test-dist \
  test-gpu verify verify-format fix-format verify-lint fix-lint verify-types verify-imports verify-protos verify-coverage \
  verify-spelling verify-blocking blocking verify-limits limits verify-dead verify-words protos released-protos release release-rehearsal simulate crowd scaling fuzz bench bench-core bench-peers bench-grpcio chaos crossings endings learn-check freshness beside-learners paced-groups smoke dist lock sbom up env down clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(VENV)/.ready $(VENV)/.demo: pyproject.toml scripts/setup_venv.py scripts/compile_bulk.py client/breadbox/stores/_bulk.c
	$(PYTHON) scripts/setup_venv.py $(VENV) $(if $(filter %.demo,$@),demo)
	@touch $@

setup: $(VENV)/.ready  ## Make the virtual environment with everything in it

# Without the tools of a contributor, unless they are there.
demo: $(or $(wildcard $(VENV)/.ready),$(VENV)/.demo)  ## Watch an agent learn CartPole through the service (ARGS="--help" for options)
	$(BIN)/breadbox demo $(ARGS)

test: $(VENV)/.ready  ## All tests but long ones, and those with targets of their own
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "$(ELSEWHERE) and not long" $(ARGS)

# Two at a time: four attacks at once on two cores are one that nobody withstands. Every command
# starts anew here, as users start it; elsewhere in the tests see tests/support/warm_start.py.
test-long: export TESTS_START_COLD = 1
test-long: $(VENV)/.ready  ## What is long by nature: every attack, chaos, simulations, learning to a target
	$(BIN)/python -m pytest $(subst -n 4,-n 2,$(SIDE_BY_SIDE)) -m "$(ELSEWHERE) and long" $(ARGS)

test-quick: $(VENV)/.ready  ## For the inner loop, within 90 seconds: core, server, client and payloads
	HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not integration and not slow and not long" tests/core tests/oracles \
	  tests/service tests/client tests/payload tests/protos $(ARGS)

test-core: $(VENV)/.ready  ## The pure core alone
	$(BIN)/python -m pytest tests/core $(ARGS)

# A tracer, and the containers that are built beside it in .ci/run, take most of the time.
verify-coverage: $(VENV)/.ready  ## Do the tests of core and service take every branch of core, admission and reading?
	$(BIN)/python -m pytest tests/core -n 3 -m "not long" --timeout 300 --cov=breadbox_server.core --cov-fail-under=100 $(ARGS)
	$(BIN)/python -m pytest tests/service -n 3 --timeout 300 --cov=breadbox_server.admission --cov=breadbox_server.reading --cov-fail-under=100 $(ARGS)

test-service: $(VENV)/.ready  ## Service and client, without other processes
	$(BIN)/python -m pytest tests/service tests/client $(ARGS)

test-integration: $(VENV)/.ready  ## Real processes, real Redis
	$(BIN)/python -m pytest tests/integration $(ARGS)

test-containers: $(VENV)/.ready  ## Build, start, drive and stop the containers
	$(BIN)/python -m pytest tests/containers -m containers $(ARGS)

test-peers: $(VENV)/.ready  ## Other projects' own code on Breadbox; pip fetches their packages
	$(BIN)/python -m pytest tests/peers tests/rollout -m peers $(ARGS)

test-dist: $(VENV)/.ready  ## The demo of an installed wheel, in an empty folder
	$(BIN)/python -m pytest tests/dist/test_installed_demo.py -m dist $(ARGS)

attacks: $(VENV)/.ready  ## Attack a server, and hold the times of its honest callers to three times quiet
	BREADBOX_TIMED_ATTACKS=1 $(BIN)/python -m pytest -s tests/hostile/test_transport.py tests/hostile/test_hostile_gateway.py \
	  tests/integration/test_hostile_clients.py $(ARGS)

test-gpu: $(VENV)/.ready  ## What needs a CUDA device
	$(BIN)/python -m pytest tests/gpu $(ARGS)

verify: verify-format verify-lint verify-spelling verify-types verify-imports verify-protos verify-blocking verify-limits verify-reference verify-dead verify-words verify-coverage test test-long  ## Everything that must hold before a merge

verify-format: $(VENV)/.ready
	$(BIN)/ruff format --check .

fix-format: $(VENV)/.ready  ## Format the code
	$(BIN)/ruff format .

verify-lint: $(VENV)/.ready
	$(BIN)/ruff check .

fix-lint: $(VENV)/.ready  ## Mend what the linter can
	$(BIN)/ruff check --fix .

verify-spelling: $(VENV)/.ready
	$(BIN)/codespell $$(git ls-files '*.py' '*.md' '*.toml' '*.proto' '*.yml' '*.yaml')

verify-types: $(VENV)/.ready
	$(BIN)/mypy

verify-imports: $(VENV)/.ready
	$(BIN)/lint-imports

verify-reference: $(VENV)/.ready
	$(BIN)/python scripts/gen_reference.py --check

verify-protos: $(VENV)/.ready
	$(BIN)/python scripts/gen_protos.py --check
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against $(RELEASED)

verify-blocking: $(VENV)/.ready
	$(BIN)/python scripts/gen_blocking.py --check

verify-words: $(VENV)/.ready
	$(BIN)/python scripts/check_words.py

verify-dead: $(VENV)/.ready
	@! $(BIN)/vulture | grep -vE '^(bench|examples|scripts|tests)/'

verify-limits: $(VENV)/.ready
	$(BIN)/python scripts/gen_limits.py --check

limits: $(VENV)/.ready  ## Write the table of limits into SECURITY.md
	$(BIN)/python scripts/gen_limits.py

reference: $(VENV)/.ready  ## Write the reference of Python, commands, settings, metrics and errors from the code
	$(BIN)/python scripts/gen_reference.py

docs: $(VENV)/.ready  ## Build the site of the documents into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

protos: $(VENV)/.ready  ## Write the stubs from protos/
	$(BIN)/python scripts/gen_protos.py

blocking: $(VENV)/.ready  ## Write the blocking client from the asyncio client
	$(BIN)/python scripts/gen_blocking.py

released-protos: $(VENV)/.ready  ## At a release: the contract that later ones are held to
	$(BIN)/buf build protos --exclude-source-info -o $(RELEASED)

release: released-protos  ## Write a release into every file that names one, to be committed and tagged (VERSION=0.1.0)
	$(BIN)/python scripts/prepare_release.py $(VERSION)

release-rehearsal: $(VENV)/.release  ## Release HEAD from end to end, on a clone and a local index
	$(BIN)/python -m pytest tests/dist/test_release.py -m dist $(ARGS)

chaos: $(VENV)/.ready  ## Kill, stop, cut off and replace at random, and balance the ledgers (ARGS="--seconds 120 --seed 7 --tickets --standby")
	$(BIN)/python tests/chaos/run.py $(ARGS)

crossings: $(VENV)/.ready  ## The same short life wherever settings meet, in minutes (ARGS="--row 7 --verbose" lives one row)
	$(BIN)/python tests/crossings/run.py --table build/crossings.md $(ARGS)

endings: $(VENV)/.ready  ## End servers under load, and by replacing them (ARGS="--rounds 500")
	$(BIN)/python tests/chaos/endings.py $(ARGS)

fuzz: $(VENV)/.ready  ## Read what nobody wrote on purpose, a minute in all (ARGS="--seconds 600 payload rpc")
	$(BIN)/python tests/fuzz $(ARGS)

simulate: $(VENV)/.ready  ## Server, store and clients in simulated time (ARGS="--seed N" replays one)
	$(BIN)/python tests/simulation $(ARGS)

crowd: $(VENV)/.ready  ## Ten thousand producers on one server in simulated time; a table and a picture in bench/out
	$(BIN)/python tests/simulation/crowd.py $(ARGS)

scaling: $(VENV)/.ready  ## Measure one server, and play ten thousand producers with what calls cost it; writes docs/studies/scaling.md
	$(BIN)/python -m bench --quick --only scale --publish
	$(BIN)/python tests/simulation/crowd.py --costs bench/out/scale.json --publish

bench-core: $(VENV)/.ready  ## Cost per operation of the core, by size
	$(BIN)/python bench/core.py $(ARGS)

bench: $(VENV)/.ready  ## All figures, beside the limit (ARGS=--quick: two minutes)
	$(BIN)/python -m bench $(ARGS)

bench-peers: $(VENV)/.ready  ## Reverb, TransferQueue, pickles in Redis and a bare socket beside Breadbox (ARGS="--quick --publish")
	$(BIN)/python -m bench.peers $(ARGS)

bench-grpcio: $(VENV)/.ready  ## Is the newest grpcio as cheap per call as the locked one? Installs it from the index, into a temporary folder
	$(BIN)/python -m bench.grpc_cost $(ARGS)

learn-check: $(VENV)/.ready  ## Does the reference PPO learn? Every task, three seeds; minutes
	$(BIN)/python -m bench.learn_check $(ARGS)

freshness: $(VENV)/.ready  ## What the age of data does to learning; goes on where it was ended; half an hour of two cores
	$(BIN)/python -m bench.freshness $(ARGS)

beside-learners: $(VENV)/.ready  ## The reference PPO beside Stable-Baselines3's and CleanRL's; goes on where it was ended; about two hours
	$(BIN)/python -m bench.beside_learners $(ARGS)

paced-groups: $(VENV)/.ready  ## Tickets and `stale` by processes that sleep, beside a simulation of the rules; about six minutes a seed
	$(BIN)/python -m bench.paced_groups $(ARGS)

smoke: $(VENV)/.ready  ## Does each target still run? Those that no test runs, as small as can be; minutes
	$(BIN)/python scripts/smoke.py $(ARGS)

$(VENV)/.release: pyproject.toml $(VENV)/.ready
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[release]"
	touch $@

dist: $(VENV)/.release  ## Build wheel and sdist of HEAD, the same bytes each time, check and try them
	$(BIN)/python scripts/make_dist.py $(ARGS)

lock: $(VENV)/.release  ## Bring uv.lock up to pyproject.toml (ARGS="--upgrade": and to the newest releases)
	$(BIN)/uv lock --default-index https://pypi.org/simple $(ARGS)
	$(BIN)/uv export -q --frozen --no-header --no-annotate --only-group image-build \
	  -o deploy/build-tools.txt

sbom:  ## List what is in the images, as CycloneDX (IMAGES="breadbox/server:local ...")
	$(PYTHON) scripts/make_sbom.py $(IMAGES) $(ARGS)

up:  ## Start the local cluster; its tokens and passwords are made once
	$(COMPOSE) up --build --detach
	@echo 'It trains. To use it from here:  eval "$$(make -s env)" && $(BIN)/breadbox top'

env:  ## Print what your own command line needs for the local cluster: address, token, store
	@$(COMPOSE) run --rm --no-deps -T secrets env

down:  ## Stop the local cluster and delete its volumes, secrets among them
	$(COMPOSE) down --volumes

clean:  ## Delete what the other targets made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis bench/out build dist sbom
