// Package kvlayout describes the KV cache of a model: which rows each layer
// keeps, how they are packed into bytes, and which layouts a peer may announce.
// Pools, tiers, transports and announcements all use it; no other package
// multiplies heads by row bytes. DESIGN.md explains the model.
//
// Non-goals: the digest function and the rows themselves (package kernels),
// and converting elements (package kvconn/convert).
package kvlayout

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Layout is the geometry of one worker's KV pool.
type Layout struct {
	BlockTokens int     `json:"block_tokens"` // positions of a block
	Groups      []Group `json:"groups"`
}

// Group is a set of model layers that keep their rows alike. Every layer of a layout is
// in exactly one group.
type Group struct {
	Kind   string  `json:"kind"` // Full, Window or Latent
	Layers Layers  `json:"layers"`
	Planes []Plane `json:"planes"`
	Heads  Heads   `json:"heads"`
	Window int     `json:"window,omitempty"` // positions that attention looks back; 0: all
	DType  DType   `json:"dtype"`
	Scale  DType   `json:"scale,omitempty"` // F32: one behind each row; "": rows have none
}

// Kinds of attention. They are compared and shown, never interpreted.
const (
	Full   = "full"
	Window = "window"
	Latent = "latent" // multi-head latent attention: one head for all query heads
)

// Plane is one of the rows that a head keeps of each position: K, V, or what a model
// has instead.
type Plane struct {
	Name string `json:"name"`
	Dim  int    `json:"dim"` // elements of a row
}

// Heads are the KV heads First .. First+Count-1 of a model's Total: all of them,
// or those of a tensor-parallel rank.
type Heads struct {
	First int `json:"first,omitempty"`
	Count int `json:"count"`
	Total int `json:"total"`
}

func (h Heads) String() string { return fmt.Sprintf("%d+%d of %d", h.First, h.Count, h.Total) }

// Plain is the layout of a model whose layers are all alike, with K and V rows of the
// same width, such as Llama. F8E4M3 rows have a scale each.
func Plain(layers, heads, dim, blockTokens int, dtype DType) Layout {
	g := Group{Kind: Full, Layers: Run(0, layers), Planes: KV(dim), Heads: Heads{Count: heads, Total: heads}, DType: dtype}
	if dtype == F8E4M3 {
		g.Scale = F32
	}
	return Layout{BlockTokens: blockTokens, Groups: []Group{g}}
}

// OfLatent is the layout of a model whose layers all attend to a latent and a rotated key, one
// of each for all query heads, such as DeepSeek's. F8E4M3 rows have a scale each.
func OfLatent(layers, latent, rope, blockTokens int, dtype DType) Layout {
	l := Plain(layers, 1, latent, blockTokens, dtype)
	l.Groups[0].Kind, l.Groups[0].Planes = Latent, []Plane{{"latent", latent}, {"rope", rope}}
	return l
}

// KV are the planes of ordinary attention.
func KV(dim int) []Plane { return []Plane{{"k", dim}, {"v", dim}} }

// Layers is the number of layers of all groups.
func (l Layout) Layers() int {
	n := 0
	for i := range l.Groups {
		n += len(l.Groups[i].Layers)
	}
	return n
}

// BlockBytes is the size of one block of all layers.
func (l Layout) BlockBytes() int {
	n := 0
	for i := range l.Groups {
		r := l.Groups[i].rows(l.BlockTokens)
		n += len(l.Groups[i].Layers) * r.BlockBytes()
	}
	return n
}

// String names everything in the layout: equal strings are equal layouts.
func (l Layout) String() string {
	s := make([]string, len(l.Groups))
	for i := range s {
		s[i] = l.Groups[i].String()
	}
	return fmt.Sprintf("blocks of %d: %s", l.BlockTokens, strings.Join(s, "; "))
}

func (g *Group) String() string {
	s := fmt.Sprintf("%s layers %v, heads %v, %s %s", g.Kind, g.Layers, g.Heads, planes(g.Planes), g.DType)
	if g.Scale != "" {
		s += " scaled by " + string(g.Scale)
	}
	if g.Window > 0 {
		s += ", window " + strconv.Itoa(g.Window)
	}
	return s
}

func planes(p []Plane) string {
	s := make([]string, len(p))
	for i, v := range p {
		s[i] = v.Name + ":" + strconv.Itoa(v.Dim)
	}
	return strings.Join(s, ",")
}

// Bounds of what Validate accepts. They keep every product of a layout's numbers
// inside an int, and digest coordinates inside their fields (Coordinates).
const (
	MaxLayers      = 1024
	MaxHeads       = 1024 // of one group, held by one worker
	MaxPlanes      = 4
	MaxBlockTokens = 256
	MaxBlockBytes  = 256 << 20 // of one layer
	MaxEncoded     = 32 << 10  // bytes of Encode, of a valid layout

	maxGroups = 16
	maxTotal  = 1 << 14
	maxDim    = 1 << 20
	maxWindow = 1 << 30
	maxName   = 32
)

// Validate reports the first error of a layout. Everything else in this package expects
// a valid one, except Compare, String and Encode.
func (l Layout) Validate() error {
	if l.BlockTokens < 1 || l.BlockTokens > MaxBlockTokens {
		return fmt.Errorf("layout: block_tokens %d is not in 1..%d", l.BlockTokens, MaxBlockTokens)
	}
	if len(l.Groups) < 1 || len(l.Groups) > maxGroups {
		return fmt.Errorf("layout: %d groups, want 1..%d", len(l.Groups), maxGroups)
	}
	var all Layers
	for i := range l.Groups {
		if err := l.Groups[i].validate(l.BlockTokens); err != nil {
			return fmt.Errorf("layout: groups[%d]: %w", i, err)
		}
		if all = append(all, l.Groups[i].Layers...); len(all) > MaxLayers {
			return fmt.Errorf("layout: over %d layers", MaxLayers)
		}
	}
	slices.Sort(all)
	for i, n := range all {
		if i != n {
			return fmt.Errorf("layout: layer %d is in no group, or in two", min(i, n))
		}
	}
	return nil
}

func (g *Group) validate(blockTokens int) error {
	h := g.Heads
	switch {
	case !name(g.Kind):
		return fmt.Errorf("kind %q", clip(g.Kind))
	case len(g.Layers) < 1 || !slices.IsSorted(g.Layers) || g.Layers[0] < 0:
		return fmt.Errorf("layers are out of range")
	case len(g.Planes) < 1 || len(g.Planes) > MaxPlanes:
		return fmt.Errorf("%d planes, want 1..%d", len(g.Planes), MaxPlanes)
	case h.Count < 1 || h.Count > MaxHeads || h.Total < 1 || h.Total > maxTotal || h.First < 0 || h.First > h.Total-h.Count:
		return fmt.Errorf("heads %v are out of range", h)
	case g.Window < 0 || g.Window > maxWindow:
		return fmt.Errorf("window %d is out of range", g.Window)
	case g.DType.Bits() == 0:
		return fmt.Errorf("dtype %q is unknown", clip(string(g.DType)))
	case g.Scale != "" && g.Scale != F32:
		return fmt.Errorf("scale %q: want %q or none", clip(string(g.Scale)), F32)
	}
	for i, p := range g.Planes {
		if !name(p.Name) || p.Dim < 1 || p.Dim > maxDim || p.Dim*g.DType.Bits()%8 != 0 {
			return fmt.Errorf("planes[%d]: %q of %d elements %s is out of range", i, clip(p.Name), p.Dim, g.DType)
		}
	}
	if r := g.rows(blockTokens); r.BlockBytes() > MaxBlockBytes {
		return fmt.Errorf("a block of a layer is over %d bytes", MaxBlockBytes)
	}
	return nil
}

// name reports whether s is a short word of plain characters.
func name(s string) bool {
	return s != "" && len(s) <= maxName && !strings.ContainsFunc(s, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' && c != '-'
	})
}

func clip(s string) string { return s[:min(len(s), maxName)] }

// Encode is the layout's form on every wire and in every file: its JSON.
func (l Layout) Encode() []byte {
	b, err := json.Marshal(l)
	if err != nil { // a Layout has nothing that JSON cannot hold
		panic(err)
	}
	return b
}

// Decode reads and validates a peer's encoded layout.
func Decode(b []byte) (l Layout, err error) {
	if len(b) > MaxEncoded {
		return Layout{}, fmt.Errorf("layout: %d bytes, at most %d", len(b), MaxEncoded)
	}
	if err := json.Unmarshal(b, &l); err != nil {
		return Layout{}, fmt.Errorf("layout: %w", err)
	}
	if err := l.Validate(); err != nil {
		return Layout{}, err
	}
	return l, nil
}
