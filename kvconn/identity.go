package kvconn

import (
	"strconv"

	"github.com/xpyd/xpyd/kvlayout"
)

// ProtocolMin and ProtocolMax are the wire versions that this build speaks; two peers
// use the highest that both speak. Development builds called theirs 1 to 3, so such a
// build and this one refuse each other by their ranges.
const (
	ProtocolMin = 4
	ProtocolMax = 4
)

// PeerID names one run of one worker. A restart has a new Epoch.
type PeerID struct {
	ID    string `json:"id"`
	Epoch uint64 `json:"epoch"`
}

func (p PeerID) String() string { return p.ID + "@" + strconv.FormatUint(p.Epoch, 10) }

// Identity is what a worker says about itself in the handshake.
type Identity struct {
	PeerID
	ModelFingerprint     string // hash of configuration and tensor bytes
	TokenizerFingerprint string
	Numerics             string // "cpu-f32-1": blocks are shared only between equal strings
	Layout               kvlayout.Layout
	Build                string // shown, never compared
}
