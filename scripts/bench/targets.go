package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// target is one proxy under test.
type target struct {
	name  string
	what  string // in a figure's peer field
	must  bool   // its failure ends the benchmark
	fewer int    // divides the number of requests
	start func(context.Context) (*harness.Process, error)
}

// engines starts the mock engines.
func (b *router) engines(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for _, addr := range []*string{&b.p, &b.d} {
		if *addr, err = harness.FreeAddr(); err != nil {
			return err
		}
		if _, err = b.Listening(ctx, *addr, harness.Spec{Name: "engine", Argv: []string{self, "engine", *addr, "0s"}, CPU: loadCPU}); err != nil {
			return err
		}
	}
	return nil
}

// targets are the proxies available here.
func (b *router) targets() []target {
	all := []target{
		{"nginx", "nginx, one leg", true, 1, b.nginx},
		{"bare", "bare two-leg fasthttp loop", true, 1, b.bareLoop},
		{"xpyd", "xpyd", true, 1, b.ours},
	}
	peer := func(name, what string, fewer int, program string, args ...string) {
		start := func(ctx context.Context) (*harness.Process, error) {
			return b.proxied(ctx, name, func(_, port string) ([]string, error) {
				return slices.Concat([]string{filepath.Join(b.python, "bin", program)}, args, []string{"--host", "127.0.0.1", "--port", port}), nil
			})
		}
		all = append(all, target{name, what, false, fewer, start})
	}
	p, d := "http://"+b.p, "http://"+b.d
	if b.python != "" {
		peer("vllm-router", "vllm-router, NIXL", 1, "vllm-router", "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", p, "--decode", d,
			"--prefill-policy", "round_robin", "--decode-policy", "round_robin", "--worker-startup-check-interval", "1", "--disable-retries")
		peer("smg", "SMG, SGLang bootstrap", 1, "python", "-m", "smg", "launch", "--pd-disaggregation", "--prefill", p, "8998", "--decode", d,
			"--policy", "round_robin", "--worker-startup-check-interval", "1", "--disable-tokenizer-autoload")
		peer("sglang-router", "sglang-router, SGLang bootstrap", 1, "python", "-m", "sglang_router.launch_router", "--pd-disaggregation", "--prefill", p, "8998",
			"--decode", d, "--policy", "round_robin")
	}
	if b.proxy != "" {
		_, pPort, _ := net.SplitHostPort(b.p)
		_, dPort, _ := net.SplitHostPort(b.d)
		peer("vllm-proxy", "vLLM's example proxy, NIXL", 40, "python", b.proxy, "--prefiller-hosts", "127.0.0.1", "--prefiller-ports", pPort,
			"--decoder-hosts", "127.0.0.1", "--decoder-ports", dPort)
	}
	if b.peers == "" {
		return all
	}
	return slices.DeleteFunc(all, func(t target) bool { return !slices.Contains(append(strings.Split(b.peers, ","), "xpyd"), t.name) })
}

// proxied starts a proxy at a free loopback address, on a processor of its own.
func (b *router) proxied(ctx context.Context, name string, argv func(addr, port string) ([]string, error)) (*harness.Process, error) {
	addr, err := harness.FreeAddr()
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(addr)
	args, err := argv(addr, port)
	if err != nil {
		return nil, err
	}
	p, err := b.Listening(ctx, addr, harness.Spec{Name: name, Argv: args, CPU: proxyCPU})
	if err != nil {
		return nil, err
	}
	if err := p.Until(ctx, 30*time.Second, func() error { return completes(addr) }); err != nil {
		p.Kill()
		return nil, err
	}
	return p, nil
}

// completes checks that a completion through addr succeeds.
func completes(addr string) error {
	c, err := dial(addr)
	if err != nil {
		return err
	}
	defer func() { c.conn.Close() }()
	return c.do(post("/v1/completions", completion("hello", false, 1, "")))
}

// file writes a configuration file of a proxy.
func (b *router) file(name, text string) (string, error) {
	path := filepath.Join(b.Dir, name)
	return path, os.WriteFile(path, []byte(text), 0o644)
}

func (b *router) nginx(ctx context.Context) (*harness.Process, error) {
	return b.proxied(ctx, "nginx", func(addr, _ string) ([]string, error) {
		conf, err := b.file("nginx.conf", fmt.Sprintf(`daemon off; worker_processes 1; pid %[1]s/nginx.pid; error_log %[1]s/nginx-error.log;
worker_rlimit_nofile 60000;
events { worker_connections 30000; }
http {
  access_log %[1]s/nginx-access.log;
  client_body_temp_path %[1]s/nginx-body; proxy_temp_path %[1]s/nginx-proxy; fastcgi_temp_path %[1]s/nginx-f; uwsgi_temp_path %[1]s/nginx-u; scgi_temp_path %[1]s/nginx-s;
  client_max_body_size 64m; keepalive_requests 1000000;
  upstream d { server %[3]s; keepalive 256; keepalive_requests 1000000; }
  server { listen %[2]s; location / { proxy_pass http://d; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_request_buffering off; proxy_buffering off; } }
}`, b.Dir, addr, b.d))
		return []string{"nginx", "-c", conf}, err
	})
}

func (b *router) bareLoop(ctx context.Context) (*harness.Process, error) {
	return b.proxied(ctx, "bare", func(addr, _ string) ([]string, error) {
		self, err := os.Executable()
		return []string{self, "bare", addr, b.p, b.d}, err
	})
}

func (b *router) ours(ctx context.Context) (*harness.Process, error) {
	binary, err := b.Binary(ctx)
	if err != nil {
		return nil, err
	}
	return b.routerOf(ctx, binary)
}

// routerOf is a build of xpyd's router with its metrics and its access log on.
func (b *router) routerOf(ctx context.Context, binary string) (*harness.Process, error) {
	return b.proxied(ctx, "xpyd", func(addr, _ string) ([]string, error) {
		data, err := os.MkdirTemp(b.Dir, "data") // its own: two builds run at once
		if err != nil {
			return nil, err
		}
		conf, err := b.file("xpyd.yaml", fmt.Sprintf(`listen: %s
data: %s
admin_listen: ""
public_metrics: true
static:
  - {id: p0, role: prefill, url: "http://%s", dialect: vllm-nixl, model: m}
  - {id: d0, role: decode, url: "http://%s", dialect: vllm-nixl, model: m, max_batch: 100000}
limits: {max_in_flight: 20000}
max_conns: 20000
`, addr, data, b.p, b.d))
		return []string{binary, "router", "--config", conf}, err
	})
}
