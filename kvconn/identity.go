package kvconn

import (
	"fmt"
	"strconv"
)

// ProtocolMin and ProtocolMax are the wire versions that this build speaks. Two
// peers use the highest version that both speak. There is one: what was spoken
// while this was being made called itself 1 and 2, so that such a build and this
// one refuse each other by their ranges.
const (
	ProtocolMin = 3
	ProtocolMax = 3
)

// PeerID names one run of one worker. A restart has a new Epoch.
type PeerID struct {
	ID    string `json:"id"`
	Epoch uint64 `json:"epoch"`
}

func (p PeerID) String() string { return p.ID + "@" + strconv.FormatUint(p.Epoch, 10) }

// Group is a run of layers that keep their KV in the same shape. A model has
// one group today; latent attention, sliding windows and pipeline stages will
// have several, laid one after the other in layer order.
type Group struct {
	Kind     string `json:"kind"`      // "full"
	Layers   int    `json:"layers"`    // layers in this group
	KVHeads  int    `json:"kv_heads"`  // heads of each of K and V
	HeadDim  int    `json:"head_dim"`  // elements of a row
	RowBytes int    `json:"row_bytes"` // bytes of one (layer, K or V, head, position) row
	DType    string `json:"dtype"`     // "f32", "bf16", "f16"
	Window   int    `json:"window"`    // sliding window in tokens; 0 is none
}

// Layout is the geometry of a worker's KV pool. BlockTokens may differ between
// peers: the sender cuts rows to the receiver's blocks. So may the dtype, where
// both sides allow it.
type Layout struct {
	Groups      []Group `json:"groups"`
	BlockTokens int     `json:"block_tokens"`
}

// Layers is the number of layers over all groups.
func (l Layout) Layers() int {
	n := 0
	for _, g := range l.Groups {
		n += g.Layers
	}
	return n
}

// Group returns the group that holds layer, counted over all groups.
func (l Layout) Group(layer int) (Group, bool) {
	if layer < 0 {
		return Group{}, false
	}
	for _, g := range l.Groups {
		if layer < g.Layers {
			return g, true
		}
		layer -= g.Layers
	}
	return Group{}, false
}

// RowsBytes is the size of n packed positions of one layer; see
// Group.PackedBytes.
func (l Layout) RowsBytes(layer, n int) int {
	g, _ := l.Group(layer)
	return g.PackedBytes(n)
}

// Bounds of a layout. They keep every product of its fields inside an int and
// every allocation that a peer can ask for inside a few hundred megabytes.
const (
	maxGroups      = 64
	maxLayers      = 1024
	maxKVHeads     = 1024
	maxHeadDim     = 1 << 16
	maxRowBytes    = 1 << 20
	maxBlockTokens = 256
	maxUnitPayload = 256 << 20 // bytes of one block of one layer
)

func (l Layout) validate() error {
	if l.BlockTokens < 1 || l.BlockTokens > maxBlockTokens {
		return fmt.Errorf("layout: block_tokens %d is not in 1..%d", l.BlockTokens, maxBlockTokens)
	}
	if len(l.Groups) < 1 || len(l.Groups) > maxGroups {
		return fmt.Errorf("layout: %d groups, want 1..%d", len(l.Groups), maxGroups)
	}
	layers := 0
	for i, g := range l.Groups {
		in := func(v, max int) bool { return v >= 1 && v <= max }
		if !in(g.Layers, maxLayers) || !in(g.KVHeads, maxKVHeads) || !in(g.HeadDim, maxHeadDim) ||
			!in(g.RowBytes, maxRowBytes) || g.Window < 0 || g.Window > 1<<30 || len(g.Kind) > 64 || len(g.DType) > 64 {
			return fmt.Errorf("layout: group %d is out of range: %+v", i, g)
		}
		if g.PackedBytes(l.BlockTokens) > maxUnitPayload {
			return fmt.Errorf("layout: group %d: a block of a layer is over %d bytes", i, maxUnitPayload)
		}
		layers += g.Layers
	}
	if layers > maxLayers {
		return fmt.Errorf("layout: %d layers, at most %d", layers, maxLayers)
	}
	return nil
}

// maxUnit is the largest unit payload and head count at this block size.
func (l Layout) maxUnit(blockTokens int) (payload, heads int) {
	for _, g := range l.Groups {
		payload = max(payload, g.PackedBytes(blockTokens))
		heads = max(heads, g.KVHeads)
	}
	return payload, heads
}

// Identity is what a worker says of itself in the handshake.
type Identity struct {
	PeerID
	ModelFingerprint     string // hash of configuration and tensor bytes
	TokenizerFingerprint string
	Numerics             string // "cpu-f32-1": blocks are shared only between equal strings
	Layout               Layout
	Build                string // shown, never compared
}
