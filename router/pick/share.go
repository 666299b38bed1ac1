package pick

import "slices"

// Routers side by side tell each other the load that each has on the workers, and where each has
// sent which prefixes. The picker notes what has changed and takes in what others say.

// WorkerLoad is what one router, or all others together, have in flight on one worker. Epoch is 0
// for engines that do not announce themselves, as each router gives them its own.
type WorkerLoad struct {
	ID    string
	Epoch uint64
	Loads
}

// Hint is a part of a chain and the pair that has served it.
type Hint struct {
	Prefill, Decode           string
	PrefillEpoch, DecodeEpoch uint64
	Hashes                    []uint64
}

// maxNoted bounds the hashes of hints that wait to be fetched.
const maxNoted = 1 << 12

// notes is what has changed since it was fetched last; under Picker.mu.
type notes struct {
	on     bool
	nodes  []*node // whose counts changed
	hints  []Hint
	hashes int // of all hints
	lost   uint64
}

// Note starts or stops noting changes for Changes and Hints; while off it costs nothing.
func (p *Picker) Note(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if on == p.notes.on {
		return
	}
	for _, n := range p.notes.nodes {
		n.noted = false
	}
	p.notes = notes{on: on, lost: p.notes.lost}
}

// Changes appends the counts of workers that have changed since the last call, at most so many; or,
// if all, of every worker with a count, leaving the changes be.
func (p *Picker) Changes(out []WorkerLoad, all bool, most int) []WorkerLoad {
	p.mu.Lock()
	defer p.mu.Unlock()
	if all {
		for _, n := range p.nodes {
			if n.own.Legs > 0 && len(out) < most {
				out = append(out, n.told())
			}
		}
		return out
	}
	k := min(len(p.notes.nodes), most)
	for _, n := range p.notes.nodes[:k] {
		n.noted = false
		out = append(out, n.told())
	}
	p.notes.nodes = slices.Delete(p.notes.nodes, 0, k)
	return out
}

func (n *node) told() WorkerLoad {
	id, epoch := n.name()
	return WorkerLoad{id, epoch, n.own}
}

// Hints returns what was noted of prefixes since the last call, and how many hashes were lost so
// far because nobody fetched them in time.
func (p *Picker) Hints() (hints []Hint, lost uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	hints, p.notes.hints, p.notes.hashes = p.notes.hints, nil, 0
	return hints, p.notes.lost
}

// recentRun bounds a hint of Recent.
const recentRun = 256

// Recent returns where the last used blocks have gone, at most so many, the oldest first: an empty
// picker that gets them by AddHints ends up with the same order of age.
func (p *Picker) Recent(most int) []Hint {
	p.mu.Lock()
	defer p.mu.Unlock()
	var hints []Hint
	var pn, dn *node
	list := p.index.list
	for i := list[0].next; i != 0 && most > 0; i, most = list[i].next, most-1 {
		e := &list[i]
		if n := len(hints); n == 0 || e.p != pn || e.d != dn || len(hints[n-1].Hashes) == recentRun {
			pn, dn = e.p, e.d
			hints = append(hints, hint(pn, dn, nil))
		}
		h := &hints[len(hints)-1]
		h.Hashes = append(h.Hashes, e.hash)
	}
	slices.Reverse(hints)
	return hints
}

// SetOthers says what other routers together have on workers. It skips unknown workers.
func (p *Picker) SetOthers(list []WorkerLoad) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range list {
		if n := p.called(w.ID, w.Epoch); n != nil {
			if n.class != nil {
				n.class.legs += w.Legs - n.others.Legs
			}
			n.others = w.Loads
		}
	}
}

// AddHints takes in where other routers have sent prefixes.
func (p *Picker) AddHints(list []Hint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, h := range list {
		pn, dn := p.called(h.Prefill, h.PrefillEpoch), p.called(h.Decode, h.DecodeEpoch)
		if pn != nil && dn != nil {
			p.index.put(Chain{hashes: h.Hashes}, pn, dn)
		}
	}
}

// note remembers that a node's counts have changed.
func (p *Picker) note(n *node) {
	if p.notes.on && !n.noted {
		n.noted = true
		p.notes.nodes = append(p.notes.nodes, n)
	}
}

// noteHint remembers which blocks of a chain the index did not have with this pair.
func (p *Picker) noteHint(c Chain, fresh int, pn, dn *node) {
	if !p.notes.on || fresh == 0 {
		return
	}
	if p.notes.hashes+fresh > maxNoted {
		p.notes.lost += uint64(fresh)
		return
	}
	p.notes.hashes += fresh
	n := min(len(c.hashes), p.index.max)
	p.notes.hints = append(p.notes.hints, hint(pn, dn, c.hashes[n-fresh:n]))
}

func hint(pn, dn *node, hashes []uint64) Hint {
	h := Hint{Hashes: hashes}
	h.Prefill, h.PrefillEpoch = pn.name()
	h.Decode, h.DecodeEpoch = dn.name()
	return h
}

// name is how routers call a worker among themselves.
func (n *node) name() (id string, epoch uint64) {
	if n.named {
		return n.key.id, 0
	}
	return n.key.id, n.key.epoch
}

// called returns the worker of such a name, nil if it is not known here.
func (p *Picker) called(id string, epoch uint64) *node {
	if epoch == 0 {
		return p.named[id]
	}
	return p.nodes[nodeKey{id, epoch}]
}

// legsAll, queuedAll, seqsAll and kvAll are the counts of all routers.
func (n *node) legsAll() int   { return n.own.Legs + n.others.Legs }
func (n *node) queuedAll() int { return n.own.Tokens + n.others.Tokens }
func (n *node) seqsAll() int   { return n.own.Seqs + n.others.Seqs }
func (n *node) kvAll() int     { return n.own.KV + n.others.KV }
