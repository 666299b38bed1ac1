package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/config"
)

const shutdownTimeout = 30 * time.Second

const dataHelp = "folder with the secrets and the router's addresses, closed to other users"

func newRouter() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "router --config FILE",
		Short: "Run a router alone",
		Long: `Run a router. Without fleet.url it embeds a NATS server. At its first start it makes the
fleet's secret in --data. It prints the file with which workers join; a second router of
the fleet joins with the same file. SIGHUP reloads limits, policy, static, keys and
certificates; SIGTERM drains. /dashboard on the admin address shows the fleet in a browser;
sign in with the text of admin-token in --data, or of admin-token-ro, which only reads.
With takeover_replay another pair goes on with the streams of lost engines of the dialects
storage, vllm-mooncake, vllm-nixl, vllm-nixl-push, vllm-offloading, vllm-p2pnccl too.
Each key of the configuration is also an environment variable: tls_cert is XPYD_TLS_CERT.`,
		Example: "  xpyd router --config configs/samples/router.yaml\n  xpyd router --listen 0.0.0.0:8000\n  xpyd router --join-file /run/xpyd/join-url --data /var/lib/xpyd-2 --listen 0.0.0.0:8002\n  xpyd router --config router.yaml --print-config\n" +
			"  env XPYD_API_KEYS_FILE=keys.yaml XPYD_TLS_CERT=cert.pem XPYD_TLS_KEY=key.pem \\\n    xpyd router --listen 0.0.0.0:8443\n" +
			"  xpyd keys new --file keys.yaml --name team-a --tokens-per-minute 100000",
	}
	f := cmd.Flags()
	def := defaultRouterConfig()
	f.String("listen", def.Listen, "public address")
	f.String("admin", def.AdminListen, "admin address; \"\" leaves it out")
	f.String("nats", "", "URL of an external NATS; default: an embedded server")
	f.String("join-file", "", "join file of another router of the fleet, with its secret and NATS; changes take effect. Or the same text in XPYD_JOIN")
	f.Bool("trust-everyone", false, trustHelp)
	f.String("data", def.Data, dataHelp)
	logFlags(f, &def.Log)
	configured(cmd, "; see configs/samples/router.yaml", &def, func(cmd *cobra.Command, cfg *RouterConfig, sources config.Sources, load func() (*RouterConfig, error)) error {
		log, level, flush := newLeveled(cmd.ErrOrStderr(), cfg.Log.Level, cfg.Log.Format)
		defer flush()
		ctx := cmd.Context()
		front, err := openFront(ctx, cfg, log, frontConfig{level: level, mounts: startsNone(), sources: sources})
		if err != nil {
			return err
		}
		lastly(ctx, front.letGo)
		endReloads := front.reloading(cfg, load)
		fmt.Fprintf(cmd.OutOrStdout(), "listening %s\njoin with: xpyd prefill --join-file %s\n", front.url(cfg), front.joinFile)
		<-ctx.Done()
		endReloads()
		stop, cancel := draining(ctx, shutdownTimeout)
		defer cancel()
		front.close(stop)
		return nil
	})
	return cmd
}
