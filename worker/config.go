package worker

import (
	"cmp"
	"slices"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/redis"
	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/kvlayout"
)

// Config is one worker's settings; the key tags are its YAML keys.
type Config struct {
	// Join is the line that a router keeps in DATA/join-url: the fleet's NATS and its secrets.
	// JoinFile is a file with it; changes of the file take effect. With TrustEveryone whoever
	// reaches this worker may use it like the router.
	Join          string `key:"join" secret:"true"`
	JoinFile      string `key:"join_file"`
	TrustEveryone bool   `key:"trust_everyone"`

	ID      string `key:"id"`      // name in the fleet; empty: the role and a random suffix
	Role    string `key:"role"`    // "prefill" or "decode"; can be changed while it runs
	Drained bool   `key:"drained"` // starts drained: no work before `xpyd undrain`

	Compute
	TensorParallel int `key:"tensor_parallel"` // ranks of this process, each with its share of the heads

	Listen    string `key:"listen"`    // HTTP
	KVListen  string `key:"kv_listen"` // kvconn
	Advertise string `key:"advertise"` // host that others dial; empty: found from listen
	// APIKeysFile has the keys of clients without the fleet's secret, such as a foreign proxy, in
	// the router's format; empty: there are none.
	APIKeysFile string   `key:"api_keys_file"`
	AllowHosts  []string `key:"allow_hosts"` // prefill hosts, besides the fleet's own, that a request may name

	Blocks      int           `key:"blocks"`        // blocks of the KV pool; 0: from kv_memory
	MaxBatch    int           `key:"max_batch"`     // sequences a step; 0: 64 on the CPU, 256 on a GPU
	MaxWaiting  int           `key:"max_waiting"`   // requests that may queue
	StepTokens  int           `key:"step_tokens"`   // tokens a step, at most; 0: 512 on the CPU, 8192 on a GPU
	MaxStepTime time.Duration `key:"max_step_time"` // aim for a step with a prefill chunk
	QueueTime   time.Duration `key:"queue_time"`    // aim for the wait of prompts: steps are as large as that takes
	Promises

	MaxBody config.Size `key:"max_body"` // bytes of a request body
	// MaxAnswer bounds an answer that does not stream: a request whose answer could become larger
	// is refused. AnswerMemory bounds all answers under way; requests wait for their share.
	MaxAnswer    config.Size   `key:"max_answer"`
	AnswerMemory config.Size   `key:"answer_memory"`
	ReadTimeout  time.Duration `key:"read_timeout"`  // for a whole request to arrive
	StallTimeout time.Duration `key:"stall_timeout"` // a client that takes no bytes for this long is cut off
	DrainTimeout time.Duration `key:"drain_timeout"` // for running requests to finish at shutdown
	LeaseTime    time.Duration `key:"lease_time"`    // how long finished prompts wait for a foreign proxy's decode
	LeaseMax     time.Duration `key:"lease_max"`     // the most, however often the proxy renews it
	TicketWait   time.Duration `key:"ticket_wait"`   // how long the router's leg waits for decode's ticket
	ReserveWait  time.Duration `key:"reserve_wait"`  // how long decode waits for free blocks

	// Topology is the worker's place, widest label first, such as "zone-a/rack-3". Routers prefer
	// near pairs.
	Topology string `key:"topology"`

	KVEvents KVEvents `key:"kv_events"`
	Fleet    Fleet    `key:"fleet"`
	KV       KV       `key:"kv"`
	Log      Log      `key:"log"`
}

// Compute says what a worker computes, and on what. All workers of `xpyd up` share it.
type Compute struct {
	Model       string `key:"model"`         // empty: the embedded stories260k; a directory, a .gguf file, or hf:OWNER/NAME
	ServedName  string `key:"served_name"`   // what clients call the model; empty: its own name
	MaxModelLen int    `key:"max_model_len"` // tokens, prompt and output; 0: what model and pool allow
	Device      string `key:"device"`        // "auto", "cpu", "cuda", or a GPU by NVML's index or its UUID: "cuda:2", "cuda:GPU-…", "cuda:MIG-…"
	Threads     int    `key:"threads"`       // CPU threads; 0: all cores
	BlockTokens int    `key:"block_tokens"`  // positions a KV block
	// KVMemory is the KV pool's size, used when blocks is 0. Auto is 256 MiB on the CPU, or 64 whole
	// contexts if these are less, and what GPUMemory leaves beside weights and scratch on a GPU.
	KVMemory  config.AutoSize `key:"kv_memory"`
	GPUMemory float64         `key:"gpu_memory"` // part of the GPU's memory that this process takes
	// BatchInvariant makes a prompt's tokens independent of the batch, the chunks and the split,
	// at the cost of some speed. On the CPU they always are.
	BatchInvariant bool   `key:"batch_invariant"`
	DType          string `key:"dtype"`          // of weights, activations and KV on a GPU: "bf16", "fp16" or "auto" (fp16 if the checkpoint's torch_dtype is float16, else bf16)
	Quantization   string `key:"quantization"`   // of the layers' projections on a GPU: "auto" (as in the checkpoint), "none" or "fp8"
	KVCacheDType   string `key:"kv_cache_dtype"` // "auto" (as dtype on a GPU, f32 on the CPU), "bf16" or "fp8"
	// How the model writes calls of tools, and reasoning: a format's name, "none", or "auto", which
	// finds it in the chat template.
	ToolParser       string `key:"tool_parser"`
	ReasoningParser  string `key:"reasoning_parser"`
	EmbeddingPooling string `key:"embedding_pooling"` // "last" or "mean": of the prompt's hidden states
	// Drafts that steps verify: "off", "ngram" (looked up in the request) or "draft" (DraftModel's). Tokens
	// that a grammar forces are drafts in any case.
	Speculation      string `key:"speculation"`
	SpeculationDepth int    `key:"speculation_depth"` // drafts of a sequence in one step, at most; 0: none, forced ones neither
	DraftModel       string `key:"draft_model"`       // as model; of the same tokenizer
	MaxLogprobs      int    `key:"max_logprobs"`      // that a request may ask for at a position; -1: all of the vocabulary
	// TrustTemplates renders the template that a request brings (chat_template); false: it is refused.
	TrustTemplates bool `key:"trust_request_chat_template"`
	// What answers have unless a request says otherwise, and what it cannot ask for.
	TokensAsIDs       bool `key:"return_tokens_as_token_ids"` // log probabilities name tokens by their IDs
	ForceUsage        bool `key:"force_include_usage"`        // every event of a stream has the usage so far
	PerRequestMetrics bool `key:"per_request_metrics"`        // an answer of one choice has its timing
}

// Promises are what requests are promised; 0: nothing.
type Promises struct {
	TTFTPromise time.Duration `key:"ttft_promise"` // time to their first token
	TPOTPromise time.Duration `key:"tpot_promise"` // the mean of the times between their tokens
	ITLPromise  time.Duration `key:"itl_promise"`  // the longest of these
	ShedLate    bool          `key:"shed_late"`    // answers 503 at once to what would be later than TTFTPromise
}

// Fleet says how to reach NATS. The TLS files are for NATS, HTTP between members, and KV over the
// network.
type Fleet struct {
	URL       string        // from the join line: nats://host:port, comma separated; empty: in no fleet
	CredsFile string        `key:"creds_file"`
	TLSCert   string        `key:"tls_cert"`
	TLSKey    string        `key:"tls_key"`
	TLSCA     string        `key:"tls_ca"`
	Insecure  bool          `key:"insecure"` // allow NATS off this machine without credentials or TLS
	Heartbeat time.Duration `key:"heartbeat"`
}

// KV are the settings of the connector (kvconn/DESIGN.md explains each deadline) and of the KV tiers
// (engine/tier/DESIGN.md).
type KV struct {
	BulkConns        int             `key:"bulk_conns"`
	DialTimeout      time.Duration   `key:"dial_timeout"`
	HandshakeTimeout time.Duration   `key:"handshake_timeout"`
	AcceptTimeout    time.Duration   `key:"accept_timeout"`
	TicketTimeout    time.Duration   `key:"ticket_timeout"`
	PeerSilence      time.Duration   `key:"peer_silence"`
	Resends          int             `key:"resends"`
	MaxSessions      int             `key:"max_sessions"`
	Ways             []string        // values of transport: way.Names
	Transport        string          `key:"transport"`          // "auto", the fastest for each peer, or the only one allowed
	MaxQuarantined   int             `key:"max_quarantined"`    // blocks; 0: a quarter of the pool
	Digest           string          `key:"digest"`             // "on"; "off" skips checks if both workers say so, for measuring
	Convert          string          `key:"convert"`            // "refuse" or "allow" peers whose KV has another dtype
	Sockets          string          `key:"sockets"`            // folder for the unix sockets of ways within a machine; empty: abstract names
	DeviceRefill     string          `key:"device_refill"`      // "on" or "off": GPUs push into blocks of another size or dtype
	HostMemory       config.PoolSize `key:"host_memory"`        // under the pool: bytes, or how many times the pool; 0: none
	SSDDir           string          `key:"ssd_dir"`            // this worker's own folder, under host memory; empty: none
	SSDSize          config.Size     `key:"ssd_size"`           // of ssd_dir, at most
	SSDIO            string          `key:"ssd_io"`             // "auto", "io_uring" or "pread": how ssd_dir is read and written
	Store            string          `key:"store" secret:"url"` // a Redis or Valkey that workers share, under host memory; empty: none
	StoreTTL         time.Duration   `key:"store_ttl"`          // how long it keeps what nobody writes or reads
	StoreTimeout     time.Duration   `key:"store_timeout"`      // of an operation; after it the store counts as down
	StoreWrite       bool            `key:"store_write"`        // false: read only
	LoadTimeout      time.Duration   `key:"load_timeout"`       // after it the rest of a prefix is computed, not loaded
	MinLoadTokens    int             `key:"min_load_tokens"`    // fewer are computed, not loaded
	WritePolicy      string          `key:"write_policy"`       // "through", "selective" or "back": when units are copied down
	WriteHits        int             `key:"write_hits"`         // of selective: requests that must find a unit first
	Eviction         string          `key:"eviction"`           // of host memory: "lru", "lfu" or "s3fifo"
	TTL              time.Duration   `key:"ttl"`                // older units are not used; 0: no limit
	PinShare         float64         `key:"pin_share"`          // part of each tier that pins may take
	TenantShare      float64         `key:"tenant_share"`       // part of host memory and of the SSD that one cache salt may fill; 0: all
	LoadQuota        config.Size     `key:"load_quota"`         // bytes a second for loads; 0: no limit
	Peers            string          `key:"peers"`              // "on" or "off": fetch prefixes from other workers, and give them
	PeerBring        string          `key:"peer_bring"`         // "on" or "off": a GPU computes while a peer's prefix arrives
	PeerQuota        config.Size     `key:"peer_quota"`         // bytes a second given to them; 0: no limit
}

// convertAllow pairs workers whose KV has different dtypes. Their numerics mix, so the same tokens
// are no longer promised.
const convertAllow = "allow"

// Log says what is logged, and how.
type Log struct {
	Level  string `key:"level"`  // debug, info, warn or error
	Format string `key:"format"` // text or json
}

// ssdSize is the default of ssd_size.
const ssdSize = 8 << 30

// DefaultConfig returns a worker's default settings.
func DefaultConfig(role fleet.Role) Config {
	kv := kvconn.DefaultConfig()
	return Config{
		Role:           string(role),
		TensorParallel: 1,
		Compute:        Compute{Device: "auto", BlockTokens: 16, GPUMemory: 0.9, DType: dtypeAuto, KVCacheDType: kvAuto, Quantization: quantAuto, ToolParser: parserAuto, ReasoningParser: parserAuto, MaxLogprobs: openai.MaxLogprobs, EmbeddingPooling: string(engine.PoolLast), Speculation: speculateOff, SpeculationDepth: engine.DefaultDepth},
		Listen:         "127.0.0.1:0", KVListen: "127.0.0.1:0", MaxWaiting: 1024,
		MaxStepTime: 50 * time.Millisecond, QueueTime: 50 * time.Millisecond,
		MaxBody: 64 << 20, MaxAnswer: openai.MaxAnswer, AnswerMemory: 512 << 20, ReadTimeout: 30 * time.Second, StallTimeout: time.Minute, DrainTimeout: 30 * time.Second,
		LeaseTime: 30 * time.Second, LeaseMax: 8 * time.Minute, TicketWait: 10 * time.Second, ReserveWait: 10 * time.Second,
		KVEvents: KVEvents{Listen: "127.0.0.1:0", Replay: "127.0.0.1:0"},
		Fleet:    Fleet{Heartbeat: 250 * time.Millisecond},
		KV: KV{BulkConns: kv.BulkConns, DialTimeout: kv.DialTimeout, HandshakeTimeout: kv.HandshakeTimeout,
			AcceptTimeout: kv.AcceptTimeout, TicketTimeout: kv.TicketTimeout, PeerSilence: kv.PeerSilence, Resends: kv.Resends, MaxSessions: kv.MaxSessions, Ways: []string{way.Auto}, Transport: way.Auto, Digest: "on", Convert: "refuse", DeviceRefill: "on",
			SSDSize: ssdSize, SSDIO: string(ssd.IOAuto), StoreTTL: 24 * time.Hour, StoreTimeout: 500 * time.Millisecond, StoreWrite: true, LoadTimeout: 500 * time.Millisecond, MinLoadTokens: 32,
			WritePolicy: string(tier.Through), WriteHits: 2, Eviction: string(host.LRU), PinShare: 0.25, Peers: "on", PeerBring: "on"},
		Log: Log{Level: "info", Format: "text"},
	}
}

// bad is the error of a setting that will not do.
var bad = config.Bad

// within refuses what is not in lo..hi.
func within[T ~int | ~int64](key string, v, lo, hi T) error {
	if v < lo || v > hi {
		return bad(key, "%v is not in %v..%v", v, lo, hi)
	}
	return nil
}

// Values of dtype, quantization and kv_cache_dtype.
const (
	dtypeAuto = "auto"
	dtypeBF16 = "bf16"
	dtypeFP16 = "fp16"

	quantAuto = "auto"
	quantNone = "none"
	quantFP8  = "fp8"

	kvAuto = "auto"
	kvBF16 = "bf16"
	kvFP8  = "fp8"
)

// valid checks the device, and the dtypes of a GPU against each other. What only a GPU has is refused here if the
// device is the CPU, and at start if "auto" finds no GPU.
func (c *Compute) valid() error {
	if err := cmp.Or(config.OneOf("kv_cache_dtype", c.KVCacheDType, kvAuto, kvBF16, kvFP8), config.OneOf("dtype", c.DType, dtypeAuto, dtypeBF16, dtypeFP16),
		config.OneOf("quantization", c.Quantization, quantAuto, quantNone, quantFP8),
		config.OneOf("embedding_pooling", c.EmbeddingPooling, string(engine.PoolLast), string(engine.PoolMean)),
		config.OneOf("tool_parser", c.ToolParser, slices.Concat([]string{parserAuto, parserNone}, answer.ToolNames())...),
		config.OneOf("reasoning_parser", c.ReasoningParser, slices.Concat([]string{parserAuto, parserNone}, answer.ThinkNames())...)); err != nil {
		return err
	}
	if err := cmp.Or(within("max_logprobs", c.MaxLogprobs, openai.All, 1<<18), c.validSpeculation()); err != nil {
		return err
	}
	d, err := gpus.ParseDevice(c.Device)
	if err != nil {
		return bad("device", "%v", err)
	}
	cpu := d.CPU
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

// validRanks checks tensor_parallel, except against the model and the GPUs that there are.
func (c *Config) validRanks() error {
	if err := within("tensor_parallel", c.TensorParallel, 1, kvlayout.MaxRanks); err != nil {
		return err
	}
	if err := within("max_logprobs", c.MaxLogprobs, openai.All, 1<<18); err != nil {
		return err
	}
	d, err := gpus.ParseDevice(c.Device)
	if err != nil {
		return bad("device", "%v", err)
	}
	switch n := len(d.GPUs); {
	case n > 0 && n != c.TensorParallel:
		return bad("device", "%d GPUs for tensor_parallel %d: set tensor_parallel to %d, or name a GPU for each rank; one that is named twice is shared by two", n, c.TensorParallel, n)
	case !d.CPU && !d.Auto && c.TensorParallel > cuda.MaxRanks:
		return bad("tensor_parallel", "%d is more than GPUs serve, %d", c.TensorParallel, cuda.MaxRanks)
	}
	return nil
}

// Validate returns a *config.KeyError.
func (l Log) Validate() error {
	return cmp.Or(config.OneOf("level", l.Level, "debug", "info", "warn", "error"), config.OneOf("format", l.Format, "text", "json"))
}

// Validate returns the first wrong setting as a *config.KeyError. Log is checked by itself.
func (c *Config) Validate() error {
	kv := &c.KV
	return cmp.Or(
		config.OneOf("role", c.Role, "prefill", "decode"),
		config.OneOf("kv.transport", kv.Transport, kv.Ways...),
		config.OneOf("kv.digest", kv.Digest, "on", "off"),
		config.OneOf("kv.device_refill", kv.DeviceRefill, "on", "off"),
		config.OneOf("kv.convert", kv.Convert, "refuse", convertAllow),
		config.OneOf("kv.peer_bring", kv.PeerBring, "on", "off"),
		config.OneOf("kv.peers", kv.Peers, "on", "off"),
		config.OneOf("kv.write_policy", kv.WritePolicy, string(tier.Through), string(tier.Selective), string(tier.Back)),
		config.OneOf("kv.eviction", kv.Eviction, string(host.LRU), string(host.LFU), string(host.S3FIFO)),
		config.OneOf("kv.ssd_io", kv.SSDIO, string(ssd.IOAuto), string(ssd.IOUring), string(ssd.IOPread)),
		c.Compute.valid(),
		c.validRanks(),
		c.validAddresses(),
		within("threads", c.Threads, 0, 1024),
		within("block_tokens", c.BlockTokens, 1, kvlayout.MaxBlockTokens),
		within("blocks", c.Blocks, 0, 1<<30),
		within("max_model_len", c.MaxModelLen, 0, 1<<30),
		within("max_batch", c.MaxBatch, 0, 1<<16),
		within("max_waiting", c.MaxWaiting, 1, 1<<20),
		within("step_tokens", c.StepTokens, 0, 1<<20),
		within("max_body", c.MaxBody, 1<<10, 1<<31),
		within("max_answer", c.MaxAnswer, 1<<16, 1<<31),
		within("answer_memory", c.AnswerMemory, 1<<20, 1<<46),
		within("kv.bulk_conns", kv.BulkConns, 1, 64),
		within("kv.resends", kv.Resends, 0, 100),
		within("kv.max_sessions", kv.MaxSessions, 1, 1<<16),
		within("kv.max_quarantined", kv.MaxQuarantined, 0, 1<<30),
		within("kv.host_memory", max(0, int64(kv.HostMemory)), 0, 1<<46),
		within("kv.ssd_size", kv.SSDSize, 1<<10, 1<<50),
		within("kv.min_load_tokens", kv.MinLoadTokens, 0, 1<<30),
		within("kv.write_hits", kv.WriteHits, 1, 1<<20),
		within("kv.load_quota", kv.LoadQuota, 0, 1<<50),
		within("kv.peer_quota", kv.PeerQuota, 0, 1<<50),
		kv.validTiers(),
		c.validPool(),
		config.Positive("max_step_time", c.MaxStepTime),
		config.Positive("queue_time", c.QueueTime),
		validPromise("ttft_promise", c.TTFTPromise),
		validPromise("tpot_promise", c.TPOTPromise),
		validPromise("itl_promise", c.ITLPromise),
		config.Positive("read_timeout", c.ReadTimeout),
		config.Positive("stall_timeout", c.StallTimeout),
		config.Positive("drain_timeout", c.DrainTimeout),
		config.Positive("lease_time", c.LeaseTime),
		c.validLease(),
		config.Positive("ticket_wait", c.TicketWait),
		config.Positive("reserve_wait", c.ReserveWait),
		within("fleet.heartbeat", c.Fleet.Heartbeat, time.Millisecond, fleet.MaxHeartbeat),
		config.Positive("kv.dial_timeout", kv.DialTimeout),
		config.Positive("kv.handshake_timeout", kv.HandshakeTimeout),
		config.Positive("kv.accept_timeout", kv.AcceptTimeout),
		config.Positive("kv.ticket_timeout", kv.TicketTimeout),
		config.Positive("kv.peer_silence", kv.PeerSilence),
		config.Positive("kv.load_timeout", kv.LoadTimeout),
		config.Positive("kv.store_ttl", kv.StoreTTL),
		config.Positive("kv.store_timeout", kv.StoreTimeout),
	)
}

// validAddresses checks who the worker is, where it listens, and how it joins.
func (c *Config) validAddresses() error {
	if c.ID != "" {
		if err := fleet.ValidID(c.ID); err != nil {
			return bad("id", "%v", err)
		}
	}
	if _, _, _, err := kvconn.SplitPorts(c.KVListen); err != nil {
		return bad("kv_listen", "%q is not host:port or host:first-last", c.KVListen)
	}
	for _, a := range []struct{ key, addr string }{{"listen", c.Listen}, {"kv_events.listen", c.KVEvents.Listen}, {"kv_events.replay", c.KVEvents.Replay}} {
		if err := config.HostPort(a.addr); err != nil && (a.addr != "" || a.key == "listen") {
			return bad(a.key, "%v", err)
		}
	}
	if c.Join != "" && c.JoinFile != "" {
		return bad("join_file", "it and join (XPYD_JOIN) exclude each other")
	}
	return config.Within("fleet", trust.ValidTLS(c.Fleet.TLSCert, c.Fleet.TLSKey, c.Fleet.TLSCA))
}

func (c *Config) validPool() error {
	if c.KVMemory != 0 && (c.KVMemory < 1<<10 || c.KVMemory > 1<<46) {
		return bad("kv_memory", "%d is not auto, nor in %d..%d", int64(c.KVMemory), 1<<10, int64(1)<<46)
	}
	if !(c.GPUMemory > 0 && c.GPUMemory <= 1) {
		return bad("gpu_memory", "%v is not in 0..1", c.GPUMemory)
	}
	return nil
}

func (c *Config) validLease() error {
	if c.LeaseMax < c.LeaseTime {
		return bad("lease_max", "%v is less than lease_time, %v", c.LeaseMax, c.LeaseTime)
	}
	return nil
}

// validTiers checks the tiers below the pool, without ranges.
func (k *KV) validTiers() error {
	if k.Store != "" {
		if _, err := redis.ParseURL(k.Store); err != nil {
			return bad("kv.store", "%v", err)
		}
	}
	switch {
	case k.SSDDir != "" && k.HostMemory == 0:
		return bad("kv.ssd_dir", "needs kv.host_memory: all KV to and from the SSD passes through it")
	case k.Store != "" && k.HostMemory == 0:
		return bad("kv.store", "needs kv.host_memory: all KV to and from the store passes through it")
	case k.SSDSize != ssdSize && k.SSDDir == "":
		return bad("kv.ssd_size", "needs kv.ssd_dir, whose size it is")
	case k.SSDIO != string(ssd.IOAuto) && k.SSDDir == "":
		return bad("kv.ssd_io", "needs kv.ssd_dir: it is how that is read and written")
	case k.WritePolicy != string(tier.Through) && k.HostMemory == 0:
		return bad("kv.write_policy", "needs kv.host_memory, to which it says when KV is copied")
	case k.Eviction != string(host.LRU) && k.HostMemory == 0:
		return bad("kv.eviction", "needs kv.host_memory, in which it makes room")
	case k.TTL < 0:
		return bad("kv.ttl", "must not be negative")
	case k.TTL > 0 && k.HostMemory == 0:
		return bad("kv.ttl", "needs kv.host_memory: it is of the tiers below the pool")
	case k.TenantShare > 0 && k.TenantShare <= 1 && k.HostMemory == 0:
		return bad("kv.tenant_share", "needs kv.host_memory, of which it is a share")
	case !(k.PinShare >= 0 && k.PinShare <= 0.5):
		return bad("kv.pin_share", "%v is not in 0..0.5", k.PinShare)
	}
	return config.Portion("kv.tenant_share", k.TenantShare)
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
