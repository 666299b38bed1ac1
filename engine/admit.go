package engine

import (
	"io"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// admit moves waiting sequences into the batch, oldest first. One that gets no memory holds back
// younger ones that need memory, but not those that have their blocks. One that waits for
// another's prefix holds nobody back.
func (e *Engine) admit() {
	active := e.claim()
	e.giveWay(active)
	full := false // of memory
	for i := 0; i < len(e.waiting) && active < e.cfg.MaxRunning; {
		q := e.waiting[i]
		if q.paused() || q.table == nil && (full || e.isBehind(q) || !e.place(q, active)) {
			full = full || q.table == nil && !q.paused() && !e.isBehind(q)
			i++
			continue
		}
		e.enroll(q) // takes it out of waiting
		active++
		if q.h.started.IsZero() {
			q.h.started = e.now()
		}
		e.unqueue(q.h)
		e.cache.SetState(q.h.owner, kvcache.StateRunning)
		if q.h.req.OnBlocks != nil && q.arriving == nil {
			if err := e.announceHits(q); err != nil {
				e.finish(q.h, err)
			}
		}
		if q.running && q.hasRows() {
			e.finish(q.h, io.EOF)
		}
	}
}

// claim counts the sequences that want to step, and tells the cache what the engine needs before
// reservations from outside: a block to grow for each, and the first waiting sequence's table.
func (e *Engine) claim() (active int) {
	for _, q := range e.running {
		if !q.paused() {
			active++
		}
	}
	for _, q := range e.waiting {
		if q.table == nil && !q.paused() {
			e.cache.Prioritise(active, e.cache.BlocksFor(len(q.tokens)), q.h.arrived)
			return active
		}
	}
	e.cache.Prioritise(active, 0, time.Time{})
	return active
}

// giveWay takes the blocks of paused sequences, whose clients do not read, if a reservation from
// outside waits for them.
func (e *Engine) giveWay(active int) {
	for n := e.cache.Wanted(); n > 0 && e.evictPaused(n+active); n = e.cache.Wanted() {
	}
}

// place gives a sequence a block table for all its tokens: what the prefix cache has, and fresh
// blocks. It leaves a block free for each active sequence, so that the new one is not preempted
// at once. Paused sequences lose their blocks if that makes enough room.
func (e *Engine) place(q *sequence, active int) bool {
	r := q.h.req
	q.chain.Extend(q.tokens)
	reusable := len(q.tokens) - min(q.draws, 1) // one is computed, for its logits
	if r.Pooling != PoolNone {
		reusable-- // or for its hidden state
	}
	if q.computesAll() {
		reusable = 0
	}
	blocks := e.cache.BlocksFor(len(q.tokens))
	reserve := func() ([]int32, int, error) {
		return e.cache.Reserve(&q.chain, reusable, blocks, active, q.h.arrived, q.h.owner)
	}
	table, hit, err := reserve()
	for err != nil && e.evictPaused(blocks+active) {
		table, hit, err = reserve()
	}
	if err != nil {
		return false
	}
	hit, ok := e.bring(q, table, hit, min(reusable, len(q.tokens)-1)) // a step proves what comes
	if !ok {
		e.cache.Release(table, q.h.owner)
		return false
	}
	q.table, q.computed, q.indexed, q.shared = table, hit, hit, false
	if !q.h.prompted {
		q.h.mu.Lock()
		// After a preemption it finds what it has computed itself.
		if r.Prefilled == nil && (q.h.started.IsZero() || hit < q.h.cached) {
			q.h.cached = hit
		}
		if r.PrefillOnly {
			q.h.blocks = table
		}
		q.h.mu.Unlock()
	}
	return true
}

// evictPaused preempts the youngest paused sequence, if all of them together hold enough blocks
// to make need available.
func (e *Engine) evictPaused(need int) bool {
	var victim *sequence
	could := e.cache.Stats().Available()
	for _, q := range e.running {
		if e.preemptible(q) && q.paused() {
			victim = q
			could += len(q.table)
		}
	}
	if victim == nil || could < need {
		return false
	}
	e.preempt(victim)
	return true
}

// makeRoom preempts one sequence for q, which is running: the youngest paused one if there is
// any, else the youngest that is younger than q.
func (e *Engine) makeRoom(q *sequence) bool {
	var paused, youngest *sequence
	for _, list := range [][]*sequence{e.waiting, e.running} {
		for _, v := range list {
			if v == q || !e.preemptible(v) {
				continue
			}
			if v.paused() && (paused == nil || paused.older(v)) {
				paused = v
			}
			if q.older(v) && (youngest == nil || youngest.older(v)) {
				youngest = v
			}
		}
	}
	if paused != nil {
		youngest = paused
	}
	if youngest == nil {
		e.short = true // the steps under way may free memory
		return false
	}
	e.preempt(youngest)
	e.offerLost(youngest)
	return true
}

// retract implements Config.RetractEvery.
func (e *Engine) retract() {
	if e.planned++; e.cfg.RetractEvery == 0 || e.planned < e.cfg.RetractEvery {
		return
	}
	for i := len(e.running) - 1; i >= 0; i-- {
		if q := e.running[i]; e.preemptible(q) {
			e.planned = 0
			e.preempt(q)
			return
		}
	}
}

// preemptible reports whether a sequence holds blocks that nobody outside the loop reads.
func (e *Engine) preemptible(q *sequence) bool {
	return q.table != nil && !q.h.req.PrefillOnly && q.chunk == 0 && q.flights == 0
}

// preempt takes a sequence's blocks. When it is admitted again, it computes what the prefix cache
// does not have.
func (e *Engine) preempt(q *sequence) {
	e.metrics.preemptions.Inc()
	q.h.preempted.Add(1)
	if e.cfg.Preempted != nil {
		e.cfg.Preempted()
	}
	e.cache.Release(q.table, q.h.owner)
	if q.h.req.PrefillOnly {
		q.h.mu.Lock()
		q.h.blocks = nil
		q.h.mu.Unlock()
	}
	q.table, q.computed, q.indexed, q.shared, q.arriving, q.lost = nil, 0, 0, false, nil, false
	if !q.h.prompted && q.h.req.Prefilled == nil {
		q.h.logprobs, q.h.pool = nil, pool{}
	}
	if q.running {
		e.enqueue(q)
	}
}

// grow makes sure that the blocks of q's missing rows exist and are q's alone. It preempts others
// if it must. False means that q cannot be in this step.
func (e *Engine) grow(q *sequence) (bool, error) {
	i := q.next() / e.blockToks
	for want := e.cache.BlocksFor(q.length()); len(q.table) < want; {
		ids, err := e.cache.Alloc(1, q.h.owner)
		switch {
		case err == nil:
			q.table = append(q.table, ids...)
		case !e.makeRoom(q):
			return false, nil
		}
	}
	if !q.shared {
		return true, nil
	}
	old := q.table[i]
	fresh, err := e.cache.Unshare(old, q.h.owner)
	for err != nil {
		if !e.makeRoom(q) {
			return false, nil
		}
		fresh, err = e.cache.Unshare(old, q.h.owner)
	}
	q.table[i], q.shared = fresh, false
	if rows := q.next() % e.blockToks; fresh != old && rows > 0 {
		err = guard(func() error {
			e.backend.CopyBlock(fresh, old, i*e.blockToks, rows)
			return nil
		})
	}
	return true, err
}

// announceHits tells OnBlocks of the blocks that the prefix cache had.
func (e *Engine) announceHits(q *sequence) error {
	q.told = q.computed / e.blockToks
	if q.told == 0 {
		return nil
	}
	return e.tellAll(q.h.req.OnBlocks, e.ready(q, 0, q.computed))
}

// tellAll tells OnBlocks of blocks for all layers.
func (e *Engine) tellAll(onBlocks func(layer int, ready []Ready), ready []Ready) error {
	return guard(func() error {
		for layer := range e.layers {
			onBlocks(layer, ready)
		}
		return nil
	})
}

// ready lists the blocks of q's rows from .. upto-1; from is the first row of a block.
func (e *Engine) ready(q *sequence, from, upto int) []Ready {
	list := make([]Ready, 0, e.cache.BlocksFor(upto-from))
	for pos := from; pos < upto; pos += e.blockToks {
		i := pos / e.blockToks
		list = append(list, Ready{Index: i, Block: q.table[i], FirstPos: pos, Rows: min(e.blockToks, upto-pos)})
	}
	return list
}
