// Package fleet knows the workers. They announce themselves on NATS, and every reader holds an
// immutable snapshot of them. The package decides who is live, suspect or dead and which pairs
// are compatible. It never routes.
package fleet

import (
	"reflect"

	"github.com/xpyd/xpyd/kvlayout"
)

// Role is what a worker does now; it can change while the worker runs.
type Role string

// Roles.
const (
	Prefill Role = "prefill"
	Decode  Role = "decode"
)

// Load is a worker's own report, refreshed with every heartbeat.
type Load struct {
	Running      int     `json:"running"`       // sequences in the batch
	Waiting      int     `json:"waiting"`       // sequences queued
	QueuedTokens int     `json:"queued_tokens"` // prompt tokens not yet computed
	KVUsed       float64 `json:"kv_used"`       // 0..1 of the block pool, held
	Steps        Steps   `json:"steps,omitzero"`
	GPU          GPU     `json:"gpu,omitzero"`
}

// Steps sums up a worker's steps since it started. Who takes the difference of two reports knows what its steps
// carried in between, and how long they took.
type Steps struct {
	Count     int64   `json:"count"`
	Seconds   float64 `json:"seconds"`
	Decodes   int64   `json:"decodes"`   // sequences that decoded, in all steps
	Context   int64   `json:"context"`   // their tokens, summed over them
	Prompt    int64   `json:"prompt"`    // tokens of prompts
	Positions float64 `json:"positions"` // before each of the latter, summed over them
}

// GPU is the load of a worker's GPU, by all its users; 0 means unknown. It is shown,
// never compared.
type GPU struct {
	Busy        float64 `json:"busy"` // 0..1, just now
	MemoryUsed  int64   `json:"memory_used"`
	MemoryTotal int64   `json:"memory_total"`
	Watts       float64 `json:"watts"`
	Celsius     float64 `json:"celsius"`
}

// Device is a GPU, or a part of one, that a worker computes on. It is shown, never compared. What is
// not known is "".
type Device struct {
	Name  string `json:"name,omitempty"`  // as a setting names it, by NVML's index or a part's UUID: "cuda:2"
	UUID  string `json:"uuid,omitempty"`  // "GPU-…", or of a part (MIG) "MIG-…"
	PCI   string `json:"pci,omitempty"`   // bus id, "0000:17:00.0"
	Model string `json:"model,omitempty"` // "NVIDIA H100 80GB HBM3"
}

// Instance is one worker's announcement.
type Instance struct {
	ID     string `json:"id"`    // stable across restarts when configured, e.g. "prefill-0"
	Epoch  uint64 `json:"epoch"` // new at every start
	Role   Role   `json:"role"`
	URL    string `json:"url"`     // http://host:port of its HTTP listener
	KVAddr string `json:"kv_addr"` // host:port of its kvconn listener, by which requests name it
	// KVWays are its addresses by ways faster than the network (kvconn/way): way → address.
	KVWays  map[string]string `json:"kv_ways,omitempty"`
	Machine string            `json:"machine,omitempty"` // way.Machine of its process
	// Secrets are trust.Ring.IDs of the fleet secrets that it accepts; "": it trusts everyone.
	Secrets  string `json:"secrets,omitempty"`
	KVPaths  string `json:"kv_paths,omitempty"` // how it reaches its prefill workers, for people
	Dialect  string `json:"dialect"`            // Native, or of a foreign engine: router/dialect
	Model    string `json:"model"`              // the name clients use
	Build    string `json:"build"`              // shown, never compared
	Draining bool   `json:"draining,omitempty"`
	WaitOnly bool   `json:"wait_only,omitempty"` // a drain lets its streams end there

	ProtocolMin int `json:"protocol_min"` // kvconn protocol range
	ProtocolMax int `json:"protocol_max"`

	ModelFingerprint     string        `json:"model_fingerprint"`
	TokenizerFingerprint string        `json:"tokenizer_fingerprint"`
	Numerics             string        `json:"numerics"`
	Parsers              string        `json:"parsers,omitempty"`  // how its answers are read: "hermes/qwen3" for calls and reasoning; "" if it does not say
	Grammars             bool          `json:"grammars,omitempty"` // it binds answers to grammars; of a decode that does not, no such request is asked
	Layout               kvlayout.Form `json:"layout"`
	Convert              bool          `json:"kv_convert,omitempty"`   // rows of another dtype may be converted
	Unchecked            bool          `json:"kv_unchecked,omitempty"` // digests are not checked where the peer says so too; shown, never compared

	TP int `json:"tp,omitempty"` // tensor-parallel ranks, 0 means 1; native workers of any two numbers fit

	// For the dialects of foreign engines.
	Version   string `json:"version,omitempty"`   // engine version; a pair's must be equal where both are known
	Bootstrap string `json:"bootstrap,omitempty"` // host:port where the other role finds it
	EngineID  string `json:"engine_id,omitempty"`
	PP        int    `json:"pp,omitempty"`       // pipeline stages, 0 means 1
	DPRanks   int    `json:"dp_ranks,omitempty"` // data-parallel ranks, 0 means 1

	// Where it publishes and replays KV events: host:port of rank 0. Rank n is at port+n.
	KVEvents string `json:"kv_events,omitempty"`
	KVReplay string `json:"kv_replay,omitempty"`
	KVTopic  string `json:"kv_topic,omitempty"` // prefix of its topics
	// KVEventsOpen means that anyone may subscribe, although it has Secrets.
	KVEventsOpen bool `json:"kv_events_open,omitempty"`
	// Topology is its place, widest label first: "zone-a/rack-3". Compatible ignores it.
	Topology string `json:"topology,omitempty"`

	MaxModelLen int   `json:"max_model_len"`      // tokens, prompt and output
	Blocks      int   `json:"blocks"`             // blocks in the pool
	KVBytes     int64 `json:"kv_bytes,omitempty"` // size of the pool; shown
	MaxBatch    int   `json:"max_batch"`
	// Gap is the time between tokens that it promises or keeps to, in seconds; 0: none.
	Gap     float64  `json:"gap,omitempty"`
	Devices []Device `json:"devices,omitempty"` // its GPUs, by rank
	PID     int      `json:"pid"`
	Load    Load     `json:"load"`
}

// Equal reports whether two announcements say the same.
func (i *Instance) Equal(j *Instance) bool { return reflect.DeepEqual(i, j) }
