// Package fleet is who is there: workers announce themselves on NATS, and
// every reader holds an immutable snapshot of them. It decides liveness
// (live, suspect, dead) and pair compatibility; it never routes.
package fleet

import "github.com/xpyd/xpyd/kvlayout"

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
	GPU          GPU     `json:"gpu,omitzero"`
}

// GPU is what a worker's GPU says of itself, whoever uses it; 0 is what it does
// not say. Shown, never compared.
type GPU struct {
	Busy        float64 `json:"busy"` // 0..1 of the last moment
	MemoryUsed  int64   `json:"memory_used"`
	MemoryTotal int64   `json:"memory_total"`
	Watts       float64 `json:"watts"`
	Celsius     float64 `json:"celsius"`
}

// Instance is one worker's announcement.
type Instance struct {
	ID       string `json:"id"`    // stable across restarts when configured, e.g. "prefill-0"
	Epoch    uint64 `json:"epoch"` // new at every start
	Role     Role   `json:"role"`
	URL      string `json:"url"`                 // http://host:port of its HTTP listener
	KVAddr   string `json:"kv_addr"`             // host:port of its kvconn listener
	KVLocal  string `json:"kv_local,omitempty"`  // "shm:NAME": the same, for workers with the same Machine
	KVDevice string `json:"kv_device,omitempty"` // "cudaipc:NAME": the same, between their GPUs
	Machine  string `json:"machine,omitempty"`   // boot id and user of its process
	// Secrets names the fleet secrets that it accepts, the newest first
	// (trust.Ring.IDs); empty: it trusts everyone.
	Secrets  string `json:"secrets,omitempty"`
	KVPaths  string `json:"kv_paths,omitempty"` // how it reaches its prefill workers, in words
	Dialect  string `json:"dialect"`            // "native", or of a foreign engine: router/dialect
	Model    string `json:"model"`              // the name clients use
	Build    string `json:"build"`              // shown, never compared
	Draining bool   `json:"draining,omitempty"`

	ProtocolMin int `json:"protocol_min"` // kvconn protocol range
	ProtocolMax int `json:"protocol_max"`

	ModelFingerprint     string        `json:"model_fingerprint"`
	TokenizerFingerprint string        `json:"tokenizer_fingerprint"`
	Numerics             string        `json:"numerics"`
	Layout               kvlayout.Form `json:"layout"`
	Convert              bool          `json:"kv_convert,omitempty"`   // rows of another dtype may be converted
	Unchecked            bool          `json:"kv_unchecked,omitempty"` // digests are not checked where the peer says so too; shown, never compared

	// What a foreign engine's dialect needs to know of it.
	Version   string `json:"version,omitempty"`   // of the engine; both of a pair must agree if both are known
	Bootstrap string `json:"bootstrap,omitempty"` // host:port where the other role finds it
	EngineID  string `json:"engine_id,omitempty"`
	TP        int    `json:"tp,omitempty"`       // tensor-parallel ranks, 0 means 1
	PP        int    `json:"pp,omitempty"`       // pipeline stages, 0 means 1
	DPRanks   int    `json:"dp_ranks,omitempty"` // data-parallel ranks, 0 means 1

	// Where its KV events are published and repeated, host:port of rank 0; the
	// ranks after it are at the ports after that.
	KVEvents string `json:"kv_events,omitempty"`
	KVReplay string `json:"kv_replay,omitempty"`
	KVTopic  string `json:"kv_topic,omitempty"` // prefix of the topics that are its own
	// KVEventsOpen: whoever connects gets them, though it has Secrets.
	KVEventsOpen bool `json:"kv_events_open,omitempty"`
	// Topology is where it is, from the widest label to the narrowest:
	// "zone-a/rack-3". It is never compared for compatibility.
	Topology string `json:"topology,omitempty"`

	MaxModelLen int   `json:"max_model_len"`      // tokens, prompt and output
	Blocks      int   `json:"blocks"`             // blocks in the pool
	KVBytes     int64 `json:"kv_bytes,omitempty"` // size of the pool; shown
	MaxBatch    int   `json:"max_batch"`
	PID         int   `json:"pid"`
	Load        Load  `json:"load"`
}
