# xpyd: `make help` lists the targets. CI calls the same ones; none needs a secret.
GO       ?= go
PKGS     ?= ./...
# The longest first: they wait more than they compute, and others run meanwhile.
WAITING   = ./kvconn/tcp ./kvconn/shm
# Folders in which something runs at the same time, or memory is touched past Go's rules.
SHARING   = $(sort $(dir $(shell grep -rlE '\<go [a-z]|\.Go\>|"sync|\<chan\>|Parallel|"unsafe"' --include='*.go' kvconn router worker engine internal prefill decode) e2e/ e2e/virtual/))
RACE     ?= $(WAITING) $(filter-out $(WAITING),$(patsubst %/,./%,$(SHARING)))
FUZZTIME ?= 10s
SEED     ?= 1
N        ?= 200
GOLANGCI ?= github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

.PHONY: alerts-test epp chart-test compose-test dashboard-test release release-test vulncheck vllm-tests schemathesis planner unbroken router-churn hostile edge-soak help build test race fuzz bench lint faults kv-soak kv-skew kv-mutate mutate soak clients goldens bench-report reference docker

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

build: ## one static binary, ./bin/xpyd
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/xpyd ./cmd/xpyd

test: ## every test, no GPU needed
	$(GO) test $(PKGS)

race: ## the packages where concurrency lives, under the race detector
	XPYD_UNBROKEN_VIRTUAL=8 $(GO) test -race -p 3 -timeout 13m -skip TestRanksProcesses $(RACE)

fuzz: ## every fuzz target for FUZZTIME (10s)
	scripts/fuzz $(FUZZTIME)

lint: ## gofmt, vet, golangci-lint with the import rules
	test -z "$$(gofmt -l $$(git ls-files '*.go'))"
	$(GO) vet $(PKGS)
	$(GO) run $(GOLANGCI) run $(PKGS)

clients: ## the official Python and Node libraries of OpenAI and Anthropic, and what builds on them, against `xpyd up`, and every dialect behind a router
	scripts/clients

dashboard-test: build ## the dashboard in Chromium (Debian's package, and npm): flows, widths, axe, a crowd; makes docs/dashboard
	cd scripts/dashboard && npm install --no-audit --no-fund --silent && node test.mjs ../../bin/xpyd

alerts-test: build ## each alert fired by its fault, on a small fleet, by a real Prometheus (PROMETHEUS, PROMTOOL: Debian's package prometheus)
	scripts/alerts-test bin/xpyd

vllm-tests: ## vLLM's own tests of its server, from PyPI, against `xpyd up` with SmolLM2-135M; an hour on two cores
	scripts/vllmtests

schemathesis: ## the router's /openapi.json, tried by schemathesis
	scripts/schemathesis

faults: ## the connector's fault matrix, then kill -9 and kill -STOP of every kind of process, 20 rounds
	XPYD_FAULT_ROUNDS=10 scripts/kv-faults
	XPYD_FAULT_ROUNDS=20 $(GO) test ./e2e/faults -run TestFault -count=1 -timeout 60m -v

unbroken: ## N (200) strikes drawn by SEED at decode workers, faults and orders, and nine times as many on virtual time: each stream goes on as if nothing had been
	XPYD_UNBROKEN_SEED=$(SEED) XPYD_UNBROKEN=$(N) $(GO) test ./e2e/faults -run TestUnbroken -count=1 -timeout 24h -v
	XPYD_UNBROKEN_SEED=$(SEED) XPYD_UNBROKEN_VIRTUAL=$$((9 * $(N))) $(GO) test ./e2e/virtual -run TestUnbroken -count=1 -timeout 24h -v

planner: ## N (200) random loads, fleets and faults drawn by SEED in the twin: what a planner promises holds
	XPYD_PLANNER_SEED=$(SEED) XPYD_PLANNER=$(N) $(GO) test ./internal/sim -run TestPlannerHolds -count=1 -timeout 24h -v

kv-soak: ## 200 peers, 10,000 KV transfers in flight, ten minutes
	$(GO) run ./scripts/kvsoak -time 10m

kv-skew: ## workers of an earlier build beside this tree's: both refuse, and say why
	scripts/kv-skew

kv-mutate: ## every guard of kvconn removed, one at a time: a test must fail
	scripts/mutate-kv

mutate: ## N (200) bugs drawn by SEED, one at a time: a test must fail; some hours, resumed where it was stopped
	mkdir -p .cache
	$(GO) run ./scripts/mutate -seed $(SEED) -n $(N) -log .cache/mutate-$(SEED).jsonl

router-churn: ## the router through ten minutes of churn, faults and cancels; the last line counts
	XPYD_CHURN=10m $(GO) test ./router -run TestChurn -count=1 -timeout 20m -v

soak: ## 1,000 random requests, xPyD against a single worker; 5,000 at each block size under a full pool, with retractions
	XPYD_SOAK_REQUESTS=1000 $(GO) test ./e2e -run TestDifferential -count=1 -timeout 60m -v
	XPYD_RETRACT_REQUESTS=5000 $(GO) test ./engine -run TestRetraction -count=1 -timeout 60m -v

edge-soak: ## half an hour of kills, stops, scale, role, drain, NATS cuts, no descriptors and no memory under load; figures go to bench/
	XPYD_EDGE_SOAK=30m XPYD_EDGE_OUT=bench $(GO) test ./e2e/soak -run TestEdgeSoak -count=1 -timeout 60m -v

hostile: ## what another user of the machine tries, on real processes
	$(GO) test ./e2e/hostile -count=1 -timeout 20m -v

goldens: ## remake recorded goldens (needs Python with torch, transformers)
	scripts/goldens

bench: ## the figures of bench/ that BENCH names (kv, router, cpu -run RUN ...); without it, what there is
	$(GO) run ./scripts/bench $(BENCH)

reference: build ## docs/reference from the code: commands, configuration, metrics, HTTP
	$(GO) run ./scripts/reference

bench-report: ## bench/README.md from bench/results/*.jsonl; fails if a figure names a command or a commit that is not there
	@mkdir -p .cache
	$(GO) run ./scripts/bench report > .cache/report.md && mv .cache/report.md bench/README.md

release: ## VERSION (v1.2.3): archives, deb, rpm, SBOM and checksums in dist/release, the same bytes for the same commit
	rm -rf dist/release
	$(GO) run ./scripts/release -version "$(VERSION)" -out dist/release

release-test: ## a release made twice and looked at: bytes, program, packages, man pages, units
	scripts/release-test

chart-test: ## the Helm chart: lint, rendered cases, and a real API server (built from its module, half an hour; CHART_TOOLS) with kwok: install, scale, upgrade, uninstall
	scripts/chart-test

epp: ## the endpoint picker, a module of its own: vet, tests under the race detector
	cd epp && test -z "$$(gofmt -l .)" && $(GO) vet ./... && $(GO) test -race ./...

vulncheck: ## known vulnerabilities in what xpyd calls (needs vuln.go.dev)
	$(GO) run golang.org/x/vuln/cmd/govulncheck@v1.9.0 ./...

docker: ## container image xpyd, for CPUs and routers
	docker build --build-arg VERSION="$$(git describe --always --dirty)" -t xpyd .

compose-test: ## docker-compose.yml on a real Docker, under load: scale, kill, cut off, restart; nothing is pulled
	scripts/compose-test
