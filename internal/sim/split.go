package sim

import (
	"errors"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// Link is how KV goes from prefill to decode.
type Link struct {
	Bytes     int           // of a token's rows
	Bandwidth float64       // bytes a second out of a worker; 0: any
	Latency   time.Duration // of a message
}

// link is a worker's, on its way out.
type link struct{ free time.Duration }

// send returns when rows arrive that a step computed, which began and ended then. They go layer by
// layer, each when it is computed: the last one waits for the end of the step.
func (l *link) send(cfg *Link, tokens, layers int, began, ended time.Duration) time.Duration {
	all := time.Duration(0)
	if cfg.Bandwidth > 0 {
		all = time.Duration(float64(tokens*cfg.Bytes) / cfg.Bandwidth * float64(time.Second))
	}
	l.free = max(max(l.free, began)+all, ended+all/time.Duration(layers))
	return l.free + cfg.Latency
}

// claim is a prompt whose blocks decode reserves, and then collects from prefill.
type claim struct {
	owner  string
	chain  *kvcache.Chain
	prompt []int32
	then   func(table []int32, had int)
	lost   func() // its worker has died
}

// claim waits for blocks.
func (w *worker) claim(c *claim) {
	w.claims = append(w.claims, c)
	w.reserve()
}

// reserve serves the claims whose turn it is and for which there are blocks.
func (w *worker) reserve() {
	for len(w.claims) > 0 {
		c := w.claims[0]
		table, had, err := w.cache.Reserve(c.chain, len(c.prompt)-1, w.cache.BlocksFor(len(c.prompt)), 0, w.clock.time(), c.owner)
		if errors.Is(err, kvcache.ErrNoSpace) {
			return
		}
		w.claims = w.claims[1:]
		if err != nil {
			table = nil
		}
		c.then(table, had)
	}
}

// push has prefill compute a prompt; arrived is called when decode, which has the first tokens, has
// the rest and the first token.
func (w *worker) push(cfg *Link, layers int, owner string, prompt []int32, had int, done, arrived func(), failed func()) {
	last := time.Duration(0)
	c := &call{token: func() {}, lost: func() { done(); failed() }}
	r := ask(prompt)
	r.PrefillOnly = true
	r.OnBlocks = func(layer int, ready []engine.Ready) {
		if layer != 0 {
			return
		}
		tokens := 0
		for _, b := range ready {
			tokens += max(0, b.FirstPos+b.Rows-max(had, b.FirstPos))
		}
		began := w.clock.now // what the cache had
		if w.device.last.ends == w.clock.now {
			began = w.device.last.begins
		}
		last = w.link.send(cfg, tokens, layers, began, w.clock.now)
	}
	c.done = func(ok bool) {
		done()
		if !ok {
			c.handle.Release()
			failed()
			return
		}
		w.clock.after(last-w.clock.now, func() {
			c.handle.Release()
			w.poke()
			arrived()
		})
	}
	if err := w.submit(r, c); err != nil {
		failed()
	}
}

// first is the token that prefill draws.
var first = []kernels.Sampled{{Token: token}}
