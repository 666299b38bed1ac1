package main

import (
	"errors"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/worker"
)

// foreignEnv are XPYD_ variables that belong to other commands, or to the CUDA
// library's search.
var foreignEnv = []string{"XPYD_DATA", "XPYD_ADMIN*", "XPYD_NATS_PASSWORD", "XPYD_CUDA_*"}

// configured runs a command with its configuration: the defaults, the file of --config, the
// environment and the flags that the command has by then, later ones overriding. load reads
// it once more.
func configured[T any](cmd *cobra.Command, file string, def *T, run func(cmd *cobra.Command, cfg *T, sources config.Sources, load func() (*T, error)) error) {
	f := cmd.Flags()
	path := f.String("config", "", "YAML file"+file)
	printOnly := f.Bool("print-config", false, "print the configuration in force and exit")
	load := func(sources config.Sources) (*T, error) {
		cfg := *def
		err := config.Load(&cfg, config.Options{File: *path, Environ: os.Environ(), EnvAllow: foreignEnv, Flags: f, FlagKeys: flagKeys(f), Sources: sources})
		return &cfg, err
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		sources := config.Sources{}
		cfg, err := load(sources)
		if err != nil {
			return usageError{err}
		}
		if *printOnly {
			return config.Print(cmd.OutOrStdout(), cfg)
		}
		return wrongSetting(sources, run(cmd, cfg, sources, func() (*T, error) { return load(nil) }))
	}
}

// flagKeys names the configuration key of each flag.
func flagKeys(f *pflag.FlagSet) map[string]string {
	keys := map[string]string{}
	f.VisitAll(func(f *pflag.Flag) { keys[f.Name] = flagKey(f.Name) })
	delete(keys, "config")
	delete(keys, "print-config")
	return keys
}

func flagKey(flag string) string {
	switch flag {
	case "admin":
		return "admin_listen"
	case "nats":
		return "fleet.url"
	case "log-level", "log-format":
		return strings.Replace(flag, "-", ".", 1)
	}
	key := strings.ReplaceAll(flag, "-", "_")
	if in, ok := strings.CutPrefix(key, "kv_"); ok && in != "listen" && in != "memory" && in != "cache_dtype" {
		return "kv." + in
	}
	return key
}

// wrongSetting turns an error that names a key, for what this machine or the model does not
// allow, into bad configuration.
func wrongSetting(sources config.Sources, err error) error {
	var e *config.KeyError
	if !errors.As(err, &e) {
		return err
	}
	return usageError{sources.Locate(e)}
}

func logFlags(f *pflag.FlagSet, def *worker.Log) {
	f.String("log-level", def.Level, "debug, info, warn or error")
	f.String("log-format", def.Format, "text or json")
}

// computeFlags are the flags for what workers compute and on what, shared by a worker and
// `up`.
func computeFlags(f *pflag.FlagSet, def *worker.Compute, gpuMemory string) {
	f.String("model", "", "a directory, a .gguf file or hf:OWNER/NAME; default: the embedded stories260k")
	f.String("device", def.Device, "auto, cpu or cuda")
	f.Int("threads", 0, "CPU threads of a worker; 0: all cores")
	f.Int("block-tokens", def.BlockTokens, "positions a KV block, 1 to 256; best 16, or a divisor or multiple of it")
	f.String("kv-memory", def.KVMemory.String(), "size of a worker's KV pool; auto: 256MiB on the CPU, what --gpu-memory leaves on a GPU")
	f.Float64("gpu-memory", def.GPUMemory, "part of the GPU's memory that "+gpuMemory)
	f.Bool("batch-invariant", false, "the same tokens whatever the batch, the chunks or the split; costs a GPU some speed, and is always so on the CPU")
	f.String("kv-cache-dtype", def.KVCacheDType, "auto (as --dtype), bf16 or fp8 (E4M3, a scale a row: half the memory, faster decoding, small errors); a GPU only. Workers that differ are not paired unless kv.convert allows it")
	f.String("dtype", def.DType, "auto (fp16 for checkpoints that say torch_dtype float16, else bf16), bf16 or fp16: weights, activations and KV on a GPU. Workers that differ are not paired unless kv.convert allows it")
	f.String("quantization", def.Quantization, "auto (as the checkpoint is), none or fp8 (E4M3, a scale a channel, made when loading; half the memory, faster, small errors): the weights of the layers, on a GPU")
}

// kvFlags are the flags of workers' kv section.
func kvFlags(f *pflag.FlagSet, k *worker.KV) {
	f.String("kv-transport", k.Transport, "how KV comes from workers of this machine: auto (from GPU to GPU or through shared memory where possible), tcp, shm, cudaipc, nccl or pinned")
	f.String("kv-host-memory", k.HostMemory.String(), "host memory that keeps KV which a worker's pool has no room for: a size, or 2x for twice the pool; 0: none")
	f.String("kv-ssd-dir", "", "folder that keeps KV also across restarts; default: none")
	f.String("kv-ssd-size", k.SSDSize.String(), "what a worker may fill of --kv-ssd-dir")
	f.String("kv-ssd-io", k.SSDIO, "how the SSD is read and written: auto, io_uring or pread")
	f.String("kv-store", "", "Redis or Valkey that keeps KV for all workers: redis://[user:password@]host[:port][/db], rediss://, valkey://, unix:///socket")
	f.String("kv-write-policy", k.WritePolicy, "when KV is copied to host memory and SSD: through (when computed: a copy of all), selective (when found again: evicted before, computed again) or back (when evicted: fewest copies, made when memory is short, some lost)")
	f.String("kv-eviction", k.Eviction, "who makes room in host memory: lru, lfu (keeps what was popular once) or s3fifo (what comes once pushes out nothing, but goes soon)")
	f.Duration("kv-ttl", k.TTL, "KV of host memory and SSD that is older is not used; 0: however old. What it ends is computed again")
	f.Float64("kv-pin-share", k.PinShare, "most of host memory, and of the SSD, that pins may keep, at most 0.5; nobody else can use that meanwhile")
	f.Float64("kv-tenant-share", k.TenantShare, "most of host memory, and of the SSD, that one cache_salt may fill; 0: all. A tenant's new KV then pushes out its own, also where there is room")
	f.Duration("kv-load-timeout", k.LoadTimeout, "what a request's prefix has not brought from host memory, SSD, peers and store by then is computed: the most that they can cost it")
	f.String("kv-load-quota", k.LoadQuota.String(), "bytes a second that loads may take from the tiers, so that they leave links to others; 0: any. What is over it is computed")
	f.String("kv-peers", k.Peers, "on: what other workers have of a prompt is fetched from them rather than computed, and given to them; off: neither")
}
