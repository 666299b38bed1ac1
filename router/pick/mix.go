package pick

import (
	"cmp"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Mixing: any of our own workers may do any part of a request, whatever its role. Of all workers and pairs the
// one is chosen that costs least, in seconds: until the first token, as predicted; what the new stream takes
// from prompts that wait beside it; and by how much it breaks what is promised of gaps.

// LocalMixed is the reason of Choice.Local where, of all, one worker costs least.
const LocalMixed = "mixed"

// spot is what a worker would be to the request. Times are in seconds.
type spot struct {
	scored
	class int     // in model.mix
	gap   float64 // between tokens, that its steps keep to
	most  float64 // between tokens, that the request is promised
	step  float64 // one that only decodes, with the request
	first float64 // until the first token, if it computes the prompt
	harm  float64 // what it costs to decode there
	after float64 // the same, where another computes the prompt
}

const (
	usualGap    = 0.05 // what steps keep to at workers that promise nothing
	keepsTo     = 0.95 // the part of a promised gap that steps take
	leastPart   = 0.02 // of its time that a worker has for prompts, however much decodes there
	noPlace     = 10   // what a full batch or pool costs
	brokenGaps  = 20   // times what the gaps are too long by
	knowsPrefix = 0.5  // of what computing the prompt costs: decode holds a part of it that no index knows
)

// Does reports whether a worker may do what is of a role.
func (p *Picker) Does(i *fleet.Instance, role fleet.Role) bool {
	return i.Role == role || p.cfg.Disaggregate == Mixed && i.Dialect == fleet.Native
}

func (s *scorer) mixes() bool { return s.p.cfg.Disaggregate == Mixed && s.req.Local != nil }

// mixed chooses among all workers and pairs.
func (s *scorer) mixed(m *model) pair {
	s.all = s.all[:0]
	for i, c := range m.mix {
		s.spots(i, c)
	}
	var out pair
	var best rating
	output := float64(s.req.Output)
	offer := func(p, d *spot, cost float64, local string) {
		r := rating{avoid: p.avoid, major: cost, minor: float64(d.n.last)}
		if p != d {
			r.avoid += d.avoid
		}
		if at := s.member(p.n).Topology; at != "" && p != d {
			r.major += perLevel * seqTime * float64(distance(at, s.member(d.n).Topology))
		}
		if ms := r.major * 1000; local != "" && (s.localMS == 0 || ms < s.localMS) {
			s.localMS = ms
		} else if local == "" && (s.splitMS == 0 || ms < s.splitMS) {
			s.splitMS = ms
		}
		if out.p == nil || r.before(&best) {
			out, best = pair{&p.scored, &d.scored, local}, r
		}
	}
	var soon, light [finalist]*spot // the best to compute the prompt, and to decode behind another
	for i := range s.all {
		w := &s.all[i]
		later := w.n.time(lineDecode, s.uncached(&w.scored)) + w.gap/2 // the push, and the second token's wait for a step
		w.after = later + w.harm + w.broken(later, output)
		w.harm += w.broken(0, output)
		offer(w, w, w.first+w.harm, LocalMixed)
		insert(&soon, w, func(w *spot) float64 { return w.first })
		insert(&light, w, func(w *spot) float64 { return w.after })
	}
	for _, p := range soon {
		for _, d := range light {
			if p != nil && d != nil && p != d && m.mixes[p.class][d.class] {
				offer(p, d, p.first+d.after, "")
			}
		}
	}
	return out
}

// insert keeps the best, best first, those to avoid last.
func insert(list *[finalist]*spot, w *spot, cost func(*spot) float64) {
	for i, o := range list {
		if o == nil || w.avoid < o.avoid || w.avoid == o.avoid && cost(w) < cost(o) {
			copy(list[i+1:], list[i:])
			list[i] = w
			return
		}
	}
}

// spots weighs the members of a class: all, or of a large one those that best would look at.
func (s *scorer) spots(nth int, c *class) {
	look := func(n *node) {
		for i := range s.all {
			if s.all[i].n == n {
				return
			}
		}
		if m := s.usable(n); m != nil {
			s.all = append(s.all, s.spot(n, m))
			s.all[len(s.all)-1].class = nth
		}
	}
	if len(c.nodes) > scanAll {
		s.sampled(c, look, fleet.Prefill, fleet.Decode)
		s.preferred(c, look)
		return
	}
	for _, n := range c.nodes {
		look(n)
	}
}

// spot weighs a worker.
func (s *scorer) spot(n *node, m *fleet.Member) spot {
	k := n.class.costs
	w := spot{gap: cmp.Or(m.Gap, usualGap)}
	w.most = cmp.Or(s.req.Gap, w.gap)
	w.n, w.avoid = n, s.avoids(n, m, fleet.Decode)
	w.share = max(s.share(n, m, fleet.Prefill), s.share(n, m, fleet.Decode))
	w.fetched = s.fetched(n, w.share)
	w.load = n.queued()

	pool := float64(m.Blocks * m.Layout.BlockTokens)
	held := m.Load.KVUsed*pool + float64(n.own.KV-n.then.KV)
	seqs, context := n.decodes(), held
	if n.long > 0 {
		context = n.long * seqs
	}
	step := k.decoding(seqs, context)
	part := max(leastPart, 1-step/w.gap) // of its time, that it has for prompts

	fresh := s.uncached(&w.scored)
	compute := k.computing(fresh, float64(s.req.Tokens)-fresh)
	w.first = (k.queue(w.load) + compute) / part
	output := float64(s.req.Output)
	w.step = k.decoding(seqs+1, context+float64(s.req.Tokens)+output/2)
	w.harm = output * (w.step - step) * n.busy
	if m.MaxBatch > 0 && seqs >= float64(m.MaxBatch) || pool > 0 && held+fresh+output > pool {
		w.harm += noPlace
	}
	if s.req.Prefer == n.key.id {
		w.harm -= knowsPrefix * compute
	}
	if s.req.Explain {
		s.note(fleet.Prefill, Candidate{ID: n.key.id, Cost: w.first, Load: w.load, Match: w.share, Fetch: w.fetched})
		s.note(fleet.Decode, Candidate{ID: n.key.id, Cost: w.harm, Load: seqs, Match: w.share})
	}
	return w
}

// broken weighs what a stream's gaps would be too long by, in the mean, if one of them is so much longer.
func (w *spot) broken(longer, output float64) float64 {
	full := w.n.busy * keepsTo * min(w.gap, w.most) // steps with prompts are as long as they may be
	return brokenGaps * max(0, output*(max(w.step, full)-w.most)+longer)
}
