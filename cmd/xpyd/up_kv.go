package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/worker"
)

// UpKV is what `xpyd up` says of its workers' KV: kv_X is kv.X of each of them.
type UpKV struct {
	KVTransport    string          `koanf:"kv_transport"`
	KVHostMemory   config.PoolSize `koanf:"kv_host_memory"`
	KVSSDDir       string          `koanf:"kv_ssd_dir"` // each worker has a folder of its own there
	KVSSDSize      config.Size     `koanf:"kv_ssd_size"`
	KVSSDIO        string          `koanf:"kv_ssd_io"`
	KVStore        string          `koanf:"kv_store" secret:"url"`
	KVStoreTTL     time.Duration   `koanf:"kv_store_ttl"`
	KVStoreTimeout time.Duration   `koanf:"kv_store_timeout"`
	KVStoreWrite   bool            `koanf:"kv_store_write"`
	KVWritePolicy  string          `koanf:"kv_write_policy"`
	KVEviction     string          `koanf:"kv_eviction"`
	KVTTL          time.Duration   `koanf:"kv_ttl"`
	KVPinShare     float64         `koanf:"kv_pin_share"`
	KVTenantShare  float64         `koanf:"kv_tenant_share"`
	KVLoadTimeout  time.Duration   `koanf:"kv_load_timeout"`
	KVLoadQuota    config.Size     `koanf:"kv_load_quota"`
	KVPeers        string          `koanf:"kv_peers"`
}

// upKVOf are a worker's settings as `up` has them.
func upKVOf(k *worker.KV) UpKV {
	return UpKV{k.Transport, k.HostMemory, k.SSDDir, k.SSDSize, k.SSDIO, k.Store, k.StoreTTL, k.StoreTimeout, k.StoreWrite,
		k.WritePolicy, k.Eviction, k.TTL, k.PinShare, k.TenantShare, k.LoadTimeout, k.LoadQuota, k.Peers}
}

// set makes them a worker's.
func (u *UpKV) set(k *worker.KV) {
	k.Transport, k.HostMemory, k.SSDDir, k.SSDSize, k.SSDIO = u.KVTransport, u.KVHostMemory, u.KVSSDDir, u.KVSSDSize, u.KVSSDIO
	k.Store, k.StoreTTL, k.StoreTimeout, k.StoreWrite = u.KVStore, u.KVStoreTTL, u.KVStoreTimeout, u.KVStoreWrite
	k.WritePolicy, k.Eviction, k.TTL, k.PinShare, k.TenantShare = u.KVWritePolicy, u.KVEviction, u.KVTTL, u.KVPinShare, u.KVTenantShare
	k.LoadTimeout, k.LoadQuota, k.Peers = u.KVLoadTimeout, u.KVLoadQuota, u.KVPeers
}

// upKey has an error about a worker's kv.X name what `up` calls it.
func upKey(err error) error {
	var e *config.KeyError
	if !errors.As(err, &e) || !strings.HasPrefix(e.Key, "kv.") {
		return err
	}
	return &config.KeyError{Key: strings.Replace(e.Key, "kv.", "kv_", 1), Msg: strings.ReplaceAll(e.Msg, "kv.", "kv_")}
}

// fits says before any starts whether so many bytes are enough for the host memory of
// all workers; each checks for itself, too. A multiple of pools whose size (0) nobody
// knows yet is left to them, and so is a machine (0) of which nothing is known.
func (u *UpKV) fits(workers int, pool, available int64) error {
	all := int64(workers) * u.KVHostMemory.Of(pool)
	if available == 0 || all <= available {
		return nil
	}
	return &config.KeyError{Key: "kv_host_memory", Msg: fmt.Sprintf("%s for each of %d workers is %s, and this machine has %s to give: take less, or start fewer",
		u.KVHostMemory, workers, config.Size(all), config.Size(available>>20<<20))}
}

// args are a worker's flags, those of settings that do something.
func (u *UpKV) args(id string) []string {
	args := []string{"--kv-transport", u.KVTransport, "--kv-peers", u.KVPeers, "--kv-load-timeout", u.KVLoadTimeout.String(), "--kv-load-quota", u.KVLoadQuota.String()}
	if u.KVHostMemory != 0 {
		share := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
		args = append(args, "--kv-host-memory", u.KVHostMemory.String(), "--kv-write-policy", u.KVWritePolicy, "--kv-eviction", u.KVEviction,
			"--kv-ttl", u.KVTTL.String(), "--kv-pin-share", share(u.KVPinShare), "--kv-tenant-share", share(u.KVTenantShare))
	}
	if u.KVSSDDir != "" {
		args = append(args, "--kv-ssd-dir", filepath.Join(u.KVSSDDir, id), "--kv-ssd-size", u.KVSSDSize.String(), "--kv-ssd-io", u.KVSSDIO)
	}
	return args
}

// env tells the workers of the shared store; a password does not show in ps.
func (u *UpKV) env() []string {
	if u.KVStore == "" {
		return nil
	}
	return []string{"XPYD_KV__STORE=" + u.KVStore, "XPYD_KV__STORE_TTL=" + u.KVStoreTTL.String(),
		"XPYD_KV__STORE_TIMEOUT=" + u.KVStoreTimeout.String(), "XPYD_KV__STORE_WRITE=" + strconv.FormatBool(u.KVStoreWrite)}
}

// kvFlags adds the flags of a worker's kv settings, with their keys, which begin
// with prefix.
func kvFlags(f *pflag.FlagSet, keys map[string]string, prefix string, k *worker.KV) {
	key := func(flag string) string {
		keys[flag] = prefix + strings.ReplaceAll(strings.TrimPrefix(flag, "kv-"), "-", "_")
		return flag
	}
	text := func(flag, def, help string) { f.String(key(flag), def, help) }
	text("kv-transport", k.Transport, "how KV comes from workers of this machine: auto (from GPU to GPU or through shared memory where possible), tcp, shm, cudaipc, nccl or pinned")
	text("kv-host-memory", k.HostMemory.String(), "host memory that keeps KV which a worker's pool has no room for: a size, or 2x for twice the pool; 0: none")
	text("kv-ssd-dir", "", "folder that keeps KV also across restarts; default: none")
	text("kv-ssd-size", k.SSDSize.String(), "what a worker may fill of --kv-ssd-dir")
	text("kv-ssd-io", k.SSDIO, "how the SSD is read and written: auto, io_uring or pread")
	text("kv-store", "", "Redis or Valkey that keeps KV for all workers: redis://[user:password@]host[:port][/db], rediss://, valkey://, unix:///socket")
	text("kv-write-policy", k.WritePolicy, "when KV is copied to host memory and SSD: through (when computed: a copy of all), selective (when found again: evicted before, computed again) or back (when evicted: fewest copies, made when memory is short, some lost)")
	text("kv-eviction", k.Eviction, "who makes room in host memory: lru, lfu (keeps what was popular once) or s3fifo (what comes once pushes out nothing, but goes soon)")
	f.Duration(key("kv-ttl"), k.TTL, "KV of host memory and SSD that is older is not used; 0: however old. What it ends is computed again")
	f.Float64(key("kv-pin-share"), k.PinShare, "most of host memory, and of the SSD, that pins may keep, at most 0.5; nobody else can use that meanwhile")
	f.Float64(key("kv-tenant-share"), k.TenantShare, "most of host memory, and of the SSD, that one cache_salt may fill; 0: all. A tenant's new KV then pushes out its own, also where there is room")
	f.Duration(key("kv-load-timeout"), k.LoadTimeout, "what a request's prefix has not brought from host memory, SSD, peers and store by then is computed: the most that they can cost it")
	text("kv-load-quota", k.LoadQuota.String(), "bytes a second that loads may take from the tiers, so that they leave links to others; 0: any. What is over it is computed")
	text("kv-peers", k.Peers, "on: what other workers have of a prompt is fetched from them rather than computed, and given to them; off: neither")
}
