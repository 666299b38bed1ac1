package grammar

// node is a stack of rules that are being read, as a graph: all readings of the text that are
// inside a rule begun at the same place share one node. A node is immutable once the place
// where it was begun is behind.
type node struct {
	id    uint64
	known bool   // one of the grammar's shared nodes
	born  uint64 // the place in the text: a number, different for each
	depth int32
	edges []edge // where its rule may return to; none: the text's end
}

type edge struct {
	ret    *state
	parent *node
}

// config is one reading of the text so far: a state within the rule of top, and the stack.
type config struct {
	at  *state
	top *node
}

const (
	maxConfigs = 256    // readings at once
	maxEdges   = 1024   // new edges at one place
	maxStack   = 10_000 // depth
)

// reader steps configurations. It is one goroutine's; its buffers are its own.
type reader struct {
	m      *machine
	nodes  func() uint64 // ids of nodes and places
	fresh  []freshNode
	bottom *node
}

type freshNode struct {
	rule int32
	n    *node
}

// read appends to out[:0] what the configurations in set become behind byte b. None: the
// text cannot go on so.
func (r *reader) read(out, set []config, b byte) []config {
	out = out[:0]
	c := r.m.class[b]
	for _, s := range set {
		if t := r.m.step(s.at, c); t != r.m.dead {
			out = append(out, config{t, s.top})
		}
	}
	return r.close(out)
}

// close adds to set, which has just been stepped, what follows without reading: the returns
// from rules that are over, and the beginnings of rules that are called. It returns none if
// that is more than the bounds allow.
func (r *reader) close(set []config) []config {
	plain := true
	for _, s := range set {
		if s.at.busy || (s.at.final && s.top != r.bottom) {
			plain = false
			break
		}
	}
	if plain {
		return set
	}
	place := r.nodes()
	r.fresh = r.fresh[:0]
	edges := 0
	var index map[config]bool
	add := func(c config) {
		if c.at == r.m.dead {
			return
		}
		if index == nil {
			for _, s := range set {
				if s == c {
					return
				}
			}
			if len(set) >= 24 {
				index = make(map[config]bool, 64)
				for _, s := range set {
					index[s] = true
				}
			}
		} else if index[c] {
			return
		}
		if index != nil {
			index[c] = true
		}
		set = append(set, c)
	}
	for i := 0; i < len(set); i++ {
		if len(set) > maxConfigs || edges > maxEdges {
			return set[:0]
		}
		s := set[i]
		if s.at.final && s.top.born != place {
			for _, e := range s.top.edges {
				add(config{e.ret, e.parent})
			}
		}
		if !s.at.busy {
			continue
		}
		for _, call := range r.m.edges(s.at) {
			n := r.begun(call.rule)
			if n == nil {
				n = &node{id: r.nodes(), born: place}
				r.fresh = append(r.fresh, freshNode{call.rule, n})
				add(config{r.m.start(call.rule), n})
			}
			if r.m.nullable[call.rule] {
				add(config{call.ret, s.top})
			}
			before := len(n.edges)
			if call.ret.final && len(call.ret.leaves) == 0 && s.top.born != place && s.top != r.bottom {
				// A call at the end of its rule returns to where the rule returns.
				for _, e := range s.top.edges {
					n.link(e)
				}
			} else {
				n.link(edge{call.ret, s.top})
			}
			edges += len(n.edges) - before
			if n.depth > maxStack {
				return set[:0]
			}
		}
	}
	return set
}

// begun is the node of a rule that was already called at this place.
func (r *reader) begun(rule int32) *node {
	for _, f := range r.fresh {
		if f.rule == rule {
			return f.n
		}
	}
	return nil
}

func (n *node) link(e edge) {
	for _, old := range n.edges {
		if old == e {
			return
		}
	}
	n.edges = append(n.edges, e)
	if e.parent != n && e.parent.depth >= n.depth {
		n.depth = e.parent.depth + 1
	}
}
