package main

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/worker"
)

// specBench measures what speculation gains: a model's answers to three sets of prompts, by engines with
// and without on the same backend in turn. Prompts are in the prefix cache: what is timed is decode.
type specBench struct {
	base
	model, kind string
	tokens      int

	opened  *worker.Opened
	tok     *tokenizer.Tokenizer
	prompts map[string][][]int32
	worst   float64
	at      string // the worst
}

//go:embed testdata/spec/*.json
var specPrompts embed.FS

var (
	specSets    = []string{"summaries", "edits", "stories"}
	specBatches = []int{1, 4, 16}
)

func (b *specBench) flags(f *flag.FlagSet) {
	f.StringVar(&b.model, "model", os.Getenv("XPYD_SMOLLM2"), "GGUF file of a chat model in ChatML, such as SmolLM2-135M-Instruct; XPYD_SMOLLM2 if empty")
	f.StringVar(&b.kind, "kind", "ngram", "speculation that is measured: ngram")
	f.IntVar(&b.tokens, "tokens", 48, "tokens of an answer")
}

func (b *specBench) parts() []part { return []part{{"speedup", b.speedup}, {"accept", b.accept}} }

func (b *specBench) open(ctx context.Context) error {
	if b.model == "" {
		return errors.New("-model or XPYD_SMOLLM2 is needed: a chat model's GGUF file")
	}
	if b.kind != "ngram" {
		return fmt.Errorf("-kind %q: only ngram is measured", b.kind)
	}
	cfg := worker.DefaultConfig("decode")
	cfg.Model, cfg.Device = b.model, "cpu"
	var err error
	if b.opened, err = worker.Open(ctx, &cfg, slog.New(slog.DiscardHandler), nil); err != nil {
		return err
	}
	if b.tok, err = tokenizer.FromGGUF(b.opened.Model.GGUFMeta()); err != nil {
		return err
	}
	b.prompts = make(map[string][][]int32)
	for _, set := range specSets {
		text, err := specPrompts.ReadFile("testdata/spec/" + set + ".json")
		if err != nil {
			return err
		}
		var list []string
		if err := json.Unmarshal(text, &list); err != nil {
			return fmt.Errorf("%s: %w", set, err)
		}
		for _, p := range list {
			b.prompts[set] = append(b.prompts[set], b.tok.Encode("<|im_start|>user\n"+p+"<|im_end|>\n<|im_start|>assistant\n", false))
		}
	}
	return nil
}

func (b *specBench) close() error {
	if b.opened == nil {
		return nil
	}
	return b.opened.Close()
}

// speculating is an engine on the shared backend. Only one computes at a time, and each clears its cache
// before, since the other has written to its blocks.
type speculating struct {
	*engine.Engine
	cache *kvcache.Cache
	reg   *prometheus.Registry
}

func (b *specBench) engine(s engine.Speculation) (*speculating, error) {
	be := b.opened.Backend
	e := &speculating{reg: prometheus.NewRegistry()}
	var err error
	if e.cache, err = kvcache.New(kvcache.Config{Blocks: be.Blocks(), BlockTokens: be.Layout().BlockTokens, Fingerprint: "bench", Numerics: be.Info().Numerics}); err != nil {
		return nil, err
	}
	cfg := b.opened.Engine
	cfg.Speculation, cfg.EOS = s, b.opened.Model.Config.EOS
	e.Engine, err = engine.New(cfg, be, e.cache, slog.New(slog.DiscardHandler), e.reg)
	return e, err
}

// counted sums a counter.
func (e *speculating) counted(name string) (sum float64) {
	families, err := e.reg.Gather()
	if err != nil {
		return 0
	}
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// specRun is one round of one way.
type specRun struct {
	Rate    float64 // tokens/s
	Mean    float64 // accepted drafts of a run of them
	drafted float64 // a token of output
}

func (r specRun) String() string {
	return fmt.Sprintf("%.1f tokens/s, %.2f of %.2f drafts a token accepted", r.Rate, r.Mean, r.drafted)
}

func (b *specBench) speedup(ctx context.Context) (err error) {
	ways := [2]string{b.kind, "off"}
	engines := map[string]*speculating{}
	for way, s := range map[string]engine.Speculation{"off": {}, b.kind: {Drafter: engine.Lookup{}, Depth: engine.DefaultDepth}} {
		e, err := b.engine(s)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, e.Close(ctx)) }()
		engines[way] = e
	}
	for _, set := range specSets {
		for _, n := range specBatches {
			runs, err := figures.Compare(b.Sayf, b.Rounds, ways, func(round int, way string) (specRun, error) {
				return b.round(ctx, engines[way], set, n, round)
			})
			if err != nil {
				return fmt.Errorf("%s, %d at a time: %w", set, n, err)
			}
			f := figures.RatiosOf(figures.Figure{
				Name: fmt.Sprintf("spec.speedup.b%d.%s", n, set), Unit: "tokens/s", Peer: "ours with speculation off",
				Model: fmt.Sprintf("%s, %s, %d at a time, prompts cached, temperature 0.6", b.opened.Model.Name, set, n),
			}, runs, func(r specRun) float64 { return r.Rate })
			if err := b.Add(f); err != nil {
				return err
			}
			if b.worst == 0 || f.Ratio < b.worst {
				b.worst, b.at = f.Ratio, f.Name
			}
		}
	}
	return b.Add(figures.Figure{Name: "spec.worst_ratio", Value: b.worst, Unit: "times as many tokens/s", Peer: "ours with speculation off", PeerValue: 1, Ratio: b.worst,
		Model: b.opened.Model.Name + ", the least of all sets and batches: " + b.at, Runs: b.Rounds})
}

// requests are n of a set's prompts, in turn.
func (b *specBench) requests(set string, n, round int) (list []*engine.Request) {
	prompts := b.prompts[set]
	for i := range n {
		list = append(list, &engine.Request{
			ID: fmt.Sprint(set, round, "-", i), Prompt: prompts[(i+round)%len(prompts)], MaxTokens: b.tokens, IgnoreEOS: true, Logprobs: -1, PromptLogprobs: -1,
			Sampling: engine.Sampling{Seed: uint64(round*100 + i), Temperature: 0.6, TopP: 1},
		})
	}
	return list
}

func (b *specBench) round(ctx context.Context, e *speculating, set string, n, round int) (r specRun, err error) {
	e.cache.Clear()
	list := b.requests(set, n, round)
	var first []*engine.Request // has the prompts computed
	for _, q := range list {
		one := *q
		one.ID, one.MaxTokens = q.ID+"-prompt", 1
		first = append(first, &one)
	}
	if _, err := e.answers(ctx, first); err != nil {
		return r, err
	}
	runs, drafted, accepted := e.counted("xpyd_engine_drafts_total"), e.counted("xpyd_engine_drafted_tokens_total"), e.counted("xpyd_engine_accepted_tokens_total")
	begin := time.Now()
	tokens, err := e.answers(ctx, list)
	if err != nil {
		return r, err
	}
	r.Rate = float64(tokens) / time.Since(begin).Seconds()
	r.Mean = (e.counted("xpyd_engine_accepted_tokens_total") - accepted) / max(1, e.counted("xpyd_engine_drafts_total")-runs)
	r.drafted = (e.counted("xpyd_engine_drafted_tokens_total") - drafted) / float64(tokens)
	return r, nil
}

// answers runs requests side by side and counts their tokens.
func (e *speculating) answers(ctx context.Context, list []*engine.Request) (tokens int, err error) {
	var handles []*engine.Handle
	for _, q := range list {
		h, err := e.Submit(ctx, q)
		if err != nil {
			return 0, err
		}
		handles = append(handles, h)
	}
	for _, h := range handles {
		n, err := read(ctx, h)
		if err != nil {
			return 0, err
		}
		tokens += len(n)
		<-h.Done()
	}
	return tokens, nil
}

// read reads the events of one choice.
func read(ctx context.Context, h *engine.Handle) (list []kernels.Sampled, err error) {
	for {
		events, err := h.Next(ctx)
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		for _, ev := range events {
			list = append(list, ev.Sampled)
		}
	}
}

// accept compares the drafts of requests whose prompts another engine computed with those of requests that one
// engine serves, to a fixed depth, since times decide otherwise.
func (b *specBench) accept(ctx context.Context) (err error) {
	fixed := engine.Speculation{Drafter: engine.Lookup{}, Depth: engine.DefaultDepth, Fixed: true}
	one, err := b.engine(fixed)
	if err != nil {
		return err
	}
	prefill, decode := &speculating{}, &speculating{}
	defer func() { err = errors.Join(err, one.Close(ctx)) }()
	for e, s := range map[*speculating]engine.Speculation{prefill: {}, decode: fixed} {
		made, err := b.engine(s)
		if err != nil {
			return err
		}
		*e = *made
		defer func() { err = errors.Join(err, e.Close(ctx)) }()
	}
	for _, set := range specSets {
		for _, q := range b.requests(set, 2, 0) {
			one.cache.Clear()
			if _, err := one.answers(ctx, []*engine.Request{q}); err != nil {
				return err
			}
			if err := b.handOver(ctx, prefill, decode, q); err != nil {
				return err
			}
		}
	}
	mean := func(e *speculating) float64 {
		return e.counted("xpyd_engine_accepted_tokens_total") / max(1, e.counted("xpyd_engine_drafts_total"))
	}
	pd, whole := mean(decode), mean(one)
	b.Sayf("accepted of a run of drafts: %.4f with prefill apart, %.4f with one engine, %v and %v runs", pd, whole, decode.counted("xpyd_engine_drafts_total"), one.counted("xpyd_engine_drafts_total"))
	if whole == 0 {
		return errors.New("no draft was accepted")
	}
	return b.Add(figures.Figure{Name: "spec.accept_ratio", Value: pd, Unit: "drafts accepted of a run", Peer: "one engine for prefill and decode", PeerValue: whole, Ratio: pd / whole,
		Model: b.opened.Model.Name + ", " + b.kind + ", fixed depth, all sets", Runs: 1})
}

// handOver has one engine compute a prompt and another go on from a copy of its rows.
func (b *specBench) handOver(ctx context.Context, prefill, decode *speculating, q *engine.Request) error {
	be := b.opened.Backend
	layout := be.Layout()
	size := layout.BlockTokens
	n := len(q.Prompt)
	prefill.cache.Clear()
	first := *q
	first.ID, first.PrefillOnly = q.ID+"-prefill", true
	h, err := prefill.Submit(ctx, &first)
	if err != nil {
		return err
	}
	drawn, err := read(ctx, h)
	if err != nil {
		return err
	}
	type part struct {
		rows   []byte
		digest []uint64
	}
	var parts []part
	for i, l := range layout.Resolve() {
		for at, id := range h.Blocks() {
			rows := min(size, n-at*size)
			p := part{make([]byte, l.PackedBytes(rows)), make([]uint64, l.Heads)}
			be.Gather(i, id, 0, rows, p.rows)
			be.Digest(i, id, p.digest)
			parts = append(parts, p)
		}
	}
	h.Release()
	<-h.Done()
	decode.cache.Clear()
	second := *q
	second.ID = q.ID + "-decode"
	second.Owner = second.ID
	blocks, _, err := decode.cache.ReserveWait(ctx, &kvcache.Chain{}, 0, decode.cache.BlocksFor(n), second.Owner)
	if err != nil {
		return err
	}
	for i := range layout.Resolve() {
		for at, id := range blocks {
			rows := min(size, n-at*size)
			be.Scatter(i, id, 0, rows, parts[0].rows)
			be.SetDigest(i, id, rows, parts[0].digest)
			parts = parts[1:]
		}
	}
	second.Prefilled = &engine.Prefilled{Blocks: blocks, First: drawn}
	_, err = decode.answers(ctx, []*engine.Request{&second})
	return err
}
