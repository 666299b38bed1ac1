package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestUpTellsWorkers: each setting of `up` that is its workers' too arrives there; what is
// not set is the worker's default.
func TestUpTellsWorkers(t *testing.T) {
	_, plain := inForce(t, "decode")
	const text = `model: /m
device: cpu
threads: 3
block_tokens: 32
kv_memory: 3GiB
batch_invariant: true
dtype: auto
ttft_promise: 2s
tpot_promise: 25ms
itl_promise: 50ms
trust_everyone: true
fleet: {tls_cert: /cert, tls_key: /key, tls_ca: /ca}
log: {level: debug, format: json}
kv:
  transport: tcp
  sockets: /tmp/sockets
  host_memory: 1GiB
  ssd_dir: /tmp/kv
  ssd_size: 3GiB
  ssd_io: pread
  write_policy: back
  write_hits: 3
  eviction: s3fifo
  ttl: 1h30m0s
  pin_share: 0.125
  tenant_share: 0.3
  load_timeout: 750ms
  load_quota: 2GiB
  min_load_tokens: 7
  peers: off
  peer_bring: off
  peer_quota: 5MiB
  store: redis://10.0.0.2:6379/0
  store_ttl: 2h0m0s
  store_timeout: 90ms
  store_write: false
  bulk_conns: 2
  dial_timeout: 11s
  handshake_timeout: 12s
  accept_timeout: 13s
  ticket_timeout: 14s
  peer_silence: 15s
  resends: 16
  max_sessions: 17
  max_quarantined: 18
  digest: off
  convert: allow
  device_refill: off
`
	path := filepath.Join(t.TempDir(), "up.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	w := workerDefaults(fleet.Prefill)
	up := upConfig{RouterConfig: defaultRouterConfig(), Prefill: 1, Decode: 1, TensorParallel: ranks{1, 1}, Compute: w.Compute, KV: w.KV}
	if env, err := up.environ(nil); err != nil || !slices.Equal(env, []string{"XPYD_GPU_MEMORY=0.45"}) {
		t.Errorf("nothing is set, and workers are told %q, %v", env, err)
	}
	if err := config.Load(&up, config.Options{File: path}); err != nil {
		t.Fatal(err)
	}
	env, err := up.environ(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range env {
		key, value, _ := strings.Cut(v, "=")
		t.Setenv(key, value)
	}
	_, told := inForce(t, append([]string{"decode"}, up.child("xpyd", fleet.Decode, &front{joinFile: "/j"}, &lastRoles{})(0).Args[1:]...)...)
	_, set := inForce(t, "up", "--config", path) // also the environment, which says the same
	for key, v := range set {
		if _, ours := plain[key]; !ours || strings.HasPrefix(key, "listen") {
			continue
		}
		if strings.HasPrefix(key, "kv.") && v == plain[key] {
			t.Errorf("%s is not set here", key)
		}
		if key == "kv.ssd_dir" {
			v = strings.Replace(v, "/tmp/kv", "/tmp/kv/decode-0", 1)
		}
		if strings.HasPrefix(key, "kv.") || v != plain[key] && key != "gpu_memory" && key != "api_keys_file" {
			if told[key] != v && key != "join_file" {
				t.Errorf("%s is %s, the worker has %s", key, v, told[key])
			}
		}
	}
	for key, want := range map[string]string{"id": "decode-0", "join_file": "/j", "gpu_memory": "0.45", "model": "/m", "threads": "3"} {
		if !strings.Contains(told[key], want) {
			t.Errorf("%s: the worker has %s, want %s", key, told[key], want)
		}
	}
}

// TestSettingFlags: each flag of a role is one of its settings.
func TestSettingFlags(t *testing.T) {
	root := newRoot(new(bytes.Buffer), new(bytes.Buffer))
	for _, role := range roles {
		c, _, err := root.Find([]string{role})
		if err != nil {
			t.Fatal(err)
		}
		_, keys := inForce(t, role)
		for flag, key := range flagKeys(c.Flags()) {
			if _, ok := keys[key]; !ok && flag != "help" {
				t.Errorf("%s --%s: there is no key %s", role, flag, key)
			}
		}
	}
}

// The host memory of all workers together is compared with the machine's before any starts.
func TestUpAddsHostMemory(t *testing.T) {
	const gib = 1 << 30
	for _, c := range []struct {
		text            string
		workers         int
		pool, available int64
		refused         string
	}{
		{"0", 6, gib, 1, ""},
		{"20GiB", 1, 0, 23 * gib, ""},
		{"20GiB", 6, 0, 0, ""},
		{"20GiB", 6, 0, 23*gib + 5, "kv.host_memory: 20GiB for each of 6 workers is 120GiB, and this machine has 23GiB to give"},
		{"2x", 2, 6 * gib, 24 * gib, ""},
		{"2x", 2, 6 * gib, 23 * gib, "kv.host_memory: 2x for each of 2 workers is 24GiB"},
		{"2x", 64, 0, gib, ""},
	} {
		u := upConfig{Prefill: 1, Decode: c.workers - 1}
		u.KVMemory = config.AutoSize(c.pool)
		if err := u.KV.HostMemory.UnmarshalText([]byte(c.text)); err != nil {
			t.Fatal(err)
		}
		err := u.fits(c.available)
		if (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s for %d of %d: %v, want %q", c.text, c.workers, c.available, err, c.refused)
		}
	}
}

// TestRestartRole: a worker restarts in the role that `up` or an order gave it, not in that of another
// process which was started with its id.
func TestRestartRole(t *testing.T) {
	w, err := fleet.Watch(fleet.WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	epoch := uint64(0)
	announced := func(pid int, role fleet.Role) *fleet.Member {
		t.Helper()
		epoch++
		if err := w.AddStatic(fleet.Instance{ID: "prefill-0", Epoch: epoch, Role: role, URL: "http://127.0.0.1:1", Dialect: "native", PID: pid}, fleet.Static); err != nil {
			t.Fatal(err)
		}
		return w.Snapshot().Get("prefill-0")
	}
	kept, drained := &lastRoles{}, false
	begin := func() func(int) (string, []string) {
		return kept.restart(w, func(string) bool { return drained }, "prefill-0", []string{"prefill", "--id", "prefill-0"})
	}
	again := begin()
	f := func(pid int, want string) {
		t.Helper()
		if role, args := again(pid); role != strings.Fields(want)[0] || strings.Join(args, " ") != want {
			t.Errorf("after %d: %s %q, want %q", pid, role, args, want)
		}
	}
	f(1, "prefill --id prefill-0") // never heard of
	announced(2, fleet.Prefill)
	announced(99, fleet.Decode)
	f(2, "prefill --id prefill-0")
	announced(3, fleet.Decode) // an order
	f(3, "decode --id prefill-0")
	f(4, "decode --id prefill-0") // ended before it was heard
	kept.see(announced(5, fleet.Prefill), 5)
	kept.see(announced(99, fleet.Decode), 5)
	drained = true
	f(5, "prefill --id prefill-0 --drained")
	begin() // asked what the child would be, while it runs
	drained = false
	f(6, "prefill --id prefill-0")
}

// TestDying: a dying decode process ends its own member, not one that took the id meanwhile; a dying
// prefill process does not.
func TestDying(t *testing.T) {
	w, err := fleet.Watch(fleet.WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for id, role := range map[string]fleet.Role{"decode-0": fleet.Decode, "prefill-0": fleet.Prefill} {
		if err := w.AddStatic(fleet.Instance{ID: id, Epoch: 1, Role: role, URL: "http://127.0.0.1:1", Dialect: "native", PID: 7}, fleet.Static); err != nil {
			t.Fatal(err)
		}
	}
	f := &front{watcher: w}
	f.dying("decode-1", 7)
	f.dying("decode-0", 8)
	f.dying("prefill-0", 7)
	for _, id := range []string{"decode-0", "prefill-0"} {
		if m := w.Snapshot().Get(id); m.State != fleet.Live {
			t.Fatalf("%s is %s (%s)", id, m.State, m.Reason)
		}
	}
	f.dying("decode-0", 7)
	if m := w.Snapshot().Get("decode-0"); m.State != fleet.Dead {
		t.Errorf("%s at its death", m.State)
	}
}
