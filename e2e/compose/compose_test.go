// Package compose tests docker-compose.yml without Docker: its topology as
// plain processes, started by compose's own commands with compose's own
// environment and configuration files. Only hosts, ports and the paths of
// mounts are replaced.
package compose

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// natsEnv makes this test binary the nats service; its arguments are the
// service's.
const natsEnv = "XPYD_E2E_COMPOSE_NATS"

func TestMain(m *testing.M) {
	if addr := os.Getenv(natsEnv); addr != "" {
		os.Exit(serveNATS(addr, os.Args[1:]))
	}
	os.Exit(cluster.Main(m))
}

// serveNATS is what the image nats does with --user and --pass.
func serveNATS(addr string, args []string) int {
	if len(args) != 6 || args[0] != "--user" || args[2] != "--pass" || args[4] != "--http_port" {
		fmt.Fprintln(os.Stderr, "unknown arguments", args)
		return 2
	}
	s, err := fleet.StartServer(fleet.ServerConfig{Listen: addr, User: args[1], Password: args[3]})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer s.Close()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	<-stop
	return 0
}

// host runs services as processes of this machine.
type host struct {
	services map[string]service
	nats     string // address
	configs  string // what is mounted at /etc/xpyd
	volume   string // fleet
	sockets  string
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{nats: cluster.Port(t), configs: t.TempDir(), volume: t.TempDir(), sockets: filepath.Join(t.TempDir(), "s")}
	if err := os.Mkdir(h.sockets, 0o700); err != nil {
		t.Fatal(err)
	}
	h.services, _ = services(t)
	address := regexp.MustCompile(`0\.0\.0\.0:\d+`)
	files, err := filepath.Glob(filepath.Join(root, "configs/compose/*.yaml"))
	if err != nil || len(files) != 3 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text := address.ReplaceAllString(string(b), "127.0.0.1:0")
		text = strings.Replace(text, "data: /data/", "data: "+h.volume+"/", 1)
		text = strings.Replace(text, "join_file: /fleet/", "join_file: "+h.volume+"/", 1)
		text = strings.Replace(text, "sockets: /run/xpyd", "sockets: "+h.sockets, 1)
		if err := os.WriteFile(filepath.Join(h.configs, filepath.Base(file)), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

// run starts one container of a service, as a process.
func (h *host) run(t *testing.T, name string) *cluster.Process {
	t.Helper()
	s := h.services[name]
	if name == "nats" {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		return cluster.StartCommand(t, exec.Command(self, s.Command...), []string{natsEnv + "=" + h.nats})
	}
	mounts := []string{"./configs/compose:/etc/xpyd:ro", "fleet:/data"}
	if name != "router" {
		mounts = []string{"./configs/compose:/etc/xpyd:ro", "fleet:/fleet:ro", "sockets:/run/xpyd", "models:/models"}
	}
	if s.Image != "xpyd" || !slices.Equal(s.Volumes, mounts) {
		t.Fatalf("%s: image %q, mounts %v", name, s.Image, s.Volumes)
	}
	var env, args []string
	for k, v := range s.Environment {
		env = append(env, k+"="+strings.Replace(v, "nats:4222", h.nats, 1))
	}
	for _, a := range s.Command {
		args = append(args, strings.Replace(a, "/etc/xpyd/", h.configs+"/", 1))
	}
	return cluster.Start(t, env, args...)
}

// up is `docker compose up`, with --scale for what scale has. The router and NATS
// find each other; workers wait until the router is healthy.
func (h *host) up(t *testing.T, scale map[string]int) (url string, prefill, decode int) {
	t.Helper()
	count := func(role string) int {
		if n, ok := scale[role]; ok {
			return n
		}
		return h.services[role].Deploy.Replicas
	}
	prefill, decode = count("prefill"), count("decode")
	router := h.run(t, "router")
	url = router.Line(t, 30*time.Second, "listening ")
	for range prefill {
		h.run(t, "prefill")
	}
	h.run(t, "nats")
	for range decode {
		h.run(t, "decode")
	}
	return url, prefill, decode
}

func TestUp(t *testing.T) {
	for _, scale := range []map[string]int{nil, {"prefill": 3, "decode": 1}} {
		t.Run(fmt.Sprint(scale), func(t *testing.T) {
			h := newHost(t)
			url, prefill, decode := h.up(t, scale)
			client := cluster.NewClient(t)
			seen := map[string]bool{}
			cluster.Wait(t, 30*time.Second, "every worker to answer", func() error {
				for i := range 8 {
					r := cluster.Post(t.Context(), client, url+"/v1/completions", fmt.Sprintf(
						`{"model":"stories260k","prompt":"Once upon a time","max_tokens":8,"temperature":0,"stream":%t}`, i%2 == 0))
					if !r.Good() || r.Text != ", there was a little girl" {
						return fmt.Errorf("%v %q", r, r.Text)
					}
					seen[r.Prefill], seen[r.Decode] = true, true
				}
				if len(seen) != prefill+decode {
					return fmt.Errorf("answered by %v", seen)
				}
				return nil
			})
		})
	}
}

// TestCompose asks Docker's own parser, where it is installed.
func TestCompose(t *testing.T) {
	if exec.Command("docker", "compose", "version").Run() != nil {
		t.Skip("no docker compose here")
	}
	cmd := exec.Command("docker", "compose", "config", "--quiet")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v: %v\n%s", cmd, err, out)
	}
}

// TestDashboard: every metric that the dashboard shows is there after a
// request.
func TestDashboard(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(root, "configs/compose/grafana/dashboards/xpyd.json"))
	if err != nil {
		t.Fatal(err)
	}
	r := cluster.Up(t)
	client := cluster.NewClient(t)
	if a := cluster.Post(t.Context(), client, r.URL+"/v1/completions", `{"model":"stories260k","prompt":"Once","max_tokens":4,"stream":true}`); !a.Good() {
		t.Fatal(a)
	}
	f, err := r.Fleet()
	if err != nil {
		t.Fatal(err)
	}
	urls := []string{r.Admin}
	for _, m := range f.Instances {
		urls = append(urls, m.URL)
	}
	names := regexp.MustCompile(`\b(xpyd|process)_[a-z_]+`).FindAllString(string(b), -1)
	slices.Sort(names)
	names = slices.Compact(names)
	cluster.Wait(t, 10*time.Second, "all metrics", func() error { // the router counts a request once its answer is sent
		var all strings.Builder
		for _, u := range urls {
			resp, err := client.Get(u + "/metrics")
			if err != nil {
				return err
			}
			_, err = io.Copy(&all, resp.Body)
			resp.Body.Close()
			if err != nil {
				return err
			}
		}
		var missing []string
		for _, name := range names {
			if !strings.Contains(all.String(), "\n"+name+"{") && !strings.Contains(all.String(), "\n"+name+" ") {
				missing = append(missing, name)
			}
		}
		if len(missing) > 0 {
			return fmt.Errorf("no metric %s", strings.Join(missing, ", "))
		}
		return nil
	})
	if len(names) < 20 {
		t.Errorf("only %v", names)
	}
}
