package main

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
)

// target is one proxy under test.
type target struct {
	name  string
	what  string // in a figure's peer field
	pd    bool   // it runs both legs
	fewer int    // a measurement has so many times fewer requests
	start func() (*process, error)
}

func (b *bench) engines() (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for _, addr := range []*string{&b.p, &b.d} {
		if *addr, err = freeAddr(); err != nil {
			return err
		}
		if _, err = b.start(1, "engine", *addr, self, "engine", *addr); err != nil {
			return err
		}
	}
	return nil
}

// targets lists what can be started here; what cannot is said by start.
func (b *bench) targets() []target {
	all := []target{
		{"nginx", "nginx, one leg", false, 1, b.nginx},
		{"bare", "bare two-leg fasthttp loop", true, 1, b.bareLoop},
		{"xpyd", "xpyd", true, 1, b.router},
	}
	if b.venv != "" {
		all = append(all,
			target{"vllm-router", "vllm-router, NIXL", true, 1, b.vllmRouter},
			target{"smg", "SMG, SGLang bootstrap", true, 1, b.smg},
			target{"sglang-router", "sglang-router, SGLang bootstrap", true, 1, b.sglangRouter})
	}
	if b.proxy != "" {
		all = append(all, target{"vllm-proxy", "vLLM's example proxy, NIXL", true, 40, b.vllmProxy})
	}
	if b.peers == "" {
		return all
	}
	wanted := append(strings.Split(b.peers, ","), "xpyd")
	return slices.DeleteFunc(all, func(t target) bool { return !slices.Contains(wanted, t.name) })
}

// listening starts argv, made for a free address, on processor 0.
func (b *bench) listening(name string, argv func(addr, host, port string) ([]string, error)) (*process, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	host, port, _ := net.SplitHostPort(addr)
	args, err := argv(addr, host, port)
	if err != nil {
		return nil, err
	}
	p, err := b.start(0, name, addr, args...)
	if err != nil {
		return nil, err
	}
	if err := answers(addr); err != nil {
		p.stop()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return p, nil
}

func (b *bench) nginx() (*process, error) {
	return b.listening("nginx", func(addr, _, _ string) ([]string, error) {
		conf, err := b.file("nginx.conf", fmt.Sprintf(`daemon off; worker_processes 1; pid %[1]s/nginx.pid; error_log %[1]s/nginx-error.log;
worker_rlimit_nofile 60000;
events { worker_connections 30000; }
http {
  access_log %[1]s/nginx-access.log;
  client_body_temp_path %[1]s/nginx-body; proxy_temp_path %[1]s/nginx-proxy; fastcgi_temp_path %[1]s/nginx-f; uwsgi_temp_path %[1]s/nginx-u; scgi_temp_path %[1]s/nginx-s;
  client_max_body_size 64m; keepalive_requests 1000000;
  upstream d { server %[3]s; keepalive 256; keepalive_requests 1000000; }
  server { listen %[2]s; location / { proxy_pass http://d; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_request_buffering off; proxy_buffering off; } }
}`, b.tmp, addr, b.d))
		return []string{"nginx", "-c", conf}, err
	})
}

func (b *bench) bareLoop() (*process, error) {
	return b.listening("bare", func(addr, _, _ string) ([]string, error) {
		self, err := os.Executable()
		return []string{self, "bare", addr, b.p, b.d}, err
	})
}

// router is xpyd with its metrics and its access log on.
func (b *bench) router() (*process, error) { return b.routerOf(b.xpyd) }

func (b *bench) routerOf(binary string) (*process, error) {
	return b.listening("xpyd", func(addr, _, _ string) ([]string, error) {
		conf, err := b.file("xpyd.yaml", fmt.Sprintf(`listen: %s
admin_listen: ""
public_metrics: true
static:
  - {id: p0, role: prefill, url: "http://%s", dialect: vllm-nixl, model: m}
  - {id: d0, role: decode, url: "http://%s", dialect: vllm-nixl, model: m, max_batch: 100000}
limits: {max_in_flight: 20000}
max_conns: 20000
`, addr, b.p, b.d))
		return []string{binary, "router", "--config", conf}, err
	})
}

func (b *bench) vllmRouter() (*process, error) {
	return b.listening("vllm-router", func(_, host, port string) ([]string, error) {
		return []string{b.venv + "/bin/vllm-router", "--vllm-pd-disaggregation", "--kv-connector", "nixl",
			"--prefill", "http://" + b.p, "--decode", "http://" + b.d, "--prefill-policy", "round_robin", "--decode-policy", "round_robin",
			"--host", host, "--port", port, "--worker-startup-check-interval", "1", "--disable-retries"}, nil
	})
}

func (b *bench) smg() (*process, error) {
	return b.listening("smg", func(_, host, port string) ([]string, error) {
		return []string{b.venv + "/bin/python", "-m", "smg", "launch", "--pd-disaggregation", "--prefill", "http://" + b.p, "8998", "--decode", "http://" + b.d,
			"--policy", "round_robin", "--host", host, "--port", port, "--worker-startup-check-interval", "1", "--disable-tokenizer-autoload"}, nil
	})
}

func (b *bench) sglangRouter() (*process, error) {
	return b.listening("sglang-router", func(_, host, port string) ([]string, error) {
		return []string{b.venv + "/bin/python", "-m", "sglang_router.launch_router", "--pd-disaggregation", "--prefill", "http://" + b.p, "8998",
			"--decode", "http://" + b.d, "--policy", "round_robin", "--host", host, "--port", port}, nil
	})
}

func (b *bench) vllmProxy() (*process, error) {
	_, pPort, _ := net.SplitHostPort(b.p)
	_, dPort, _ := net.SplitHostPort(b.d)
	return b.listening("vllm-proxy", func(_, host, port string) ([]string, error) {
		return []string{b.venv + "/bin/python", b.proxy, "--host", host, "--port", port, "--prefiller-hosts", "127.0.0.1", "--prefiller-ports", pPort,
			"--decoder-hosts", "127.0.0.1", "--decoder-ports", dPort}, nil
	})
}
