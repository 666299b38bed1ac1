package main

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/worker"
)

// foreignEnv are the XPYD_ variables of other commands, and of the search for the CUDA library.
var foreignEnv = []string{"XPYD_DATA", "XPYD_ADMIN*", "XPYD_NATS_PASSWORD", "XPYD_CUDA_*"}

// configured makes cmd run with its configuration: defaults, the file of --config, the environment
// and the flags registered so far; later ones win. load reads it again.
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
		var cfg *T
		if err := unlessStopped(cmd.Context(), func() (err error) { cfg, err = load(sources); return err }); err != nil {
			if errors.Is(err, context.Canceled) {
				return nil
			}
			return usageError{err}
		}
		if *printOnly {
			return config.Print(cmd.OutOrStdout(), cfg)
		}
		err := run(cmd, cfg, sources, func() (*T, error) { return load(nil) })
		if errors.Is(err, context.Canceled) && cmd.Context().Err() != nil { // stopped while starting
			return nil
		}
		return wrongSetting(sources, err)
	}
}

// unlessStopped returns what f does, or ctx's error if that ends first: reading a pipe that nobody
// writes to has no end. Then f goes on until the process ends, which is soon.
func unlessStopped(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func flagKeys(f *pflag.FlagSet) map[string]string {
	keys := map[string]string{}
	f.VisitAll(func(f *pflag.Flag) { keys[f.Name] = flagKey(f.Name) })
	for _, no := range []string{"config", "print-config", "upgrade", "upgrade-timeout"} {
		delete(keys, no)
	}
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

// wrongSetting turns an error that names a key, because this machine or the model does not allow
// its value, into bad configuration.
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

// computeFlags are the flags of Compute, shared by a worker and `up`.
func computeFlags(f *pflag.FlagSet, def *worker.Compute, gpuMemory string) {
	f.String("model", "", "a directory, a .gguf file or hf:OWNER/NAME; default: the embedded stories260k")
	f.String("served-name", "", "what clients call the model; default: its own name")
	f.Int("max-model-len", 0, "tokens a request may have, prompt and output; 0: what model and KV pool allow")
	f.Int("max-logprobs", def.MaxLogprobs, "log probabilities that a request may ask for at each position; -1: the whole vocabulary")
	f.String("speculation", def.Speculation, "guess tokens that steps verify: off, ngram (what followed the latest tokens where they came before) or draft (--draft-model); the tokens stay the same")
	f.Int("speculation-depth", def.SpeculationDepth, "guesses of a sequence in one step, at most; 0: none, and tokens that a grammar forces are drawn one by one")
	f.String("draft-model", def.DraftModel, "model that guesses, as --model, with the same tokenizer (--speculation draft)")
	f.String("embedding-pooling", def.EmbeddingPooling, "what becomes a text's embedding: last (the last token's hidden state) or mean (of all tokens)")
	f.Bool("trust-request-chat-template", false, "render the template that a request brings (chat_template), within tighter bounds than the model's; without it such a request is refused")
	f.Bool("return-tokens-as-token-ids", false, "name tokens by their ids (token_id:N) in the log probabilities of requests that do not say return_tokens_as_token_ids")
	f.Bool("force-include-usage", false, "put the usage so far into every event of a stream, as if each request asked for it by stream_options")
	f.Bool("per-request-metrics", false, "tell each request's timing in its answer (metrics), if that has one choice; a stream's comes with its usage")
	f.String("device", def.Device, "auto, cpu, cuda (the first GPU), or a GPU: cuda:2 by nvidia-smi's index, cuda:GPU-… or cuda:MIG-… by UUID")
	f.Int("threads", 0, "CPU threads of a worker; 0: all cores")
	f.Int("block-tokens", def.BlockTokens, "positions in a KV block, 1 to 256; best are 16, its divisors and its multiples")
	f.String("kv-memory", def.KVMemory.String(), "size of a worker's KV pool; auto: 256MiB on the CPU (64 whole contexts if these are less), and what --gpu-memory leaves on a GPU")
	f.Float64("gpu-memory", def.GPUMemory, "part of the GPU's memory that "+gpuMemory)
	f.Bool("batch-invariant", false, "make tokens independent of the batch, the chunks and the split; costs a GPU some speed. Always so on the CPU")
	f.String("kv-cache-dtype", def.KVCacheDType, "of KV on a GPU: auto (like --dtype), bf16 or fp8 (E4M3, a scale per row: half the memory, faster decoding, small errors). Workers that differ are not paired unless kv.convert allows it")
	f.String("dtype", def.DType, "of weights, activations and KV on a GPU: auto (fp16 if the checkpoint's torch_dtype is float16, else bf16), bf16 or fp16. Workers that differ are not paired unless kv.convert allows it")
	f.String("tool-parser", def.ToolParser, "how the model writes calls of tools: auto (as its chat template shows), none, or a name that vLLM's --tool-call-parser has too: "+strings.Join(answer.ToolNames(), ", "))
	f.String("reasoning-parser", def.ReasoningParser, "how the model writes reasoning: auto (as its chat template shows), none, or a name that vLLM's --reasoning-parser has too: "+strings.Join(answer.ThinkNames(), ", "))
	f.String("quantization", def.Quantization, "of the layers' weights on a GPU: auto (as in the checkpoint), none or fp8 (E4M3, a scale per channel, converted at load: half the memory, faster, small errors)")
}

// promiseFlags are the flags of Promises, shared by a worker and `up`.
func promiseFlags(f *pflag.FlagSet) {
	f.Duration("ttft-promise", 0, "time to the first token that requests are promised; 0: nothing")
	f.Duration("tpot-promise", 0, "mean time between tokens that requests are promised; 0: nothing")
	f.Duration("itl-promise", 0, "longest time between two tokens that requests are promised; 0: nothing")
	f.Bool("shed-late", false, "answer 503 at once to a request whose first token would be later than promised, instead of computing it behind the others")
}

func kvFlags(f *pflag.FlagSet, k *worker.KV) {
	f.String("kv-transport", k.Transport, "how KV comes from other workers: auto (the fastest for each), or only by one of "+strings.Join(k.Ways[1:], ", "))
	f.String("kv-host-memory", k.HostMemory.String(), "host memory for KV that a worker's pool has no room for: a size, or 2x for twice the pool; 0: none")
	f.String("kv-ssd-dir", "", "folder that keeps KV, even across restarts; default: none")
	f.String("kv-ssd-size", k.SSDSize.String(), "most bytes that a worker keeps in --kv-ssd-dir")
	f.String("kv-ssd-io", k.SSDIO, "how the SSD is read and written: auto, io_uring or pread")
	f.String("kv-store", "", "Redis or Valkey that keeps KV for all workers: redis://[user:password@]host[:port][/db], rediss://, valkey://, unix:///socket")
	f.String("kv-write-policy", k.WritePolicy, "when KV is copied to host memory and SSD: through (when computed), selective (when found again; what is evicted before is computed again) or back (when evicted: fewest copies, made when memory is short, so that some KV is lost)")
	f.String("kv-eviction", k.Eviction, "what leaves a full host memory: lru, lfu (keeps what once was popular) or s3fifo (KV used once pushes nothing out, and leaves soon)")
	f.Duration("kv-ttl", k.TTL, "age at which KV in host memory and on the SSD is no longer used, but computed again; 0: no limit")
	f.Float64("kv-pin-share", k.PinShare, "part of host memory, and of the SSD, that pins may take from others, at most 0.5")
	f.Float64("kv-tenant-share", k.TenantShare, "part of host memory, and of the SSD, that one cache_salt may fill; 0: all. Beyond it a tenant's new KV pushes out its own, even if there is room")
	f.Duration("kv-load-timeout", k.LoadTimeout, "most time that a request waits for KV from host memory, SSD, peers and store; the rest of its prefix is computed")
	f.String("kv-load-quota", k.LoadQuota.String(), "bytes a second that loads may take from the tiers; 0: no limit. The rest is computed")
	f.String("kv-peers", k.Peers, "on: fetch KV that other workers have of a prompt instead of computing it, and give them ours; off: neither")
}
