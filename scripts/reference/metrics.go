package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/gpustat"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

// metrics runs a router, a prefill and a decode worker with all tiers in this process and lists
// their registries.
func metrics() (text string, err error) {
	dir, err := os.MkdirTemp("", "xpyd-reference-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	quiet := slog.New(slog.DiscardHandler)
	ring, err := trust.NewRing(trust.NewSecret())
	if err != nil {
		return "", err
	}
	server, err := fleet.StartServer(fleet.ServerConfig{Ring: ring, Log: quiet})
	if err != nil {
		return "", err
	}
	defer server.Close()
	conn, err := fleet.Connect(fleet.ConnConfig{URL: server.ClientURL(), Ring: ring, Log: quiet})
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(ctx) }()
	front, back := prometheus.NewRegistry(), prometheus.NewRegistry()
	watcher, err := fleet.Watch(fleet.WatcherConfig{Conn: conn, Log: quiet, Registerer: front})
	if err != nil {
		return "", err
	}
	defer watcher.Close()
	cfg := router.DefaultConfig()
	cfg.Listen, cfg.AdminListen = "127.0.0.1:0", ""
	r, err := router.New(cfg, router.Deps{Ring: ring, Fleet: watcher, Bus: conn.Bus(), Log: quiet, Registerer: front})
	if err != nil {
		return "", err
	}
	if err := r.Start(); err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, r.Shutdown(ctx)) }()
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		reg := prometheus.NewRegistry()
		if role == fleet.Decode {
			reg = back
		}
		transport := tcp.New(nil)
		cfg := worker.DefaultConfig(role)
		cfg.Device, cfg.Fleet.URL = "cpu", server.ClientURL()
		cfg.TTFTPromise, cfg.TPOTPromise, cfg.ITLPromise = time.Second, time.Second, time.Second // for their metrics
		cfg.KV.Store, cfg.KV.SSDDir, cfg.KV.SSDSize = "redis://127.0.0.1:1", dir+"/"+string(role), 64<<20
		if err := cfg.KV.HostMemory.UnmarshalText([]byte("16MiB")); err != nil {
			return "", err
		}
		w, err := worker.Start(ctx, cfg, worker.Deps{Ring: ring, NATS: ring, Log: quiet, Registry: reg, Ways: []way.Kind{way.Network(transport)}})
		if err != nil {
			return "", err
		}
		defer func() { _ = w.Close(ctx) }()
	}
	if err := request(ctx, r); err != nil {
		return "", err
	}
	gpu := gpustat.Poll(noGPU{}, quiet)
	defer func() { _ = gpu.Close(ctx) }()
	back.MustRegister(gpu)

	var b strings.Builder
	b.WriteString("# Metrics" + made + `
In Prometheus' text format at ` + "`/metrics`" + ` of a router's admin listener and of each worker. Both also have
` + "`xpyd_build_info`" + `, with the build in its labels; a router has Go's and the process's own.
`)
	for _, p := range []struct {
		title string
		reg   *prometheus.Registry
	}{{"A router's", front}, {"A worker's", back}} {
		rows, err := list(p.reg)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "\n## %s\n\n| metric | type | labels | what |\n|---|---|---|---|\n%s", p.title, rows)
	}
	return b.String(), nil
}

// request makes one request, so that metrics with labels have samples.
func request(ctx context.Context, r *router.Router) error {
	for !r.Ready() {
		select {
		case <-ctx.Done():
			return errors.New("no pair is ready")
		case <-time.After(10 * time.Millisecond):
		}
	}
	body := strings.NewReader(`{"prompt":"Once upon a time","max_tokens":8,"stream":true}`)
	resp, err := http.Post("http://"+r.Addr().String()+"/v1/completions", "application/json", body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && (resp.StatusCode != 200 || !bytes.Contains(text, []byte("[DONE]"))) {
		err = fmt.Errorf("a request: %s %s", resp.Status, text)
	}
	return err
}

// described parses how a Desc prints itself, the only way to read it.
var described = regexp.MustCompile(`^Desc\{fqName: "([^"]*)", help: ("(?:[^"\\]|\\.)*"),(?: unit: "[^"]*",)? constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)

// list is a row per metric of a registry.
func list(reg *prometheus.Registry) (string, error) {
	families, err := reg.Gather()
	if err != nil {
		return "", err
	}
	types := map[string]string{}
	for _, f := range families {
		types[f.GetName()] = strings.ToLower(f.GetType().String())
	}
	descs := make(chan *prometheus.Desc, 1024)
	reg.Describe(descs)
	close(descs)
	var rows []string
	for d := range descs {
		m := described.FindStringSubmatch(d.String())
		if m == nil {
			return "", fmt.Errorf("cannot read %v", d)
		}
		help, err := strconv.Unquote(m[2])
		if err != nil {
			return "", err
		}
		kind, seen := types[m[1]]
		switch {
		case seen:
		case strings.HasSuffix(m[1], "_total"):
			kind = "counter"
		case strings.HasSuffix(m[1], "_seconds"):
			kind = "histogram" // of operations that did not happen here
		default:
			kind = "gauge"
		}
		var labels []string
		for l := range strings.SplitSeq(m[4]+","+m[3], ",") {
			if name, _, _ := strings.Cut(l, "="); name != "" {
				labels = append(labels, name)
			}
		}
		rows = append(rows, fmt.Sprintf("| `%s` | %s | %s | %s |\n", m[1], kind, strings.Join(labels, ", "), cell([]string{help})))
	}
	slices.Sort(rows)
	return strings.Join(slices.Compact(rows), ""), nil
}

// noGPU stands for a GPU, for its metrics.
type noGPU struct{}

func (noGPU) Read() (gpustat.Sample, error) { return gpustat.Sample{}, nil }
func (noGPU) Close() error                  { return nil }
