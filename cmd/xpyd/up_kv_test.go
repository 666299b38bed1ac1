package main

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/worker"
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
