package worker

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/way"
)

// setKey gives the field of a dotted YAML key a value.
func setKey(t *testing.T, c *Config, key string, v any) {
	t.Helper()
	at := reflect.ValueOf(c).Elem()
next:
	for name := range strings.SplitSeq(key, ".") {
		for _, f := range reflect.VisibleFields(at.Type()) { // also of Compute
			if f.Tag.Get("key") == name {
				at = at.FieldByIndex(f.Index)
				continue next
			}
		}
		t.Fatalf("there is no key %s", key)
	}
	at.Set(reflect.ValueOf(v).Convert(at.Type()))
}

// TestValidate: each key's limits are good, what is just beyond is refused by the
// key's name, and so is what its list does not have. Each number has such a row.
func TestValidate(t *testing.T) {
	refused := map[string]bool{}
	f := func(want string, changes ...any) {
		t.Helper()
		c := DefaultConfig(fleet.Decode)
		for i := 0; i < len(changes); i += 2 {
			setKey(t, &c, changes[i].(string), changes[i+1])
		}
		refused[want] = true
		err := c.Validate()
		if e := (*config.KeyError)(nil); (want != "" || err != nil) && (!errors.As(err, &e) || e.Key != want || strings.Contains(e.Msg, "%!")) {
			t.Errorf("%v: %v; want %q refused", changes, err, want)
		}
	}
	f("")
	for _, key := range []string{"role", "device", "dtype", "quantization", "kv_cache_dtype", "tool_parser", "reasoning_parser", "kv.transport", "kv.digest", "kv.device_refill", "kv.convert",
		"kv.peer_bring", "kv.peers", "kv.write_policy", "kv.eviction", "kv.ssd_io"} {
		f(key, key, "other")
		f(key, key, "")
	}
	for _, r := range []struct {
		key    string
		lo, hi int
	}{
		{"threads", 0, 1024}, {"tensor_parallel", 1, 64}, {"block_tokens", 1, 256}, {"blocks", 0, 1 << 30}, {"max_model_len", 0, 1 << 30}, {"max_logprobs", -1, 1 << 18}, {"speculation_depth", 0, maxDepth}, {"max_batch", 0, 1 << 16},
		{"max_waiting", 1, 1 << 20}, {"step_tokens", 0, 1 << 20}, {"max_body", 1 << 10, 1 << 31},
		{"max_answer", 1 << 16, 1 << 31}, {"answer_memory", 1 << 20, 1 << 46}, {"kv.bulk_conns", 1, 64}, {"kv.resends", 0, 100},
		{"kv.max_sessions", 1, 1 << 16}, {"kv.max_quarantined", 0, 1 << 30}, {"kv.ssd_size", 1 << 10, 1 << 50}, {"kv.min_load_tokens", 0, 1 << 30},
		{"kv.write_hits", 1, 1 << 20}, {"kv.load_quota", 0, 1 << 50}, {"kv.peer_quota", 0, 1 << 50}, {"kv_memory", 1 << 10, 1 << 46},
	} {
		f("", r.key, r.lo, "kv.host_memory", 1<<20, "kv.ssd_dir", "/x")
		f("", r.key, r.hi, "kv.host_memory", 1<<20, "kv.ssd_dir", "/x")
		f(r.key, r.key, r.lo-1)
		f(r.key, r.key, r.hi+1)
	}
	f("", "kv.host_memory", 1<<46)
	f("kv.host_memory", "kv.host_memory", 1<<46+1)
	f("", "kv_memory", 0) // auto
	for _, key := range []string{"max_step_time", "queue_time", "read_timeout", "stall_timeout", "drain_timeout", "lease_time", "ticket_wait", "reserve_wait",
		"kv.dial_timeout", "kv.handshake_timeout", "kv.accept_timeout", "kv.ticket_timeout", "kv.peer_silence",
		"kv.load_timeout", "kv.store_ttl", "kv.store_timeout"} {
		f(key, key, time.Duration(0))
		f("", key, time.Nanosecond)
	}
	for _, key := range []string{"ttft_promise", "tpot_promise", "itl_promise"} {
		for d, ok := range map[time.Duration]bool{-1: false, 0: true, 1: true, time.Hour: true, time.Hour + 1: false} {
			f(map[bool]string{false: key}[ok], key, d)
		}
	}
	for d, want := range map[time.Duration]string{0: "fleet.heartbeat", time.Millisecond - 1: "fleet.heartbeat", time.Millisecond: "", fleet.MaxHeartbeat: "",
		fleet.MaxHeartbeat + 1: "fleet.heartbeat"} {
		f(want, "fleet.heartbeat", d)
	}
	f("", "kv.transport", way.Auto)
	f("gpu_memory", "gpu_memory", 0.0)
	f("", "gpu_memory", 1.0)
	f("gpu_memory", "gpu_memory", 1.01)
	f("gpu_memory", "gpu_memory", math.NaN())
	f("", "kv.pin_share", 0.5)
	f("", "kv.pin_share", 0.0)
	f("kv.pin_share", "kv.pin_share", 0.51)
	f("kv.pin_share", "kv.pin_share", -0.01)
	f("", "kv.tenant_share", 1.0, "kv.host_memory", 1<<20)
	f("kv.tenant_share", "kv.tenant_share", 1.0)
	f("", "kv.ttl", time.Second, "kv.host_memory", 1<<20)
	f("kv.ttl", "kv.ttl", time.Second)
	f("kv.tenant_share", "kv.tenant_share", 1.01)
	f("kv.tenant_share", "kv.tenant_share", math.NaN())
	f("kv.ttl", "kv.ttl", -time.Second)
	f("", "lease_time", time.Minute, "lease_max", time.Minute)
	f("lease_max", "lease_time", time.Minute, "lease_max", time.Minute-1)
	f("id", "id", "no spaces")
	f("", "id", "decode-7")
	f("listen", "listen", "nowhere")
	f("kv_listen", "kv_listen", "127.0.0.1:9-3")
	f("", "kv_listen", "127.0.0.1:3-9")
	f("kv_events.listen", "kv_events.listen", "nowhere")
	f("kv_events.replay", "kv_events.replay", "nowhere")
	f("", "kv_events.listen", "", "kv_events.replay", "")
	f("fleet.tls_cert", "fleet.tls_cert", "/cert", "fleet.tls_ca", "/ca")
	f("join_file", "join", "nats://x", "join_file", "/x")
	f("", "join", "nats://x")
	f("", "join_file", "/x")
	for key, v := range map[string]any{"kv.ssd_size": 1 << 20, "kv.ssd_io": "pread", "kv.write_policy": "back", "kv.eviction": "lfu"} {
		f(key, key, v) // without what it is of
		f("", key, v, "kv.host_memory", 1<<20, "kv.ssd_dir", "/x")
	}
	f("", "kv.write_policy", "back", "kv.eviction", "lfu", "kv.host_memory", 1<<20)
	f("kv.ssd_dir", "kv.ssd_dir", "/x")
	f("", "kv.ssd_dir", "/x", "kv.host_memory", 1<<20)
	f("kv.store", "kv.store", "redis://127.0.0.1")
	f("", "kv.store", "redis://127.0.0.1", "kv.host_memory", 1<<20)
	f("kv.store", "kv.store", "http://127.0.0.1", "kv.host_memory", 1<<20)
	// What excludes what, and what only a GPU has.
	f("speculation", "speculation", "fast")
	f("speculation", "speculation", speculateDraft)
	f("draft_model", "draft_model", "m")
	f("draft_model", "draft_model", "m", "speculation", speculateNGram)
	f("speculation", "speculation", speculateNGram, "speculation_depth", 0)
	f("speculation", "speculation", speculateDraft, "draft_model", "m", "device", "cuda:0")
	f("", "speculation", speculateDraft, "draft_model", "m", "device", "cpu")
	f("kv_cache_dtype", "device", "cpu", "kv_cache_dtype", kvBF16)
	f("", "kv_cache_dtype", kvFP8)
	f("kv_cache_dtype", "kv_cache_dtype", kvFP8, "batch_invariant", true)
	f("kv_cache_dtype", "kv_cache_dtype", kvFP8, "block_tokens", 24)
	f("", "kv_cache_dtype", kvBF16, "block_tokens", 24, "batch_invariant", true)
	f("dtype", "device", "cpu", "dtype", dtypeBF16)
	f("dtype", "dtype", dtypeFP16, "kv_cache_dtype", kvFP8)
	f("dtype", "dtype", dtypeFP16, "quantization", quantFP8)
	f("", "dtype", dtypeBF16, "quantization", quantFP8, "kv_cache_dtype", kvFP8)
	f("quantization", "device", "cpu", "quantization", quantFP8)
	f("", "device", "cpu", "quantization", quantNone)
	f("quantization", "quantization", quantFP8, "batch_invariant", true)
	f("", "device", "cuda", "tensor_parallel", 8)
	f("tensor_parallel", "device", "cuda", "tensor_parallel", 9)
	f("", "device", "auto", "tensor_parallel", 9) // the CPU may be what it takes
	f("device", "device", "cuda:0,cuda:1")
	f("device", "device", "cuda:0", "tensor_parallel", 2)
	f("", "device", "cuda:0,cuda:0", "tensor_parallel", 2)
	f("", "device", "cuda", "tensor_parallel", 1)
	f("", "device", "cpu", "tensor_parallel", 2)

	var numbers func(of reflect.Type, prefix string)
	numbers = func(of reflect.Type, prefix string) {
		for _, field := range reflect.VisibleFields(of) {
			switch name, kind := field.Tag.Get("key"), field.Type.Kind(); {
			case name == "":
			case kind == reflect.Struct:
				numbers(field.Type, prefix+name+".")
			case kind >= reflect.Int && kind <= reflect.Float64 && !refused[prefix+name]:
				t.Errorf("%s has no row", prefix+name)
			}
		}
	}
	numbers(reflect.TypeFor[Config](), "")
}

// TestKVConn: each setting of the connector reaches it.
func TestKVConn(t *testing.T) {
	c := DefaultConfig(fleet.Prefill)
	want := kvconn.DefaultConfig()
	want.Identity.ID = "p"
	if got := c.kvconn(kvconn.Identity{PeerID: kvconn.PeerID{ID: "p"}}); !reflect.DeepEqual(got, want) {
		t.Errorf("defaults: %+v, want %+v", got, want)
	}
	for key, v := range map[string]any{"kv.max_sessions": 3, "kv.bulk_conns": 5, "kv.resends": 7, "kv.dial_timeout": 11 * time.Second,
		"kv.handshake_timeout": 12 * time.Second, "kv.accept_timeout": 13 * time.Second, "kv.ticket_timeout": 14 * time.Second,
		"kv.peer_silence": 15 * time.Second, "kv.digest": "off", "kv.convert": convertAllow} {
		setKey(t, &c, key, v)
	}
	want.MaxSessions, want.BulkConns, want.Resends, want.Unchecked, want.Convert = 3, 5, 7, true, true
	want.DialTimeout, want.HandshakeTimeout, want.AcceptTimeout = 11*time.Second, 12*time.Second, 13*time.Second
	want.TicketTimeout, want.PeerSilence = 14*time.Second, 15*time.Second
	if got := c.kvconn(want.Identity); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
