package worker

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/redis"
	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/way"
)

// Config is one worker's settings; the key tags are its YAML keys.
type Config struct {
	// Join is the line that a router keeps in DATA/join-url: the fleet's NATS and its
	// secrets. JoinFile is a file with it, which is followed. With TrustEveryone whoever
	// reaches this worker may use it like the router.
	Join          string `key:"join" secret:"true"`
	JoinFile      string `key:"join_file"`
	TrustEveryone bool   `key:"trust_everyone"`

	ID   string `key:"id"`   // name in the fleet; empty: the role and a random suffix
	Role string `key:"role"` // "prefill" or "decode"; can be changed while it runs
	// Drained: it starts drained and gets no work before `xpyd undrain`.
	Drained bool `key:"drained"`

	Compute
	ServedName string `key:"served_name"` // what clients call the model; empty: its own name

	Listen    string `key:"listen"`    // HTTP
	KVListen  string `key:"kv_listen"` // kvconn
	Advertise string `key:"advertise"` // host that others dial; empty: found from listen
	// APIKeysFile has the keys of those who ask this worker without the fleet's secret,
	// such as a foreign proxy, in the router's format; empty: nobody may.
	APIKeysFile string   `key:"api_keys_file"`
	AllowHosts  []string `key:"allow_hosts"` // prefill hosts, besides the fleet's own, that a request may name

	Blocks      int           `key:"blocks"`        // blocks of the KV pool; 0: from kv_memory
	MaxModelLen int           `key:"max_model_len"` // tokens, prompt and output; 0: what model and pool allow
	MaxBatch    int           `key:"max_batch"`     // sequences a step; 0: 64 on the CPU, 256 on a GPU
	MaxWaiting  int           `key:"max_waiting"`   // requests that may queue
	StepTokens  int           `key:"step_tokens"`   // tokens a step, at most; 0: 512 on the CPU, 8192 on a GPU
	MaxStepTime time.Duration `key:"max_step_time"` // aim for a step with a prefill chunk
	QueueTime   time.Duration `key:"queue_time"`    // aim for the wait of prompts: steps are as large as that takes

	MaxBody config.Size `key:"max_body"` // bytes of a request body
	// MaxAnswer bounds an answer that does not stream: a request whose answer could become
	// larger is refused. AnswerMemory bounds all answers under way; requests wait for
	// their share.
	MaxAnswer    config.Size   `key:"max_answer"`
	AnswerMemory config.Size   `key:"answer_memory"`
	ReadTimeout  time.Duration `key:"read_timeout"`  // for a whole request to arrive
	StallTimeout time.Duration `key:"stall_timeout"` // a client that takes no bytes for so long is cut off
	DrainTimeout time.Duration `key:"drain_timeout"` // for running requests to finish at shutdown
	LeaseTime    time.Duration `key:"lease_time"`    // finished prompts wait so long for a foreign proxy's decode
	LeaseMax     time.Duration `key:"lease_max"`     // and so long at most, however often the proxy renews that
	TicketWait   time.Duration `key:"ticket_wait"`   // the router's leg waits so long for decode's ticket
	ReserveWait  time.Duration `key:"reserve_wait"`  // decode waits so long for free blocks

	// Topology says where the worker is, from the widest label to the narrowest, such as
	// "zone-a/rack-3". Routers prefer near pairs.
	Topology string `key:"topology"`

	KVEvents KVEvents `key:"kv_events"`
	Fleet    Fleet    `key:"fleet"`
	KV       KV       `key:"kv"`
	Log      Log      `key:"log"`
}

// Compute is what a worker computes, and on what; `xpyd up` has the same of all its workers.
type Compute struct {
	Model       string `key:"model"`        // empty: the embedded stories260k; a directory, a .gguf file, or hf:OWNER/NAME
	Device      string `key:"device"`       // "auto", "cpu" or "cuda"
	Threads     int    `key:"threads"`      // CPU threads; 0: all cores
	BlockTokens int    `key:"block_tokens"` // positions a KV block
	// KVMemory is the KV pool's size, used when blocks is 0. Auto is 256 MiB on
	// the CPU; on a GPU what GPUMemory leaves beside weights and scratch.
	KVMemory  config.AutoSize `key:"kv_memory"`
	GPUMemory float64         `key:"gpu_memory"` // part of the GPU's memory that this process takes in all
	// BatchInvariant gives a prompt the same tokens whatever the batch, the chunks
	// or the split, at some speed. On the CPU it is always so.
	BatchInvariant bool   `key:"batch_invariant"`
	DType          string `key:"dtype"`          // "auto" (fp16 for checkpoints whose torch_dtype is float16, else bf16), "bf16" or "fp16": of weights, activations and KV on a GPU
	Quantization   string `key:"quantization"`   // "auto" (as the checkpoint is), "none" or "fp8": of the layers' projections on a GPU
	KVCacheDType   string `key:"kv_cache_dtype"` // "auto", "bf16" or "fp8"; auto is as dtype on a GPU, f32 on the CPU
}

// Fleet says how to reach NATS. The TLS files are for NATS, for HTTP with routers and workers,
// and for KV over the network.
type Fleet struct {
	URL       string        // of the join line, nats://host:port, comma separated; empty is a worker of its own
	CredsFile string        `key:"creds_file"`
	TLSCert   string        `key:"tls_cert"`
	TLSKey    string        `key:"tls_key"`
	TLSCA     string        `key:"tls_ca"`
	Insecure  bool          `key:"insecure"` // allow NATS off this machine without credentials or TLS
	Heartbeat time.Duration `key:"heartbeat"`
}

// KV are the connector's settings; kvconn/DESIGN.md explains each deadline.
type KV struct {
	BulkConns        int             `key:"bulk_conns"`
	DialTimeout      time.Duration   `key:"dial_timeout"`
	HandshakeTimeout time.Duration   `key:"handshake_timeout"`
	AcceptTimeout    time.Duration   `key:"accept_timeout"`
	TicketTimeout    time.Duration   `key:"ticket_timeout"`
	PeerSilence      time.Duration   `key:"peer_silence"`
	Resends          int             `key:"resends"`
	MaxSessions      int             `key:"max_sessions"`
	Ways             []string        // what transport may be: way.Names
	Transport        string          `key:"transport"`          // "auto", the fastest for each peer, or the only one that may be taken
	MaxQuarantined   int             `key:"max_quarantined"`    // blocks; 0: a quarter of the pool
	Digest           string          `key:"digest"`             // "on"; "off" leaves digests unchecked where both workers say so, for measuring
	Convert          string          `key:"convert"`            // "refuse" or "allow" peers whose KV has another dtype
	DeviceRefill     string          `key:"device_refill"`      // "on" or "off": whether GPUs push into blocks of another size or dtype
	HostMemory       config.PoolSize `key:"host_memory"`        // host memory under the pool, or how many times the pool; 0: none
	SSDDir           string          `key:"ssd_dir"`            // folder of this worker alone, under host memory; empty: none
	SSDSize          config.Size     `key:"ssd_size"`           // what ssd_dir may fill
	SSDIO            string          `key:"ssd_io"`             // "auto", "io_uring" or "pread": how ssd_dir is read and written
	Store            string          `key:"store" secret:"url"` // of a Redis or Valkey that workers share, under host memory; empty: none
	StoreTTL         time.Duration   `key:"store_ttl"`          // what nobody wrote or read for so long leaves it
	StoreTimeout     time.Duration   `key:"store_timeout"`      // of an operation; later it counts as down
	StoreWrite       bool            `key:"store_write"`        // false: it is only read
	LoadTimeout      time.Duration   `key:"load_timeout"`       // what a request's prefix has not brought by then is computed
	MinLoadTokens    int             `key:"min_load_tokens"`    // fewer are computed rather than loaded
	WritePolicy      string          `key:"write_policy"`       // "through", "selective" or "back": when units are copied to the tier below
	WriteHits        int             `key:"write_hits"`         // of selective: requests that must have found a unit
	Eviction         string          `key:"eviction"`           // of host memory: "lru", "lfu" or "s3fifo"
	TTL              time.Duration   `key:"ttl"`                // older units of the tiers are not used; 0: however old
	PinShare         float64         `key:"pin_share"`          // most of each tier that pins may keep
	TenantShare      float64         `key:"tenant_share"`       // most of host memory, and of the SSD, that one cache salt may fill; 0: all
	LoadQuota        config.Size     `key:"load_quota"`         // bytes a second that loads may take; 0: any
	Peers            string          `key:"peers"`              // "on" or "off": whether prefixes are fetched from other workers and given to them
	PeerBring        string          `key:"peer_bring"`         // "on" or "off": whether a GPU computes behind what a peer gives
	PeerQuota        config.Size     `key:"peer_quota"`         // bytes a second that are given to them; 0: any
}

// convertAllow pairs workers that keep KV in different dtypes. Their blocks' numerics are mixed
// then, and the same tokens are no longer promised.
const convertAllow = "allow"

// Log is what is logged, and how.
type Log struct {
	Level  string `key:"level"`  // debug, info, warn or error
	Format string `key:"format"` // text or json
}

// DefaultConfig returns a worker's settings where nothing is set.
func DefaultConfig(role fleet.Role) Config {
	kv := kvconn.DefaultConfig()
	return Config{
		Role:    string(role),
		Compute: Compute{Device: "auto", BlockTokens: 16, GPUMemory: 0.9, DType: dtypeAuto, KVCacheDType: kvAuto, Quantization: quantAuto},
		Listen:  "127.0.0.1:0", KVListen: "127.0.0.1:0", MaxWaiting: 1024,
		MaxStepTime: 50 * time.Millisecond, QueueTime: 100 * time.Millisecond,
		MaxBody: 64 << 20, MaxAnswer: openai.MaxAnswer, AnswerMemory: 512 << 20, ReadTimeout: 30 * time.Second, StallTimeout: time.Minute, DrainTimeout: 30 * time.Second,
		LeaseTime: 30 * time.Second, LeaseMax: 8 * time.Minute, TicketWait: 10 * time.Second, ReserveWait: 10 * time.Second,
		KVEvents: KVEvents{Listen: "127.0.0.1:0", Replay: "127.0.0.1:0"},
		Fleet:    Fleet{Heartbeat: 250 * time.Millisecond},
		KV: KV{BulkConns: kv.BulkConns, DialTimeout: kv.DialTimeout, HandshakeTimeout: kv.HandshakeTimeout,
			AcceptTimeout: kv.AcceptTimeout, TicketTimeout: kv.TicketTimeout, PeerSilence: kv.PeerSilence, Resends: kv.Resends, MaxSessions: kv.MaxSessions, Ways: []string{way.Auto}, Transport: way.Auto, Digest: "on", Convert: "refuse", DeviceRefill: "on",
			SSDSize: 8 << 30, SSDIO: string(ssd.IOAuto), StoreTTL: 24 * time.Hour, StoreTimeout: 500 * time.Millisecond, StoreWrite: true, LoadTimeout: 500 * time.Millisecond, MinLoadTokens: 32,
			WritePolicy: string(tier.Through), WriteHits: 2, Eviction: string(host.LRU), PinShare: 0.25, Peers: "on", PeerBring: "on"},
		Log: Log{Level: "info", Format: "text"},
	}
}

func bad(key, format string, args ...any) error {
	return &config.KeyError{Key: key, Msg: fmt.Sprintf(format, args...)}
}

func oneOf(key, v string, allowed ...string) error {
	if slices.Contains(allowed, v) {
		return nil
	}
	return bad(key, "%q is not one of %s", v, strings.Join(allowed, ", "))
}

// valid checks what a GPU computes in and keeps, and what of it goes together. What only a
// GPU has is refused here when the device is the CPU, and when "auto" finds none at start.
func (c *Compute) valid() error {
	if err := errors.Join(oneOf("kv_cache_dtype", c.KVCacheDType, kvAuto, kvBF16, kvFP8), oneOf("dtype", c.DType, dtypeAuto, dtypeBF16, dtypeFP16),
		oneOf("quantization", c.Quantization, quantAuto, quantNone, quantFP8)); err != nil {
		return err
	}
	cpu := c.Device == "cpu"
	switch kv, fp16, fp8 := c.KVCacheDType, c.DType == dtypeFP16, c.Quantization == quantFP8; {
	case cpu && kv != kvAuto:
		return bad("kv_cache_dtype", "%s needs a GPU: the CPU keeps KV in f32 (%s)", kv, kvAuto)
	case cpu && c.DType != dtypeAuto:
		return bad("dtype", "%s needs a GPU: the CPU computes in f32 (%s)", c.DType, dtypeAuto)
	case cpu && fp8:
		return bad("quantization", "%s needs a GPU: the CPU computes in f32", quantFP8)
	case kv == kvFP8 && c.BatchInvariant:
		return bad("kv_cache_dtype", "%s and batch_invariant exclude each other", kv)
	case kv == kvFP8 && c.BlockTokens%16 != 0:
		return bad("kv_cache_dtype", "%s needs block_tokens to be a multiple of 16, not %d", kv, c.BlockTokens)
	case fp16 && kv != kvAuto:
		return bad("dtype", "%s and kv_cache_dtype %s exclude each other", c.DType, kv)
	case fp16 && fp8:
		return bad("dtype", "%s and quantization %s exclude each other", c.DType, quantFP8)
	case fp8 && c.BatchInvariant:
		return bad("quantization", "%s and batch_invariant exclude each other", quantFP8)
	}
	return nil
}

// What dtype may be.
const (
	dtypeAuto = "auto"
	dtypeBF16 = "bf16"
	dtypeFP16 = "fp16"
)

// What quantization may be.
const (
	quantAuto = "auto"
	quantNone = "none"
	quantFP8  = "fp8"
)

// What kv_cache_dtype may be.
const (
	kvAuto = "auto"
	kvBF16 = "bf16"
	kvFP8  = "fp8"
)

// Validate returns a *config.KeyError.
func (l Log) Validate() error {
	if err := oneOf("level", l.Level, "debug", "info", "warn", "error"); err != nil {
		return err
	}
	return oneOf("format", l.Format, "text", "json")
}

// Validate returns the first setting that is wrong, as a *config.KeyError. Log has a check of
// its own.
func (c *Config) Validate() error {
	onOff := []string{"on", "off"}
	for _, o := range []struct {
		key, value string
		allowed    []string
	}{
		{"role", c.Role, []string{"prefill", "decode"}},
		{"device", c.Device, []string{"auto", "cpu", "cuda"}},
		{"kv.transport", c.KV.Transport, c.KV.Ways},
		{"kv.digest", c.KV.Digest, onOff},
		{"kv.device_refill", c.KV.DeviceRefill, onOff},
		{"kv.convert", c.KV.Convert, []string{"refuse", convertAllow}},
		{"kv.peer_bring", c.KV.PeerBring, onOff},
		{"kv.peers", c.KV.Peers, onOff},
		{"kv.write_policy", c.KV.WritePolicy, []string{string(tier.Through), string(tier.Selective), string(tier.Back)}},
		{"kv.eviction", c.KV.Eviction, []string{string(host.LRU), string(host.LFU), string(host.S3FIFO)}},
		{"kv.ssd_io", c.KV.SSDIO, []string{string(ssd.IOAuto), string(ssd.IOUring), string(ssd.IOPread)}},
	} {
		if err := oneOf(o.key, o.value, o.allowed...); err != nil {
			return err
		}
	}
	if err := c.Compute.valid(); err != nil {
		return err
	}
	if err := c.KV.validTiers(); err != nil {
		return err
	}
	if c.ID != "" {
		if err := fleet.ValidID(c.ID); err != nil {
			return bad("id", "%v", err)
		}
	}
	if err := config.HostPort(c.Listen); err != nil {
		return bad("listen", "%v", err)
	}
	if _, _, _, err := kvconn.SplitPorts(c.KVListen); err != nil {
		return bad("kv_listen", "%q is not host:port or host:first-last", c.KVListen)
	}
	var wrong *trust.TLSError
	if err := trust.ValidTLS(c.Fleet.TLSCert, c.Fleet.TLSKey, c.Fleet.TLSCA); errors.As(err, &wrong) {
		return bad("fleet."+wrong.Key, "%v", wrong)
	}
	for _, a := range []struct{ key, addr string }{{"kv_events.listen", c.KVEvents.Listen}, {"kv_events.replay", c.KVEvents.Replay}} {
		if err := config.HostPort(a.addr); a.addr != "" && err != nil {
			return bad(a.key, "%v", err)
		}
	}
	if c.Join != "" && c.JoinFile != "" {
		return bad("join_file", "it and join (XPYD_JOIN) exclude each other")
	}
	for _, r := range []struct {
		key       string
		v, lo, hi int64
	}{
		{"threads", int64(c.Threads), 0, 4096},
		{"block_tokens", int64(c.BlockTokens), 1, 256},
		{"blocks", int64(c.Blocks), 0, 1 << 30},
		{"max_model_len", int64(c.MaxModelLen), 0, 1 << 30},
		{"max_batch", int64(c.MaxBatch), 0, 1 << 16},
		{"max_waiting", int64(c.MaxWaiting), 1, 1 << 20},
		{"step_tokens", int64(c.StepTokens), 0, 1 << 20},
		{"max_body", int64(c.MaxBody), 1 << 10, 1 << 31},
		{"max_answer", int64(c.MaxAnswer), 1 << 16, 1 << 31},
		{"answer_memory", int64(c.AnswerMemory), 1 << 20, 1 << 46},
		{"kv.bulk_conns", int64(c.KV.BulkConns), 1, 64},
		{"kv.resends", int64(c.KV.Resends), 0, 100},
		{"kv.max_sessions", int64(c.KV.MaxSessions), 1, 1 << 16},
		{"kv.max_quarantined", int64(c.KV.MaxQuarantined), 0, 1 << 30},
		{"kv.host_memory", max(0, int64(c.KV.HostMemory)), 0, 1 << 46},
		{"kv.ssd_size", int64(c.KV.SSDSize), 1 << 10, 1 << 50},
		{"kv.min_load_tokens", int64(c.KV.MinLoadTokens), 0, 1 << 30},
		{"kv.write_hits", int64(c.KV.WriteHits), 1, 1 << 20},
		{"kv.load_quota", int64(c.KV.LoadQuota), 0, 1 << 50},
		{"kv.peer_quota", int64(c.KV.PeerQuota), 0, 1 << 50},
	} {
		if r.v < r.lo || r.v > r.hi {
			return bad(r.key, "%d is not in %d..%d", r.v, r.lo, r.hi)
		}
	}
	if c.KVMemory != 0 && (c.KVMemory < 1<<10 || c.KVMemory > 1<<46) {
		return bad("kv_memory", "%d is not auto, nor in %d..%d", int64(c.KVMemory), 1<<10, int64(1)<<46)
	}
	if !(c.GPUMemory > 0 && c.GPUMemory <= 1) {
		return bad("gpu_memory", "%v is not in 0..1", c.GPUMemory)
	}
	for _, d := range []struct {
		key string
		v   time.Duration
	}{
		{"max_step_time", c.MaxStepTime}, {"queue_time", c.QueueTime}, {"read_timeout", c.ReadTimeout}, {"stall_timeout", c.StallTimeout}, {"drain_timeout", c.DrainTimeout},
		{"lease_time", c.LeaseTime}, {"ticket_wait", c.TicketWait}, {"reserve_wait", c.ReserveWait},
		{"fleet.heartbeat", c.Fleet.Heartbeat}, {"kv.dial_timeout", c.KV.DialTimeout}, {"kv.handshake_timeout", c.KV.HandshakeTimeout},
		{"kv.accept_timeout", c.KV.AcceptTimeout}, {"kv.ticket_timeout", c.KV.TicketTimeout}, {"kv.peer_silence", c.KV.PeerSilence},
		{"kv.load_timeout", c.KV.LoadTimeout}, {"kv.store_ttl", c.KV.StoreTTL}, {"kv.store_timeout", c.KV.StoreTimeout},
	} {
		if d.v <= 0 {
			return bad(d.key, "must be positive")
		}
	}
	if c.LeaseMax < c.LeaseTime {
		return bad("lease_max", "%v is less than lease_time, %v", c.LeaseMax, c.LeaseTime)
	}
	return nil
}

// validTiers checks the tiers below the pool, but for ranges.
func (k *KV) validTiers() error {
	if k.Store != "" {
		if _, err := redis.ParseURL(k.Store); err != nil {
			return bad("kv.store", "%v", err)
		}
	}
	switch {
	case k.SSDDir != "" && k.HostMemory == 0:
		return bad("kv.ssd_dir", "needs kv.host_memory: what comes from the SSD and goes there passes through it")
	case k.Store != "" && k.HostMemory == 0:
		return bad("kv.store", "needs kv.host_memory: what comes from the store and goes there passes through it")
	case k.TTL < 0:
		return bad("kv.ttl", "must not be negative")
	case !(k.PinShare >= 0 && k.PinShare <= 0.5):
		return bad("kv.pin_share", "%v is not in 0..0.5", k.PinShare)
	case !(k.TenantShare >= 0 && k.TenantShare <= 1):
		return bad("kv.tenant_share", "%v is not in 0..1", k.TenantShare)
	}
	return nil
}

func (c *Config) kvconn(id kvconn.Identity) kvconn.Config {
	kv := kvconn.DefaultConfig()
	kv.Identity = id
	kv.MaxSessions = c.KV.MaxSessions
	kv.Unchecked = c.KV.Digest == "off"
	kv.BulkConns, kv.Resends, kv.Convert = c.KV.BulkConns, c.KV.Resends, c.KV.Convert == convertAllow
	kv.DialTimeout, kv.HandshakeTimeout = c.KV.DialTimeout, c.KV.HandshakeTimeout
	kv.AcceptTimeout, kv.TicketTimeout, kv.PeerSilence = c.KV.AcceptTimeout, c.KV.TicketTimeout, c.KV.PeerSilence
	return kv
}
