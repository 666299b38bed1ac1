package pick

import (
	"fmt"
	"slices"

	"github.com/xpyd/xpyd/internal/fleet"
)

// table is which classes there are, made for one view and never changed.
type table struct {
	version, generation uint64
	models              map[string]*model
}

// older reports whether v may have members that the table does not know.
func (t *table) older(v View) bool {
	switch {
	case t == nil || v.Snapshot.Version > t.version:
		return true
	case v.Snapshot.Version < t.version:
		return false
	}
	return v.Generation > t.generation || v.Generation < t.generation && !v.Behind
}

func (t *table) model(name string) *model {
	if t == nil {
		return nil
	}
	return t.models[name]
}

// nodes yields the members of all classes.
func (m *model) nodes(yield func(*node) bool) {
	for _, c := range slices.Concat(m.prefill, m.decode) {
		for _, n := range c.nodes {
			if !yield(n) {
				return
			}
		}
	}
}

// model is the members that serve one model.
type model struct {
	name              string
	prefill, decode   []*class
	mix               []*class // whose members do either, if mixing
	mixes             [][]bool // of these, which as prefill with which as decode
	compatible        [][]bool // by prefill class, decode class
	nPrefill, nDecode int      // members of each role, whatever their state
}

// Refresh brings the picker up to a view. Under the lock that choices need it touches only what has
// changed.
func (p *Picker) Refresh(v View) {
	if !p.table.Load().older(v) {
		return
	}
	p.build.Lock()
	defer p.build.Unlock()
	if !p.table.Load().older(v) {
		return
	}
	p.stamp++
	t := &table{version: v.Snapshot.Version, generation: v.Generation, models: map[string]*model{}}
	moves, reports := p.plan(v, t)
	for _, m := range t.models {
		m.pairUp()
	}
	var gone []nodeKey
	for key, n := range p.nodes { // only this changes the map
		switch {
		case n.seen != p.stamp:
			gone = append(gone, key)
			fallthrough
		case n.stamp != p.stamp:
			moves = append(moves, move{n: n})
		}
	}
	p.mu.Lock()
	for _, m := range moves {
		if m.n.class == m.to {
			continue
		}
		if m.n.class != nil {
			m.n.class.leave(m.n)
		}
		if m.to == nil {
			continue
		}
		if p.nodes[m.n.key] == nil {
			p.nodes[m.n.key] = m.n
			if m.n.named {
				p.named[m.n.key.id] = m.n
			}
			m.n.last, m.n.born = p.tick, v.Now
		}
		m.to.join(m.n)
		if g := &m.n.guard; g.state == Open { // a worker that comes back may show at once that it is well
			g.until = v.Now
		}
	}
	for _, r := range reports {
		r.n.report(&r.load, r.costs, v.Now)
	}
	for _, key := range gone {
		if p.nodes[key].own.Legs == 0 {
			if p.named[key.id] == p.nodes[key] {
				delete(p.named, key.id)
			}
			delete(p.nodes, key)
		}
	}
	p.table.Store(t)
	p.mu.Unlock()
	kept := map[*costs]bool{}
	for id, c := range p.classes {
		if c.stamp != p.stamp {
			delete(p.classes, id)
		} else {
			kept[c.costs] = true
		}
	}
	for kind, c := range p.kinds {
		if !kept[c] {
			delete(p.kinds, kind)
		}
	}
}

// move is a node that changes its class; to is nil for none.
type move struct {
	n  *node
	to *class
}

// plan sorts the usable members into classes, and returns which nodes have to move. It changes
// nothing that choices read.
func (p *Picker) plan(v View, t *table) (moves []move, reports []report) {
	for i := range v.Snapshot.Members {
		mem := &v.Snapshot.Members[i]
		m := t.models[mem.Model]
		if m == nil {
			m = &model{name: mem.Model}
			t.models[mem.Model] = m
		}
		list := &m.prefill
		if mem.Role == fleet.Decode {
			list = &m.decode
			m.nDecode++
		} else {
			m.nPrefill++
		}
		key := nodeKey{mem.ID, mem.Epoch}
		n := p.nodes[key]
		if n != nil {
			n.seen = p.stamp
		}
		if !mem.Usable() || v.Eligible != nil && !v.Eligible(mem) {
			continue
		}
		if n == nil {
			n = &node{key: key, seen: p.stamp, point: hashString(mem.ID), named: mem.Source != "" && mem.Source != fleet.NATS, guard: guard{state: Closed}}
		}
		n.at.Store(int32(i))
		n.stamp = p.stamp
		c := p.classOf(&mem.Instance)
		if c.stamp != p.stamp {
			c.stamp = p.stamp
			*list = append(*list, c)
			if c.costs != nil {
				m.mix = append(m.mix, c)
			}
		}
		if c.costs != nil && mem.Load != n.said {
			reports = append(reports, report{n, c.costs, mem.Load})
		}
		if n.class != c { // written under build too
			moves = append(moves, move{n, c})
		}
	}
	return moves, reports
}

// report is what a worker says of its steps.
type report struct {
	n     *node
	costs *costs
	load  fleet.Load
}

func (p *Picker) classOf(i *fleet.Instance) *class {
	id := classID{i.Traits(), zone(i.Topology, p.cfg.TopologyLevel)}
	c := p.classes[id]
	if c == nil {
		c = &class{id: id, rep: *i}
		if p.cfg.Disaggregate == Mixed && i.Dialect == fleet.Native {
			c.costs = p.costsOf(&id)
		}
		c.root.prev, c.root.next = &c.root, &c.root
		p.classes[id] = c
	}
	return c
}

func (m *model) pairUp() {
	m.compatible, m.mixes = fit(m.prefill, m.decode), fit(m.mix, m.mix)
}

// fit reports which classes may prefill for which others.
func fit(prefill, decode []*class) [][]bool {
	out := make([][]bool, len(prefill))
	for i, a := range prefill {
		out[i] = make([]bool, len(decode))
		for j, b := range decode {
			out[i][j] = a.id.zone == b.id.zone && fleet.Compatible(&a.rep, &b.rep) == nil
		}
	}
	return out
}

func (m *model) ready() bool {
	return len(m.mix) > 0 || slices.ContainsFunc(m.decode, func(c *class) bool { return c.rep.Alone() }) ||
		slices.ContainsFunc(m.compatible, func(row []bool) bool { return slices.Contains(row, true) })
}

// why returns why a model has no pair, for people.
func (m *model) why(v View) string {
	switch {
	case m.ready():
		return "the remaining pairs have failed it already"
	case m.nPrefill == 0:
		return "there is no prefill worker"
	case m.nDecode == 0:
		return "there is no decode worker"
	case len(m.prefill) == 0:
		return "no prefill worker is live and probed" + m.draining(v, fleet.Prefill) + m.refusal(v)
	case len(m.decode) == 0:
		return "no decode worker is live and probed" + m.draining(v, fleet.Decode) + m.refusal(v)
	}
	p, d := &m.prefill[0].rep, &m.decode[0].rep
	if diff := fleet.Compatible(p, d); diff != nil {
		return fmt.Sprintf("%s and %s are incompatible, %v", p.ID, d.ID, diff)
	}
	return fmt.Sprintf("%s and %s are too far apart: topology %q and %q", p.ID, d.ID, p.Topology, d.Topology)
}

// draining names a worker of a role that is well but drains, if there is one.
func (m *model) draining(v View, role fleet.Role) string {
	for i := range v.Snapshot.Members {
		if mem := &v.Snapshot.Members[i]; mem.Model == m.name && mem.Serves() && mem.Draining && (mem.Role == role || mem.Alone()) {
			return " and takes new work: " + mem.ID + " drains"
		}
	}
	return ""
}

// refusal returns why some live worker of the model is incompatible, if there is one.
func (m *model) refusal(v View) string {
	for _, r := range v.Snapshot.Refusals() {
		if mem := v.Snapshot.Get(r.ID); mem != nil && mem.Model == m.name {
			return "; " + r.String()
		}
	}
	return ""
}
