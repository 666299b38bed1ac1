package pick

import (
	"fmt"
	"math"

	"github.com/xpyd/xpyd/internal/fleet"
)

type nodeKey struct {
	id    string
	epoch uint64
}

// node is what the picker remembers of one instance in one epoch; all under
// Picker.mu.
type node struct {
	key nodeKey
	at  int // its place in the snapshot's members, as of the table

	legs   int // choices that count it
	queued int // prompt tokens in flight (prefill)
	seqs   int // sequences in flight (decode)
	kv     int // tokens that they may hold (decode)

	last   uint64  // tick of the last dispatch
	memory float64 // dispatched work, decayed by later dispatches
}

// halfLife is how many dispatches halve a node's memory of its work.
const halfLife = 32

// recent is the decayed work at tick.
func (n *node) recent(tick uint64) float64 {
	return n.memory * math.Exp2(-float64(tick-n.last)/halfLife)
}

func (n *node) use(tick uint64, work float64) {
	n.memory = n.recent(tick) + work
	n.last = tick
}

// table is the snapshot as choices need it, made once a version.
type table struct {
	version, generation uint64
	models              map[string]*model
}

// model is the members that serve one model, in classes: members of a class
// are the same in everything that compatibility compares.
type model struct {
	name              string
	prefill, decode   []class
	compatible        [][]bool // by prefill class, decode class
	nPrefill, nDecode int      // members of each role, whatever their state
}

type class struct {
	rep   *fleet.Instance
	key   classKey
	nodes []*node
}

type classKey struct {
	dialect, fingerprint, tokenizer, numerics string
	layout                                    fleet.Layout
	version                                   string
	protoMin, protoMax                        int
	convert                                   bool
}

func keyOf(i *fleet.Instance) classKey {
	return classKey{i.Dialect, i.ModelFingerprint, i.TokenizerFingerprint, i.Numerics, i.Layout, i.Version, i.ProtocolMin, i.ProtocolMax, i.Convert}
}

// refresh makes the table of v unless it is the present one.
func (p *Picker) refresh(v View) *table {
	if p.table != nil && p.table.version == v.Snapshot.Version && p.table.generation == v.Generation {
		return p.table
	}
	t := &table{version: v.Snapshot.Version, generation: v.Generation, models: map[string]*model{}}
	seen := map[nodeKey]bool{}
	for i := range v.Snapshot.Members {
		mem := &v.Snapshot.Members[i]
		m := t.models[mem.Model]
		if m == nil {
			m = &model{name: mem.Model}
			t.models[mem.Model] = m
		}
		classes := &m.prefill
		if mem.Role == fleet.Decode {
			classes = &m.decode
			m.nDecode++
		} else {
			m.nPrefill++
		}
		key := nodeKey{mem.ID, mem.Epoch}
		seen[key] = true
		if !mem.Usable() || v.Eligible != nil && !v.Eligible(mem) {
			continue
		}
		n := p.nodes[key]
		if n == nil {
			n = &node{key: key}
			p.nodes[key] = n
		}
		n.at = i
		addTo(classes, &mem.Instance, n)
	}
	for _, m := range t.models {
		m.compatible = make([][]bool, len(m.prefill))
		for i := range m.prefill {
			m.compatible[i] = make([]bool, len(m.decode))
			for j := range m.decode {
				m.compatible[i][j] = fleet.Compatible(m.prefill[i].rep, m.decode[j].rep) == nil
			}
		}
	}
	for key, n := range p.nodes {
		if !seen[key] && n.legs == 0 {
			delete(p.nodes, key)
		}
	}
	p.table = t
	return t
}

func addTo(classes *[]class, inst *fleet.Instance, n *node) {
	key := keyOf(inst)
	for i := range *classes {
		if (*classes)[i].key == key {
			(*classes)[i].nodes = append((*classes)[i].nodes, n)
			return
		}
	}
	*classes = append(*classes, class{rep: inst, key: key, nodes: []*node{n}})
}

func (m *model) ready() bool {
	for i := range m.decode {
		if m.decode[i].rep.Alone() {
			return true
		}
	}
	for _, row := range m.compatible {
		for _, ok := range row {
			if ok {
				return true
			}
		}
	}
	return false
}

// why says why a model has no pair, for the error's reader.
func (m *model) why(v View) string {
	switch {
	case m.nDecode > 0 && len(m.decode) > 0 && m.ready():
		return "the remaining pairs have failed it already"
	case m.nPrefill == 0:
		return "there is no prefill worker"
	case m.nDecode == 0:
		return "there is no decode worker"
	case len(m.prefill) == 0:
		return "no prefill worker is live and probed" + m.refusal(v)
	case len(m.decode) == 0:
		return "no decode worker is live and probed" + m.refusal(v)
	}
	p, d := m.prefill[0].rep, m.decode[0].rep
	return fmt.Sprintf("%s and %s are incompatible, %v", p.ID, d.ID, fleet.Compatible(p, d))
}

// refusal is why a live worker of the model cannot even be probed, if there is
// such a one.
func (m *model) refusal(v View) string {
	for _, r := range v.Snapshot.Refusals() {
		if mem := v.Snapshot.Get(r.ID); mem != nil && mem.Model == m.name {
			return "; " + r.String()
		}
	}
	return ""
}
