package bind

import (
	"slices"
	"strings"
	"sync"

	"github.com/xpyd/xpyd/internal/answer"
)

// Where an answer is free until a call begins, a trigger is what begins one: from there on the call is bound. Triggers are
// found in the text, wherever tokens cut it; a token in which there is more text behind one may not come.

// trigger is a text that begins a call, and how it goes on.
type trigger struct {
	text  string
	later bool // only behind another call
	then  []option
}

// finder finds triggers in the tokens of an answer, all at once.
type finder struct {
	triggers []trigger
	nodes    []node
	first    [256]bool // bytes that begin a trigger
	shortest int
	tokens   [][]byte

	mu   sync.Mutex
	torn map[tear][]int32
}

// node is a text that begins a trigger, or several.
type node struct {
	next map[byte]int32
	back int32 // the longest end of it that is another node
	ends int32 // the trigger that it is, or that ends with it; -1: none
}

// tear is where a token would come: behind the text of a node, which has begun behind another call or not.
type tear struct {
	at    int32
	later bool
}

func newFinder(list []trigger, tokens [][]byte) *finder {
	f := &finder{triggers: list, nodes: []node{{ends: -1}}, tokens: tokens, torn: map[tear][]int32{}, shortest: 1 << 20}
	for i, t := range list {
		at := int32(0)
		for _, b := range []byte(t.text) {
			n, ok := f.nodes[at].next[b]
			if !ok {
				n = int32(len(f.nodes))
				if f.nodes[at].next == nil {
					f.nodes[at].next = map[byte]int32{}
				}
				f.nodes[at].next[b] = n
				f.nodes = append(f.nodes, node{ends: -1})
			}
			at = n
		}
		if f.nodes[at].ends < 0 {
			f.nodes[at].ends = int32(i)
		}
		f.first[t.text[0]] = true
		f.shortest = min(f.shortest, len(t.text))
	}
	queue := []int32{0}
	for len(queue) > 0 { // the shorter ones first
		at := queue[0]
		queue = queue[1:]
		for b, n := range f.nodes[at].next {
			if at != 0 {
				f.nodes[n].back = f.step(f.nodes[at].back, b)
			}
			if f.nodes[n].ends < 0 {
				f.nodes[n].ends = f.nodes[f.nodes[n].back].ends
			}
			queue = append(queue, n)
		}
	}
	return f
}

func (f *finder) step(at int32, b byte) int32 {
	for {
		if n, ok := f.nodes[at].next[b]; ok {
			return n
		}
		if at == 0 {
			return 0
		}
		at = f.nodes[at].back
	}
}

// feed goes on behind a node. It returns where that leads, or the trigger that was found and the text behind it.
func (f *finder) feed(at int32, later bool, text []byte) (now int32, found *trigger, rest []byte) {
	for i, b := range text {
		at = f.step(at, b)
		if n := f.nodes[at].ends; n >= 0 && (later || !f.triggers[n].later) {
			return 0, &f.triggers[n], text[i+1:]
		}
	}
	return at, nil, nil
}

// tears lists tokens that may not come: they would hide the begin of a call.
func (f *finder) tears(at int32, later bool) []int32 {
	f.mu.Lock()
	defer f.mu.Unlock()
	key := tear{at, later}
	list, ok := f.torn[key]
	if ok {
		return list
	}
	var goesOn [256]bool
	for n := at; n != 0; n = f.nodes[n].back {
		for b := range f.nodes[n].next {
			goesOn[b] = true
		}
	}
	for id, text := range f.tokens {
		if len(text) < 2 || !goesOn[text[0]] && (len(text) <= f.shortest || !slices.ContainsFunc(text, func(b byte) bool { return f.first[b] })) {
			continue
		}
		if _, found, rest := f.feed(at, later, text); found != nil && len(rest) > 0 {
			list = append(list, int32(id))
		}
	}
	f.torn[key] = list
	return list
}

// triggers are what begins a call in a format, and how it goes on: marks, or where there are none the begins of calls. apart: of
// the latter each stands for itself.
func (b *Binder) triggers(calls *Calls, how *answer.Calling, text func(Tool) func() (matcher, error)) (list []trigger, apart bool) {
	for _, m := range answer.ToolFormat(calls.Format).Triggers() {
		t := trigger{text: m.Text, later: m.Later}
		for _, tool := range calls.Tools {
			t.then = append(t.then, b.option(how, calls.First, m.Rest(tool.Name), text(tool)))
		}
		list = append(list, t)
	}
	if list != nil {
		return list, false
	}
	for _, tool := range calls.Tools {
		begin := how.Begin(tool.Name)
		if !how.JSON() { // Python's: only where a list begins
			begin = "[" + begin
		} else if tool.Free { // nothing is bound in it
			continue
		}
		for _, s := range spellings(begin) {
			list = append(list, trigger{text: s, then: []option{{begin: text(tool)}}})
		}
	}
	return list, how.JSON()
}

// spellings are the ways to write the begin of an object.
func spellings(begin string) (list []string) {
	list = []string{begin}
	if head, ok := strings.CutSuffix(begin, `"arguments":`); ok {
		list = append(list, head+`"parameters":`)
	} else if head, ok := strings.CutSuffix(begin, `"parameters":`); ok {
		list = append(list, head+`"arguments":`)
	}
	for _, sep := range []string{": \"", ", \""} {
		for _, s := range list {
			if other := strings.Replace(s, sep, strings.Replace(sep, " ", "", 1), 1); other != s {
				list = append(list, other)
			}
		}
	}
	return list
}
