package main

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/worker"
)

// TestUpTellsWorkers: each kv_ setting of `up` arrives as its workers' kv setting
// of that name; what is not set is the worker's default.
func TestUpTellsWorkers(t *testing.T) {
	def := worker.DefaultConfig(fleet.Decode)
	up := upConfig{UpKV: upKVOf(&def.KV)}
	_, plain := inForce(t, "decode")
	if _, told := inForce(t, append([]string{"decode"}, up.args("decode-0")...)...); !maps.Equal(plain, told) {
		t.Errorf("nothing is set, and a worker has\n%v, want\n%v", told, plain)
	}
	const text = `kv_transport: tcp
kv_host_memory: 1GiB
kv_ssd_dir: /tmp/kv
kv_ssd_size: 3GiB
kv_ssd_io: pread
kv_write_policy: back
kv_eviction: s3fifo
kv_ttl: 1h30m0s
kv_pin_share: 0.125
kv_tenant_share: 0.3
kv_load_timeout: 750ms
kv_load_quota: 2GiB
kv_peers: off
kv_store: redis://10.0.0.2:6379/0
kv_store_ttl: 2h0m0s
kv_store_timeout: 90ms
kv_store_write: false
`
	path := filepath.Join(t.TempDir(), "up.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := config.Load(&up.UpKV, config.Options{File: path}); err != nil {
		t.Fatal(err)
	}
	for _, v := range up.env() {
		key, value, _ := strings.Cut(v, "=")
		t.Setenv(key, value)
	}
	_, told := inForce(t, append([]string{"decode"}, up.args("decode-0")...)...)
	_, set := inForce(t, "up", "--config", path)
	for key, v := range set {
		name, ours := strings.CutPrefix(key, "kv_")
		if _, a := plain["kv."+name]; !ours || !a {
			continue
		}
		if v == plain["kv."+name] {
			t.Errorf("%s is not set here", key)
		}
		if key == "kv_ssd_dir" {
			v = strings.Replace(v, "/tmp/kv", "/tmp/kv/decode-0", 1)
		}
		if told["kv."+name] != v {
			t.Errorf("%s is %s, the worker has %s", key, v, told["kv."+name])
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
		{"20GiB", 6, 0, 23*gib + 5, "kv_host_memory: 20GiB for each of 6 workers is 120GiB, and this machine has 23GiB to give"},
		{"2x", 2, 6 * gib, 24 * gib, ""},
		{"2x", 2, 6 * gib, 23 * gib, "kv_host_memory: 2x for each of 2 workers is 24GiB"},
		{"2x", 64, 0, gib, ""},
	} {
		var u UpKV
		if err := u.KVHostMemory.UnmarshalText([]byte(c.text)); err != nil {
			t.Fatal(err)
		}
		err := u.fits(c.workers, c.pool, c.available)
		if (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s for %d of %d: %v, want %q", c.text, c.workers, c.available, err, c.refused)
		}
	}
}
