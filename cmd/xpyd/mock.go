package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/mock"
)

func newMock() *cobra.Command {
	cfg := mock.Config{}
	var fault, logLevel string
	cmd := &cobra.Command{
		Use:   "mock --dialect NAME --role ROLE",
		Short: "A fake engine that speaks one dialect, for tests and demos",
		Long: `A test tool: no model runs. It speaks one engine's protocol as prefill, decode or both.
It refuses with 400 what that engine would not understand, names the field, and answers
with a text that depends on the prompt alone. A decode mock collects from the prefill
mock that its request names.

GET /mock/records shows the requests. Its address is also its bootstrap address. A
router's probes are exempt from a fault without "probes".`,
		Example: `  xpyd mock --dialect vllm-nixl --role prefill --listen 127.0.0.1:8100
  xpyd mock --dialect vllm-nixl --role decode --listen 127.0.0.1:8200 --ttft 50ms --itl 10ms
  xpyd mock --dialect sglang --role decode --listen 127.0.0.1:8200 --fault cut=3
  xpyd mock --dialect openai --role decode --listen 127.0.0.1:8300 --fault status=503`,
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dialect, "dialect", "openai", "engine protocol: "+strings.Join(mock.Dialects, ", "))
	f.StringVar(&cfg.Role, "role", "decode", "prefill, decode or both (both: only in dialects whose requests name the leg)")
	f.StringVar(&cfg.Listen, "listen", "127.0.0.1:0", "address; port 0 takes a free one")
	f.StringVar(&cfg.Model, "model", "mock", "model name in answers")
	f.StringVar(&cfg.Version, "engine-version", "mock", "what GET /version says; \"\" for 404")
	f.BoolVar(&cfg.Embeds, "embeddings", false, "only make embeddings")
	f.DurationVar(&cfg.TTFT, "ttft", 0, "time before the first token")
	f.DurationVar(&cfg.ITL, "itl", 0, "time between tokens")
	f.StringVar(&fault, "fault", "", "status=CODE, hang, refuse (close connections), error-event, cut=CHUNKS,\nfreeze=CHUNKS; for prefill also mute and no-params; add \",probes\" to include probes")
	f.DurationVar(&cfg.Lease, "lease", 0, "how long prefill keeps prompts that no decode collects; 0: for ever")
	f.StringVar(&logLevel, "log-level", "warn", "debug, info, warn or error; refused requests are warnings")
	f.StringVar(&cfg.KV.Listen, "kv-events", "", "address at which to publish KV events over ZMQ")
	f.StringVar(&cfg.KV.Replay, "kv-replay", "", "address of their replay socket")
	f.StringVar(&cfg.KV.Topic, "kv-topic", "", "their topic")
	f.BoolVar(&cfg.KV.Arrays, "kv-arrays", false, "events as arrays, like SGLang and older vLLMs")
	f.IntVar(&cfg.KV.Block, "kv-block", 16, "tokens a block; text is a token a byte")
	f.IntVar(&cfg.KV.Blocks, "kv-blocks", 1024, "blocks of the cache")
	f.StringVar(&cfg.Register, "register", "", "a router's discovery.p2p_listen, at which to register like vllm-p2pnccl engines")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var err error
		if cfg.Fault, err = mock.ParseFault(fault); err != nil {
			return usageError{err}
		}
		if err := cfg.Validate(); err != nil {
			return usageError{err}
		}
		log, flush := newLogger(cmd.ErrOrStderr(), logLevel, "text")
		defer flush()
		cfg.Log = log
		e, err := mock.Start(cfg)
		if err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "listening %s engine_id %s since %s\n", e.URL(), e.ID(), time.Now().Format(time.RFC3339))
		<-cmd.Context().Done()
		return e.Close()
	}
	return cmd
}
