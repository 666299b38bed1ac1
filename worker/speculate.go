package worker

import (
	"cmp"
	"context"
	"errors"
	"runtime"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

// Values of speculation.
const (
	speculateOff   = "off"
	speculateNGram = "ngram"
	speculateDraft = "draft"
)

// maxDepth bounds speculation_depth.
const maxDepth = 16

// draftMemory is the KV pool of a draft model, at most.
const draftMemory = 64 << 20

// validSpeculation checks who guesses.
func (c *Compute) validSpeculation() error {
	if err := cmp.Or(config.OneOf("speculation", c.Speculation, speculateOff, speculateNGram, speculateDraft),
		within("speculation_depth", c.SpeculationDepth, 0, maxDepth)); err != nil {
		return err
	}
	switch d, err := gpus.ParseDevice(c.Device); {
	case c.Speculation == speculateDraft && c.DraftModel == "":
		return bad("speculation", "%s needs draft_model, the model that guesses", speculateDraft)
	case c.Speculation != speculateDraft && c.DraftModel != "":
		return bad("draft_model", "needs speculation: %s", speculateDraft)
	case c.Speculation != speculateOff && c.SpeculationDepth == 0:
		return bad("speculation", "%s needs a speculation_depth of at least 1", c.Speculation)
	case c.Speculation == speculateDraft && err == nil && !d.CPU && !d.Auto:
		return bad("speculation", "%s needs device: cpu: %s", speculateDraft, noDraftOnGPU)
	}
	return nil
}

// noDraftOnGPU is why.
const noDraftOnGPU = "a GPU has no room for a second model yet"

// drafter opens whoever guesses; nil: nobody does.
func (w *Worker) drafter(ctx context.Context) (engine.Drafter, error) {
	how := w.cfg.Speculation
	info := w.backend.Info()
	switch {
	case how == speculateOff || how == "":
		return nil, nil
	case !info.Verify:
		return nil, bad("speculation", "%s: the device %s cannot verify drafts", how, info.Name)
	case how == speculateNGram:
		return engine.Lookup{}, nil
	case info.Name != "cpu":
		return nil, bad("speculation", "%s needs device: cpu: %s", how, noDraftOnGPU)
	}
	m, err := model.Open(ctx, w.cfg.DraftModel, model.Options{Log: w.log})
	if err != nil {
		return nil, bad("draft_model", "%v", err)
	}
	d, b, err := w.openDraft(m)
	if err = errors.Join(err, m.Close()); err != nil { // the backend has its own copy
		if b != nil {
			err = errors.Join(err, b.Close())
		}
		return nil, err
	}
	w.free("free the draft model", func(context.Context) error { return b.Close() })
	return d, nil
}

func (w *Worker) openDraft(m *model.Model) (*engine.DraftModel, kernels.Backend, error) {
	tok, err := loadTokenizer(m)
	if err != nil {
		return nil, nil, bad("draft_model", "%v", err)
	}
	if tok.Fingerprint() != w.tok.Fingerprint() {
		return nil, nil, bad("draft_model", "%s has another tokenizer than %s", m.Name, w.model.Name)
	}
	cfg := Config{Compute: Compute{BlockTokens: 16}, TensorParallel: 1}
	blocks, err := poolBlocks(&cfg, &m.Config, cpu.KVDType, draftMemory)
	if err != nil {
		return nil, nil, bad("draft_model", "%v", err)
	}
	b, err := cpu.New(m.Config, m.Weights(false), cpu.Options{Blocks: blocks, BlockTokens: cfg.BlockTokens, Threads: cmp.Or(w.cfg.Threads, runtime.GOMAXPROCS(0))})
	if err != nil {
		return nil, nil, bad("draft_model", "%v", err)
	}
	d, err := engine.NewDraftModel(b, w.backend.Arch().Vocab)
	if err != nil {
		return nil, b, bad("draft_model", "%v", err)
	}
	return d, b, nil
}
