// Command epp is an endpoint picker for the Gateway API Inference Extension: Envoy shows it each
// request (ext_proc over gRPC), and it says which decode engine gets it and which prefill engine that
// one is to ask, in the header x-prefiller-host-port, as llm-d's sidecar beside decode reads it. The
// choice is router/pick's: the least loaded pair, less what a warm prefix saves, guessed from the
// text. It is a module of its own, so that gRPC and Envoy's types stay out of xpyd.
//
//	go build -o xpyd-epp . && ./xpyd-epp -endpoints endpoints.yaml
//
// The file of endpoints is read again at each look at their metrics:
//
//	endpoints:
//	  - {address: 10.0.0.1:8000, role: prefill, model: qwen3-8b}
//	  - {address: 10.0.0.2:8000, role: decode, model: qwen3-8b}
//
// A role may also be both. It has no view of Kubernetes' own: who watches an InferencePool writes the
// file. Nor has it flow control, objectives or several replicas that share what they know.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/xpyd/xpyd/router/pick"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:9002", "address for Envoy; plain gRPC, and gRPC's health service")
	file := flag.String("endpoints", "", "file of the endpoints")
	every := flag.Duration("scrape", time.Second, "how often endpoints' metrics are read, and the file")
	policy := flag.String("policy", pick.Prefix, "how pairs are chosen, as pick.policy of a router without kv_events")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := run(ctx, *listen, *file, *every, *policy, log); err != nil {
		fmt.Fprintln(os.Stderr, "xpyd-epp:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, listen, file string, every time.Duration, policy string, log *slog.Logger) error {
	if every < 50*time.Millisecond || every > time.Minute {
		return fmt.Errorf("-scrape %v is not in 50ms..1m", every)
	}
	cfg := pick.DefaultConfig()
	cfg.Policy = policy
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("-policy: %w", err)
	}
	if policy == pick.KVEvents {
		return fmt.Errorf("-policy %s: nobody's events are read here; %s guesses from the text", policy, pick.Prefix)
	}
	if _, err := readEndpoints(file); err != nil { // later a bad file is only logged
		return fmt.Errorf("-endpoints: %w", err)
	}
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	log.Info("listens", "addr", ln.Addr())
	return serve(ctx, ln, file, every, cfg, log)
}

const drainTimeout = 30 * time.Second

// serve runs until ctx ends, then until the exchanges under way end, for drainTimeout at most.
func serve(ctx context.Context, ln net.Listener, file string, every time.Duration, cfg pick.Config, log *slog.Logger) error {
	picker := pick.New(cfg, rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())))
	transport := &http.Transport{MaxIdleConnsPerHost: 1, MaxIdleConns: maxEndpoints}
	defer transport.CloseIdleConnections()
	p := &pool{file: file, every: every, client: &http.Client{Transport: transport}, picker: picker, log: log}
	// A peer that is gone is noticed, and its exchanges end.
	g := grpc.NewServer(grpc.MaxConcurrentStreams(1<<14), grpc.MaxRecvMsgSize(maxBody+maxRest), grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}))
	extproc.RegisterExternalProcessorServer(g, &server{pool: p, picker: picker, now: time.Now})
	live := health.NewServer()
	live.SetServingStatus("", healthpb.HealthCheckResponse_NOT_SERVING)
	healthpb.RegisterHealthServer(g, live)

	var all sync.WaitGroup
	defer all.Wait()
	looking, end := context.WithCancel(ctx)
	defer end()
	all.Go(func() {
		p.run(looking, func() {
			ready := healthpb.HealthCheckResponse_NOT_SERVING
			if picker.Ready(pick.View{Snapshot: p.snapshot.Load()}, func(string) bool { return true }) {
				ready = healthpb.HealthCheckResponse_SERVING
			}
			live.SetServingStatus("", ready)
		})
	})
	all.Go(func() {
		<-looking.Done()
		live.Shutdown()
		timer := time.AfterFunc(drainTimeout, g.Stop)
		defer timer.Stop()
		g.GracefulStop()
	})
	return g.Serve(ln)
}
