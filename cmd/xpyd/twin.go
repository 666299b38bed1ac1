package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/kvlayout"
	"github.com/xpyd/xpyd/worker"
)

// mostWorkers bounds a fleet that is computed, mostBlocks the KV pool of each.
const mostWorkers, mostBlocks = 1000, 1 << 24

// openTable opens --table.
func openTable(path string) (*steptable.Table, error) {
	if path == "" {
		return nil, errors.New("--table is needed: xpyd bench step writes one")
	}
	t, err := steptable.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--table: %w", err)
	}
	if a := &t.About; a.Blocks < 1 || a.BlockTokens < 1 || a.BlockTokens > kvlayout.MaxBlockTokens || a.MaxBatch < 1 || a.StepTokens < 1 || a.Shape.Layers < 1 {
		return nil, fmt.Errorf("--table %s does not say what a worker has: its blocks, block_tokens, max_batch, step_tokens and layers", path)
	}
	if a := &t.About; a.Blocks > mostBlocks || a.MaxBatch > mostBlocks {
		return nil, fmt.Errorf("--table %s: workers of %d blocks and batches of %d: at most %d of either", path, a.Blocks, a.MaxBatch, mostBlocks)
	}
	return t, nil
}

// warmedBy is how many requests each worker has served before a load: after that its steps are as they stay.
const warmedBy = 4

// twinOf is what all fleets on a table have in common.
func twinOf(t *steptable.Table, promise sim.Promise, seed uint64, shed bool) sim.Config {
	w := worker.DefaultConfig(fleet.Decode)
	w.MaxBatch, w.StepTokens = t.About.MaxBatch, t.About.StepTokens
	w.Promises = promises(promise)
	w.ShedLate = shed
	cfg := sim.On(t, worker.EngineConfig(&w, t.About.Backend == "cuda"))
	cfg.Seed, cfg.Warm = seed, warmedBy
	return cfg
}

// promises are what workers are told of a promise.
func promises(p sim.Promise) worker.Promises {
	return worker.Promises{TTFTPromise: p.TTFT, TPOTPromise: p.TPOT, ITLPromise: p.ITL}
}

// remeasure is what helps a bad table.
const remeasure = "measure it again, on a machine that does nothing else, for longer (xpyd bench step --time)"

// room is how many tokens a request may have, and what says so.
func room(t *steptable.Table, maxContext int) (most int, why string) {
	a := &t.About
	most, why = a.Blocks*a.BlockTokens, "which the table's KV pool has room for"
	if a.MaxContext > 0 && a.MaxContext < most {
		most, why = a.MaxContext, "the table's max_context"
	}
	if maxContext > 0 && maxContext < most {
		most, why = maxContext, "of --max-context"
	}
	return most, why
}

// createJSON opens the file of --json, if there is one.
func createJSON(path string) (*outFile, error) {
	if path == "-" {
		return nil, nil
	}
	return createOut(path)
}

func encodeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(v)
}
